"""Guards: watch a run and say when it should stop. Plain values that the callback polls at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from lightning_ft.guards.divergence import DivergenceGuard
from lightning_ft.guards.hang import HangGuard
from lightning_ft.guards.preemption import PreemptionGuard

__all__ = ["AnyGuard", "DivergenceGuard", "Guard", "HangGuard", "PreemptionGuard", "Verdict"]


@dataclass(frozen=True)
class Verdict:
    """What a guard wants: the run saves at the next boundary and stops, on all ranks at the same step."""

    reason: str
    """Why, for the log and the checkpoint's manifest; one line."""


@runtime_checkable
class Guard(Protocol):
    """Something that may want the run to stop."""

    def poll(self, step: int) -> Verdict | None:
        """What the guard says before the batch after `step`.

        Ranks: all; one rank's verdict stops all of them. Thread: main. Must not block and must not communicate.

        Args:
            step: Optimizer steps taken.

        Returns:
            Why the run should save and stop; None: it goes on.
        """


AnyGuard = Guard | PreemptionGuard | DivergenceGuard | HangGuard
"""What `FaultTolerantCheckpoint(guards=...)` takes."""
