"""Processes that save checkpoints and are killed on the way, and the one check of what they leave behind.

`check` is what every test of this directory judges by; `BREAKAGES` are wrong savers that it has to catch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

import lightning_ft as ft
from lightning_ft import events, rotation
from lightning_ft._disk import attempt, direct, sink
from lightning_ft._history import event_file
from lightning_ft._names import KEY, LOCK_NAME, STARTS_NAME, checkpoint_name, parse_leftover
from lightning_ft._proof.recorder import KillSwitch
from lightning_ft._saving import task
from lightning_ft.plugin import SaveOptions
from lightning_ft.retention import Retention
from lightning_ft.storage import Storage
from tests.ranks import WITHIN_SECS

RUN_ID = "c" * 32
SYSCALLS = ("open", "write", "pwrite", "fsync", "close", "replace", "rename", "unlink")
WRITING_THREADS = ("lightning-ft-writer", "lightning-ft-disk")


# -- what the parent does ----------------------------------------------------------------------------------------


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The events of all starts so far, in order."""
    if not os.path.exists(path):
        return []
    whole = Path(path).read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def check(dirpath: str | Path, log: str | Path, keep: int) -> list[str]:
    """After a kill at any moment `dirpath` is in order; returns the names of what the next start has to clear away.

    Raises:
        AssertionError: A file under a final name is not whole, a checkpoint that had been committed is lost, fewer
            than `keep` are there although so many had been committed, or there is a file that nobody would clear away.
    """
    directory = Path(dirpath)
    names = sorted(os.listdir(directory)) if directory.exists() else []
    hidden = [name for name in names if parse_leftover(name)]
    files = [name for name in names if name.endswith(".ckpt") and name not in hidden]
    strange = set(names) - set(hidden) - set(files) - {LOCK_NAME, STARTS_NAME, event_file.DIRECTORY}
    assert not strange, f"nobody would ever remove {strange}"
    found = {name: ft.verify(str(directory / name)) for name in files}
    broken = {name: info.problem for name, info in found.items() if info.problem is not None}
    assert not broken, f"not whole under their final names: {broken}"
    committed = [e for e in read_log(log) if e["event"] == "Committed"]
    if not committed:
        return hidden
    good = ft.last_good(str(directory))
    assert good is not None, "a checkpoint was committed, and none is there"
    assert good.manifest is not None
    newest = max(e["step"] for e in committed)
    assert good.manifest.step >= newest, f"step {newest} was committed, {good.manifest.step} is the newest there"
    steps = {e["step"] for e in committed}
    assert len(found) >= min(keep, len(steps)), f"{len(steps)} were committed, {len(found)} of {keep} are left"
    return hidden


# -- a saver without a trainer -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saver:
    """Saves some checkpoints, continuing after the newest one there, in a process of its own."""

    dirpath: str
    keep: int = 2
    rotates: str = "callback"
    """Who asks for removals: our callback after the commit, or a `ModelCheckpoint` that calls the plugin itself."""
    kill_event: str = ""
    kill_call: int = 0
    """Killed at this system call of the threads that write, from 1."""
    how: str = "before"
    """Before that call, after it, or with half of the bytes of a write written."""
    broken: str = ""
    steps: int = 5
    numbers: int = 1000
    """Of the smaller of two tensors in every checkpoint."""

    @property
    def log(self) -> str:
        return f"{self.dirpath}.events"


def start(saver: Saver, kill_after_secs: float | None = None) -> int:
    """The exit code of one start; with `kill_after_secs` it is killed so long after its first commit."""
    context = multiprocessing.get_context("forkserver")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_save_all, args=(saver, send))
    process.start()
    send.close()
    if kill_after_secs is not None:
        assert receive.poll(WITHIN_SECS)
        process.join(kill_after_secs)
        process.kill()
    process.join(WITHIN_SECS)
    assert process.exitcode is not None, "a saver hangs"
    return process.exitcode


def _save_all(saver: Saver, first_commit: Any) -> None:
    torch.set_num_threads(1)
    # Small buffers, so that a checkpoint of some kilobytes takes several writes, as a large one would.
    sink.BUFFER_BYTES, sink.CHUNK_BYTES = 2048, 4096
    direct.BUFFERS = direct.DiskBuffers(4096, 3)
    if saver.broken:
        BREAKAGES[saver.broken]()
    log_events(saver.log)

    def tell(event: events.Event) -> None:
        if isinstance(event, events.Committed) and not first_commit.closed:
            first_commit.send(True)
            first_commit.close()

    events.observe(tell)
    if saver.kill_event:
        KillSwitch(saver.kill_event)
    if saver.kill_call:
        _kill_at_call(saver.kill_call, saver.how)
    save_steps(saver)


