"""The background writer: one save running, at most one waiting, everything in the order it was asked for.

One save, who runs each step and what is on disk after it::

    step                     thread   on disk afterwards
    -----------------------  -------  ------------------------------------------------------------
    make_room(), save()      main     nothing
    wait for late copies     writer   nothing
    open attempt             writer   a hidden, empty attempt beside the target
    serialise, hash, write   writer   the attempt grows
    check the copy           writer   the attempt has all but the manifest
    commit                   writer   the checkpoint, complete, synced and under its final name
    release the snapshot     writer   the same
    read back, if wished     writer   the same; or, if it is not what was written, nothing
    held-back removals       writer   what callers asked to remove before this save is gone
    on_commit (rotation)     writer   what the retention policy gives up is gone

A removal waits in the same queue, so it never overtakes a save submitted before it; and after a failed save removals
are held back until a later one has committed, because the caller who asked for them believed the save had succeeded.
"""

from __future__ import annotations

import atexit
import logging
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import tenacity

from lightning_ft import events
from lightning_ft._copying.staging import SnapshotError, SnapshotWithdrawnError
from lightning_ft._saving.read_back import ReadBackDepth
from lightning_ft._saving.task import SaveTask, Target
from lightning_ft._saving.times import SaveTimes
from lightning_ft._stores.errors import is_transient
from lightning_ft.errors import SaveError
from lightning_ft.manifest import Manifest
from lightning_ft.storage import Storage

_log = logging.getLogger(__name__)

_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


@atexit.register
def _finish() -> None:
    """What was submitted before the interpreter ends is written; its threads are daemons and would be cut off."""
    while any(writer.unfinished for writer in list(_writers)):  # what one has written may be what another one copies
        for writer in list(_writers):
            writer.close()


# First of all before executors refuse work, as they do when functions of `atexit` run: clients of stores look up the
# names of hosts in them. The name is private; where it is gone, only connections that are there already can be used.
getattr(threading, "_register_atexit", atexit.register)(_finish)


@dataclass(frozen=True)
class _RemoveTask:
    path: str


@dataclass(frozen=True)
class _CallTask:
    path: str
    function: Callable[[], None]


@dataclass(frozen=True)
class _ReplacedTask:
    """Keeps the place in the order of a save that will not be made."""

    path: str


