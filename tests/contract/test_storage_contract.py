"""What every kind of storage promises, run over each of them."""

from __future__ import annotations

import io
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from lightning_ft import events
from lightning_ft._names import join
from lightning_ft.discovery import last_good, list_checkpoints, select, verify
from lightning_ft.errors import CheckpointError, SaveError
from lightning_ft.manifest import Manifest
from lightning_ft.storage import Storage
from tests import directories
from tests.stores.fixtures import Place


@pytest.fixture(
    params=[
        "local",
        "memory",
        pytest.param("s3", marks=pytest.mark.needs("s3fs", "weed")),
        pytest.param("poor_s3", marks=pytest.mark.needs("s3fs", "rclone")),
    ]
)
def dirpath(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "run")
        return
    if request.param in ("s3", "poor_s3"):
        place: Place = request.getfixturevalue(request.param)
        # Credentials and endpoint by fsspec's own configuration; other tests give `storage_options`.
        monkeypatch.setitem(fsspec.config.conf, "s3", place.options)
        yield place.url
        return
    url = f"memory://{uuid.uuid4().hex}/run"
    yield url
    fs = fsspec.filesystem("memory")
    if fs.exists(url):
        fs.rm(url, recursive=True)


@pytest.fixture
def storage() -> Storage:
    return Storage()


def archive(data: bytes = b"weights") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", data)
    return buffer.getvalue()


def manifest(size_bytes: int, digest: str, step: int = 1) -> Manifest:
    return Manifest(
        generation=uuid.uuid4().hex, run_id="run", start=1, step=step, batch=step, epoch=0,
        reason="periodic", boundary="step", created="", size_bytes=size_bytes, digest=digest,
    )  # fmt: skip


def save(storage: Storage, path: str, step: int = 1, data: bytes = b"weights") -> Manifest:
    with storage.open_attempt(path) as attempt:
        attempt.write(archive(data))
        return attempt.commit(lambda size_bytes, digest: manifest(size_bytes, digest, step))


def put(storage: Storage, path: str, data: bytes) -> None:
    fs = fsspec.core.url_to_fs(path)[0]
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.pipe_file(path, data)


def test_a_commit_is_visible_verified_and_alone(storage: Storage, dirpath: str) -> None:
    path = join(dirpath, "a.ckpt")
    written = save(storage, path)
    assert storage.listdir(dirpath) == ["a.ckpt"]
    assert storage.exists(path)
    found, size_bytes = storage.read_manifest(path)
    assert found == written
    assert size_bytes == storage.size(path)
    assert storage.read_digest(path, written.size_bytes) == written.digest
    assert verify(path).problem is None
    with storage.open_read(path) as file, zipfile.ZipFile(file) as opened:
        assert opened.read("archive/data.pkl") == b"weights"


def test_nothing_is_visible_before_the_commit(storage: Storage, dirpath: str) -> None:
    path = join(dirpath, "a.ckpt")
    with storage.open_attempt(path) as attempt:
        attempt.write(archive(b"x" * (20 << 20)))
        assert not storage.exists(path)
        attempt.commit(manifest)
    assert storage.exists(path)


def test_an_abort_leaves_nothing_and_may_be_repeated(storage: Storage, dirpath: str) -> None:
    attempt = storage.open_attempt(join(dirpath, "a.ckpt"))
    attempt.write(b"x" * (20 << 20))
    attempt.abort()
    attempt.abort()
    assert storage.listdir(dirpath) == []


def test_an_abort_after_the_commit_does_nothing(storage: Storage, dirpath: str) -> None:
    path = join(dirpath, "a.ckpt")
    attempt = storage.open_attempt(path)
    attempt.write(archive())
    attempt.commit(manifest)
    attempt.abort()
    assert verify(path).problem is None


def test_a_failed_save_leaves_the_older_one_of_that_name(storage: Storage, dirpath: str) -> None:
    path = join(dirpath, "last.ckpt")
    old = save(storage, path)
    attempt = storage.open_attempt(path)
    attempt.write(b"no archive, and nothing that could be one")
    with pytest.raises(SaveError):
        attempt.commit(manifest)
    attempt.abort()
    assert storage.read_manifest(path)[0] == old
    assert storage.listdir(dirpath) == ["last.ckpt"]


def test_a_second_save_of_a_name_replaces_the_first(storage: Storage, dirpath: str) -> None:
    path = join(dirpath, "last.ckpt")
    save(storage, path, data=b"a long first one" * 100)
    second = save(storage, path, step=2)
    assert storage.read_manifest(path)[0] == second
    assert verify(path).problem is None


