"""Workers of data loaders outlive the signals that are meant for the training.

Schedulers and launchers signal whole groups of processes (torchrun, SLURM, the terminal's Ctrl-C), and a worker that
dies of it takes the training along before it has saved: PyTorch raises for a dead worker, in the middle of a step. So
what stops the training does nothing in its workers, which end when their parent tells them to, or is gone.

A worker that is being started, which takes seconds where it is spawned, has these signals blocked until it can do that:
a process inherits what the one that starts it has blocked. Not so one of a forkserver, which forks it by itself: a
signal in the first moments, while the dataset is unpickled, still ends that worker.

SIGTERM is also what the parent itself sends to a worker that does not end as it is told; SIGKILL takes its place there.

Private, as of torch 2.13 and torchdata 0.11: `_worker_loop`, what a worker runs, and the functions of
`torch.utils.data._utils.signal_handling`, which take its signals and note its number. The public `worker_init_fn` is
the user's, and is called after a while in which a signal would still end the worker. Of Python (3.10 to 3.12),
`Process._popen`, which is what `Process.terminate` calls, and that is what torch calls.
"""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import sys
from collections.abc import Callable, Collection
from functools import partial, partialmethod
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import _utils

_TORCHDATA = "torchdata.stateful_dataloader.stateful_dataloader"
_TORCHDATA_WORKER = "torchdata.stateful_dataloader.worker"

_torch_worker: Any = _utils.worker
_handling: Any = _utils.signal_handling  # asked for these functions whenever they are called
_of_torch: Callable[..., None] = _torch_worker._worker_loop


def shield(numbers: Collection[int]) -> Callable[[], None]:
    """Workers that start from now on outlive these signals, and Ctrl-C, until the returned function is called."""
    undo = [
        _replaced(_torch_worker, "_worker_loop", partial(_torch_worker_loop, tuple(numbers))),
        _replaced(BaseProcess, "start", partialmethod(_started_blocked, BaseProcess.start, {*numbers, signal.SIGINT})),
        _replaced(_handling, "_set_worker_pids", partial(_workers_started, _handling._set_worker_pids)),
    ]
    torchdata = sys.modules.get(_TORCHDATA)
    if torchdata is not None:
        undo.append(_replaced(torchdata, "_worker_loop", partial(_torchdata_worker_loop, tuple(numbers))))

    def stop() -> None:
        for step in reversed(undo):
            step()

    return stop


def _replaced(module: Any, name: str, value: Any) -> Callable[[], None]:
    before = getattr(module, name)
    setattr(module, name, value)
    return partial(setattr, module, name, before)


def _started_blocked(process: BaseProcess, start: Callable[[BaseProcess], None], numbers: set[int]) -> None:
    """Thread: the one that makes the iterator. Signals that come meanwhile arrive when this is over."""
    loop = getattr(getattr(process, "_target", None), "func", None)
    if loop not in (_torch_worker_loop, _torchdata_worker_loop) or not hasattr(signal, "pthread_sigmask"):
        start(process)
        return
    method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
    if method != "fork":
        resource_tracker.ensure_running()  # which, when it has to be started, unblocks signals
    if method == "forkserver":
        forkserver.ensure_running()  # it would have them blocked for ever, and so would all that it forks
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        start(process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _workers_started(go_on: Callable[[int, tuple[int, ...]], None], loader: int, pids: tuple[int, ...]) -> None:
    """Thread: the one that makes the iterator, in the parent."""
    go_on(loader, pids)
    for process in multiprocessing.active_children():
        started: Any = getattr(process, "_popen", None)
        if process.pid in pids and started is not None:
            started.terminate = started.kill


# -- in the worker -------------------------------------------------------------------------------------------------


def _torch_worker_loop(numbers: tuple[int, ...], *args: Any) -> None:
    _outlive(numbers)
    _of_torch(*args)


def _torchdata_worker_loop(numbers: tuple[int, ...], *args: Any) -> None:
    _outlive(numbers)
    importlib.import_module(_TORCHDATA_WORKER)._worker_loop(*args)


def _outlive(numbers: tuple[int, ...]) -> None:
    def set_handlers() -> None:
        theirs()
        _ignore(numbers)

    _ignore({*numbers, signal.SIGINT})
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*numbers, signal.SIGINT})
    # The loop's first act, which takes SIGTERM back.
    theirs = _handling._set_worker_signal_handlers
    _handling._set_worker_signal_handlers = set_handlers


def _ignore(numbers: Collection[int]) -> None:
    for number in numbers:
        # Not SIG_IGN: programs that a dataset starts would inherit that.
        signal.signal(number, _nothing)
        if hasattr(signal, "siginterrupt"):
            signal.siginterrupt(number, False)  # what the dataset's libraries wait for goes on


def _nothing(number: int, frame: Any) -> None:
    pass
