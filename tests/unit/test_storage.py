"""What only a local directory can show: what is on disk at each step, and what is left when a step fails."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import xxhash
from _archives import archive, maker, save
from fsspec.spec import AbstractBufferedFile

from lightning_ft import events
from lightning_ft._disk import attempt as _attempt
from lightning_ft._disk import direct, disk_file, sink
from lightning_ft._names import attempt_name, deleted_name, parse_leftover, probe_name
from lightning_ft.discovery import verify
from lightning_ft.errors import ConfigurationError, CorruptCheckpointError, SaveError
from lightning_ft.storage import Attempt, Storage

NAME = "step=00000010.ckpt"
HEX = "0123456789abcdef"


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a write of some MiB has to wait for the disk, as one of some GiB does."""
    monkeypatch.setattr(direct, "BUFFERS", direct.DiskBuffers(direct.ALIGN_BYTES, 2))


def names(dirpath: Path) -> list[str]:
    return sorted(os.listdir(dirpath))


def attempted(path: Path, body: Callable[[Attempt], object]) -> None:
    with Storage().open_attempt(str(path)) as attempt:
        body(attempt)


def kinds(seen: list[events.Event]) -> list[str]:
    return [type(event).__name__ for event in seen]


def test_what_is_on_disk_at_each_event_of_a_save(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run" / NAME
    states: dict[str, tuple[bool, int]] = {}

    def look(event: events.Event) -> None:
        hidden = [name for name in os.listdir(path.parent) if parse_leftover(name)]
        states[type(event).__name__] = (path.exists(), len(hidden))

    stop = events.observe(look)
    try:
        save(str(path))
    finally:
        stop()
    assert states == {
        "AttemptOpened": (False, 1),
        "DataWritten": (False, 1),
        "DataSynced": (False, 1),
        "Renamed": (True, 0),
    }
    assert list(states) == ["AttemptOpened", "DataWritten", "DataSynced", "Renamed"]
    assert names(path.parent) == [NAME]


def test_order_of_system_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(fd: int) -> None:
        calls.append("fsync dir" if stat.S_ISDIR(os.fstat(fd).st_mode) else "fsync file")
        fsync(fd)

    def record_replace(source: str, target: str) -> None:
        calls.append("replace")
        assert os.path.dirname(source) == os.path.dirname(target)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    save(str(tmp_path / NAME))
    assert calls == ["fsync file", "replace", "fsync dir"]


def test_new_directories_are_synced_into_their_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    for module in (_attempt, disk_file):
        monkeypatch.setattr(module, "sync_dir", synced.append)
    save(str(tmp_path / "a" / "b" / NAME))
    assert synced == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]


