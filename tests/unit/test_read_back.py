"""Read back after a write, before anything trusts it; and rotation that counts only on what was read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from _archives import archive, maker, manifest, save

from lightning_ft import discovery, events, rotation
from lightning_ft._copying.staging import Stager
from lightning_ft._names import checkpoint_name
from lightning_ft._saving.engine import SaveTask, Writer
from lightning_ft.errors import ConfigurationError, SaveError
from lightning_ft.manifest import Manifest
from lightning_ft.plugin import FaultTolerantCheckpointIO
from lightning_ft.retention import Retention
from lightning_ft.storage import Storage
from tests.trainer import runs


def written(
    path: str, depth: Any, storage: Storage | None = None, on_commit: Callable[[Manifest], None] | None = None
) -> Writer:
    """One save by a writer that reads back, over, and its writer closed."""
    writer = Writer(storage or Storage(), retries=2, verify_after_write=depth)
    staged = Stager(overlap=False).stage({"weights": torch.arange(4000.0)})
    writer.save(SaveTask(path, staged, manifest(step=3), on_commit))
    writer.close()
    return writer


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str, tuple[str, ...]]] = {
    # What happens to the file, what is said of it, and which depths notice.
    "a bit of a tensor": (lambda path: flip(path, 3000), "its digest does not match", ("full",)),
    "a bit of the manifest": (lambda path: flip(path, -100), "manifest is damaged", ("size", "full")),
    "cut short": (lambda path: os.truncate(path, 5000), "truncated", ("size", "full")),
    "empty": (lambda path: os.truncate(path, 0), "truncated", ("size", "full")),
    "gone": (os.unlink, "No such file", ("size", "full")),
    "another save": (lambda path: save(str(path), generation="b" * 32), "is of another save", ("size", "full")),
    "other data of that save": (lambda path: save(str(path)), "is of another save", ("size", "full")),
    "another tool's": (lambda path: path.write_bytes(archive()), "has no manifest", ("size", "full")),
}


@pytest.mark.parametrize("depth", ["size", "full"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_read_back_is_a_failed_save_and_gone(
    damage: str, depth: str, tmp_path: Path, seen: list[events.Event]
) -> None:
    harm, reason, depths = DAMAGE[damage]
    path = tmp_path / "a.ckpt"
    done: list[Any] = []

    def decay(event: events.Event) -> None:
        if isinstance(event, events.Renamed) and not done:
            done.append(True)
            harm(path)

    followed: list[Manifest] = []
    with runs.observing(decay):
        writer = written(str(path), depth, on_commit=followed.append)
    failure = writer.take_failure()
    kinds = [type(event) for event in seen]
    if depth not in depths:
        assert failure is None
        assert path.exists()
        return
    assert failure is not None
    assert f"checkpoint {path} (step 3) was not saved" in str(failure)
    assert reason in str(failure)
    assert os.listdir(tmp_path) == []
    assert followed == [], "rotation ran after a save that failed"
    assert (writer.failures_in_a_row, writer.newest_failed, writer.last_save_failed) == (1, True, True)
    assert events.Committed not in kinds
    assert kinds.count(events.SaveFailed) == 1


@pytest.mark.parametrize("depth", ["size", "full"])
def test_a_good_one_is_read_before_it_counts(depth: Any, tmp_path: Path, seen: list[events.Event]) -> None:
    writer = written(str(tmp_path / "a.ckpt"), depth)
    assert not writer.failed
    kinds = [type(event).__name__ for event in seen]
    assert kinds[-3:] == ["Renamed", "ReadBack", "Committed"]
    metrics = next(event.metrics for event in seen if isinstance(event, events.Committed))
    assert metrics["total_secs"] >= metrics["write_secs"] + metrics["read_back_secs"]


@pytest.mark.parametrize(
    ("depth", "read_bytes"), [(None, 0), ("size", 0), ("full", 16_000)], ids=["off", "size", "full"]
)
def test_as_much_is_read_as_was_asked_for(depth: Any, read_bytes: int, tmp_path: Path) -> None:
    class Counting(Storage):
        tails = read = 0

        def read_manifest(self, path: str) -> Any:
            Counting.tails += 1
            return super().read_manifest(path)

        def read_digest(self, path: str, size_bytes: int) -> str:
            Counting.read += size_bytes
            return super().read_digest(path, size_bytes)

    written(str(tmp_path / "a.ckpt"), depth, Counting())
    assert Counting.tails == (0 if depth is None else 1)
    assert Counting.read >= read_bytes
    assert (Counting.read > 0) == (depth == "full")


def test_the_disk_is_asked_and_not_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def fadvise(fd: int, offset: int, length: int, advice: int) -> None:
        assert (offset, length) == (0, 0)
        asked.append((os.readlink(f"/proc/self/fd/{fd}"), advice))

    monkeypatch.setattr(os, "posix_fadvise", fadvise)
    written(str(tmp_path / "a.ckpt"), "full")
    assert asked == [(str(tmp_path / "a.ckpt"), os.POSIX_FADV_DONTNEED)]


@pytest.mark.parametrize("depth", ["size", "full"])
def test_e8_on_an_object_store(depth: Any, seen: list[events.Event]) -> None:
    with runs.memory() as url:
        path = f"{url}/a.ckpt"
        assert not written(path, depth).failed

        def decay(event: events.Event) -> None:
            if isinstance(event, events.DataSynced):
                fs = fsspec.filesystem("memory")
                fs.pipe_file(path, fs.cat_file(path)[:-1])

        with runs.observing(decay):
            assert "truncated" in str(written(path, depth).take_failure())
        assert not Storage().exists(path)


class Unreliable(Storage):
    """Does not answer a question for the manifest, or a removal, so many times."""

    def __init__(self, reads: int, removals: int = 0) -> None:
        super().__init__()
        self.reads, self.removals = reads, removals

    def read_manifest(self, path: str) -> Any:
        if self.reads:
            self.reads -= 1
            raise TimeoutError("no answer")
        return super().read_manifest(path)

    def remove(self, path: str) -> None:
        if self.removals:
            self.removals -= 1
            raise PermissionError("not allowed")
        super().remove(path)


def test_a_question_that_is_not_answered_is_asked_again_without_writing_again(
    tmp_path: Path, naps: list[float], seen: list[events.Event]
) -> None:
    assert not written(str(tmp_path / "a.ckpt"), "size", Unreliable(2)).failed
    assert len(naps) == 2
    assert [type(event) for event in seen].count(events.SaveStarted) == 1


def test_what_can_be_neither_read_nor_removed_is_said(tmp_path: Path, naps: list[float]) -> None:
    path = tmp_path / "a.ckpt"
    failure = str(written(str(path), "size", Unreliable(3, 1)).take_failure())
    assert "TimeoutError: no answer" in failure
    assert f"could not be removed (PermissionError: not allowed): remove {path} by hand" in failure


def test_removals_asked_for_earlier_wait_for_one_that_reads_back(tmp_path: Path) -> None:
    writer = Writer(Storage(), retries=0, verify_after_write="full")
    old = tmp_path / "old.ckpt"
    save(str(old))

    def save_one(name: str) -> None:
        staged = Stager(overlap=False).stage({"weights": torch.arange(4000.0)})
        writer.save(SaveTask(str(tmp_path / name), staged, manifest(step=3)))

    def decay(event: events.Event) -> None:
        if isinstance(event, events.Renamed) and event.path.endswith("bad.ckpt"):
            flip(Path(event.path), 3000)

    with runs.observing(decay):
        save_one("bad.ckpt")
        writer.remove(str(old))
        writer.drain()
    assert os.listdir(tmp_path) == ["old.ckpt"]
    save_one("good.ckpt")
    writer.close()
    assert os.listdir(tmp_path) == ["good.ckpt"]
    assert isinstance(writer.take_failure(), SaveError)


@pytest.mark.parametrize("value", [True, "off", "", 1, None])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"verify_after_write={value!r}: must be one of False, 'size', 'full'"):
        FaultTolerantCheckpointIO(verify_after_write=value)


# -- rotation that trusts what was read --------------------------------------------------------------------------


def ours(dirpath: Path, step: int) -> Path:
    path = dirpath / checkpoint_name(step)
    with Storage().open_attempt(str(path)) as attempt:
        attempt.write(archive(b"weights" * 1000))
        attempt.commit(maker(step=step, batch=step, generation=f"{step:032d}"))
    return path


def rotate(dirpath: Path, newest: int, keep: int, trust: rotation.Trust | None) -> list[int]:
    """The steps that are left."""
    path = str(dirpath / checkpoint_name(newest))
    found, _ = Storage().read_manifest(path)
    assert found is not None
    rotation.rotate(str(dirpath), path, "run", Retention(keep), None, found, trust=trust)
    return sorted(info.manifest.step for info in discovery.list_checkpoints(str(dirpath)) if info.manifest)


@pytest.mark.parametrize(
    ("keep", "damaged", "trusting", "distrusting"),
    [
        (1, [], [5], [5]),
        (2, [], [4, 5], [4, 5]),
        (2, [4], [4, 5], [3, 4, 5]),
        (2, [3, 4], [4, 5], [2, 3, 4, 5]),
        (3, [4], [3, 4, 5], [2, 3, 4, 5]),
        (2, [1, 2, 3, 4], [4, 5], [1, 2, 3, 4, 5]),
        (1, [4], [5], [5]),
        (-1, [4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),
    ],
)
def test_what_decayed_does_not_count_as_one_of_the_last(
    keep: int, damaged: list[int], trusting: list[int], distrusting: list[int], tmp_path: Path
) -> None:
    """Without reading, a listing is believed: it sees the manifest and the size, and no flipped bit."""
    for place, trust, left in (("a", None, trusting), ("b", rotation.Trust(None), distrusting)):
        for step in range(1, 6):
            ours(tmp_path / place, step)
        for step in damaged:
            flip(tmp_path / place / checkpoint_name(step), 3000)
        assert rotate(tmp_path / place, 5, keep, trust) == left


def test_each_checkpoint_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trust = rotation.Trust(None)
    read: list[str] = []
    read_digest = Storage.read_digest

    def counted(self: Storage, path: str, size_bytes: int) -> str:
        read.append(os.path.basename(path))
        return read_digest(self, path, size_bytes)

    monkeypatch.setattr(Storage, "read_digest", counted)
    for step in (1, 2, 3):
        ours(tmp_path, step)
    flip(tmp_path / checkpoint_name(2), 3000)
    for _ in range(2):
        assert rotate(tmp_path, 3, 2, trust) == [1, 2, 3]
    for step in (4, 5):
        ours(tmp_path, step)
        rotate(tmp_path, step, 2, trust)
    # Never the newest, which was read when it was written, and never those of before again, good or damaged.
    assert read == [checkpoint_name(2), checkpoint_name(1)]


def test_a_store_that_does_not_answer_ends_the_rotation_and_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trust = rotation.Trust(None)
    for step in (1, 2, 3):
        ours(tmp_path, step)

    def no_answer(self: Storage, path: str, size_bytes: int) -> str:
        raise TimeoutError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "read_digest", no_answer)
        assert rotate(tmp_path, 3, 2, trust) == [1, 2, 3]
    assert "no rotation after" in caplog.text
    assert rotate(tmp_path, 3, 2, trust) == [2, 3]