def save_steps(saver: Saver) -> None:
    """What `saver` is to do was done, in this process and by its rules."""
    Storage().remove_leftovers(saver.dirpath)
    good = ft.last_good(saver.dirpath)
    first = good.manifest.step if good is not None and good.manifest is not None else 0
    plugin = ft.FaultTolerantCheckpointIO()
    previous: list[str] = [] if good is None else [good.path]
    for step in range(first + 1, first + 1 + saver.steps):
        path = f"{saver.dirpath}/{checkpoint_name(step)}"
        options = None
        if saver.rotates == "callback":
            options = SaveOptions(partial(rotation.rotate, saver.dirpath, path, RUN_ID, Retention(saver.keep), None))
        plugin.save_checkpoint(checkpoint(step, saver.numbers), path, options)
        previous.append(path)
        if saver.rotates == "user" and len(previous) > saver.keep:
            plugin.remove_checkpoint(previous.pop(0))
    plugin.teardown()


def checkpoint(step: int, numbers: int = 1000) -> dict[str, Any]:
    """What a run of ours would hand to the plugin, as far as the plugin looks at it."""
    ours = {
        "generation": uuid.uuid4().hex, "run_id": RUN_ID, "start": 1, "step": step, "batch": step,
        "reason": "periodic", "boundary": "step", "parent": None,
    }  # fmt: skip
    weights = {"w": torch.full((numbers,), float(step)), "v": torch.full((numbers * 3 // 2,), -float(step))}
    return {"state_dict": weights, "global_step": step, "epoch": 0, KEY: ours}


def log_events(path: str) -> None:
    """Every event from now on is a line of `path`, with the operating system before the next thing happens."""

    def write(event: events.Event) -> None:
        line = json.dumps({"event": type(event).__name__, **asdict(event)}) + "\n"
        descriptor = _CALLS["open"](path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        _CALLS["write"](descriptor, line.encode())
        _CALLS["close"](descriptor)

    events.observe(write)


_CALLS: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in SYSCALLS}


def _kill_at_call(at: int, how: str) -> None:
    """The process is killed at the `at`-th system call by which a thread that writes changes the disk."""
    count = 0

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if threading.current_thread().name not in WRITING_THREADS:
                return original(*args, **kwargs)
            count += 1
            if count != at:
                return original(*args, **kwargs)
            try:
                if how == "after":
                    original(*args, **kwargs)
                elif how == "half" and name in ("write", "pwrite"):
                    original(args[0], memoryview(args[1])[: len(args[1]) // 2], *args[2:])
            finally:
                os.kill(os.getpid(), signal.SIGKILL)

        return call

    for name, original in _CALLS.items():
        setattr(os, name, wrap(name, original))


# -- savers that are wrong ---------------------------------------------------------------------------------------


def _in_place() -> None:
    """The bytes go straight to the final name."""
    attempt.attempt_name = lambda name, token: name  # type: ignore[assignment]


def _early_rename() -> None:
    """The final name is there before the data are."""
    put = attempt.LocalAttempt._put

    def rename_and_put(self: Any, view: memoryview) -> None:
        if self.attempt != self.path:
            os.replace(self.attempt, self.path)
            self.attempt = self.path
        put(self, view)

    attempt.LocalAttempt._put = rename_and_put  # type: ignore[method-assign]


def _delete_first() -> None:
    """The older checkpoints go before the new one is there."""
    open_attempt = Storage.open_attempt

    def rotate_and_open(self: Storage, path: str, expected_bytes: int | None = None) -> Any:
        dirpath = os.path.dirname(path)
        for name in self.listdir(dirpath):
            if name.endswith(".ckpt") and not name.startswith("."):
                self.remove(f"{dirpath}/{name}")
        return open_attempt(self, path, expected_bytes)

    Storage.open_attempt = rotate_and_open  # type: ignore[method-assign]


def _early_commit() -> None:
    """The commit is announced before it has happened."""
    write = task.SaveTask.write

    def announce_and_write(self: Any, target: Any, times: Any) -> Any:
        events.emit(events.Committed(self.path, self.manifest.step, self.manifest.generation, 0, 0.0))
        return write(self, target, times)

    task.SaveTask.write = announce_and_write  # type: ignore[method-assign]


def _stray_names() -> None:
    """Attempts have a name by which no later start knows them."""
    attempt.attempt_name = lambda name, token: f"tmp-{token}"  # type: ignore[assignment]


BREAKAGES: dict[str, Callable[[], None]] = {
    "in_place": _in_place,
    "early_rename": _early_rename,
    "delete_first": _delete_first,
    "early_commit": _early_commit,
    "stray_names": _stray_names,
}


class NothingLeft(Callback):
    """What a kill left behind is gone when training starts; nothing has been saved by then."""

    def __init__(self, dirpath: str) -> None:
        self.dirpath = dirpath

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        left = [name for name in os.listdir(self.dirpath) if parse_leftover(name)]
        assert not left, f"still there after a start: {left}"