def _fail(code: int) -> Callable[..., Any]:
    def failing(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return failing


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace", "close"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["no-space", "io-error"])
def test_a_failed_step_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
    closing = os.close

    def close(fd: int) -> None:
        closing(fd)
        raise OSError(code, os.strerror(code))

    def body(attempt: Attempt) -> None:
        attempt.write(archive())
        with monkeypatch.context() as patch:
            patch.setattr(os, call, close if call == "close" else _fail(code))
            attempt.commit(maker())

    with pytest.raises(OSError, match=os.strerror(code)):
        attempted(tmp_path / NAME, body)
    assert names(tmp_path) == []


@pytest.mark.usefixtures("small_buffers")
def test_a_failed_save_leaves_the_file_of_that_name_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    save(str(path), b"old")
    before = path.read_bytes()
    monkeypatch.setattr(os, "pwrite", _fail(errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        attempted(path, lambda attempt: attempt.write(b"x" * (3 << 20)))
    assert path.read_bytes() == before
    assert names(tmp_path) == ["last.ckpt"]


def test_when_only_the_last_sync_fails_the_whole_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_attempt, "sync_dir", _fail(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        save(str(tmp_path / NAME))
    assert names(tmp_path) == [NAME]
    assert verify(str(tmp_path / NAME)).problem is None


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_directories_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: _fail(code)() if stat.S_ISDIR(os.fstat(fd).st_mode) else fsync(fd))
    save(str(tmp_path / NAME))
    assert "cannot sync a directory" in caplog.text


@pytest.mark.parametrize("event", ["AttemptOpened", "DataWritten", "DataSynced", "Renamed"])
def test_an_observer_that_raises_makes_the_save_fail(tmp_path: Path, event: str) -> None:
    def fail(found: events.Event) -> None:
        if type(found).__name__ == event:
            raise RuntimeError("injected")

    stop = events.observe(fail)
    try:
        with pytest.raises(RuntimeError, match="injected"):
            save(str(tmp_path / NAME))
    finally:
        stop()
    assert names(tmp_path) == ([NAME] if event == "Renamed" else [])


@pytest.mark.usefixtures("small_buffers")
def test_the_storage_error_and_not_the_one_made_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(attempt: Attempt) -> None:
        with pytest.raises(OSError, match="No space"):
            attempt.write(b"x" * (3 << 20))
        raise RuntimeError("PytorchStreamWriter failed")

    monkeypatch.setattr(os, "pwrite", _fail(errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        attempted(tmp_path / NAME, body)


@pytest.mark.usefixtures("small_buffers")
def test_after_a_failed_write_nothing_can_be_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = Storage().open_attempt(str(tmp_path / NAME))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", _fail(errno.ENOSPC))
        with pytest.raises(OSError, match="No space"):
            attempt.write(b"x" * (3 << 20))
    attempt.write(archive())
    with pytest.raises(OSError, match="No space"):
        attempt.commit(maker())
    attempt.abort()
    assert names(tmp_path) == []


@pytest.mark.parametrize("at_most", [1, 7, 1000])
def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_most: int) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:at_most], offset))
    save(str(tmp_path / NAME), b"y" * 3000)
    assert verify(str(tmp_path / NAME)).problem is None


@pytest.mark.parametrize("written", [b"", b"short", b"x" * 100, archive() + b"x", archive()[:-1]])
def test_what_is_no_archive_is_not_committed(tmp_path: Path, written: bytes) -> None:
    def body(attempt: Attempt) -> None:
        attempt.write(written)
        attempt.commit(maker())

    with pytest.raises(SaveError, match="end-of-archive") as caught:
        attempted(tmp_path / NAME, body)
    assert (caught.value.path, caught.value.step) == (str(tmp_path / NAME), 10)
    assert names(tmp_path) == []


SIZES = [
    [1] * 200,
    [21, 1, 22, 23],
    [0, 0, 22, 0],
    [sink.BUFFER_BYTES - 1, 2, sink.BUFFER_BYTES, 5],
    [3, sink.CHUNK_BYTES + 10, 3],
]


@pytest.mark.parametrize("sizes", SIZES, ids=["ones", "around-22", "empty", "around-buffer", "over-chunk"])
def test_any_cut_of_the_stream_gives_the_same_file(tmp_path: Path, sizes: list[int]) -> None:
    data = archive(os.urandom(sum(sizes)))
    path = tmp_path / NAME
    with Storage().open_attempt(str(path)) as attempt:
        left = memoryview(data)
        for size in sizes:
            assert attempt.write(left[:size]) == size
            left = left[size:]
        attempt.write(left)
        attempt.flush()
        found = attempt.commit(maker())
    assert path.read_bytes()[: len(data) - 2] == data[:-2]
    assert (found.size_bytes, found.digest) == (len(data) - 22, xxhash.xxh3_128_hexdigest(data[:-22]))
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None


def test_a_buffer_that_its_owner_reuses_was_copied(tmp_path: Path) -> None:
    buffer = bytearray(archive())
    with Storage().open_attempt(str(tmp_path / NAME)) as attempt:
        attempt.write(memoryview(buffer))
        buffer[:] = b"\0" * len(buffer)
        attempt.commit(maker())
    assert verify(str(tmp_path / NAME)).problem is None


def test_nothing_goes_through_the_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    monkeypatch.setattr("tempfile.tempdir", None)
    save(str(tmp_path / "run" / NAME))
    assert names(tmp_path) == ["run"]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save(str(tmp_path / NAME))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o640


@pytest.mark.parametrize("directory", [False, True], ids=["file", "directory"])
def test_what_is_on_disk_at_each_event_of_a_deletion(tmp_path: Path, directory: bool) -> None:
    path = tmp_path / NAME
    if directory:
        path.mkdir()
        (path / "shard").write_bytes(b"x")
    else:
        path.write_bytes(b"x")
    states: dict[str, tuple[bool, int]] = {}
    stop = events.observe(lambda event: states.update({type(event).__name__: (path.exists(), len(names(tmp_path)))}))
    try:
        Storage().remove(str(path))
    finally:
        stop()
    assert states == {"DeleteStarted": (True, 1), "DeleteHidden": (False, 1), "Deleted": (False, 0)}


def test_the_name_is_gone_durably_before_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("rename", "fsync", "unlink"):
        original = getattr(os, name)

        def record(*args: Any, name: str = name, original: Callable[..., Any] = original) -> Any:
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(os, name, record)
    (tmp_path / NAME).write_bytes(b"x")
    Storage().remove(str(tmp_path / NAME))
    assert calls == ["rename", "fsync", "unlink"]


def test_deleting_a_link_leaves_its_target(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "shard").write_bytes(b"x")
    (tmp_path / NAME).symlink_to(target)
    Storage().remove(str(tmp_path / NAME))
    assert names(tmp_path) == ["elsewhere"]
    assert names(target) == ["shard"]


def test_only_our_leftovers_are_removed(tmp_path: Path, seen: list[events.Event]) -> None:
    ours = [attempt_name(NAME, HEX), deleted_name("last.ckpt", HEX), probe_name(HEX)]
    others = [NAME, ".nfs01", ".hidden.attempt", ".lightning_ft.lock", f"a.{HEX}.attempt", "x.tmp"]
    for name in [*ours, *others]:
        (tmp_path / name).write_bytes(b"x")
    folder = deleted_name("dir.ckpt", HEX)
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "shard").write_bytes(b"x")
    removed = Storage().remove_leftovers(str(tmp_path))
    assert sorted(removed) == sorted(str(tmp_path / name) for name in [*ours, folder])
    assert names(tmp_path) == sorted(others)
    assert kinds(seen) == ["LeftoverRemoved"] * 4


