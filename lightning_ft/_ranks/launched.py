"""Lightning's own launcher, and the time that it leaves rank 0 when another of its processes has ended badly.

Rank 0 is the launcher. A thread of it looks at the others every few seconds, and kills them all, and its own process,
with SIGKILL when one has ended with another code than 0: also while rank 0 writes a checkpoint, or ends by itself.

Private to Lightning (2.5.5 to 2.6): the launcher's class, the thread's, and of that the list of its processes and the
method that kills. Nobody holds the thread, and there is no setting that turns it off.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import lightning.pytorch as pl
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_ft._fit import loops

_log = logging.getLogger(__name__)

ENDS_SECS = 30.0
"""A process whose fit is over ends by itself within this time, or hangs."""


def be_patient(trainer: pl.Trainer, fit_is_over: threading.Event, finish: Callable[[], object]) -> Callable[[], None]:
    """Processes are killed only after they had the time to end by themselves, until the returned function is called.

    Args:
        trainer: The trainer.
        fit_is_over: Set when the fit of this process has ended.
        finish: Blocks until what this process writes is written; has to end by itself. Called in a thread.
    """
    launcher = trainer.strategy.launcher
    if not isinstance(launcher, _SubprocessScriptLauncher):
        return lambda: None
    pids = [process.pid for process in launcher.procs]
    undo = [
        loops.replaced(observer, "_terminate_all", _patient(observer, fit_is_over, finish))
        for observer in threading.enumerate()
        if isinstance(observer, _ChildProcessObserver) and [p.pid for p in observer._child_processes] == pids
    ]

    def remove() -> None:
        for step in undo:
            step()

    return remove


def _patient(
    observer: _ChildProcessObserver, fit_is_over: threading.Event, finish: Callable[[], object]
) -> Callable[[], None]:
    kill = observer._terminate_all

    def terminate_all() -> None:
        _log.info("a process of this run has failed; the others are killed when they have had time to end")
        fit_is_over.wait(ENDS_SECS)
        finish()
        time.sleep(ENDS_SECS)  # which is cut short by the end of this process
        kill()

    return terminate_all
