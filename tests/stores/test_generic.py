"""Stores that are reached through fsspec's common interface only; here those that never answer, or fail half-way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from lightning_ft.discovery import last_good, verify
from lightning_ft.errors import StorageError
from lightning_ft.storage import Storage
from tests.stores.checkpoints import MIB, archive, manifest, save


class Held(AbstractBufferedFile):  # type: ignore[misc]
    """A file of `Hanging`: parts are kept until the upload is complete."""

    def _initiate_upload(self) -> None:
        self.fs.step("initiate")
        self.parts = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.fs.step("part")
        self.parts += self.buffer.getvalue()
        if final:
            self.commit()
        return True

    def commit(self) -> None:
        self.fs.step("complete")
        MemoryFile(self.fs.inner, self.fs.inner._strip_protocol(f"memory://{self.path}"), self.parts).commit()

    def discard(self) -> None:
        self.parts = b""


class Hanging(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A file system that knows no coroutines, and stops answering where it is told to."""

    protocol = "hanging"
    cachable = False
    at: str | None = None
    reading = False
    released = threading.Event()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inner = MemoryFileSystem()

    def step(self, name: str) -> None:
        if name == Hanging.at:
            Hanging.released.wait(60)

    def _inner(self, path: str) -> str:
        return f"memory://{self._strip_protocol(path)}"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb":
            return Held(self, self._strip_protocol(path), mode, block_size=5 * MIB)
        return self.inner.open(self._inner(path), mode)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        assert not Hanging.reading, "two reads at the same time"
        Hanging.reading = True
        try:
            self.step("read")
            data: bytes = self.inner.cat_file(self._inner(path), start, end)
        finally:
            Hanging.reading = False
        return data

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        self.step("info")
        found: dict[str, Any] = self.inner.info(self._inner(path))
        return found

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self.step("list")
        return self.inner.ls(self._inner(path), detail)

    def rm_file(self, path: str) -> None:
        self.inner.rm_file(self._inner(path))


@pytest.fixture
def url() -> Iterator[str]:
    fsspec.register_implementation("hanging", Hanging, clobber=True)
    Hanging.at = None
    Hanging.released = threading.Event()
    yield "hanging://generic/run"
    Hanging.released.set()
    for thread in threading.enumerate():
        if thread.name == "store-call":  # it goes on where it hung, and puts there what it had to
            thread.join(60)
    inner = MemoryFileSystem()
    if inner.exists("memory://generic"):
        inner.rm("memory://generic", recursive=True)


@pytest.mark.parametrize("at", ["info", "read", "list"])
def test_reading_ends_at_the_deadline(url: str, at: str) -> None:
    path = save(Storage(), url)
    assert verify(path).problem is None
    Hanging.at = at
    with pytest.raises(StorageError, match="no answer from the store") as caught:
        last_good(url, storage_options={"deadline_secs": 0.3})
    assert caught.value.transient


@pytest.mark.parametrize("at", ["initiate", "part", "complete"])
def test_writing_ends_at_the_deadline(url: str, at: str) -> None:
    storage = Storage()
    first = save(storage, url, 1)
    Hanging.at = at
    with pytest.raises(StorageError, match="no answer from the store"):
        save(Storage({"deadline_secs": 0.3}), url, 2, size_bytes=12 * MIB)
    Hanging.at = None
    assert storage.listdir(url) == ["step=00000001.ckpt"]
    assert verify(first).problem is None


def test_an_upload_in_several_parts_is_read_back_and_loaded(url: str) -> None:
    storage = Storage()
    with storage.open_attempt(f"{url}/a.ckpt") as attempt:
        attempt.write(archive(50 * MIB))
        written = attempt.commit(manifest)
    assert verify(f"{url}/a.ckpt").problem is None
    file, found = storage.open_verified(f"{url}/a.ckpt")
    with file:
        assert found == written
        assert file.read() == storage._store(url).fs.cat_file(f"{url}/a.ckpt")