def test_only_attempts_that_nobody_writes_are_abandoned(tmp_path: Path, seen: list[events.Event]) -> None:
    storage, token = Storage(), "0" * 16
    dead = tmp_path / attempt_name("a.ckpt", token)
    others = [deleted_name("a.ckpt", token), probe_name(token), "b.ckpt"]
    for name in (dead.name, *others):
        (tmp_path / name).write_bytes(b"half")
    with storage.open_attempt(str(tmp_path / "c.ckpt")) as living:
        assert storage.remove_abandoned(str(tmp_path)) == [str(dead)]
        assert set(os.listdir(tmp_path)) == {*others, Path(living.attempt).name}
        living.write(archive())
        living.commit(maker())
    assert [e.path for e in seen if isinstance(e, events.LeftoverRemoved)] == [str(dead)]
    assert storage.remove_abandoned(str(tmp_path)) == []
    assert storage.remove_abandoned(str(tmp_path / "nowhere")) == []


def test_an_attempt_that_cannot_be_removed_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unreadable, dead = (tmp_path / attempt_name(name, "0" * 16) for name in ("a.ckpt", "b.ckpt"))
    unreadable.symlink_to(unreadable)  # as good as another user's, also for root
    dead.write_bytes(b"half")
    assert Storage().remove_abandoned(str(tmp_path)) == [str(dead)]
    assert names(tmp_path) == [unreadable.name]
    assert f"{unreadable}: left by a save that was killed, and cannot be removed" in caplog.text
    assert Storage().remove_abandoned(str(unreadable)) == []
    assert f"in {unreadable} is not looked for" in caplog.text


