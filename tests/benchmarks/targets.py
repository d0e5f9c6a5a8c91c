"""What the figures are to be: one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.benchmarks.figures import Samples
from tests.benchmarks.plan import MIB, Plan


@dataclass(frozen=True)
class Target:
    """A figure and where it may be at most, or at least."""

    name: str
    value: Callable[[Samples, Plan], float | None]
    limit: float
    unit: str
    at_least: bool = False
    least: Callable[[Samples, Plan], float | None] = lambda samples, plan: None
    """What was measured without a checkpoint, of what none can be without."""

    def met(self, value: float) -> bool:
        """Whether `value` is on the right side of the limit."""
        return value >= self.limit if self.at_least else value <= self.limit


@dataclass(frozen=True)
class Outcome:
    """A target and what was measured; `value` and `met` are None where this machine cannot measure it."""

    name: str
    limit: float
    unit: str
    at_least: bool
    value: float | None
    met: bool | None
    least: float | None


def _scaled(name: str, factor: float) -> Callable[[Samples, Plan], float | None]:
    def value(samples: Samples, plan: Plan) -> float | None:
        median = samples.median(name)
        return None if median is None else median * factor

    return value


def _ratio(name: str, other: str) -> Callable[[Samples, Plan], float | None]:
    return lambda samples, plan: samples.ratio(name, other)


def _copies(samples: Samples, plan: Plan) -> float | None:
    """In units of a copy with as many threads as torch has while it trains."""
    return samples.ratio("large.blocking.blocked_secs", f"large.limits.memcpy_{min(plan.threads, 2)}_secs")


def _peak(samples: Samples, plan: Plan) -> float | None:
    highest = samples.highest("memory.overlap.peak_bytes")
    return None if highest is None else highest / (1.05 * plan.large.size_bytes + 64 * MIB)


def _growth(samples: Samples, plan: Plan) -> float | None:
    growth = samples.growth("memory.overlap.peak_bytes")
    return None if growth is None else growth / MIB


TARGETS = (
    Target(
        "blocked: overlap, of AsyncCheckpointIO's",
        _ratio("large.overlap.blocked_secs", "large.lightning_async.blocked_secs"), 0.03, "x",
    ),
    Target("blocked: overlap, large state (for 1 GiB)", _scaled("large.overlap.blocked_secs", 1e3), 10, "ms"),
    Target("blocked: blocking, of a copy into warm buffers with the same threads", _copies, 1.2, "x"),
    Target("blocked: overlap, 2,000 small tensors", _scaled("small.overlap.blocked_secs", 1e3), 5, "ms",
           least=_scaled("small.floor.blocked_secs", 1e3)),
    Target(
        "durable: overlap, of a raw O_DIRECT write",
        _ratio("large.overlap.durable_secs", "large.limits.direct_secs"), 1.25, "x",
    ),
    Target(
        "durable: overlap, of a raw buffered write and fsync",
        _ratio("large.overlap.durable_secs", "large.limits.write_secs"), 1.15, "x",
    ),
    Target(
        "durable: blocking, of a raw O_DIRECT write",
        _ratio("large.blocking.durable_secs", "large.limits.direct_secs"), 1.25, "x",
    ),
    Target(
        "durable: blocking, of a raw buffered write and fsync",
        _ratio("large.blocking.durable_secs", "large.limits.write_secs"), 1.15, "x",
    ),
    Target(
        "throughput: overlap, saving back to back, of not saving",
        _scaled("large.overlap.throughput", 1), 0.95, "x", at_least=True, least=_scaled("large.floor.throughput", 1),
    ),
    Target("memory: highest peak of a save, of 1.05 x state + 64 MiB", _peak, 1, "x"),
    # Allocators return memory in pieces: exactly 0 would be luck.
    Target("memory: highest peak of all saves above the first two", _growth, 16, "MiB"),
    Target("heartbeat: longest gap while a save is written", _scaled("large.overlap.gap_secs", 1e3), 15, "ms"),
    Target("idle: added per step, one process", _scaled("idle.one.added_secs", 1e6), 20, "us",
           least=_scaled("idle.one.floor_added_secs", 1e6)),
    Target("idle: added per step, two ranks", _scaled("idle.two.added_secs", 1e6), 100, "us",
           least=_scaled("idle.two.floor_added_secs", 1e6)),
    Target("guards: all of them, added per step, two ranks", _scaled("idle.two.guards_secs", 1e6), 100, "us"),
    Target(
        "restart: verified in full, of Lightning's plain load",
        _ratio("restart.ours.secs", "restart.lightning.secs"), 1.15, "x",
    ),
)  # fmt: skip


def judge(samples: Samples, plan: Plan) -> list[Outcome]:
    """Every target with what was measured."""
    outcomes = []
    for target in TARGETS:
        value = target.value(samples, plan)
        met = None if value is None else target.met(value)
        outcomes.append(
            Outcome(target.name, target.limit, target.unit, target.at_least, value, met, target.least(samples, plan))
        )
    return outcomes
