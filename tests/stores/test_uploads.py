"""Uploads to a real S3 server: what is in memory and on the way, what is compared, and what is left when they end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from hashlib import md5
from pathlib import Path
from typing import Any

import pytest

from lightning_ft import events
from lightning_ft._stores import s3 as _s3
from lightning_ft._stores import s3_parts, s3_upload
from lightning_ft.discovery import verify
from lightning_ft.errors import SaveError, StorageError
from lightning_ft.storage import Storage
from tests.stores.checkpoints import MIB, archive, manifest, requests, save, small_parts, uploads
from tests.stores.fixtures import Place

__all__ = ["small_parts"]

pytestmark = pytest.mark.needs("s3fs", "weed")


@pytest.mark.usefixtures("small_parts")
def test_g5_parts_go_in_parallel_and_few_are_in_memory(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a save does not depend on the size of the checkpoint: parts are counted, not time."""
    storage = Storage(s3.options)
    fs: Any = storage._store(s3.url).fs
    on_their_way = most_on_their_way = most_held = 0
    original = fs._call_s3

    async def count(method: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal on_their_way, most_on_their_way
        on_their_way += method == "upload_part"
        most_on_their_way = max(most_on_their_way, on_their_way)
        try:
            await asyncio.sleep(0)
            return await original(method, *args, **kwargs)
        finally:
            on_their_way -= method == "upload_part"

    monkeypatch.setattr(fs, "_call_s3", count, raising=False)
    data = memoryview(archive(64 * MIB))
    path = f"{s3.url}/step=00000001.ckpt"
    with storage.open_attempt(path) as attempt:
        assert isinstance(attempt, s3_upload.S3Attempt)
        for start in range(0, len(data), MIB):
            attempt.write(data[start : start + MIB])
            most_held = max(most_held, attempt._parts.held_parts)
        attempt.commit(manifest)
    assert most_held == s3_parts.PARTS_AT_ONCE + 1
    assert 2 <= most_on_their_way <= s3_parts.PARTS_AT_ONCE
    monkeypatch.undo()
    assert verify(path, storage_options=s3.options).problem is None


def test_a_small_checkpoint_is_one_request_and_a_look_at_it(s3: Place) -> None:
    storage = Storage(s3.options)
    storage.probe(s3.url)
    with requests(storage, s3.url) as made:
        save(storage, s3.url)
    assert made == {"put_object": 1, "get_object": 1}


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("through", ["abort", "error", "no-archive"])
def test_a_failed_upload_leaves_nothing(s3: Place, through: str) -> None:
    storage = Storage(s3.options)
    path = f"{s3.url}/step=00000001.ckpt"
    attempt = storage.open_attempt(path)
    attempt.write(b"x" * (12 * MIB))
    assert uploads(storage, s3.url) == ["step=00000001.ckpt"]
    if through == "abort":
        attempt.abort()
        attempt.abort()
    elif through == "error":
        with pytest.raises(ZeroDivisionError), attempt:
            raise ZeroDivisionError
    else:
        with pytest.raises(SaveError), attempt:
            attempt.commit(manifest)
    assert uploads(storage, s3.url) == []
    assert storage.listdir(s3.url) == []


KILLED = """
import os, signal, sys
from lightning_ft._stores import s3_parts as _s3_parts
from lightning_ft.storage import Storage
_s3_parts.PART_BYTES = 5 << 20
url, key, secret, endpoint = sys.argv[1:]
options = {"key": key, "secret": secret, "endpoint_url": endpoint, "client_kwargs": {"region_name": "us-east-1"}}
attempt = Storage(options).open_attempt(url)
attempt.write(b"x" * (12 << 20))
attempt._parts._settle()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_upload_of_a_killed_process_is_removed_when_it_is_old(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(s3.options)
    save(storage, s3.url)
    arguments = [f"{s3.url}/step=00000002.ckpt", s3.options["key"], s3.options["secret"], s3.options["endpoint_url"]]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    store: Any = storage._store(s3.url)
    # Not ours; not of this directory; of a rank's part of a checkpoint.
    for name in ("notes.txt", "deeper/step=00000003.ckpt", "step=00000004.ckpt/__1_0.distcp"):
        store.request(s3.url, "create_multipart_upload", **store.place(f"{s3.url}/{name}"))
    assert storage.listdir(s3.url) == ["step=00000001.ckpt"]
    left = ["__1_0.distcp", "notes.txt", "step=00000002.ckpt", "step=00000003.ckpt"]
    assert sorted(uploads(storage, s3.url)) == left
    assert storage.remove_leftovers(s3.url) == []  # it may be of a living process
    monkeypatch.setattr(_s3, "LEFTOVER_AGE", timedelta(0))
    other = f"{s3.url}/deeper"  # of a `ModelCheckpoint`
    assert storage.remove_abandoned(other) == [f"{other}/step=00000003.ckpt"]
    store.request(other, "create_multipart_upload", **store.place(f"{other}/step=00000003.ckpt"))
    seen: list[events.Event] = []
    stop = events.observe(seen.append)
    old = [f"{s3.url}/step=00000002.ckpt", f"{s3.url}/step=00000004.ckpt/__1_0.distcp"]
    try:
        assert sorted(storage.remove_leftovers(s3.url)) == old  # in no order that a store promises
    finally:
        stop()
    assert sorted(event.path for event in seen if isinstance(event, events.LeftoverRemoved)) == old
    assert len(seen) == len(old)
    assert sorted(uploads(storage, s3.url)) == ["notes.txt", "step=00000003.ckpt"]
    assert storage.listdir(s3.url) == ["step=00000001.ckpt"]


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("answer", ["etag", "checksum"])
def test_e8_a_part_that_arrived_as_another_one_fails_the_save(
    s3: Place, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    storage = Storage(s3.options)
    fs: Any = storage._store(s3.url).fs
    original = fs._call_s3

    async def lie(method: str, *args: Any, **kwargs: Any) -> Any:
        found = await original(method, *args, **kwargs)
        if method == "upload_part" and kwargs["PartNumber"] == 2:
            found.pop("ChecksumCRC32", None)
            found.update({"ETag": f'"{"0" * 32}"'} if answer == "etag" else {"ChecksumCRC32": "AAAAAA=="})
        return found

    monkeypatch.setattr(fs, "_call_s3", lie, raising=False)
    with pytest.raises(StorageError, match="holds another part 2") as caught:
        save(storage, s3.url, size_bytes=12 * MIB)
    assert caught.value.transient
    monkeypatch.undo()
    assert storage.listdir(s3.url) == []
    assert uploads(storage, s3.url) == []


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("size_bytes", [100, 12 * MIB], ids=["one-request", "parts"])
def test_a_store_that_takes_no_checksums_is_compared_by_etag(
    s3: Place, monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    options = {**s3.options, "config_kwargs": {"request_checksum_calculation": "when_required"}}
    storage = Storage(options)
    compared: list[int] = []

    def counting(body: bytes, **kwargs: Any) -> Any:
        compared.append(len(body))
        return md5(body, usedforsecurity=False)

    monkeypatch.setattr("hashlib.md5", counting)
    path = save(storage, s3.url, size_bytes=size_bytes)
    assert len(compared) == (1 if size_bytes == 100 else 3)
    monkeypatch.undo()
    assert verify(path, storage_options=s3.options).problem is None


def _another_generation(store: Any, path: str) -> None:
    with Storage(store.fs.storage_options).open_attempt(f"{path}.other") as attempt:
        attempt.write(archive())
        attempt.commit(manifest)
    data = store.fs.cat_file(f"{path}.other")
    store.fs.rm_file(f"{path}.other")
    store.fs.pipe_file(path, data)


def _cut(store: Any, path: str) -> None:
    store.fs.pipe_file(path, store.fs.cat_file(path)[:-1])


@pytest.mark.parametrize(("change", "stays"), [(_cut, False), (_another_generation, True)], ids=["cut", "another"])
def test_e8_what_is_there_after_the_commit_is_looked_at(
    s3: Place, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, str], None], stays: bool
) -> None:
    """A damaged object is taken back; one of another save, which came at the same moment, is not ours to remove."""
    storage = Storage(s3.options)
    verifying = s3_upload.Publication._verify

    def verify_changed(self: Any, etag: str) -> None:
        monkeypatch.undo()
        change(self._store, self._path)
        verifying(self, etag)

    monkeypatch.setattr(s3_upload.Publication, "_verify", verify_changed)
    with pytest.raises(SaveError if stays else StorageError):
        save(storage, s3.url)
    assert storage.listdir(s3.url) == (["step=00000001.ckpt"] if stays else [])


@pytest.mark.needs("rclone")
def test_a_store_that_ignores_conditions_is_noticed(s3: Place, poor_s3: Place) -> None:
    for place, refuses in ((s3, True), (poor_s3, False)):
        storage = Storage(place.options)
        storage.probe(place.url)
        assert storage.listdir(place.url) == []
        store: Any = storage._store(place.url)
        assert store.refuses_existing(place.url) is refuses


@pytest.mark.needs("rclone")
@pytest.mark.parametrize("kind", ["s3", "poor_s3"])
def test_a_name_of_the_run_is_given_once(kind: str, request: pytest.FixtureRequest) -> None:
    """Two runs write into one directory of a store; on a disk the lock keeps them apart."""
    place: Place = request.getfixturevalue(kind)
    storage = Storage(place.options)
    storage.probe(place.url)
    path = save(storage, place.url)
    first = storage.read_manifest(path)[0]
    with pytest.raises(SaveError, match="there is another checkpoint of this name"):
        save(storage, place.url, size_bytes=12 * MIB)
    assert storage.read_manifest(path)[0] == first
    assert storage.listdir(place.url) == ["step=00000001.ckpt"]
    assert uploads(storage, place.url) == []


def test_other_callbacks_may_write_over_their_own_files(s3: Place) -> None:
    storage = Storage(s3.options)
    storage.probe(s3.url)
    save(storage, s3.url, boundary="none")
    path = save(storage, s3.url, boundary="none", start=2)
    found = storage.read_manifest(path)[0]
    assert found is not None
    assert found.start == 2


def test_g1_nothing_appears_on_the_local_disk(s3: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No directory called `s3:`; and no copy of what was loaded is left in the temporary directory."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.chdir(tmp_path)
    storage = Storage(s3.options)
    path = save(storage, s3.url, size_bytes=10 * MIB)
    file, _ = storage.open_verified(path)
    with file:
        assert os.listdir(temporary) == []
        assert file.read(4) == b"PK\x03\x04"
    assert os.listdir(tmp_path) == ["temporary"]
    assert os.listdir(temporary) == []
