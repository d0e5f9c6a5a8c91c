"""The process ends with a code once Lightning has torn down the fit, and the user's script does not go on.

Lightning knows only one way out of `Trainer.fit` that is not its return: an exception, which is the failure of the run
to it and to all callbacks and loggers. So the fit ends by itself, and `SystemExit` is raised after the last that it
does, past Lightning's handling of errors. A script's own ``finally`` blocks run.

Private to Lightning (2.5.5 to 2.6): `call._call_teardown_hook`, `call._interrupt` and `Trainer._teardown`, the ends of
`call._call_and_handle_interrupt`, after whose `teardown` hooks, in any order, there is no other; `Trainer._run_stage`,
the loops, around which a process that was spawned calls no hook; the launchers' `procs`, and `_ChildProcessObserver`,
which is a thread that nobody holds. Of Python (3.10 to 3.13): `multiprocessing.process` drops the
`SystemExit` of a child itself.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerStatus
from torch.multiprocessing.spawn import ProcessExitedException

from lightning_ft import exit_codes
from lightning_ft._fit import loops

_log = logging.getLogger(__name__)

_CHILDREN_WITHIN_SECS = 60.0


class _Left(SystemExit):
    """The fit is over and torn down, and the process ends.

    Args:
        code: The exit code.
        stays: Called if the process does not end: this was caught, and nobody has it any more.
    """

    def __init__(self, code: object, stays: Callable[[], None] | None = None) -> None:
        super().__init__(code)
        self._stays = stays

    def __del__(self) -> None:
        # Who is about to exit drops it: the interpreter below the last frame of the program, or a child's first frame.
        below = sys._getframe().f_back
        caught = below is not None and below.f_globals.get("__name__") != "multiprocessing.process"
        if self._stays is not None and caught and not sys.is_finalizing():
            self._stays()


def leave_after_fit(trainer: pl.Trainer, code: int, last: Callable[[int], None], stays: Callable[[], None]) -> None:
    """`trainer.fit`, which has ended its training, does not return: the process ends with `code`.

    Unless it still fails: then that error goes its way.

    Args:
        trainer: The trainer, in `on_train_end`.
        code: The exit code.
        last: Called with the code when everything is torn down, on all ranks.
        stays: Called if the process does not end after all, as somebody has caught its `SystemExit`.
    """
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
        undo.append(loops.replaced(trainer, "_teardown", forget))
        raise _Left(code, stays)

    def interrupted(of: pl.Trainer, exception: BaseException) -> None:
        if isinstance(exception, _Left):
            return
        if of is trainer:
            forget()
        interrupt(of, exception)

    undo += [
        loops.replaced(call, "_call_teardown_hook", torn_down),
        loops.replaced(call, "_interrupt", interrupted),
    ]


def end_with(trainer: pl.Trainer, error: BaseException) -> None:
    """`trainer.fit`, which is about to end with another exception, ends with `error`, once it is torn down."""

    def torn_down() -> None:
        undo()
        trainer._teardown()
        trainer.state.stage = None  # as Lightning does it next
        raise error

    # The last that Lightning calls before it raises the exception again.
    undo = loops.replaced(trainer, "_teardown", torn_down)


def leave_with_spawned(trainer: pl.Trainer, exception: BaseException) -> None:
    """If the ranks that this process has spawned have left with a code of ours, so does it.

    Blocks on: those ranks after a Ctrl-C, which a terminal sends to them as well: they save, and leave. Lightning would
    wait for them too, and then forget their code.
    """
    launcher = trainer.strategy.launcher
    if not isinstance(launcher, _MultiProcessingLauncher):
        return
    codes: list[int | None] = []
    if isinstance(exception, ProcessExitedException):
        codes = [exception.exit_code]
    elif isinstance(exception, KeyboardInterrupt):
        for process in launcher.procs:
            process.join()
        codes = [process.exitcode for process in launcher.procs]
    code = next((code for code in codes if code in exit_codes.ALL), None)
    if code is not None:
        raise _Left(code) from None


def leave_spawned(trainer: pl.Trainer, failed: Callable[[BaseException], None]) -> None:
    """What ends the fit of a process that Lightning has spawned ends it as it ends any other.

    Lightning tells callbacks of an exception in the process that has spawned the ranks, and torch makes exit code 1 of
    everything that is an `Exception` by its type, as those of our errors are that have a code of their own.

    Args:
        trainer: The trainer, which is dropped with the fit.
        failed: Called with the exception.
    """
    if not isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
        return
    run_stage = trainer._run_stage

    def run_and_leave() -> Any:
        try:
            return run_stage()
        except BaseException as error:
            failed(error)
            if isinstance(error, SystemExit):
                raise _Left(error.code) from error
            raise

    loops.replaced(trainer, "_run_stage", run_and_leave)


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
        return 0 if code in exit_codes.ASKED_TO_END else code

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
