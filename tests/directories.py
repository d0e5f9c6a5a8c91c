"""Checkpoint directories as several ranks would write them, without torch."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from lightning_ft._disk.directory import DirectoryAttempt
from lightning_ft.manifest import FileRecord, Manifest
from lightning_ft.storage import Storage

TOKEN = "01" * 8
FILES = {
    "__0_0.distcp": b"first rank",
    "__1_0.distcp": b"next rank",
    ".metadata": b"what is where",
    "meta.pt": b"all the rest",
}


def manifest(files: Mapping[str, FileRecord], step: int = 1, generation: str | None = None) -> Manifest:
    return Manifest(
        generation=generation or uuid.uuid4().hex, run_id="run", start=1, step=step, batch=step, epoch=0,
        reason="periodic", boundary="step", created="", size_bytes=0, digest="", files=dict(files),
    )  # fmt: skip


def write(attempt: DirectoryAttempt, files: Mapping[str, bytes]) -> dict[str, FileRecord]:
    """`files` are finished in the attempt."""
    records = {}
    for name, data in files.items():
        with attempt.open_file(name, len(data)) as file:
            file.write(data)
            records[name] = file.finish()
    return records


def save(storage: Storage, path: str, files: Mapping[str, bytes] = FILES, step: int = 1) -> Manifest:
    """A checkpoint directory at `path`, by one process in the place of all ranks."""
    generation = uuid.uuid4().hex
    attempt = storage.open_directory(path, generation[:16], leads=True)
    try:
        return attempt.commit(manifest(write(attempt, files), step, generation))
    finally:
        attempt.abort()
