"""Whether a checkpoint reads as it was written: asked right after the commit, before anything trusts it."""

from __future__ import annotations

import os
from typing import Literal

from lightning_ft import events
from lightning_ft._names import is_local, join
from lightning_ft.errors import CorruptCheckpointError, SaveError
from lightning_ft.manifest import DIRECTORY_MANIFEST, FileRecord, Manifest
from lightning_ft.storage import Storage

ReadBackDepth = Literal["size", "full"]


def read_back(storage: Storage, path: str, written: Manifest, depth: ReadBackDepth) -> None:
    """The disk or the store gives back under `path` what was written.

    Of a local file what the kernel holds in its page cache is dropped first, so that the answer comes from the device,
    as far as that can be asked for: a file system in memory has no device, and a disk has a cache of its own.

    Thread: writer. Blocks on: the tail of the file, or manifest and listing of the directory; with ``depth="full"``
    every byte.

    Args:
        storage: Where `path` is.
        path: A checkpoint that has just been committed.
        written: Its manifest.
        depth: "size": manifest and size. "full": the digest of every byte, too.

    Raises:
        CorruptCheckpointError: Something else is there.
        OSError: It cannot be read. Stores raise their client's own classes besides.
    """
    if is_local(path):
        for name in (*written.files, DIRECTORY_MANIFEST) if written.files else ("",):
            _drop_cached(os.path.join(path, name) if name else path)
    _same_manifest(storage, path, written)
    if depth == "full":
        storage.compare(path, written)
    events.emit(events.ReadBack(path))


def read_back_file(storage: Storage, dirpath: str, name: str, written: FileRecord, depth: ReadBackDepth) -> None:
    """The disk or the store gives back the file `name` of the attempt or checkpoint `dirpath` as it was written.

    Otherwise as `read_back`.
    """
    path = join(dirpath, name)
    if is_local(path):
        _drop_cached(path)
    size_bytes = storage.size(path)
    if size_bytes != written.size_bytes:
        raise CorruptCheckpointError(path, f"has {size_bytes} bytes, {written.size_bytes} were written")
    if depth == "full" and not storage.holds(path, written):
        raise CorruptCheckpointError(path, "data is damaged: its digest does not match what was written")


def read_back_directory(storage: Storage, path: str, written: Manifest) -> None:
    """The directory `path`, whose files were read back, has the manifest that was written.

    Thread: writer. Raises: as `read_back`.
    """
    _same_manifest(storage, path, written)
    events.emit(events.ReadBack(path))


def take_away(storage: Storage, path: str, problem: Exception) -> SaveError:
    """No restart can choose `path`, which did not read back as written; returns the error to report."""
    what = f"it does not read back as it was written ({type(problem).__name__}: {problem})"
    try:
        storage.remove(path)
    except Exception as error:  # stores have errors of their own classes
        failure = SaveError(
            f"{what} and could not be removed ({type(error).__name__}: {error}): remove {path} by hand; until then, "
            'only verify="full" passes it over',
            path,
        )
    else:
        failure = SaveError(f"{what}; it was removed, and older checkpoints are untouched", path)
    failure.__cause__ = problem
    return failure


def _same_manifest(storage: Storage, path: str, written: Manifest) -> None:
    manifest, _ = storage.read_manifest(path)
    if manifest is None:
        raise CorruptCheckpointError(path, "has no manifest any more")
    if (manifest.generation, manifest.digest) != (written.generation, written.digest):
        raise CorruptCheckpointError(path, f"is of another save (generation {manifest.generation})")


def _drop_cached(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        # Pages that are not yet on disk would stay; after the commit there are none.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
