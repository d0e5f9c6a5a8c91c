"""Workers of data loaders outlive the signals that are meant for the training.

Schedulers and launchers signal whole groups of processes (torchrun, SLURM, the terminal's Ctrl-C), and a worker that
dies of it takes the training along before it has saved: PyTorch raises for a dead worker, in the middle of a step. So
what stops the training does nothing in its workers, which end when their parent tells them to, or is gone.

SIGTERM is the one that the parent itself uses, for a worker that does not end. Who sent it is told by `sigwaitinfo`
alone, so a thread of the worker waits for it there.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

from torch.utils.data._utils import worker as _torch_worker

_ENVIRONMENT = "_LIGHTNING_FT_WORKERS_OUTLIVE"  # for workers that are spawned, and have nothing else of their parent
_TORCHDATA = "torchdata.stateful_dataloader.stateful_dataloader"

_of_torch: Callable[..., None] = _torch_worker._worker_loop
_of_torchdata: Callable[..., None] | None = None


def shield(numbers: Collection[int]) -> Callable[[], None]:
    """Workers that start from now on outlive these signals, until the returned function is called."""
    global _of_torchdata
    undo = [_replaced(_torch_worker, _torch_worker_loop), _in_environment(numbers)]
    torchdata = sys.modules.get(_TORCHDATA)
    if torchdata is not None:
        if torchdata._worker_loop is not _torchdata_worker_loop:
            _of_torchdata = torchdata._worker_loop
        undo.append(_replaced(torchdata, _torchdata_worker_loop))

    def stop() -> None:
        for step in reversed(undo):
            step()

    return stop


def _replaced(module: ModuleType, loop: Callable[..., None]) -> Callable[[], None]:
    before = module._worker_loop
    module._worker_loop = loop  # type: ignore[attr-defined]

    def undo() -> None:
        module._worker_loop = before  # type: ignore[attr-defined]

    return undo


def _in_environment(numbers: Collection[int]) -> Callable[[], None]:
    before = os.environ.get(_ENVIRONMENT)
    os.environ[_ENVIRONMENT] = " ".join(map(str, sorted(numbers)))

    def undo() -> None:
        if before is None:
            os.environ.pop(_ENVIRONMENT, None)
        else:
            os.environ[_ENVIRONMENT] = before

    return undo


def _torch_worker_loop(*args: Any) -> None:
    _outlive()
    _of_torch(*args)


def _torchdata_worker_loop(*args: Any) -> None:
    _outlive()
    if _of_torchdata is not None:
        _of_torchdata(*args)
    else:  # spawned: this process has replaced nothing
        importlib.import_module("torchdata.stateful_dataloader.worker")._worker_loop(*args)


def _outlive() -> None:
    for number in map(int, os.environ.get(_ENVIRONMENT, "").split()):
        if number == signal.SIGTERM:
            _only_from_parent()
        else:
            # Not SIG_IGN: programs that a dataset starts would inherit that.
            signal.signal(number, _nothing)
    signal.signal(signal.SIGINT, _nothing)


def _nothing(number: int, frame: Any) -> None:
    pass


def _only_from_parent() -> None:
    if not hasattr(signal, "sigwaitinfo"):  # macOS: a SIGTERM to the whole group ends workers there
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    # Programs started by the dataset can be ended as ever.
    os.register_at_fork(after_in_child=_unblock)
    threading.Thread(target=_end_if_told, args=(os.getppid(),), name="lightning-ft-sigterm", daemon=True).start()


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _end_if_told(parent: int) -> None:
    while True:
        sender = signal.sigwaitinfo([signal.SIGTERM]).si_pid
        if sender in (parent, os.getpid()) or os.getppid() != parent:
            os._exit(0)