@pytest.mark.parametrize("again", [False, True], ids=["once", "already-gone"])
def test_removing(storage: Storage, dirpath: str, again: bool) -> None:
    path = join(dirpath, "a.ckpt")
    save(storage, path)
    save(storage, join(dirpath, "b.ckpt"))
    storage.remove(path)
    seen: list[events.Event] = []
    stop = events.observe(seen.append)
    try:
        if again:
            storage.remove(path)
    finally:
        stop()
    assert storage.listdir(dirpath) == ["b.ckpt"]
    skipped = [events.DeleteStarted(path), events.DeleteSkipped(path, "already gone")]
    assert seen == (skipped if again else [])


def test_removing_a_directory(storage: Storage, dirpath: str) -> None:
    for name in ("manifest.json", "shard0", "sub/shard1"):
        save(storage, join(dirpath, f"a.ckpt/{name}"))
    storage.remove(join(dirpath, "a.ckpt"))
    assert storage.listdir(dirpath) == []


def test_names_are_no_patterns(storage: Storage, dirpath: str) -> None:
    for run in ("lr=[01]", "lr=1"):
        save(storage, join(dirpath, f"{run}/a.ckpt/manifest.json"))
        save(storage, join(dirpath, f"{run}/a.ckpt/sub/shard"))
    storage.remove(join(dirpath, "lr=[01]/a.ckpt"))
    assert storage.listdir(join(dirpath, "lr=[01]")) == []
    assert storage.listdir(join(dirpath, "lr=1/a.ckpt")) == ["manifest.json", "sub"]
    assert storage.listdir(join(dirpath, "lr=1/a.ckpt/sub")) == ["shard"]


def test_what_does_not_exist(storage: Storage, dirpath: str) -> None:
    path = join(dirpath, "a.ckpt")
    assert storage.listdir(dirpath) == []
    assert not storage.exists(path)
    assert storage.remove_leftovers(dirpath) == []
    for ask in (storage.size, storage.read_manifest, storage.open_read):
        with pytest.raises(FileNotFoundError):
            ask(path)
    assert verify(path).problem == "missing"
    assert last_good(dirpath) is None


@pytest.mark.parametrize("data", [b"", b"x", b"x" * 100_000], ids=["empty", "one-byte", "larger-than-tail"])
def test_what_is_no_checkpoint(storage: Storage, dirpath: str, data: bytes) -> None:
    storage.probe(dirpath)
    path = join(dirpath, "a.ckpt")
    put(storage, path, data)
    assert verify(path).problem == "truncated or not a zip archive"


def test_a_directory_is_no_file(storage: Storage, dirpath: str) -> None:
    save(storage, join(dirpath, "a.ckpt/shard0"))
    with pytest.raises(IsADirectoryError):
        storage.read_manifest(join(dirpath, "a.ckpt"))
    assert verify(join(dirpath, "a.ckpt")).problem == "a directory without manifest.json or .metadata: no checkpoint"


def test_listings_are_fresh(storage: Storage, dirpath: str) -> None:
    for step in range(3):
        save(storage, join(dirpath, f"step=0000000{step}.ckpt"), step)
        assert [info.manifest.step for info in list_checkpoints(dirpath) if info.manifest] == list(range(step, -1, -1))


def test_a_probe_leaves_nothing(storage: Storage, dirpath: str) -> None:
    storage.probe(dirpath)
    assert storage.listdir(dirpath) == []


