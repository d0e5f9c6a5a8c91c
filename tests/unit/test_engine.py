from __future__ import annotations

import errno
import gc
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tenacity
import tenacity.nap
import torch
from _archives import manifest

from lightning_ft import discovery, events
from lightning_ft._copying.staging import Stager
from lightning_ft._disk import attempt, direct, disk_file
from lightning_ft._saving.engine import SaveTask, Writer
from lightning_ft.errors import SaveError
from lightning_ft.manifest import Manifest
from lightning_ft.storage import Attempt, Storage

WAIT_SECS = 30  # for a thread that is expected at once; only a failing test takes this long


class ScriptedStorage(Storage):
    """Waits, counts and fails as told; what is not scripted happens on the disk."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.errors: list[Exception] = []
        self.remove_error: Exception | None = None
        self.gates: dict[str, threading.Event] = {}
        self.entered: dict[str, threading.Event] = {}
        self.threads: set[str] = set()

    def hold(self, path: Path) -> threading.Event:
        """The save of `path` waits, once begun, until the returned event is set."""
        self.entered[str(path)] = threading.Event()
        return self.gates.setdefault(str(path), threading.Event())

    def open_attempt(self, path: str, expected_bytes: int | None = None) -> Attempt:
        self.log.append(f"open {os.path.basename(path)}")
        self.threads.add(threading.current_thread().name)
        if path in self.gates:
            self.entered[path].set()
            assert self.gates[path].wait(WAIT_SECS)
        if self.errors:
            raise self.errors.pop(0)
        return super().open_attempt(path, expected_bytes)

    def remove(self, path: str) -> None:
        self.log.append(f"remove {os.path.basename(path)}")
        if self.remove_error is not None:
            raise self.remove_error
        super().remove(path)


@pytest.fixture
def storage() -> ScriptedStorage:
    return ScriptedStorage()


@pytest.fixture
def writer(storage: ScriptedStorage, naps: list[float]) -> Iterator[Writer]:
    writer = Writer(storage, retries=2)
    yield writer
    for gate in storage.gates.values():
        gate.set()
    writer.close()


def task(path: Path, on_commit: Callable[[Manifest], None] | None = None, **state: Any) -> SaveTask:
    staged = Stager(overlap=False).stage({"weights": torch.arange(4.0), **state})
    return SaveTask(str(path), staged, manifest(step=3), on_commit)


def good(path: Path) -> bool:
    return discovery.verify(str(path)).problem is None


def no_space(*args: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# -- order -------------------------------------------------------------------------------------------------------


def test_a_saved_checkpoint_is_good_and_written_by_the_writer_thread(
    writer: Writer, storage: ScriptedStorage, tmp_path: Path
) -> None:
    committed: list[Manifest] = []
    writer.save(task(tmp_path / "a.ckpt", committed.append))
    assert writer.drain(WAIT_SECS)
    assert good(tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["weights"].tolist() == [0, 1, 2, 3]
    assert storage.threads == {"lightning-ft-writer"}
    assert [m.digest for m in committed] == [Storage().read_manifest(str(tmp_path / "a.ckpt"))[0].digest]  # type: ignore[union-attr]
    assert not writer.failed


def test_saves_and_removals_happen_in_the_order_they_were_asked_for(
    writer: Writer, storage: ScriptedStorage, tmp_path: Path
) -> None:
    gate = storage.hold(tmp_path / "a.ckpt")
    writer.save(task(tmp_path / "a.ckpt"))
    writer.save(task(tmp_path / "b.ckpt"))
    writer.remove(str(tmp_path / "a.ckpt"))
    writer.remove(str(tmp_path / "none.ckpt"))
    gate.set()
    writer.save(task(tmp_path / "c.ckpt"))
    writer.remove(str(tmp_path / "b.ckpt"))
    writer.drain()
    order = ["open a.ckpt", "open b.ckpt", "remove a.ckpt", "remove none.ckpt", "open c.ckpt", "remove b.ckpt"]
    assert storage.log == order
    assert sorted(os.listdir(tmp_path)) == ["c.ckpt"]


def test_a_removal_waits_for_the_save_before_it(writer: Writer, storage: ScriptedStorage, tmp_path: Path) -> None:
    writer.save(task(tmp_path / "old.ckpt"))
    writer.drain()
    gate = storage.hold(tmp_path / "new.ckpt")
    writer.save(task(tmp_path / "new.ckpt"))
    writer.remove(str(tmp_path / "old.ckpt"))
    assert storage.entered[str(tmp_path / "new.ckpt")].wait(WAIT_SECS)
    assert good(tmp_path / "old.ckpt")
    gate.set()
    writer.drain()
    assert sorted(os.listdir(tmp_path)) == ["new.ckpt"]


def test_one_save_runs_one_waits_and_a_third_blocks(writer: Writer, storage: ScriptedStorage, tmp_path: Path) -> None:
    gates = [storage.hold(tmp_path / f"{name}.ckpt") for name in "ab"]
    assert not writer.busy
    writer.save(task(tmp_path / "a.ckpt"))
    assert storage.entered[str(tmp_path / "a.ckpt")].wait(WAIT_SECS)
    assert writer.busy
    assert not writer.full
    writer.save(task(tmp_path / "b.ckpt"))
    assert writer.full
    blocked, returned = threading.Event(), threading.Event()

    def third() -> None:
        blocked.set()
        writer.save(task(tmp_path / "c.ckpt"))
        returned.set()

    thread = threading.Thread(target=third)
    thread.start()
    assert blocked.wait(WAIT_SECS)
    assert not returned.wait(0.05)
    gates[0].set()
    assert returned.wait(WAIT_SECS)
    assert storage.entered[str(tmp_path / "b.ckpt")].wait(WAIT_SECS)
    assert storage.log == ["open a.ckpt", "open b.ckpt"]
    gates[1].set()
    thread.join()
    writer.drain()
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt", "c.ckpt"]
    assert not writer.busy
    assert not writer.full


def test_a_waiting_removal_does_not_make_the_writer_full(
    writer: Writer, storage: ScriptedStorage, tmp_path: Path
) -> None:
    storage.hold(tmp_path / "a.ckpt")
    writer.save(task(tmp_path / "a.ckpt"))
    writer.remove(str(tmp_path / "x"))
    assert storage.entered[str(tmp_path / "a.ckpt")].wait(WAIT_SECS)
    assert not writer.full


def test_a_newer_save_takes_the_place_of_a_replaceable_one(
    writer: Writer, storage: ScriptedStorage, tmp_path: Path, seen: list[events.Event]
) -> None:
    """It is counted as over in its turn, its memory is free, and what was asked for after it happens all the same."""
    gate = storage.hold(tmp_path / "a.ckpt")
    writer.save(task(tmp_path / "a.ckpt"))
    assert storage.entered[str(tmp_path / "a.ckpt")].wait(WAIT_SECS)
    waiting = replace(task(tmp_path / "b.ckpt"), replaceable=True)
    writer.save(waiting)
    writer.remove(str(tmp_path / "x"))
    writer.make_room(replace=True)
    assert not writer.full
    assert writer.saves == (2, 0)
    with pytest.raises(KeyError):
        waiting.snapshot.wait()["weights"]
    writer.save(task(tmp_path / "c.ckpt"))
    gate.set()
    writer.drain()
    assert storage.log == ["open a.ckpt", "remove x", "open c.ckpt"]
    assert writer.saves == (3, 3)
    assert [(e.path, e.reason) for e in seen if isinstance(e, events.SaveSkipped)] == [
        (str(tmp_path / "b.ckpt"), "a newer save has taken its place")
    ]


def test_a_copy_that_cannot_be_given_up_does_not_undo_the_commit(
    writer: Writer, tmp_path: Path, seen: list[events.Event]
) -> None:
    """The checkpoint is announced, what follows a commit happens, and the run hears of the error."""
    followed: list[Manifest] = []
    save = task(tmp_path / "a.ckpt", followed.append)

    def broken() -> None:
        raise RuntimeError("the device is lost")

    save.snapshot.release = broken  # type: ignore[method-assign]
    writer.save(save)
    writer.drain()
    assert good(tmp_path / "a.ckpt")
    assert [type(e) for e in seen].count(events.Committed) == len(followed) == 1
    assert "the device is lost" in str(writer.take_failure())
    assert writer.failures_in_a_row == 0


def test_a_save_that_must_be_made_keeps_its_place(writer: Writer, storage: ScriptedStorage, tmp_path: Path) -> None:
    gate = storage.hold(tmp_path / "a.ckpt")
    writer.save(task(tmp_path / "a.ckpt"))
    assert storage.entered[str(tmp_path / "a.ckpt")].wait(WAIT_SECS)
    writer.save(task(tmp_path / "b.ckpt"))
    thread = threading.Thread(target=writer.make_room, kwargs={"replace": True})
    thread.start()
    gate.set()
    thread.join(WAIT_SECS)
    writer.drain()
    assert storage.log == ["open a.ckpt", "open b.ckpt"]


def test_saving_now_comes_after_what_was_submitted_and_runs_in_the_callers_thread(
    writer: Writer, storage: ScriptedStorage, tmp_path: Path
) -> None:
    writer.save(task(tmp_path / "a.ckpt"))
    writer.save_now(task(tmp_path / "b.ckpt"))
    assert storage.log == ["open a.ckpt", "open b.ckpt"]
    assert storage.threads == {"lightning-ft-writer", threading.current_thread().name}
    assert good(tmp_path / "b.ckpt")


def test_drain_gives_up_after_its_timeout(writer: Writer, storage: ScriptedStorage, tmp_path: Path) -> None:
    gate = storage.hold(tmp_path / "a.ckpt")
    writer.save(task(tmp_path / "a.ckpt"))
    assert not writer.drain(0.01)
    gate.set()
    assert writer.drain(WAIT_SECS)
    assert writer.drain(0)


def test_closing_finishes_everything_leaves_no_thread_and_the_writer_works_again(
    writer: Writer, storage: ScriptedStorage, tmp_path: Path
) -> None:
    writer.close()
    for name in "ab":
        writer.save(task(tmp_path / f"{name}.ckpt"))
        writer.remove(str(tmp_path / "none"))
        writer.close()
        assert good(tmp_path / f"{name}.ckpt")
        assert "lightning-ft-writer" not in [t.name for t in threading.enumerate()]
    writer.close()


def test_what_is_asked_for_while_the_thread_ends_is_done(
    writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload ends at any time, and then asks the writer for something."""
    done: list[str] = []
    join = threading.Thread.join

    def joined(thread: threading.Thread, *args: Any) -> None:
        join(thread, *args)
        if thread.name == "lightning-ft-writer" and not done:
            done.append("asked")
            writer.then("a", lambda: done.append("done"))

    monkeypatch.setattr(threading.Thread, "join", joined)
    writer.save(task(tmp_path / "a.ckpt"))
    writer.close()
    assert done == ["asked", "done"]
    assert not writer.unfinished
    assert writer.drain(0)


