"""The background writer: one save running, at most one waiting, everything in the order it was asked for.

One save, who runs each step and what is on disk after it::

    step                     thread   on disk afterwards
    -----------------------  -------  ------------------------------------------------------------
    save(): queue            main     nothing
    open attempt             writer   a hidden, empty attempt beside the target
    serialise, hash, write   writer   the attempt grows
    commit                   writer   the checkpoint, complete, synced and under its final name
    held-back removals       writer   what callers asked to remove before this save is gone
    on_commit (rotation)     writer   what the retention policy gives up is gone

A removal waits in the same queue, so it never overtakes a save submitted before it; and after a failed save removals
are held back until a later one has committed, because the caller who asked for them believed the save had succeeded.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import IO, Any, cast

import tenacity
import torch

from lightning_ft import events
from lightning_ft.errors import SaveError
from lightning_ft.manifest import Manifest
from lightning_ft.storage import Attempt, Storage

_log = logging.getLogger(__name__)

# Errors of a busy or briefly absent store; a full disk or a missing permission is not going to mend itself.
_TRANSIENT = frozenset({errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET})


@dataclass(frozen=True)
class SaveTask:
    """One checkpoint to write: `checkpoint` belongs to the writer from now on."""

    path: str
    checkpoint: dict[str, Any]
    manifest: Manifest
    """Complete but for size and digest, which are known when the bytes are."""
    on_commit: Callable[[Manifest], None] | None = None


@dataclass(frozen=True)
class _RemoveTask:
    path: str


class Writer:
    """Writes checkpoints in the background, in order, and remembers the first failure nobody has heard of yet.

    Thread: every method is for the main thread; the writer thread starts with the first task and ends with `close`.
    """

    def __init__(self, storage: Storage, retries: int) -> None:
        self._storage = storage
        self._retries = retries
        self._condition = threading.Condition()
        self._tasks: deque[SaveTask | _RemoveTask] = deque()
        self._running = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._failure: SaveError | None = None
        self._held_back: list[str] = []
        self._last_save_failed = False
        self.failures_in_a_row = 0

    @property
    def busy(self) -> bool:
        """Whether `save` would wait: a save is waiting behind the one that runs."""
        with self._condition:
            return self._waiting_saves() > 0

    def save(self, task: SaveTask) -> None:
        """`task` is queued. Blocks on: a save that waits already (memory for one running and one waiting)."""
        with self._condition:
            self._condition.wait_for(lambda: not self._waiting_saves())
            self._enqueue(task)

    def save_now(self, task: SaveTask) -> None:
        """`task` is on disk or recorded as failed. Thread: the caller's; earlier tasks finish first."""
        self.drain()
        self._save(task)

    def remove(self, path: str) -> None:
        """The removal of `path` is queued behind everything submitted before. Blocks on: nothing."""
        with self._condition:
            self._enqueue(_RemoveTask(path))

    def drain(self, timeout_secs: float | None = None) -> bool:
        """Everything submitted is on disk, or recorded as failed; False if that took longer than the timeout."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._tasks and not self._running, timeout_secs)

    def record_failure(self, path: str, step: int, error: Exception) -> None:
        """A save that could not be submitted counts like one that could not be written."""
        failure = SaveError(
            f"checkpoint {path} (step {step}) was not saved: {type(error).__name__}: {error}", path, step
        )
        failure.__cause__ = error
        with self._condition:
            self._failure = self._failure or failure
            self._last_save_failed = True
            self.failures_in_a_row += 1
        events.emit(events.SaveFailed(path, step, f"{type(error).__name__}: {error}"))

    @property
    def failed(self) -> bool:
        """Whether a failure waits to be taken."""
        with self._condition:
            return self._failure is not None

    def take_failure(self) -> SaveError | None:
        """The oldest failure not yet taken; it is reported once."""
        with self._condition:
            failure, self._failure = self._failure, None
            return failure

    def close(self) -> None:
        """Everything submitted is on disk or failed and no thread is left; the next task starts a new one."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        self._closing = False

    # -- the writer thread ---------------------------------------------------------------------------------------

    def _waiting_saves(self) -> int:
        return sum(isinstance(t, SaveTask) for t in self._tasks)

    def _enqueue(self, task: SaveTask | _RemoveTask) -> None:
        self._tasks.append(task)
        if self._thread is None:
            # A daemon: at interpreter exit without teardown the attempt is abandoned, as in a crash, not waited for.
            self._thread = threading.Thread(target=self._run, name="lightning-ft-writer", daemon=True)
            self._thread.start()
        self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._tasks or self._closing)
                if not self._tasks:
                    return
                task = self._tasks.popleft()
                self._running = True
                self._condition.notify_all()
            try:
                if isinstance(task, SaveTask):
                    self._save(task)
                elif self._last_save_failed:
                    self._held_back.append(task.path)
                else:
                    self._remove(task.path)
            finally:
                del task  # the snapshot's memory goes before the next task is waited for
                with self._condition:
                    self._running = False
                    self._condition.notify_all()

    def _save(self, task: SaveTask) -> None:
        began = time.monotonic()
        try:
            manifest = self._retrying()(self._write, task)
        except Exception as error:
            self.record_failure(task.path, task.manifest.step, error)
            return
        with self._condition:
            self._last_save_failed = False
            self.failures_in_a_row = 0
        secs = time.monotonic() - began
        events.emit(events.Committed(task.path, manifest.step, manifest.generation, manifest.size_bytes, secs))
        _log.info(
            "saved %s (step %d, %s): %.1f MiB in %.2f s", task.path, manifest.step, manifest.reason,
            manifest.size_bytes / 2**20, secs,
        )  # fmt: skip
        held_back, self._held_back = self._held_back, []
        for path in held_back:
            self._remove(path)
        if task.on_commit is not None:
            task.on_commit(manifest)

    def _write(self, task: SaveTask) -> Manifest:
        events.emit(events.SaveStarted(task.path, task.manifest.step))
        attempt = self._storage.open_attempt(task.path)
        sink = _Sink(attempt)
        try:
            torch.save(task.checkpoint, cast(IO[bytes], sink))
            return attempt.commit(lambda size, digest: replace(task.manifest, size_bytes=size, digest=digest))
        except BaseException as error:
            attempt.abort()
            if sink.error is not None and sink.error is not error:
                raise sink.error from error
            raise

    def _retrying(self) -> tenacity.Retrying:
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_transient),
            stop=tenacity.stop_after_attempt(self._retries + 1),
            wait=tenacity.wait_exponential(multiplier=0.2, max=10.0) + tenacity.wait_random(0.0, 1.0),
            before_sleep=tenacity.before_sleep_log(_log, logging.WARNING),
            reraise=True,
        )

    def _remove(self, path: str) -> None:
        try:
            self._storage.remove(path)
        except OSError as error:
            # A file too many is no danger to the run; it is said, and the disk is no fuller than before.
            _log.warning("could not remove %s: %s: %s", path, type(error).__name__, error)
            events.emit(events.DeleteSkipped(path, f"{type(error).__name__}: {error}"))


class _Sink:
    """What torch.save writes into. Remembers an error of `write`: torch replaces it by one that hides the cause."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._attempt.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Nothing to do: the attempt is synced when it is committed."""


def _is_transient(error: BaseException) -> bool:
    return isinstance(error, (ConnectionError, TimeoutError)) or (
        isinstance(error, OSError) and error.errno in _TRANSIENT
    )