@pytest.mark.parametrize("large", [False, True], ids=["one-block", "several-blocks"])
def test_e5_every_flipped_bit_is_found_before_anything_is_used(storage: Storage, dirpath: str, large: bool) -> None:
    """In the pickle, in tensor data, in the archive's directory, in the manifest and in its seal."""
    data = b"weights" * (1_500_000 if large else 100)
    path = join(dirpath, "a.ckpt")
    save(storage, path, data=data)
    with storage.open_read(path) as file:
        whole = file.read()
    for place in (40, len(whole) // 2, len(data) + 100, whole.index(b'"generation"') + 20, len(whole) - 10):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        put(storage, path, bytes(damaged))
        assert verify(path).problem is not None, place
        with pytest.raises(CheckpointError):
            storage.open_verified(path)
    put(storage, path, whole)
    file, found = storage.open_verified(path)
    with file:
        assert found is not None
        assert file.read() == whole


# -- checkpoints that are directories --------------------------------------------------------------------------------


def test_a_directory_is_a_checkpoint_when_its_manifest_is_there(storage: Storage, dirpath: str) -> None:
    path = join(dirpath, "step=00000001.ckpt")
    attempts = [storage.open_directory(path, directories.TOKEN, leads=leads) for leads in (True, False)]
    large = b"x" * (20 << 20)
    records = directories.write(attempts[0], directories.FILES)
    records |= directories.write(attempts[1], {"__2_0.distcp": large})
    attempts[1].close()
    assert last_good(dirpath) is None
    written = attempts[0].commit(directories.manifest(records))
    assert storage.listdir(dirpath) == ["step=00000001.ckpt"]
    assert storage.is_sharded(path)
    assert not storage.is_file(path)
    found, size_bytes = storage.read_manifest(path)
    assert found == written
    assert size_bytes > written.size_bytes
    assert verify(path).problem is None
    chosen = last_good(dirpath)
    assert chosen is not None
    assert chosen.path == path
    with storage.open_verified_file(path, "__2_0.distcp", written.files["__2_0.distcp"]) as file:
        assert file.read() == large
    with storage.open_file(path, ".metadata") as file:
        assert file.read() == directories.FILES[".metadata"]


def test_a_directory_that_was_given_up_leaves_nothing(storage: Storage, dirpath: str) -> None:
    path = join(dirpath, "step=00000001.ckpt")
    attempt = storage.open_directory(path, directories.TOKEN, leads=True)
    with attempt.open_file("__0_0.distcp") as file:
        file.write(b"x" * (20 << 20))
    directories.write(attempt, directories.FILES)
    attempt.abort()
    attempt.abort()
    assert storage.listdir(dirpath) == []
    directories.save(storage, path)  # the next try of the same save
    assert verify(path).problem is None


def test_a_directory_takes_the_place_of_no_checkpoint_of_a_run(storage: Storage, dirpath: str) -> None:
    path = join(dirpath, "step=00000001.ckpt")
    written = directories.save(storage, path)
    with pytest.raises(SaveError, match="another checkpoint of this name"):
        directories.save(storage, path)
    assert storage.read_manifest(path)[0] == written
    assert storage.listdir(dirpath) == ["step=00000001.ckpt"]


@pytest.mark.parametrize("old", ["file", "directory"])
def test_a_directory_takes_the_place_of_the_last_one(storage: Storage, dirpath: str, old: str) -> None:
    path = join(dirpath, "last.ckpt")
    if old == "file":
        save(storage, path)
    else:
        directories.save(storage, path, {".metadata": b"x", "of the old one": b"x"})
    written = directories.save(storage, path)
    assert storage.read_manifest(path)[0] == written
    assert storage.listdir(dirpath) == ["last.ckpt"]
    assert set(storage.listdir(path)) == {*directories.FILES, "manifest.json"}


def test_what_is_missing_of_a_directory_fails_the_save(storage: Storage, dirpath: str) -> None:
    path = join(dirpath, "step=00000001.ckpt")
    attempt = storage.open_directory(path, directories.TOKEN, leads=True)
    records = directories.write(attempt, directories.FILES)
    nobody = {"__2_0.distcp": records["__0_0.distcp"]}
    with pytest.raises(SaveError, match="distcp is missing"):
        attempt.commit(directories.manifest({**records, **nobody}))
    attempt.abort()
    assert storage.listdir(dirpath) == []


def test_what_a_kill_leaves_of_a_directory_is_no_checkpoint_and_goes(storage: Storage, dirpath: str) -> None:
    directories.save(storage, join(dirpath, "step=00000001.ckpt"))
    attempt = storage.open_directory(join(dirpath, "step=00000002.ckpt"), directories.TOKEN, leads=True)
    directories.write(attempt, directories.FILES)
    attempt.close()
    assert [info.name for info in list_checkpoints(dirpath)] == ["step=00000001.ckpt"]
    assert select(dirpath).passed_over == ()
    assert len(storage.remove_leftovers(dirpath)) == 1
    assert storage.listdir(dirpath) == ["step=00000001.ckpt"]


def test_a_directory_that_was_being_deleted_is_no_checkpoint_and_goes(
    storage: Storage, dirpath: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = join(dirpath, "step=00000001.ckpt")
    directories.save(storage, path)

    def kill(event: events.Event) -> None:
        if isinstance(event, events.DeleteHidden):
            raise KeyboardInterrupt

    stop = events.observe(kill)
    with pytest.raises(KeyboardInterrupt):
        storage.remove(path)
    stop()
    assert last_good(dirpath) is None
    assert len(storage.remove_leftovers(dirpath)) == 1
    assert storage.listdir(dirpath) == []


def test_e5_every_flipped_bit_of_a_directory_is_found(storage: Storage, dirpath: str) -> None:
    path = join(dirpath, "step=00000001.ckpt")
    directories.save(storage, path)
    for name in (*directories.FILES, "manifest.json"):
        with storage.open_file(path, name) as file:
            whole = file.read()
        damaged = bytearray(whole)
        damaged[len(whole) // 2] ^= 4
        put(storage, join(path, name), bytes(damaged))
        problem = verify(path).problem
        assert problem is not None
        assert ("manifest" if name == "manifest.json" else name) in problem
        assert select(dirpath).chosen is None
        put(storage, join(path, name), whole)
    assert verify(path).problem is None


def test_a_directory_of_plain_lightning_is_foreign(storage: Storage, dirpath: str) -> None:
    path = join(dirpath, "last.ckpt")
    for name, data in directories.FILES.items():
        put(storage, join(path, name), data)
    assert storage.read_manifest(path)[0] is None
    assert [info.path for info in select(dirpath).foreign] == [path]
