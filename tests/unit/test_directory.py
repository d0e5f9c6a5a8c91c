"""A checkpoint directory on a local disk: all of it under its name, or nothing. Other storages: tests/contract."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_ft import events
from lightning_ft._disk import directory
from lightning_ft._disk.directory import DirectoryAttempt
from lightning_ft._names import attempt_name
from lightning_ft._restart.fallback import last_of_others
from lightning_ft._saving.read_back import ReadBackDepth, read_back
from lightning_ft._saving.uploads import Uploads
from lightning_ft.discovery import select, start_of, verify, verify_files
from lightning_ft.errors import CorruptCheckpointError, ManifestError, SaveError
from lightning_ft.manifest import FileRecord, Manifest, digest_of_files, parse_directory, seal_directory
from lightning_ft.retention import Retention
from lightning_ft.rotation import Trust, rotate
from lightning_ft.storage import Storage
from tests.directories import FILES, TOKEN, manifest, save, write

NAME = "step=00000010.ckpt"


@pytest.fixture
def storage() -> Storage:
    return Storage()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "run" / NAME)


def names(path: str) -> list[str]:
    return sorted(os.listdir(os.path.dirname(path)))


def test_two_ranks_write_one_checkpoint(storage: Storage, path: str) -> None:
    attempts = [storage.open_directory(path, TOKEN) for _ in range(2)]
    assert attempts[0].attempt == attempts[1].attempt
    records = write(attempts[0], {"__0_0.distcp": b"zero", ".metadata": b"table"})
    records |= write(attempts[1], {"__1_0.distcp": b"one"})
    assert names(path) == [attempt_name(NAME, TOKEN)]
    attempts[1].close()
    written = attempts[0].commit(manifest(records))
    assert names(path) == [NAME]
    assert sorted(os.listdir(path)) == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
    assert written.size_bytes == len(b"zero" + b"table" + b"one")
    assert written.digest == digest_of_files(records)
    assert storage.read_manifest(path)[0] == written
    assert verify(path).problem is None
    with storage.open_verified_file(path, "__1_0.distcp", records["__1_0.distcp"]) as file:
        assert file.read() == b"one"


def test_what_is_said_of_each_step(storage: Storage, path: str) -> None:
    seen: list[events.Event] = []
    stop = events.observe(seen.append)
    save(storage, path, {"a": b"x"})
    stop()
    assert [type(event).__name__ for event in seen] == [
        "AttemptOpened", "FileWritten", "FileSynced", "DataWritten", "DataSynced", "Renamed",
    ]  # fmt: skip
    assert {type(event).__name__ for event in seen} <= set(events.DIRECTORY_KILL_POINTS)


def test_everything_is_synced_before_the_name(storage: Storage, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(fd: int) -> None:
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def renamed(source: str, target: str) -> None:
        done.append("rename")
        rename(source, target)

    attempt = storage.open_directory(path, TOKEN)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    attempt.commit(manifest(write(attempt, {"a": b"x", "b": b"y"})))
    assert done == ["a", "b", "manifest.json", attempt_name(NAME, TOKEN), "rename", "run"]


def test_a_file_that_is_not_finished_is_gone(storage: Storage, path: str) -> None:
    attempt = storage.open_directory(path, TOKEN)
    with attempt.open_file("a") as file:
        file.write(b"x" * (20 << 20))
        assert file.tell() == 20 << 20
    assert os.listdir(attempt.attempt) == []
    write(attempt, {"a": b"another try"})
    attempt.abort()
    assert names(path) == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "manifest.json", "a\\b"])
def test_names_that_no_file_may_have(storage: Storage, path: str, name: str) -> None:
    attempt = storage.open_directory(path, TOKEN)
    with pytest.raises(ValueError, match="no name for a file"):
        attempt.open_file(name)
    attempt.abort()


def _without_one(attempt: DirectoryAttempt, records: dict[str, FileRecord]) -> None:
    os.unlink(f"{attempt.attempt}/__1_0.distcp")


def _cut(attempt: DirectoryAttempt, records: dict[str, FileRecord]) -> None:
    os.truncate(f"{attempt.attempt}/__1_0.distcp", 1)


def _with_another(attempt: DirectoryAttempt, records: dict[str, FileRecord]) -> None:
    write(attempt, {"__2_0.distcp": b"of a rank that nobody has counted"})


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_without_one, "__1_0.distcp is missing"),
        (_cut, "has 1 bytes, 9"),
        (_with_another, "__2_0.distcp is of no rank"),
    ],
)
def test_what_is_not_whole_is_not_committed(storage: Storage, path: str, change: Any, what: str) -> None:
    attempt = storage.open_directory(path, TOKEN)
    records = write(attempt, FILES)
    change(attempt, records)
    with pytest.raises(SaveError, match=what):
        attempt.commit(manifest(records))
    attempt.abort()
    assert names(path) == []


def test_a_checkpoint_of_a_run_is_never_replaced(storage: Storage, path: str) -> None:
    first = save(storage, path)
    attempt = storage.open_directory(path, TOKEN)
    with pytest.raises(SaveError, match="another checkpoint of this name"):
        attempt.commit(manifest(write(attempt, FILES)))
    attempt.abort()
    assert storage.read_manifest(path)[0] == first
    assert names(path) == [NAME]


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchanged", "two-renames"])
@pytest.mark.parametrize("old", ["file", "directory"])
def test_the_last_one_of_another_callback_is(
    storage: Storage, tmp_path: Path, exchanges: bool, old: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    if old == "file":
        path.write_bytes(b"of plain Lightning")
    else:
        save(storage, str(path), {"old": b"x"})
    if not exchanges:
        monkeypatch.setattr(directory, "_exchange", lambda path, other: False)
    second = save(storage, str(path), step=2)
    assert storage.read_manifest(str(path))[0] == second
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.mark.parametrize("call", ["fsync", "rename", "listdir", "open"])
def test_a_failed_commit_leaves_nothing(
    storage: Storage, path: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = storage.open_directory(path, TOKEN)
    records = write(attempt, FILES)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as context:
        context.setattr(os, call, fail)
        with pytest.raises(OSError, match="injected"):
            attempt.commit(manifest(records))
    attempt.abort()
    attempt.abort()
    assert names(path) == []


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchanged", "two-renames"])
def test_what_was_there_is_there_after_a_failed_commit(
    storage: Storage, tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "last.ckpt")
    first = save(storage, path)
    attempt = storage.open_directory(path, TOKEN)
    records = write(attempt, {"new": b"x"})
    rename = os.rename

    def fail(source: str, target: str) -> None:
        if source == attempt.attempt:
            raise OSError(errno.EIO, "injected")
        rename(source, target)

    def no_exchange(path: str, other: str) -> bool:
        if exchanges:
            raise OSError(errno.EIO, "injected")
        return False

    with monkeypatch.context() as context:
        context.setattr(os, "rename", fail)
        context.setattr(directory, "_exchange", no_exchange)
        with pytest.raises(OSError, match="injected"):
            attempt.commit(manifest(records))
    attempt.abort()
    assert storage.read_manifest(path)[0] == first
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_replaced_one_that_cannot_be_removed_does_not_fail_the_save(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "last.ckpt")
    save(storage, path)

    def fail(path: str) -> None:
        raise PermissionError(errno.EACCES, "injected", path)

    with monkeypatch.context() as context:
        context.setattr(directory, "remove_local", fail)
        second = save(storage, path, step=2)
    assert storage.read_manifest(path)[0] == second
    assert "stays until the next start" in caplog.text
    (left,) = storage.remove_leftovers(str(tmp_path))
    assert left in caplog.text
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_an_abort_after_the_commit_does_nothing(storage: Storage, path: str) -> None:
    attempt = storage.open_directory(path, TOKEN)
    attempt.commit(manifest(write(attempt, FILES)))
    attempt.abort()
    assert verify(path).problem is None


def test_only_what_nobody_writes_is_abandoned(storage: Storage, path: str) -> None:
    dirpath = os.path.dirname(path)
    attempts = [storage.open_directory(path, TOKEN) for _ in range(2)]
    write(attempts[1], {"a": b"x"})
    attempts[0].close()
    assert storage.remove_abandoned(dirpath) == []
    attempts[1].close()
    assert storage.remove_abandoned(dirpath) == [attempts[1].attempt]
    assert os.listdir(dirpath) == []


def test_what_a_kill_leaves_is_removed_at_the_next_start(storage: Storage, path: str) -> None:
    dirpath = os.path.dirname(path)
    attempt = storage.open_directory(path, TOKEN)
    write(attempt, FILES)
    attempt.close()
    assert storage.remove_leftovers(dirpath) == [attempt.attempt]
    assert os.listdir(dirpath) == []


@pytest.mark.parametrize("file", [*FILES, "manifest.json"])
def test_e5_a_flipped_bit_is_found_in_every_file(storage: Storage, path: str, file: str) -> None:
    save(storage, path)
    whole = Path(path, file).read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        Path(path, file).write_bytes(damaged)
        problem = verify(path).problem
        assert problem is not None
        assert ("manifest" if file == "manifest.json" else file) in problem
        assert select(os.path.dirname(path)).chosen is None
    Path(path, file).write_bytes(whole)
    assert verify(path).problem is None


def test_ranks_share_the_reading(storage: Storage, path: str) -> None:
    written = save(storage, path)
    Path(path, "__1_0.distcp").write_bytes(b"x" * 9)
    assert verify_files(path, written, ["__0_0.distcp", ".metadata"]) is None
    assert verify_files(path, written, ["__1_0.distcp"]) == (
        "__1_0.distcp is damaged: its digest does not match the manifest"
    )
    with pytest.raises(CorruptCheckpointError, match="does not match"):
        storage.open_verified_file(path, "__1_0.distcp", written.files["__1_0.distcp"])


def test_sizes_are_in_the_listing(storage: Storage, path: str) -> None:
    save(storage, path)
    os.truncate(f"{path}/__0_0.distcp", 3)
    assert verify(path, "listed").problem == "__0_0.distcp has 3 bytes, 10 were written"
    os.unlink(f"{path}/__0_0.distcp")
    assert verify(path, "listed").problem == "__0_0.distcp is missing"


def test_a_file_that_was_added_later_is_nobodys_business(storage: Storage, path: str) -> None:
    save(storage, path)
    Path(path, "notes.txt").write_text("kept for the paper")
    assert verify(path).problem is None


def test_a_directory_of_plain_lightning(storage: Storage, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.mkdir()
    assert not storage.is_sharded(str(path))
    (path / ".metadata").write_bytes(b"table")
    assert storage.is_sharded(str(path))
    assert storage.read_manifest(str(path)) == (None, 5)
    selection = select(str(tmp_path))
    assert [info.path for info in selection.foreign] == [str(path)]
    assert selection.empty


def test_the_manifest_is_sealed_and_complete() -> None:
    files = {"a": FileRecord(1, "0" * 32), "b": FileRecord(2, "1" * 32)}
    whole = replace(manifest(files), size_bytes=3, digest=digest_of_files(files))
    sealed = seal_directory(whole)
    assert parse_directory(sealed, "a.ckpt") == whole
    values = json.loads(sealed)
    assert next(iter(values)) == "lightning_ft"
    assert list(values)[-1] == "seal"
    assert values["files"] == {"a": {"size_bytes": 1, "digest": "0" * 32}, "b": {"size_bytes": 2, "digest": "1" * 32}}
    for place in range(0, len(sealed), 7):
        damaged = bytearray(sealed)
        damaged[place] ^= 4
        with pytest.raises(CorruptCheckpointError):
            parse_directory(bytes(damaged), "a.ckpt")


@pytest.mark.parametrize("name", ["../a", "a/b", "manifest.json", ""])
def test_a_manifest_names_no_files_elsewhere(name: str) -> None:
    files = {name: FileRecord(1, "0" * 32)}
    sealed = seal_directory(replace(manifest(files), size_bytes=1, digest=digest_of_files(files)))
    with pytest.raises(ManifestError, match="files is not"):
        parse_directory(sealed, "a.ckpt")


def test_one_digest_stands_for_all_files() -> None:
    files = {"a": FileRecord(1, "0" * 32), "b": FileRecord(2, "1" * 32)}
    digest = digest_of_files(files)
    assert digest == digest_of_files(dict(reversed(files.items())))
    others = [{"a": files["a"]}, {"a": files["b"], "b": files["a"]}, {"a": files["a"], "c": files["b"]}]
    assert digest not in {digest_of_files(other) for other in others}
    assert len({digest_of_files(other) for other in others}) == 3


def test_a_manifest_that_is_no_sum_of_its_files_is_refused() -> None:
    files = {"a": FileRecord(1, "0" * 32)}
    sealed = seal_directory(Manifest(**{**vars(manifest(files)), "size_bytes": 2, "digest": digest_of_files(files)}))
    with pytest.raises(ManifestError, match="not those of its files"):
        parse_directory(sealed, "a.ckpt")


# -- what others make of it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", ["size", "full"])
def test_it_is_read_back(storage: Storage, path: str, depth: ReadBackDepth) -> None:
    written = save(storage, path)
    read_back(storage, path, written, depth)
    Path(path, "__1_0.distcp").write_bytes(b"x" * 9 if depth == "full" else b"x")
    with pytest.raises(CorruptCheckpointError, match="__1_0.distcp"):  # noqa: RUF043
        read_back(storage, path, written, depth)


def test_rotation_removes_whole_directories_and_keeps_files_and_directories_apart(
    storage: Storage, tmp_path: Path
) -> None:
    saved = [save(storage, str(tmp_path / f"step=0000000{step}.ckpt"), step=step) for step in (1, 2, 3)]
    newest = str(tmp_path / "step=00000003.ckpt")
    rotate(str(tmp_path), newest, "run", Retention(2), None, saved[-1], trust=Trust(None))
    assert sorted(os.listdir(tmp_path)) == ["step=00000002.ckpt", "step=00000003.ckpt"]


def test_what_is_damaged_does_not_count_for_the_rotation(storage: Storage, tmp_path: Path) -> None:
    saved = [save(storage, str(tmp_path / f"step=0000000{step}.ckpt"), step=step) for step in (1, 2, 3)]
    Path(tmp_path, "step=00000002.ckpt", "meta.pt").write_bytes(b"all the REST")
    newest = str(tmp_path / "step=00000003.ckpt")
    rotate(str(tmp_path), newest, "run", Retention(2), None, saved[-1], trust=Trust(None))
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.parametrize("url", [False, True], ids=["local", "memory"])
def test_it_is_uploaded_file_by_file(storage: Storage, tmp_path: Path, path: str, url: bool) -> None:
    written = save(storage, path)
    target = f"memory://{tmp_path.name}/{NAME}" if url else str(tmp_path / "far" / NAME)
    uploads = Uploads(storage, retries=0, verify_after_write="full")
    committed: list[Manifest] = []
    uploads.upload(path, target, written, committed.append)
    uploads.close()
    assert uploads.take_failure() is None
    assert committed == [written]
    for name in (*FILES, "manifest.json"):
        with storage.open_file(path, name) as one, storage.open_file(target, name) as other:
            assert one.read() == other.read()


def test_a_damaged_file_is_not_uploaded(storage: Storage, tmp_path: Path, path: str) -> None:
    written = save(storage, path)
    Path(path, "meta.pt").write_bytes(b"all the REST")
    uploads = Uploads(storage, retries=0)
    uploads.upload(path, str(tmp_path / "far" / NAME), written, lambda manifest: None)
    uploads.close()
    failure = uploads.take_failure()
    assert failure is not None
    assert "meta.pt is damaged" in str(failure)
    assert os.listdir(tmp_path / "far") == []


def test_the_last_one_of_plain_lightning_is_a_fallback(tmp_path: Path) -> None:
    for name in FILES:
        Path(tmp_path, "last.ckpt").mkdir(exist_ok=True)
        Path(tmp_path, "last.ckpt", name).write_bytes(b"x")
    selection = select(str(tmp_path))
    assert last_of_others(selection, "full", None) == (str(tmp_path / "last.ckpt"), [])
    Path(tmp_path, "last.ckpt", "meta.pt").unlink()
    taken, unusable = last_of_others(selection, "full", None)
    assert taken is None
    assert "meta.pt" in unusable[0][1]


def test_a_start_of_directories_supersedes_them(storage: Storage, path: str) -> None:
    save(storage, path)
    assert start_of(os.path.dirname(path)) == ({NAME}, 2)