def test_what_comes_then_comes_in_its_turn_and_may_fail(
    writer: Writer, storage: ScriptedStorage, tmp_path: Path
) -> None:
    order: list[str] = []
    gate = storage.hold(tmp_path / "a.ckpt")
    writer.save(task(tmp_path / "a.ckpt", lambda m: order.append("a")))
    writer.then("x", lambda: order.append("then"))
    writer.save(task(tmp_path / "b.ckpt", lambda m: order.append("b")))
    writer.then("y", no_space)
    gate.set()
    writer.drain()
    assert order == ["a", "then", "b"]
    assert "the writer failed at y: OSError" in str(writer.take_failure())
    writer.save(task(tmp_path / "c.ckpt"))
    writer.drain()
    assert good(tmp_path / "c.ckpt")


def test_no_thread_before_the_first_task(writer: Writer) -> None:
    assert "lightning-ft-writer" not in [t.name for t in threading.enumerate()]
    assert writer.drain(0)


# -- failures ----------------------------------------------------------------------------------------------------


def test_a_failure_is_reported_once_and_the_oldest_first(
    writer: Writer, storage: ScriptedStorage, tmp_path: Path, seen: list[events.Event]
) -> None:
    storage.errors = [PermissionError("first"), PermissionError("second")]
    for name in "ab":
        writer.save(task(tmp_path / f"{name}.ckpt"))
    writer.drain()
    assert writer.failed
    assert writer.failures_in_a_row == 2
    failure = writer.take_failure()
    assert isinstance(failure, SaveError)
    assert str(failure) == f"checkpoint {tmp_path}/a.ckpt (step 3) was not saved: PermissionError: first"
    assert (failure.path, failure.step) == (f"{tmp_path}/a.ckpt", 3)
    assert isinstance(failure.__cause__, PermissionError)
    assert writer.take_failure() is None
    assert not writer.failed
    assert [(type(e).__name__, e.path) for e in seen if isinstance(e, events.SaveFailed)] == [
        ("SaveFailed", f"{tmp_path}/a.ckpt"),
        ("SaveFailed", f"{tmp_path}/b.ckpt"),
    ]
    writer.save(task(tmp_path / "c.ckpt"))
    writer.drain()
    assert writer.failures_in_a_row == 0


