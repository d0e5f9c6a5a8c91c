"""How much is asked of a store to find the last checkpoint, and to read one."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash

from lightning_ft import discovery
from lightning_ft._names import checkpoint_name
from lightning_ft._stores import ranged_file, verified_file
from lightning_ft.discovery import LOOKED_AT_FIRST, last_good, list_checkpoints, start_of
from lightning_ft.errors import NoUsableCheckpointError
from lightning_ft.manifest import EOCD_BYTES, seal
from lightning_ft.storage import Storage
from tests.stores.checkpoints import MIB, archive, manifest, requests, save
from tests.stores.fixtures import Place

needs_s3 = pytest.mark.needs("s3fs", "weed")

THOUSAND = 1000


def fill(storage: Storage, dirpath: str) -> None:
    """A thousand checkpoints, put side by side, which a save does not do."""
    store: Any = storage._store(dirpath)
    data = archive()
    archived, eocd = data[:-EOCD_BYTES], data[-EOCD_BYTES:]
    digest = xxhash.xxh3_128_hexdigest(archived)
    coming = []
    for step in range(1, THOUSAND + 1):
        place = store.place(f"{dirpath}/{checkpoint_name(step)}")
        body = archived + seal(eocd, manifest(len(archived), digest, step))
        coming.append(store.calls.start(partial(store.fs._call_s3, "put_object", **place, Body=body)))
        if len(coming) == 32 or step == THOUSAND:
            while coming:
                store.calls.finish(coming.pop(), dirpath)


@needs_s3
def test_the_last_of_a_thousand(s3: Place) -> None:
    """One listing (a page holds a thousand), a few manifests, and, to verify it, the chosen one."""
    storage = Storage(s3.options)
    storage.probe(s3.url)
    fill(storage, s3.url)
    with requests(storage, s3.url) as made:
        found = last_good(s3.url, "size", s3.options)
    assert found is not None
    assert found.name == checkpoint_name(THOUSAND)
    assert made["list_objects_v2"] == 1
    assert made["get_object"] <= LOOKED_AT_FIRST + 1
    assert set(made) == {"list_objects_v2", "get_object"}
    with requests(storage, s3.url) as made:
        last_good(s3.url, "full", s3.options)
    # What was read before is known while the listing says that it is the same.
    assert made == {"list_objects_v2": 1, "get_object": 2, "head_object": 1}
    with requests(storage, s3.url) as made:
        names, start = start_of(s3.url, s3.options)
    assert (len(names), start) == (THOUSAND, 2)
    assert made == {"list_objects_v2": 1}
    discovery._known.clear()
    with requests(storage, s3.url) as made:
        assert len(list_checkpoints(s3.url, s3.options)) == THOUSAND
    assert made == {"list_objects_v2": 1, "get_object": THOUSAND}
    with requests(storage, s3.url) as made:  # of a rotation: only what is new
        save(storage, s3.url, THOUSAND + 1)
        infos = list_checkpoints(s3.url, s3.options)
    assert infos[0].name == checkpoint_name(THOUSAND + 1)
    assert made["get_object"] == 2  # the look after the commit, and the manifest


def read_paths(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    read: Counter[str] = Counter()
    reading = Storage.read_manifests

    def count(self: Storage, paths: Any) -> Any:
        paths = list(paths)
        read.update(path.rpartition("/")[2] for path in paths)
        return reading(self, paths)

    monkeypatch.setattr(Storage, "read_manifests", count)
    return read


def many(dirpath: Path, count: int = 30) -> None:
    for step in range(1, count + 1):
        save(Storage(), str(dirpath), step)


def test_the_last_of_many_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many(tmp_path)
    read = read_paths(monkeypatch)
    found = last_good(str(tmp_path))
    assert found is not None
    assert found.name == checkpoint_name(30)
    assert len(read) == LOOKED_AT_FIRST


def test_all_are_read_when_the_newest_is_not_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many(tmp_path)
    newest = tmp_path / checkpoint_name(30)
    data = bytearray(newest.read_bytes())
    data[45] ^= 1  # only its digest tells
    newest.write_bytes(data)
    (tmp_path / checkpoint_name(29)).rename(tmp_path / "renamed.ckpt")
    found = last_good(str(tmp_path))
    assert found is not None
    assert found.name == "renamed.ckpt"


def test_only_damaged_ones_among_many(tmp_path: Path) -> None:
    many(tmp_path)
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(NoUsableCheckpointError) as caught:
        last_good(str(tmp_path))
    assert len(caught.value.reasons) == 30


# -- reading one -------------------------------------------------------------------------------------------------


@needs_s3
def test_torch_loads_from_a_store_in_few_requests(s3: Place) -> None:
    """It asks for a byte, then for four, and so on; each is no request."""
    torch = pytest.importorskip("torch")
    storage = Storage(s3.options)
    path = f"{s3.url}/many.ckpt"
    tensors = {str(number): torch.full((1000,), float(number)) for number in range(300)}
    with storage._store(path).fs.open(path, "wb") as file:
        torch.save(tensors, file)
    with requests(storage, path) as made, storage.open_read(path) as file:
        loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["299"], tensors["299"])
    assert made["get_object"] <= 2 + storage.size(path) // ranged_file.BLOCK_BYTES


@needs_s3
def test_g5_a_large_one_is_read_in_few_blocks_at_a_time(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a verification does not depend on the size of the checkpoint."""
    monkeypatch.setattr(ranged_file, "BLOCK_BYTES", MIB)
    storage = Storage(s3.options)
    path = save(storage, s3.url, size_bytes=40 * MIB)
    most_held = most_coming = 0
    block = ranged_file.RangedFile._block

    def watched(self: Any, index: int, last_wanted: int) -> bytes:
        nonlocal most_held, most_coming
        data = block(self, index, last_wanted)
        most_held, most_coming = max(most_held, self.held_blocks), max(most_coming, len(self._coming))
        return data

    monkeypatch.setattr(ranged_file.RangedFile, "_block", watched)
    assert discovery.verify(path, storage_options=s3.options).problem is None
    assert 2 <= most_coming <= ranged_file.BLOCKS_AHEAD
    assert most_held <= ranged_file.BLOCKS_AHEAD + ranged_file.BLOCKS_KEPT
    most_held = 0
    file, _ = storage.open_verified(path)
    file.close()
    assert 0 < most_held <= ranged_file.BLOCKS_AHEAD + ranged_file.BLOCKS_KEPT


@needs_s3
def test_an_object_that_is_replaced_is_not_read_in_its_stead(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranged_file, "BLOCK_BYTES", MIB)
    storage = Storage(s3.options)
    path = save(storage, s3.url, size_bytes=20 * MIB, boundary="none")
    with storage.open_read(path) as file:
        file.read(100)
        save(storage, s3.url, size_bytes=20 * MIB, boundary="none")
        file.seek(10 * MIB)
        with pytest.raises(OSError, match="was replaced while it was read"):
            file.read(100)


@pytest.mark.needs("/dev/shm")
def test_a_temporary_directory_in_memory_is_known() -> None:
    assert verified_file._in_memory("/dev/shm")
    assert not verified_file._in_memory("/proc/self")


@pytest.mark.parametrize("broken", ["gettempdir", "TemporaryFile"])
def test_without_a_temporary_directory_it_is_fetched_twice(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(verified_file.tempfile, broken, fails)
    monkeypatch.setattr(verified_file, "_in_memory", lambda directory: False)
    storage = Storage()
    path = save(storage, "memory://without_tmp")
    file, found = storage.open_verified(path)
    with file:
        assert found is not None
        assert len(file.read()) == storage.size(path)
        assert isinstance(file, ranged_file.RangedFile)
