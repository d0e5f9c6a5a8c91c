"""One page of memory that the training writes and its watcher reads: what the training is doing, and how far it is.

Plain stores into it, no call, no lock: the cost of a step is that of a few assignments. The watcher sees some of them
later than others, and a number that grows is all that it needs.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from enum import IntEnum

_BYTES = mmap.PAGESIZE


class Phase(IntEnum):
    """What the main thread of the training is doing."""

    STARTUP = 0
    """Until the first step is complete."""
    STEP = 1
    VALIDATION = 2
    BETWEEN = 3
    """What is no step at the end of an epoch or of the training."""
    SAVE = 4
    """The part of a save that the training waits for."""


class Cell:
    """Where on the page a number is; plain integers, since looking up a member of an enumeration takes longer."""

    PHASE = 0
    PROGRESS = 1
    """Grows whenever the main thread has completed something: a step, a batch of validation, a file that was read."""
    STEPS = 2
    """Optimizer steps of the run."""
    POSITION = 3
    """Twice the batches that were begun, and one more when the loss of the last one is known: to compare the ranks."""
    SAVES_BEGUN = 4
    SAVES_OVER = 5
    SAVE_PROGRESS = 6
    """Grows whenever something of a save in the background was written."""


@dataclass(frozen=True)
class Seen:
    """The page at one moment."""

    phase: Phase
    progress: int
    steps: int
    position: int
    saves_begun: int
    saves_over: int
    save_progress: int

    @property
    def saving(self) -> bool:
        """Whether a save is being made."""
        return self.saves_begun > self.saves_over


class Page:
    """The page, in the process that made it or in one that was given its descriptor.

    Attributes:
        cells: The numbers, by `Cell`; assign to change one.
        fd: Its descriptor.
    """

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            fd = os.memfd_create("lightning_ft")
            os.ftruncate(fd, _BYTES)
        self.fd = fd
        self.cells = memoryview(mmap.mmap(fd, _BYTES)).cast("Q")

    def look(self) -> Seen:
        """What it says now."""
        cells = self.cells
        return Seen(
            Phase(cells[Cell.PHASE]), cells[Cell.PROGRESS], cells[Cell.STEPS], cells[Cell.POSITION],
            cells[Cell.SAVES_BEGUN], cells[Cell.SAVES_OVER], cells[Cell.SAVE_PROGRESS],
        )  # fmt: skip