def test_removals_asked_for_after_a_failed_save_wait_for_a_good_one(
    writer: Writer, storage: ScriptedStorage, tmp_path: Path
) -> None:
    writer.save(task(tmp_path / "old.ckpt"))
    writer.drain()
    storage.errors = [PermissionError("no"), PermissionError("no")]
    for name in "ab":
        writer.save(task(tmp_path / f"{name}.ckpt"))
        writer.remove(str(tmp_path / "old.ckpt"))
        writer.drain()
    writer.close()
    assert os.listdir(tmp_path) == ["old.ckpt"]
    writer.save(task(tmp_path / "c.ckpt"))
    writer.drain()
    assert os.listdir(tmp_path) == ["c.ckpt"]
    assert storage.log.count("remove old.ckpt") == 2


def test_removals_held_back_happen_before_the_rotation_and_only_after_the_commit(
    writer: Writer, storage: ScriptedStorage, tmp_path: Path
) -> None:
    writer.save(task(tmp_path / "old.ckpt"))
    writer.drain()
    writer.record_failure("b.ckpt", 4, ValueError("could not be copied"))
    writer.remove(str(tmp_path / "old.ckpt"))
    writer.drain()
    assert good(tmp_path / "old.ckpt")
    seen_by_rotation: list[list[str]] = []
    writer.save(task(tmp_path / "c.ckpt", lambda m: seen_by_rotation.append(os.listdir(tmp_path))))
    writer.drain()
    assert seen_by_rotation == [["c.ckpt"]]
    failure = writer.take_failure()
    assert str(failure) == "checkpoint b.ckpt (step 4) was not saved: ValueError: could not be copied"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EAGAIN, "try again"),
        OSError(errno.ESTALE, "stale"),
        OSError(errno.EBUSY, "busy"),
        TimeoutError("late"),
        ConnectionResetError("reset"),
    ],
    ids=lambda e: type(e).__name__ + str(e.errno),
)
def test_errors_that_may_pass_are_tried_again(
    writer: Writer, storage: ScriptedStorage, naps: list[float], tmp_path: Path, error: OSError
) -> None:
    storage.errors = [error, error]
    writer.save(task(tmp_path / "a.ckpt"))
    writer.drain()
    assert good(tmp_path / "a.ckpt")
    assert not writer.failed
    assert len(naps) == 2
    assert 0 < naps[0] < 12


