"""Small checkpoint files for the tests of stores, and what a store is asked while they are handled."""

from __future__ import annotations

import io
import uuid
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lightning_ft._names import checkpoint_name
from lightning_ft._stores import calls, s3_parts
from lightning_ft.manifest import Manifest
from lightning_ft.storage import Storage

MIB = 1 << 20


def archive(size_bytes: int = 100) -> bytes:
    return archive_of(b"weights." * (size_bytes // 8))


def archive_of(data: bytes) -> bytes:
    """A zip archive without a comment, as `torch.save` leaves it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", data)
    return buffer.getvalue()


def manifest(size_bytes: int, digest: str, step: int = 1, **fields: Any) -> Manifest:
    values: dict[str, Any] = {
        "generation": uuid.uuid4().hex, "run_id": "run", "start": 1, "step": step, "batch": step, "epoch": 0,
        "reason": "periodic", "boundary": "step", "created": "", "size_bytes": size_bytes, "digest": digest,
    }  # fmt: skip
    return Manifest(**{**values, **fields})


def save(storage: Storage, dirpath: str, step: int = 1, size_bytes: int = 100, **fields: Any) -> str:
    """The path of a committed checkpoint."""
    path = f"{dirpath}/{checkpoint_name(step)}"
    with storage.open_attempt(path, size_bytes) as attempt:
        data = memoryview(archive(size_bytes))
        for start in range(0, len(data), MIB):
            attempt.write(data[start : start + MIB])
        attempt.commit(lambda size, digest: manifest(size, digest, step, **fields))
    return path


def uploads(storage: Storage, dirpath: str) -> list[str]:
    """Names of unfinished uploads into the directory."""
    store: Any = storage._store(dirpath)
    place = store.place(f"{dirpath}/")
    answer = store.request(dirpath, "list_multipart_uploads", Bucket=place["Bucket"], Prefix=place["Key"])
    return [upload["Key"].rpartition("/")[2] for upload in answer.get("Uploads", [])]


@contextmanager
def requests(storage: Storage, dirpath: str) -> Iterator[Counter[str]]:
    """How often which request was made by this thread's file system meanwhile."""
    fs: Any = storage._store(dirpath).fs
    counted: Counter[str] = Counter()
    original = fs._call_s3

    async def count(method: str, *args: Any, **kwargs: Any) -> Any:
        counted[method] += 1
        return await original(method, *args, **kwargs)

    fs._call_s3 = count
    try:
        yield counted
    finally:
        del fs._call_s3


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest that a store takes."""
    monkeypatch.setattr(s3_parts, "PART_BYTES", 5 * MIB)


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are repeated at once."""
    monkeypatch.setattr(calls, "LONGEST_WAIT_SECS", 0.0)
