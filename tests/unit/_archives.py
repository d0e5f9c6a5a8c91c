"""Checkpoint files for tests, made with zipfile in place of torch.save."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from typing import Any

from lightning_ft.manifest import CheckpointInfo, Manifest
from lightning_ft.storage import Storage


def archive(data: bytes = b"weights") -> bytes:
    """A zip archive without a comment, as torch.save leaves it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", data)
    return buffer.getvalue()


def manifest(**fields: Any) -> Manifest:
    values: dict[str, Any] = {
        "generation": "a" * 32,
        "run_id": "run",
        "start": 1,
        "step": 10,
        "batch": 10,
        "epoch": 0,
        "reason": "periodic",
        "boundary": "step",
        "created": "2024-01-01T00:00:00+00:00",
        "size_bytes": 0,
        "digest": "",
    }
    return Manifest(**{**values, **fields})


def maker(**fields: Any) -> Callable[[int, str], Manifest]:
    return lambda size_bytes, digest: manifest(**fields, size_bytes=size_bytes, digest=digest)


def save(path: str, data: bytes = b"weights", **fields: Any) -> Manifest:
    """A committed checkpoint at `path`."""
    with Storage().open_attempt(path) as attempt:
        attempt.write(archive(data))
        return attempt.commit(maker(**fields))


def info(path: str, problem: str | None = None, **fields: Any) -> CheckpointInfo:
    """What a listing would say of a checkpoint, without a file."""
    name = path.rpartition("/")[2]
    return CheckpointInfo(path, name, 100, None if problem else manifest(**fields), problem)