def test_after_the_last_retry_the_error_itself_is_reported(
    writer: Writer, storage: ScriptedStorage, naps: list[float], tmp_path: Path
) -> None:
    storage.errors = [TimeoutError(str(n)) for n in range(5)]
    writer.save(task(tmp_path / "a.ckpt"))
    writer.drain()
    failure = writer.take_failure()
    assert failure is not None
    assert str(failure.__cause__) == "2"
    assert (len(naps), len(storage.errors)) == (2, 2)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "full"),
        PermissionError(errno.EACCES, "denied"),
        FileNotFoundError(errno.ENOENT, "gone"),
        OSError(errno.EROFS, "read-only"),
        OSError(errno.EDQUOT, "quota"),
        ValueError("bug"),
    ],
    ids=lambda e: type(e).__name__ + str(getattr(e, "errno", "")),
)
def test_errors_that_do_not_pass_are_not_tried_again(
    writer: Writer, storage: ScriptedStorage, naps: list[float], tmp_path: Path, error: Exception
) -> None:
    storage.errors = [error]
    writer.save(task(tmp_path / "a.ckpt"))
    writer.drain()
    failure = writer.take_failure()
    assert failure is not None
    assert failure.__cause__ is error
    assert naps == []
    assert storage.log == ["open a.ckpt"]


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace", "close"])
def test_a_full_disk_is_reported_as_such_whatever_notices_it(
    writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, naps: list[float], call: str
) -> None:
    closing = os.close

    def close(fd: int) -> None:
        closing(fd)
        no_space()

    with monkeypatch.context() as patch:
        patch.setattr(os, call, close if call == "close" else no_space)
        # More than all buffers hold, so that a write fails within torch.save.
        patch.setattr(direct, "BUFFERS", direct.DiskBuffers(direct.ALIGN_BYTES, 2))
        writer.save(task(tmp_path / "a.ckpt", large=torch.zeros(3 << 20, dtype=torch.uint8)))
        writer.drain()
    failure = writer.take_failure()
    assert failure is not None
    assert isinstance(failure.__cause__, OSError)
    assert failure.__cause__.errno == errno.ENOSPC
    assert naps == []
    assert os.listdir(tmp_path) == []