def test_an_attempt_cleared_away_before_it_was_held_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    cleared: list[str] = []

    def late(fd: int, operation: int) -> None:
        if not cleared:
            cleared.append(os.readlink(f"/proc/self/fd/{fd}"))
            os.unlink(cleared[0])
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with Storage().open_attempt(str(tmp_path / "a.ckpt")) as attempt:
        attempt.write(archive())
        attempt.commit(maker())
    assert len(cleared) == 1
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_nothing_is_taken_for_abandoned(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(fd: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    (tmp_path / attempt_name("a.ckpt", "0" * 16)).write_bytes(b"half")
    assert Storage().remove_abandoned(str(tmp_path)) == []
    with Storage().open_attempt(str(tmp_path / "b.ckpt")) as attempt:
        attempt.write(archive())
        attempt.commit(maker())
    assert verify(tmp_path / "b.ckpt").problem is None


@pytest.mark.parametrize("call", ["fsync", "replace", "unlink", "mkdir"])
def test_probe_names_directory_and_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(os, call, _fail(errno.EROFS))
    with pytest.raises(ConfigurationError, match="Read-only file system") as caught:
        Storage().probe(str(tmp_path / "run"))
    assert str(tmp_path / "run") in str(caught.value)


def test_a_directory_that_cannot_be_listed_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="is a file, and a directory"):
        Storage().listdir(str(tmp_path / "file"))


def test_a_file_shorter_than_sealed_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"x" * 10)
    with pytest.raises(CorruptCheckpointError, match="ends 5 of 15 bytes too early"):
        Storage().read_digest(str(tmp_path / NAME), 15)


@pytest.mark.parametrize("url", ["nosuchscheme://bucket/run", "sftp://host/run"])
def test_a_url_without_file_system_is_a_configuration_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise ImportError("Install the client to access this")

    if url.startswith("sftp"):
        monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ConfigurationError, match=url):
        Storage().listdir(url)


class Upload(AbstractBufferedFile):  # type: ignore[misc]
    """A store that publishes at close, like the real ones."""

    published: dict[str, bytes] = {}  # noqa: RUF012 - the store
    lost_bytes = 0

    def _initiate_upload(self) -> None:
        self.parts = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts += self.buffer.getvalue()
        if final:
            self.published[self.path] = self.parts[: len(self.parts) - self.lost_bytes]
        return True


class Store(fsspec.AbstractFileSystem):  # type: ignore[misc]
    protocol = "upload"

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Upload:
        return Upload(self, path, mode, block_size=1 << 20)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        key = self._strip_protocol(path)
        if key not in Upload.published:
            raise FileNotFoundError(path)
        return {"name": key, "size": len(Upload.published[key]), "type": "file"}

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        key = self._strip_protocol(path)
        if key not in self.dircache:
            self.dircache[key] = [name for name in Upload.published if name.startswith(f"{key}/")]
        return list(self.dircache[key])

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def rm_file(self, path: str) -> None:
        del Upload.published[self._strip_protocol(path)]


@pytest.fixture
def store() -> Iterator[dict[str, bytes]]:
    fsspec.register_implementation("upload", Store, clobber=True)
    Upload.published.clear()
    Upload.lost_bytes = 0
    yield Upload.published
    Upload.lost_bytes = 0


def test_an_upload_is_published_whole(store: dict[str, bytes], seen: list[events.Event]) -> None:
    save("upload://run/a.ckpt", b"x" * (3 << 20))
    assert list(store) == ["run/a.ckpt"]
    assert kinds(seen) == ["AttemptOpened", "DataWritten", "DataSynced"]


@pytest.mark.parametrize("size", [10, 3 << 20], ids=["one-part", "several-parts"])
def test_an_aborted_upload_never_appears(store: dict[str, bytes], size: int) -> None:
    store["run/a.ckpt"] = b"older"
    attempt = Storage().open_attempt("upload://run/a.ckpt")
    attempt.write(b"x" * size)
    attempt.abort()
    # A file object publishes when it is collected, unless it was told not to.
    del attempt
    assert store == {"run/a.ckpt": b"older"}


def test_an_upload_of_another_size_is_no_checkpoint(store: dict[str, bytes]) -> None:
    Upload.lost_bytes = 1
    with pytest.raises(SaveError, match="the store holds"):
        save("upload://run/a.ckpt")
    assert store == {}


def test_a_listing_is_never_the_remembered_one(store: dict[str, bytes]) -> None:
    store["run/a.ckpt"] = b"x"
    assert Storage().listdir("upload://run") == ["a.ckpt"]
    store["run/b.ckpt"] = b"written by another machine"
    assert Storage().listdir("upload://run") == ["a.ckpt", "b.ckpt"]
