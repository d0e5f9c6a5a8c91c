"""Copies of local checkpoints to the directory of the run, in the background: the same bytes, in order, verified."""

from __future__ import annotations

import os
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import tenacity.nap
import torch
from _archives import save

from lightning_ft import discovery, events
from lightning_ft._copying.staging import Stager
from lightning_ft._saving import uploads as _uploads
from lightning_ft._saving.engine import SaveTask, Writer
from lightning_ft._saving.uploads import Uploads
from lightning_ft.errors import SaveError
from lightning_ft.manifest import Manifest
from lightning_ft.storage import Attempt, Storage
from tests.trainer import runs

WAIT_SECS = 30


class Gated(Storage):
    """Uploads wait at their beginning until they are let in, and fail as told."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.errors: list[Exception] = []
        self.gate = threading.Event()
        self.gate.set()
        self.stands = threading.Event()

    def open_attempt(self, path: str, expected_bytes: int | None = None) -> Attempt:
        self.opened.append(os.path.basename(path))
        self.stands.set()
        assert self.gate.wait(WAIT_SECS)
        if self.errors:
            raise self.errors.pop(0)
        return super().open_attempt(path, expected_bytes)


@pytest.fixture
def storage() -> Gated:
    return Gated()


@pytest.fixture
def uploads(storage: Gated, monkeypatch: pytest.MonkeyPatch) -> Iterator[Uploads]:
    monkeypatch.setattr(tenacity.nap.time, "sleep", lambda secs: None)
    uploads = Uploads(storage, retries=2)
    yield uploads
    storage.gate.set()
    uploads.close()


def local(dirpath: Path, step: int, size_bytes: int = 100_000) -> tuple[str, Manifest]:
    """A checkpoint on the local disk, as a save leaves it."""
    path = str(dirpath / "local" / f"{step}.ckpt")
    return path, save(path, bytes(size_bytes), step=step, generation=f"{step:032d}")


def ask(uploads: Uploads, dirpath: Any, step: int, size_bytes: int = 100_000) -> list[Manifest]:
    """An upload of step `step` is asked for; the list has its manifest once it has committed."""
    path, manifest = local(Path(dirpath), step, size_bytes)
    committed: list[Manifest] = []
    uploads.upload(path, f"{dirpath}/remote/{step}.ckpt", manifest, committed.append)
    return committed


@pytest.mark.parametrize("size_bytes", [0, 1, 100_000, 3 * _uploads.PIECE_BYTES + 5])
def test_the_same_file_byte_for_byte(uploads: Uploads, tmp_path: Path, size_bytes: int) -> None:
    committed = ask(uploads, tmp_path, 3, size_bytes)
    uploads.drain()
    remote = (tmp_path / "remote" / "3.ckpt").read_bytes()
    assert remote == (tmp_path / "local" / "3.ckpt").read_bytes()
    assert [m.generation for m in committed] == [f"{3:032d}"]
    assert discovery.verify(str(tmp_path / "remote" / "3.ckpt")).manifest == committed[0]


def test_what_torch_has_written_too(uploads: Uploads, tmp_path: Path) -> None:
    """With the metrics, versions and numbers that only a real save has in its manifest."""
    committed: list[Manifest] = []
    source, target = str(tmp_path / "a.ckpt"), str(tmp_path / "remote" / "a.ckpt")
    plain = save(source)
    writer = Writer(Storage(), 0)
    staged = Stager(overlap=False).stage({"weights": torch.arange(40_000.0), "n": 3})
    writer.save(SaveTask(source, staged, plain, committed.append))
    writer.close()
    uploads.upload(source, target, committed[0], lambda manifest: None)
    uploads.drain()
    assert Path(target).read_bytes() == Path(source).read_bytes()
    assert torch.load(target, weights_only=True)["n"] == 3


def test_to_an_object_store(uploads: Uploads, tmp_path: Path) -> None:
    with runs.memory() as url:
        source, manifest = local(tmp_path, 3)
        uploads.upload(source, f"{url}/3.ckpt", manifest, lambda manifest: None)
        uploads.drain()
        assert uploads.take_failure() is None
        assert fsspec.filesystem("memory").cat_file(f"{url}/3.ckpt") == Path(source).read_bytes()


def test_memory_does_not_grow_with_the_file(uploads: Uploads, tmp_path: Path) -> None:
    def peak(step: int, pieces: int) -> int:
        source, manifest = local(tmp_path, step, pieces * _uploads.PIECE_BYTES)
        target = str(tmp_path / "remote" / f"{step}.ckpt")
        tracemalloc.start()
        uploads.upload(source, target, manifest, lambda manifest: None)
        uploads.drain()
        size_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size_bytes

    small, large = peak(1, 3), peak(2, 9)
    assert large < small + _uploads.PIECE_BYTES
    assert large < 4 * _uploads.PIECE_BYTES


@pytest.mark.parametrize("offset", [60, 50_000, -30], ids=["first", "middle", "manifest"])
def test_what_has_decayed_on_the_local_disk_is_not_uploaded(uploads: Uploads, tmp_path: Path, offset: int) -> None:
    source, manifest = local(tmp_path, 3)
    data = bytearray(Path(source).read_bytes())
    data[offset] ^= 1
    Path(source).write_bytes(data)
    uploads.upload(source, str(tmp_path / "remote" / "3.ckpt"), manifest, pytest.fail)
    uploads.drain()
    failure = str(uploads.take_failure())
    assert f"checkpoint 3.ckpt (step 3) was not uploaded to {tmp_path}/remote: CorruptCheckpointError" in failure
    assert f"{source}: " in failure
    assert "damaged" in failure
    assert not (tmp_path / "remote").exists() or os.listdir(tmp_path / "remote") == []


@pytest.mark.parametrize("what", ["shorter", "another", "gone"])
def test_a_source_that_is_not_what_was_saved(uploads: Uploads, tmp_path: Path, what: str) -> None:
    source, manifest = local(tmp_path, 3)
    if what == "shorter":
        os.truncate(source, 500)
    elif what == "another":
        save(source, generation="f" * 32)
    else:
        os.unlink(source)
    uploads.upload(source, str(tmp_path / "remote" / "3.ckpt"), manifest, pytest.fail)
    uploads.drain()
    assert isinstance(uploads.take_failure(), SaveError)
    assert not (tmp_path / "remote").exists()


def test_one_runs_and_the_newest_waits(uploads: Uploads, storage: Gated, tmp_path: Path) -> None:
    storage.gate.clear()
    with runs.recorded() as seen:
        first = ask(uploads, tmp_path, 1)
        assert storage.stands.wait(WAIT_SECS)
        skipped, last = ask(uploads, tmp_path, 2), ask(uploads, tmp_path, 3)
        assert uploads.sources == {str(tmp_path / "local" / f"{step}.ckpt") for step in (1, 3)}
        assert uploads.saves == (3, 0)
        storage.gate.set()
        uploads.drain()
    assert (len(first), len(skipped), len(last)) == (1, 0, 1)
    assert storage.opened == ["1.ckpt", "3.ckpt"]
    assert uploads.saves == (3, 3)
    assert uploads.sources == frozenset()
    assert [(e.path, e.step) for e in seen if isinstance(e, events.SaveSkipped)] == [
        (str(tmp_path / "remote" / "2.ckpt"), 2)
    ]


def test_a_source_stays_until_all_is_over(uploads: Uploads, storage: Gated, tmp_path: Path) -> None:
    """Also while what follows the upload runs."""
    source, manifest = local(tmp_path, 1)
    then: list[frozenset[str]] = []
    target = str(tmp_path / "remote" / "1.ckpt")
    uploads.upload(source, target, manifest, lambda manifest: then.append(uploads.sources))
    uploads.drain()
    assert then == [frozenset({source})]
    assert uploads.sources == frozenset()


def test_errors_that_may_pass_are_tried_again_and_others_are_not(
    uploads: Uploads, storage: Gated, tmp_path: Path
) -> None:
    storage.errors = [TimeoutError("1"), ConnectionResetError("2")]
    assert ask(uploads, tmp_path, 1) is not None
    uploads.drain()
    assert (storage.opened, uploads.take_failure()) == (["1.ckpt"] * 3, None)
    storage.errors = [PermissionError("no")]
    ask(uploads, tmp_path, 2)
    uploads.drain()
    assert storage.opened[3:] == ["2.ckpt"]
    assert isinstance(uploads.take_failure().__cause__, PermissionError)  # type: ignore[union-attr]
    assert (uploads.failures_in_a_row, uploads.newest_failed) == (1, True)


def test_read_back_from_where_it_was_uploaded_to(tmp_path: Path) -> None:
    uploads = Uploads(Storage(), 0, "full")

    def decay(event: events.Event) -> None:
        if isinstance(event, events.Renamed) and "remote" in event.path:
            data = bytearray(Path(event.path).read_bytes())
            data[60] ^= 1
            Path(event.path).write_bytes(data)

    with runs.observing(decay):
        ask(uploads, tmp_path, 1)
        uploads.close()
    assert "does not read back as it was written" in str(uploads.take_failure())
    assert os.listdir(tmp_path / "remote") == []
    assert discovery.verify(str(tmp_path / "local" / "1.ckpt")).problem is None