def test_an_error_of_a_class_of_the_store_is_reported_itself(
    writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ClientError(Exception):
        pass

    def fail(self: Any, view: memoryview) -> None:
        raise ClientError("access denied")

    monkeypatch.setattr(disk_file.DiskFile, "append", fail)
    writer.save(task(tmp_path / "a.ckpt", large=torch.zeros(3 << 20, dtype=torch.uint8)))
    writer.drain()
    failure = writer.take_failure()
    assert failure is not None
    assert type(failure.__cause__) is ClientError


def test_an_abort_that_fails_does_not_hide_why(writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise OSError(errno.EIO, "abort")

    monkeypatch.setattr(attempt.LocalAttempt, "abort", fail)
    monkeypatch.setattr(os, "fsync", no_space)
    writer.save(task(tmp_path / "a.ckpt"))
    writer.drain()
    failure = writer.take_failure()
    assert failure is not None
    assert isinstance(failure.__cause__, OSError)
    assert failure.__cause__.errno == errno.ENOSPC


def test_a_state_that_cannot_be_pickled_is_a_failure(writer: Writer, tmp_path: Path) -> None:
    class Sealed:
        def __deepcopy__(self, memo: Any) -> Sealed:
            return self

        def __reduce__(self) -> Any:
            raise TypeError("cannot be pickled")

    writer.save(task(tmp_path / "a.ckpt", sealed=Sealed()))
    writer.drain()
    failure = writer.take_failure()
    assert failure is not None
    assert isinstance(failure.__cause__, TypeError)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [PermissionError("denied"), RuntimeError("a client's own")])
def test_a_removal_that_fails_is_said_and_is_no_failed_save(
    writer: Writer,
    storage: ScriptedStorage,
    tmp_path: Path,
    error: Exception,
    seen: list[events.Event],
    caplog: pytest.LogCaptureFixture,
) -> None:
    storage.remove_error = error
    writer.remove(str(tmp_path / "a.ckpt"))
    writer.save(task(tmp_path / "b.ckpt"))
    writer.drain()
    assert not writer.failed
    assert good(tmp_path / "b.ckpt")
    assert f"could not remove {tmp_path}/a.ckpt" in caplog.text
    assert [e.path for e in seen if isinstance(e, events.DeleteSkipped)] == [f"{tmp_path}/a.ckpt"]


@pytest.mark.parametrize("now", [False, True], ids=["background", "now"])
def test_a_rotation_that_raises_is_reported_and_the_writer_lives(writer: Writer, tmp_path: Path, now: bool) -> None:
    def broken(committed: Manifest) -> None:
        raise KeyError("rotation")

    (writer.save_now if now else writer.save)(task(tmp_path / "a.ckpt", broken))
    assert writer.drain(WAIT_SECS)
    assert good(tmp_path / "a.ckpt")
    # The checkpoint is there: removals need not wait, and it does not count towards giving up.
    assert writer.failures_in_a_row == 0
    failure = writer.take_failure()
    assert failure is not None
    assert "a.ckpt (step 3) was saved, and what follows a save failed: KeyError" in str(failure)
    assert isinstance(failure.__cause__, KeyError)
    writer.save(task(tmp_path / "b.ckpt"))
    writer.remove(str(tmp_path / "a.ckpt"))
    assert writer.drain(WAIT_SECS)
    assert os.listdir(tmp_path) == ["b.ckpt"]


@pytest.mark.parametrize("event", ["SaveStarted", "DataWritten", "Committed", "SaveFailed", "DeleteStarted", "Deleted"])
def test_an_observer_that_raises_does_not_end_the_writer(
    writer: Writer, storage: ScriptedStorage, tmp_path: Path, event: str
) -> None:
    def observer(seen: events.Event) -> None:
        if type(seen).__name__ == event:
            raise RuntimeError("observer")

    storage.errors = [PermissionError("no")] if event == "SaveFailed" else []
    stop = events.observe(observer)
    try:
        writer.save(task(tmp_path / "a.ckpt"))
        writer.remove(str(tmp_path / "a.ckpt"))
        assert writer.drain(WAIT_SECS)
    finally:
        stop()
    assert writer.failed == (not event.startswith("Delete"))
    writer.save(task(tmp_path / "b.ckpt"))
    assert writer.drain(WAIT_SECS)
    assert good(tmp_path / "b.ckpt")


# -- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("errors", [[], [TimeoutError("once")]], ids=["at-once", "after-a-retry"])
def test_the_copy_is_released_when_it_is_written(
    writer: Writer, storage: ScriptedStorage, tmp_path: Path, errors: list[Exception]
) -> None:
    storage.errors = list(errors)
    tensor = torch.zeros(10)
    alive = weakref.ref(tensor)
    gc.collect()
    gc.disable()
    try:
        writer.save(task(tmp_path / "a.ckpt", tensor=tensor))
        del tensor
        writer.drain()
        assert alive() is None
    finally:
        gc.enable()
    assert good(tmp_path / "a.ckpt")


def test_the_copy_of_a_failed_save_is_released_with_its_failure(
    writer: Writer, storage: ScriptedStorage, tmp_path: Path
) -> None:
    storage.errors = [PermissionError("no")]
    tensor = torch.zeros(10)
    alive = weakref.ref(tensor)
    writer.save(task(tmp_path / "a.ckpt", tensor=tensor))
    del tensor
    writer.drain()
    storage.errors = []
    writer.take_failure()
    gc.collect()
    assert alive() is None


def test_a_save_that_could_not_be_submitted_holds_back_removals_though_an_earlier_one_commits_later(
    writer: Writer, storage: ScriptedStorage, tmp_path: Path
) -> None:
    gate = storage.hold(tmp_path / "a.ckpt")
    writer.save(task(tmp_path / "a.ckpt"))
    writer.record_failure("b.ckpt", 4, ValueError("could not be copied"))
    writer.remove(str(tmp_path / "a.ckpt"))
    gate.set()
    writer.drain()
    assert good(tmp_path / "a.ckpt")
    assert writer.failures_in_a_row == 1
    writer.save(task(tmp_path / "c.ckpt"))
    writer.drain()
    assert os.listdir(tmp_path) == ["c.ckpt"]
    assert writer.failures_in_a_row == 0


def test_retries_do_not_draw_from_the_generators_of_the_training() -> None:
    writer = Writer(Storage(), retries=1)
    before = random.getstate()
    state = tenacity.RetryCallState(None, None, (), {})  # type: ignore[arg-type]
    waits = {writer._retrying().wait(state) for _ in range(3)}
    assert len(waits) == 3
    assert random.getstate() == before
