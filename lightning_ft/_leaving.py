"""The process ends with a code once Lightning has torn down the fit, and the user's script does not go on.

Lightning knows only one way out of `Trainer.fit` that is not its return: an exception, which is the failure of the run
to it and to all callbacks and loggers. So the fit ends by itself, and `SystemExit` is raised after the last that it
does, past Lightning's handling of errors. A script's own ``finally`` blocks run.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Callable, Collection
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerStatus
from torch.multiprocessing.spawn import ProcessExitedException

from lightning_ft import _loops
from lightning_ft.exit_codes import ASKED_TO_END

_log = logging.getLogger(__name__)

_CHILDREN_WITHIN_SECS = 60.0


class _Left(SystemExit):
    """The fit is over and torn down, and the process ends."""


def leave_after_fit(trainer: pl.Trainer, code: int | None, last: Callable[[int], None]) -> None:
    """`trainer.fit`, which has ended its training, does not return: the process ends with `code`, if that is one.

    Unless it still fails: then that error goes its way.

    Args:
        trainer: The trainer, in `on_train_end`.
        code: The exit code.
        last: Called with the code when everything is torn down, on all ranks.
    """
    if code is None:
        return
    undo: list[Callable[[], None]] = []

    def forget() -> None:
        for step in reversed(undo):
            step()
        undo.clear()

    tear_down, interrupt = call._call_teardown_hook, call._interrupt

    def torn_down(of: pl.Trainer) -> None:
        tear_down(of)
        if of is not trainer:
            return
        _await_children(trainer)
        last(code)
        trainer.state.status = TrainerStatus.INTERRUPTED
        # It was called; Lightning calls it once more, before it lets the exception go.
        undo.append(_loops.replaced(trainer, "_teardown", forget))
        raise _Left(code)

    def interrupted(of: pl.Trainer, exception: BaseException) -> None:
        if isinstance(exception, _Left):
            return
        if of is trainer:
            forget()
        interrupt(of, exception)

    undo += [
        _loops.replaced(call, "_call_teardown_hook", torn_down),
        _loops.replaced(call, "_interrupt", interrupted),
    ]


def leave_with_spawned(exception: BaseException) -> None:
    """If the ranks that this process has spawned have left with a code of ours, so does it."""
    if isinstance(exception, ProcessExitedException) and exception.exit_code in ASKED_TO_END:
        raise _Left(exception.exit_code) from None


def expect_exits(trainer: pl.Trainer) -> None:
    """Lightning's watch over the processes that it started takes our exit codes for what they are: a good end.

    It would kill this process, which may still have something to do, within seconds of another one's end.
    """
    processes = getattr(trainer.strategy.launcher, "procs", ())
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver) and _same(thread._child_processes, processes):
            thread._child_processes = [_Expected(process) for process in processes]  # type: ignore[misc]


def _same(some: Collection[Any], others: Collection[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


class _Expected:
    """A child process, as Lightning's observer asks for it."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        code = self._process.returncode
        return 0 if code in ASKED_TO_END else code

    def poll(self) -> int | None:
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)


def _await_children(trainer: pl.Trainer) -> None:
    """The processes that Lightning started here are gone: they would end with this one, which may be their init."""
    for process in getattr(trainer.strategy.launcher, "procs", ()):
        if isinstance(process, subprocess.Popen):
            try:
                process.wait(_CHILDREN_WITHIN_SECS)
            except subprocess.TimeoutExpired:
                _log.warning(
                    "process %d, another rank, has not ended %.0f s after its fit; left behind",
                    process.pid,
                    _CHILDREN_WITHIN_SECS,
                )
