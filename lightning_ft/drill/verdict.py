"""What a drill found."""

from __future__ import annotations

from collections.abc import Iterator
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
    """The restarted run went on, with other numbers than the uninterrupted one.

    Also where two uninterrupted runs have other numbers already: see `Trial.repeatable`.
    """
    HARD_FAILURE = "HARD FAILURE"
    """A run ended with an error, hung, or was never killed; or there was nothing to restart from."""

    @property
    def rank(self) -> int:
        """The larger, the worse."""
        return list(Verdict).index(self)


@dataclass(frozen=True)
class Trial:
    """One kill and one restart."""

    kill_at: str | None
    """The batch or event at which the run was to be killed; None if nothing was to be killed yet."""
    verdict: Verdict
    killed: bool = False
    """Whether it came to that."""
    reason: str = ""
    """One sentence; empty if all is well."""
    cause: str = ""
    """What is likely behind it, in one sentence."""
    output: str = ""
    """The end of what the failed run printed."""
    resumed_batch: int | None = None
    """How many batches were trained where the restart went on; None if it began again, or nobody knows."""
    durable_batch: int | None = None
    """Where the newest checkpoint stood that was durable at the kill; None: there was none."""
    replayed: int = 0
    """Batches trained a second time, by each rank."""
    differ_from: str = ""
    """The step from which on two uninterrupted runs differ; empty if they do not, as far as is known."""

    @property
    def repeatable(self) -> bool:
        """Whether two uninterrupted runs were equal, or it did not matter. If not, nothing can be said of restarts."""
        return not self.differ_from

    def text(self) -> Iterator[str]:
        """Lines for people; the first has the verdict."""
        where = "before anything was killed"
        if self.kill_at is not None:
            where = f"{'killed' if self.killed else 'to be killed'} at {place(self.kill_at)}"
        went_on = "" if self.resumed_batch is None else f", went on after batch {self.resumed_batch}"
        twice = f", {self.replayed} trained twice" if self.replayed else ""
        if not self.repeatable and self.verdict is Verdict.SILENT_DIVERGENCE:
            yield (
                f"NOT REPEATABLE: two uninterrupted runs differ from {self.differ_from} on; nothing can be said of "
                f"restarts ({self.verdict.value}: {where}{went_on}{twice})"
            )
        else:
            yield f"{self.verdict.value}: {where}{went_on}{twice}"
        if self.reason:
            yield f"  {self.reason}"
        if self.cause:
            yield f"  Likely: {self.cause}"
        if self.output:
            yield "  The end of its output:"
            yield from (f"  | {line}" for line in self.output.splitlines())


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
    """What the drill says nothing about, a few words each."""

    @property
    def verdict(self) -> Verdict:
        """The worst of all trials."""
        return max((trial.verdict for trial in self.trials), key=lambda verdict: verdict.rank)

    @property
    def repeatable(self) -> bool:
        """Whether two uninterrupted runs were equal, or it did not matter."""
        return all(trial.repeatable for trial in self.trials)

    def document(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "verdict": self.verdict.value,
            "repeatable": self.repeatable,
            "drilled": list(self.command),
            "batches": self.batches,
            "world_size": self.world_size,
            "validations": self.validations,
            "trials": [{**vars(trial), "verdict": trial.verdict.value} for trial in self.trials],
            "not_covered": list(self.not_covered),
        }

    def summary(self) -> str:
        """What was compared, in a line."""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        return f"{self.batches} batches, {self.validations} validation batches, {ranks}"


def place(kill_at: str) -> str:
    """A kill point in words."""
    return f"batch {kill_at}" if kill_at[0].isdecimal() else kill_at
