"""What a drill found."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Verdict(str, Enum):
    """The outcomes, from the best to the worst."""

    PASS = "PASS"  # noqa: S105 - no password
    """Every number after the restart is that of the uninterrupted run."""
    LOST_WORK = "LOST WORK"
    """Every number is right, but a checkpoint that was durable was not continued from."""
    SILENT_DIVERGENCE = "SILENT DIVERGENCE"
    """The restarted run went on, with other numbers than the uninterrupted one."""
    HARD_FAILURE = "HARD FAILURE"
    """A run ended with an error, hung, or never came to where it was to be killed."""

    @property
    def rank(self) -> int:
        """The larger, the worse."""
        return list(Verdict).index(self)


@dataclass(frozen=True)
class Trial:
    """One kill and one restart."""

    kill_at: str
    """The batch number or event at which the run was killed."""
    verdict: Verdict
    reason: str = ""
    """One sentence; empty if all is well."""
    cause: str = ""
    """What is likely behind it, in one sentence."""
    resumed_batch: int | None = None
    """How many batches were trained where the restart went on; None if it began again, or nobody knows."""
    durable_batch: int | None = None
    """Where the newest checkpoint stood that was durable at the kill."""
    replayed: int = 0
    """Batches trained a second time, over all ranks."""


@dataclass(frozen=True)
class Outcome:
    """All trials of a drill."""

    command: tuple[str, ...]
    batches: int
    """Of the uninterrupted run."""
    world_size: int
    validations: int
    """Validated batches of the uninterrupted run, over all ranks."""
    trials: tuple[Trial, ...]
    not_covered: tuple[str, ...] = field(default=())
    """What the drill says nothing about, one sentence each."""

    @property
    def verdict(self) -> Verdict:
        """The worst of all trials."""
        return max((trial.verdict for trial in self.trials), key=lambda verdict: verdict.rank)

    def document(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "verdict": self.verdict.value,
            "drilled": list(self.command),
            "batches": self.batches,
            "world_size": self.world_size,
            "validations": self.validations,
            "trials": [{**vars(trial), "verdict": trial.verdict.value} for trial in self.trials],
            "not_covered": list(self.not_covered),
        }
