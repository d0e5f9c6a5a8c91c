"""How much is measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

MIB = 2**20
LARGE_PARAMETERS = 40
# With its two moments each, the optimizer makes 2,001 tensors of them.
SMALL_PARAMETERS = 667


@dataclass(frozen=True)
class Shape:
    """A trained state: parameters of equal size and Adam's two moments of each."""

    name: str
    mib: float
    parameters: int

    @property
    def width(self) -> int:
        """Rows and columns of each parameter, for which the size comes out."""
        return max(1, round((self.mib * MIB / 4 / 3 / self.parameters) ** 0.5))

    @property
    def size_bytes(self) -> int:
        """Of all its tensors, without the step counters."""
        return 3 * 4 * self.parameters * self.width**2


@dataclass(frozen=True)
class Plan:
    """Sizes and counts of one run of the benchmark."""

    large_mib: float = 1024
    small_mib: float = 64
    sharded_mib: float = 128
    sharded_saves: int = 4
    """Of two ranks, per contender, the first of which is not counted."""
    replicated_rounds: int = 1
    """Trainings of two DDP ranks in each layout, of the state and saves of the sharded ones."""
    rounds: int = 3
    large_steps: int = 4
    """Steps of a throughput window; so many are needed that several saves fall into it."""
    small_steps: int = 10
    beats: int = 1
    """Saves per run and round during which the heartbeat is measured."""
    memory_saves: int = 30
    other_memory_saves: int = 2
    """Of the contenders that are no overlapped save."""
    idle_steps: int = 400
    idle_pairs: int = 2
    threads: int = 1
    """Of torch, while it trains: one core is left for what happens in the background."""
    batch_rows: int = 128

    @property
    def large(self) -> Shape:
        """Few large tensors."""
        return Shape("large", self.large_mib, LARGE_PARAMETERS)

    @property
    def small(self) -> Shape:
        """Many small tensors."""
        return Shape("small", self.small_mib, SMALL_PARAMETERS)

    @property
    def sharded(self) -> Shape:
        """Spread over two ranks."""
        return Shape("sharded", self.sharded_mib, LARGE_PARAMETERS)

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return asdict(self)


FULL = Plan()
QUICK = Plan(
    large_mib=96, sharded_mib=64, sharded_saves=3, rounds=1, small_steps=4, idle_steps=150, idle_pairs=1,
)  # fmt: skip
