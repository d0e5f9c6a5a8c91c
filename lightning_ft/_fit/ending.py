"""What ends a fit before its time, and how its process then ends."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl

from lightning_ft._fit.watch import Request
from lightning_ft._preemption import leaving
from lightning_ft._restart.starts import is_no_fault


class Ending:
    """Whether a fit is asked to end. The same on all ranks.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self.request: Request | None = None
        """The request that ends the fit: the first one, and before that the first one that ends the process, too."""
        self.error: BaseException | None = None
        """What ended it, if an exception did."""
        self.finished = False
        """Whether it has ended without one."""

    @property
    def saves(self) -> bool:
        """Whether the state at the end is to be saved, as far as the request is concerned."""
        return self.request is None or self.request.save is not None

    @property
    def leaves(self) -> bool:
        """Whether the process ends with a code of its own."""
        return self.request is not None and self.request.exit_code is not None

    def heed(self, request: Request) -> None:
        """The fit is to end, as `request` asks, unless it is already, and the process with it if that is asked for."""
        if self.request is None or (self.request.exit_code is None and request.exit_code is not None):
            self.request = request
            if request.exit_code is not None:
                leaving.expect_exits(self._trainer)

    def forget(self) -> None:
        """The fit goes on from an older checkpoint, where nothing had asked for its end."""
        self.request = None

    def leave(self, *, saved: bool, last: Callable[[int | None], None], stays: Callable[[], None]) -> None:
        """Once Lightning has torn down the fit, the process ends with the code that was asked for, if one was.

        Args:
            saved: Whether the state at the end is on disk.
            last: Called with the code as the very last thing; with None at once, if a request ends the fit alone.
            stays: Called if the process does not end.
        """
        if self.request is None:
            return
        code = self.request.code_when(saved=saved)
        if code is None:
            last(code)
        else:
            leaving.leave_after_fit(self._trainer, code, last, stays)

    @property
    def is_no_fault(self) -> bool:
        """Whether the way it has ended says nothing against the checkpoint that it was started from."""
        if self.finished:
            return is_no_fault(SystemExit(self.request.exit_code if self.request is not None else 0))
        return self.error is not None and is_no_fault(self.error)


def last_words(code: int | None, newest: str, *, saved: bool) -> str:
    """What there is, and what to do now: the last line of a fit that was asked to end.

    Args:
        code: With which the process ends; None: it goes on.
        newest: The newest durable checkpoint; empty if there is none.
        saved: Whether it has the state at the end.
    """
    if not newest:
        what = "nothing is saved yet"
    else:
        what = f"saved {newest}" if saved else f"nothing newer than {newest} is saved"
    return f"{what}. " + ("" if code is None else f"Exit code {code}: ") + "start the same command again to go on"