class Writer:
    """Writes checkpoints in the background, in order, and remembers the first failure nobody has heard of yet.

    Thread: every method is for the main thread; the writer thread starts with the first task and ends with `close`.

    Args:
        storage: Where to write.
        retries: How often a write is tried again after an error that may pass.
        verify_after_write: How deep a checkpoint is read back before it counts as saved; None: not at all.
    """

    THREAD = "lightning-ft-writer"

    def __init__(self, storage: Storage, retries: int, verify_after_write: ReadBackDepth | None = None) -> None:
        self._storage = storage
        self._retries = retries
        self._target = Target(storage, self._retrying, verify_after_write)
        self._condition = threading.Condition()
        self._tasks: deque[SaveTask | _RemoveTask | _CallTask | _ReplacedTask] = deque()
        self._running = False
        self._closing = self._ended = False
        self._thread: threading.Thread | None = None
        self._failure: SaveError | None = None
        self._jitter = random.Random()  # noqa: S311 - its own: the global one belongs to the training
        self._held_back: list[str] = []
        self._last_save_failed = False
        self._saving = False
        self._writing = ""
        self._submitted = self._begun = self._over = 0
        self._failed_after = -1  # so many saves were submitted before the last one that failed
        self.failures_in_a_row = 0
        _writers.add(self)

    @property
    def busy(self) -> bool:
        """Whether a save is being written, or waits to be."""
        with self._condition:
            return self._saving or self._waiting_saves() > 0

    @property
    def full(self) -> bool:
        """Whether `make_room` would wait: a save waits behind the one being written."""
        with self._condition:
            return self._running and self._waiting_saves() > 0

    def holds(self, path: str) -> bool:
        """Whether a save to `path` is queued or being written."""
        return path in self.paths

    @property
    def paths(self) -> set[str]:
        """Where saves go that are queued, and where the task at hand is at work. Thread: any."""
        with self._condition:
            queued = {t.path for t in self._tasks if isinstance(t, SaveTask)}
            return queued | ({self._writing} if self._running else set())

    @property
    def last_save_failed(self) -> bool:
        """Whether the newest save that is over failed, so that nothing may be removed. Thread: any."""
        with self._condition:
            return self._last_save_failed

    @property
    def saves(self) -> tuple[int, int]:
        """How many saves were submitted, and how many of these are over, committed or failed."""
        with self._condition:
            return self._submitted, self._over

    def make_room(self, *, replace: bool = False) -> None:
        """No save waits behind the running one, so that a snapshot can be taken: two copies of the state at most.

        Blocks on: a save that waits already; not, with `replace`, if that one is replaceable: then it is not made.
        """
        with self._condition:
            dropped = self._drop_waiting() if replace else None
            self._condition.wait_for(lambda: not self._waiting_saves())
        if dropped is not None:
            dropped.snapshot.release()
            events.emit(events.SaveSkipped(dropped.path, dropped.manifest.step, "a newer save has taken its place"))

    def save(self, task: SaveTask) -> None:
        """`task` is queued. Blocks on: what `make_room` blocks on, if that was not called before."""
        with self._condition:
            self._condition.wait_for(lambda: not self._waiting_saves())
            self._submitted += 1
            self._enqueue(task)

    def save_now(self, task: SaveTask) -> None:
        """`task` is on disk or recorded as failed. Thread: the caller's; earlier tasks finish first."""
        self.drain()
        self._submitted += 1
        self._save(task, blocking=True)

    def remove(self, path: str) -> None:
        """The removal of `path` is queued behind everything submitted before. Blocks on: nothing."""
        with self._condition:
            self._enqueue(_RemoveTask(path))

    def then(self, path: str, function: Callable[[], None]) -> None:
        """`function`, which is about `path`, runs in the writer thread, behind what was submitted. Thread: any."""
        with self._condition:
            self._enqueue(_CallTask(path, function))

    @property
    def unfinished(self) -> bool:
        """Whether there is anything left to do, or a thread that could do it. Thread: any."""
        with self._condition:
            return self._thread is not None or bool(self._tasks)

    def drain(self, timeout_secs: float | None = None) -> bool:
        """Everything submitted is on disk, or recorded as failed; False if that took longer than the timeout."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._tasks and not self._running, timeout_secs)

    def record_failure(self, path: str, step: int, error: Exception) -> None:
        """A save that could not be submitted counts like one that could not be written."""
        self._fail(self._submitted, path, step, error)

    def _fail(self, after: int, path: str, step: int, error: Exception) -> None:
        with self._condition:
            self._last_save_failed = True
            self._failed_after = max(self._failed_after, after)
            self.failures_in_a_row += 1
        self._keep(path, step, self._what_failed(path, step), error)
        events.emit(events.SaveFailed(path, step, f"{type(error).__name__}: {error}"))

    def _what_failed(self, path: str, step: int) -> str:
        return f"checkpoint {path} (step {step}) was not saved"

    def _keep(self, path: str, step: int | None, what: str, error: Exception) -> None:
        failure = SaveError(f"{what}: {type(error).__name__}: {error}", path, step)
        failure.__cause__ = error
        with self._condition:
            self._failure = self._failure or failure

    @property
    def failed(self) -> bool:
        """Whether a failure waits to be taken."""
        with self._condition:
            return self._failure is not None

    @property
    def newest_failed(self) -> bool:
        """Whether the save submitted last is known to have failed, so that its state is on no disk."""
        with self._condition:
            return self._failed_after >= self._submitted

    def settle_failure(self) -> None:
        """A failure of which another rank has heard waits to be taken here, too.

        Blocks on: the save at hand, which is about to hear of it, if it has not.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._failure is not None or not self._saving)

    def take_failure(self) -> SaveError | None:
        """The oldest failure not yet taken; it is reported once."""
        with self._condition:
            failure, self._failure = self._failure, None
            return failure

    def abandon(self) -> None:
        """Nobody waits any more for what is being written, not even the end of the interpreter, which cuts it off."""
        _writers.discard(self)

    def close(self) -> None:
        """Everything submitted is on disk or failed and no thread is left; the next task starts a new one."""
        thread = None
        while True:
            with self._condition:
                if self._thread is thread and not self._tasks:  # nobody has asked for anything in the meantime
                    self._thread, self._closing = None, False
                    return
                self._closing, thread = True, self._thread
                self._condition.notify_all()
            if thread is not None:
                thread.join()

    # -- the writer thread ---------------------------------------------------------------------------------------

    def _waiting_saves(self) -> int:
        return sum(isinstance(t, SaveTask) for t in self._tasks)

    def _drop_waiting(self) -> SaveTask | None:
        for index, task in enumerate(self._tasks):
            if isinstance(task, SaveTask) and task.replaceable:
                self._tasks[index] = _ReplacedTask(task.path)
                return task
        return None

    def _enqueue(self, task: SaveTask | _RemoveTask | _CallTask) -> None:
        self._tasks.append(task)
        if self._thread is None or self._ended:
            self._ended = False
            # A daemon, since a thread that waits for tasks would keep the interpreter from ending: see `_finish`.
            self._thread = threading.Thread(target=self._run, name=self.THREAD, daemon=True)
            self._thread.start()
        self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._tasks or self._closing)
                if not self._tasks:
                    self._ended = True
                    return
                task = self._tasks.popleft()
                self._running, self._saving, self._writing = True, isinstance(task, SaveTask), task.path
                self._condition.notify_all()
            try:
                if isinstance(task, SaveTask):
                    self._save(task)
                elif isinstance(task, _ReplacedTask):
                    self._count_replaced()
                elif isinstance(task, _CallTask):
                    task.function()
                elif self._last_save_failed:
                    self._held_back.append(task.path)
                else:
                    self._remove(task.path)
            except Exception as error:  # of an observer of events: without this thread every later save would hang
                self._keep(task.path, None, f"the writer failed at {task.path}", error)
            finally:
                del task  # the snapshot's memory goes before the next task is waited for
                with self._condition:
                    self._running = self._saving = False
                    self._condition.notify_all()

    def _count_replaced(self) -> None:
        with self._condition:
            self._begun += 1
            self._over += 1

    def _save(self, task: SaveTask, *, blocking: bool = False) -> None:
        self._begun += 1
        try:
            self._save_begun(task, SaveTimes(task.snapshot, task.asked_at, blocking))
        finally:
            with self._condition:
                self._over += 1

    def _save_begun(self, task: SaveTask, times: SaveTimes) -> None:
        try:
            manifest = task.write(self._target, times)
        except SnapshotWithdrawnError as error:
            events.emit(events.SaveSkipped(task.path, task.manifest.step, str(error)))
            return
        except SnapshotError as error:
            # Said by the stager, and the save is made again: nothing is lost for which the run would have to end.
            events.emit(events.SaveFailed(task.path, task.manifest.step, str(error)))
            return
        except Exception as error:
            self._fail(self._begun, task.path, task.manifest.step, error)
            return
        finally:
            self._release(task)  # now, and not after a rotation, which may be slow
        metrics = times.metrics(manifest.size_bytes)
        try:
            if task.read_back(self._target, manifest):
                metrics |= times.after_read_back()
        except SaveError as error:
            self._fail(self._begun, task.path, manifest.step, error)
            return
        with self._condition:
            if self._begun > self._failed_after:  # else a save asked for after this one has failed already
                self._last_save_failed = False
                self.failures_in_a_row = 0
        if not task.speaks:
            return
        try:
            self._after_commit(task, manifest, metrics)
        except Exception as error:  # the checkpoint is good, and the run hears that its rotation is not
            what = f"checkpoint {task.path} (step {manifest.step}) was saved, and what follows a save failed"
            self._keep(task.path, manifest.step, what, error)

    def _release(self, task: SaveTask) -> None:
        try:
            task.snapshot.release()
        except Exception as error:  # of a device that is broken: the checkpoint may be good all the same
            self._keep(task.path, task.manifest.step, f"the copy written to {task.path} could not be given up", error)

    def _after_commit(self, task: SaveTask, manifest: Manifest, metrics: dict[str, float | int]) -> None:
        committed = events.Committed(
            task.path, manifest.step, manifest.generation, manifest.size_bytes, metrics["total_secs"], metrics
        )
        events.emit(committed)
        _log.info(
            "saved %s (step %d, %s): %.1f MiB in %.2f s, training waited %.1f ms", task.path, manifest.step,
            manifest.reason, manifest.size_bytes / 2**20, metrics["total_secs"], 1e3 * metrics["blocked_secs"],
        )  # fmt: skip
        if not self._last_save_failed:
            held_back, self._held_back = self._held_back, []
            for path in held_back:
                self._remove(path)
        if task.on_commit is not None:
            task.on_commit(manifest)

    def _retrying(self) -> tenacity.Retrying:
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(is_transient),
            stop=tenacity.stop_after_attempt(self._retries + 1),
            wait=lambda state: min(10.0, 0.1 * 2.0**state.attempt_number) + self._jitter.random(),
            before_sleep=_say_and_forget,
            reraise=True,
        )

    def _remove(self, path: str) -> None:
        try:
            self._storage.remove(path)
        except Exception as error:  # stores have errors of their own classes
            # A file too many is no danger to the run; it is said, and the disk is no fuller than before.
            _log.warning("could not remove %s: %s: %s", path, type(error).__name__, error)
            events.emit(events.DeleteSkipped(path, f"{type(error).__name__}: {error}"))


def _say_and_forget(retry: tenacity.RetryCallState) -> None:
    """An error that is tried again is in the log, and no longer holds on to the frames, and so to the copy written."""
    tenacity.before_sleep_log(_log, logging.WARNING)(retry)
    error = retry.outcome.exception() if retry.outcome is not None else None
    while error is not None:
        error.__traceback__ = None
        error = error.__context__
