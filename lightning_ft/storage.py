"""The commit protocol: what is on disk while a checkpoint is written, published and deleted. No policy.

====================  ==========================================  ==================================
Step (in this order)  Local directory: true on disk after it      Object store: true after it
====================  ==========================================  ==================================
`open_attempt`        an empty attempt under a hidden name        nothing
`write` ...           a growing attempt                           parts of an upload, invisible
`commit`: seal        every byte is in the attempt, not durable   the same
`commit`: publish     attempt durable, renamed, name durable      the object, whole, under its name
`remove`: hide        the name is gone, durably                   a directory has lost its manifest
`remove`: data        the data is gone                            the data is gone
====================  ==========================================  ==================================

Local files do not pass through `fsspec`, whose local transactions go through the system's temporary
directory, move without fsync, and keep their state on an instance shared by all threads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Mapping
from typing import Any, BinaryIO, cast

import fsspec
import xxhash

from lightning_ft._attempt import CHUNK_BYTES, Attempt, LocalAttempt, ObjectAttempt, hold, make_dirs, sync_dir
from lightning_ft._names import deleted_name, is_local, join, normalise, parse_leftover, probe_name, split
from lightning_ft._threaded_file import ThreadedFile
from lightning_ft.errors import ConfigurationError, CorruptCheckpointError
from lightning_ft.events import (
    AttemptOpened,
    Deleted,
    DeleteHidden,
    DeleteSkipped,
    DeleteStarted,
    LeftoverRemoved,
    emit,
)
from lightning_ft.manifest import TAIL_BYTES, Manifest, parse_tail

__all__ = ["DIRECTORY_MANIFEST", "Attempt", "Storage"]

# What is read of a local file at a time, into the same memory: it is hashed while it is in the processor's cache.
HASHED_BYTES = 1 << 20
# The marker of a checkpoint that is a directory.
DIRECTORY_MANIFEST = "manifest.json"


class Storage:
    """Files of checkpoints at any path or URL.

    Args:
        storage_options: For `fsspec`, used with URLs only.
    """

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        self.storage_options = dict(storage_options or {})

    def _fs(self, path: str) -> Any:
        """The file system of a URL, with nothing remembered: a cached listing hides other writers."""
        try:
            fs, _ = fsspec.core.url_to_fs(path, **self.storage_options)
        except (ImportError, ValueError) as error:
            raise ConfigurationError(f"{path}: no file system for this URL: {error}") from error
        fs.invalidate_cache()
        return fs

    def open_attempt(self, path: str, expected_bytes: int | None = None) -> Attempt:
        """A checkpoint can be written; its directory exists. See `Attempt` for what is on disk.

        Thread: writer.

        Args:
            path: The final name.
            expected_bytes: At least so many will be written. A local disk that has no room for them is full now, and
                not after most of them have been written.
        """
        path = normalise(path)
        attempt = LocalAttempt(path, expected_bytes) if is_local(path) else ObjectAttempt(self._fs(path), path)
        try:
            emit(AttemptOpened(path, attempt.attempt))
        except BaseException:
            attempt.abort()
            raise
        return attempt

    def remove(self, path: str) -> None:
        """Nothing of the checkpoint `path` is left; a file or a directory, and already gone is fine.

        Thread: writer. Blocks on: the disk or the store.
        On disk after: nothing. Killed on the way: the whole checkpoint, or data under a hidden name only.
        """
        path = normalise(path)
        emit(DeleteStarted(path))
        try:
            if is_local(path):
                self._remove_local(path)
            else:
                self._remove_object(path)
        except FileNotFoundError:
            emit(DeleteSkipped(path, "already gone"))
            return
        emit(Deleted(path))

    def _remove_local(self, path: str) -> None:
        dirpath, name = split(path)
        hidden = join(dirpath, deleted_name(name, secrets.token_hex(8)))
        os.rename(path, hidden)
        sync_dir(dirpath)
        emit(DeleteHidden(path))
        _unlink(hidden)

    def _remove_object(self, path: str) -> None:
        fs = self._fs(path)
        if fs.info(path)["type"] != "directory":
            fs.rm_file(path)
            return
        with contextlib.suppress(FileNotFoundError):  # not every directory has the marker
            fs.rm_file(join(path, DIRECTORY_MANIFEST))
        emit(DeleteHidden(path))
        fs.rm(path, recursive=True)

    def remove_leftovers(self, dirpath: str) -> list[str]:
        """What killed processes left under our hidden names in `dirpath` is gone; returns these paths.

        Ranks: zero. Thread: main, before the first save, holding the directory's lock: an attempt of a living
        process looks the same. Object stores have no hidden names.
        """
        dirpath = normalise(dirpath)
        paths = [join(dirpath, name) for name in self.listdir(dirpath) if parse_leftover(name)]
        for path in paths:
            # A process that starts at the same time tries the directory out before it finds it locked: its probe may
            # be gone by now.
            with contextlib.suppress(FileNotFoundError):
                if is_local(path):
                    _unlink(path)
                else:
                    self._fs(path).rm(path, recursive=True)
                emit(LeftoverRemoved(path))
        return paths

    def remove_abandoned(self, dirpath: str) -> list[str]:
        """Attempts in `dirpath` that no living process writes are gone; returns their paths.

        For directories that others may be writing to: what is being written, on this machine or on one that shares its
        locks, stays. Ranks: zero. Thread: main.
        """
        dirpath = normalise(dirpath)
        if not is_local(dirpath):
            return []
        removed = []
        for name in self.listdir(dirpath):
            leftover = parse_leftover(name)
            if leftover is None or leftover.kind != "attempt":
                continue
            path = join(dirpath, name)
            # Committed or cleared away by another process since it was listed.
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDWR)  # a lock by way of NFS needs write access
                try:
                    if not hold(fd):
                        continue
                    os.unlink(path)
                finally:
                    os.close(fd)
                emit(LeftoverRemoved(path))
                removed.append(path)
        return removed

    def read_manifest(self, path: str) -> tuple[Manifest | None, int]:
        """The manifest of `path`, None if it is somebody else's archive, and its size; reads only the tail.

        Raises:
            CheckpointError: See `parse_tail`.
            OSError: It cannot be read.
        """
        path = normalise(path)
        if is_local(path):
            with open(path, "rb") as file:
                size_bytes = os.fstat(file.fileno()).st_size
                file.seek(max(0, size_bytes - TAIL_BYTES))
                tail = file.read(TAIL_BYTES)
        else:
            fs = self._fs(path)
            size_bytes = _object_size(fs, path)
            start = max(0, size_bytes - TAIL_BYTES)
            tail = fs.cat_file(path, start=start, end=size_bytes) if size_bytes else b""
        return parse_tail(tail, size_bytes, path), size_bytes

    def read_digest(self, path: str, size_bytes: int) -> str:
        """The xxh3-128 of the first `size_bytes` bytes of `path`, hexadecimal; memory: one chunk.

        Raises:
            CorruptCheckpointError: The file is shorter.
        """
        state = xxhash.xxh3_128()
        left = size_bytes
        buffer = memoryview(bytearray(min(size_bytes, HASHED_BYTES)))
        with self.open_read(path) as file:
            while left:
                if isinstance(file, ThreadedFile):
                    chunk = buffer[: file.readinto(buffer[:left])]
                else:  # each read of a store may be a request: not many small ones; some files have no `readinto`
                    chunk = memoryview(file.read(min(left, CHUNK_BYTES)))
                if not chunk:
                    raise CorruptCheckpointError(path, f"ends {left} bytes before its end-of-archive record")
                state.update(chunk)
                left -= len(chunk)
        return state.hexdigest()

    def open_read(self, path: str) -> BinaryIO:
        """The bytes of `path`, to be closed by the caller; large `readinto` of a local file use several threads."""
        path = normalise(path)
        return ThreadedFile(path) if is_local(path) else cast(BinaryIO, self._fs(path).open(path, "rb"))

    def size(self, path: str) -> int:
        """Size in bytes of the file `path`."""
        path = normalise(path)
        return os.stat(path).st_size if is_local(path) else _object_size(self._fs(path), path)

    def is_file(self, path: str) -> bool:
        """Whether `path` is one file, and no directory."""
        return os.path.isfile(path) if is_local(path) else bool(self._fs(path).isfile(path))

    def exists(self, path: str) -> bool:
        """Whether there is something at `path`; a storage that does not answer raises and is not "no"."""
        path = normalise(path)
        try:
            # fsspec's own `exists` turns every error into False, and `os.path.exists` some of them.
            os.stat(path) if is_local(path) else self._fs(path).info(path)
        except FileNotFoundError:
            return False
        return True

    def listdir(self, dirpath: str) -> list[str]:
        """The names in `dirpath`, sorted and fresh; none if it does not exist, any other error is raised."""
        dirpath = normalise(dirpath)
        try:
            if is_local(dirpath):
                return sorted(os.listdir(dirpath))
            fs = self._fs(dirpath)
            own = fs._strip_protocol(dirpath).strip("/")
            keys = [str(key).strip("/") for key in fs.ls(dirpath, detail=False)]
            # Some stores list a placeholder object of the directory itself.
            return sorted(key.rpartition("/")[2] for key in keys if key != own)
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            raise ConfigurationError(f"{dirpath} is a file, and a directory for checkpoints is needed") from error

    def probe(self, dirpath: str) -> None:
        """`dirpath` exists, and writing, renaming and deleting in it was tried and worked.

        Ranks: zero. Thread: main, before training. On disk after: the directory.

        Raises:
            ConfigurationError: It did not work; says why.
        """
        dirpath = normalise(dirpath)
        path = join(dirpath, probe_name(secrets.token_hex(8)))
        try:
            if is_local(dirpath):
                self._probe_local(dirpath, path)
            else:
                fs = self._fs(path)
                fs.pipe_file(path, b"probe")
                fs.rm_file(path)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"checkpoints cannot be written to {dirpath}: {type(error).__name__}: {error}"
            ) from error

    def _probe_local(self, dirpath: str, path: str) -> None:
        renamed = join(dirpath, probe_name(secrets.token_hex(8)))
        make_dirs(dirpath)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.write(fd, b"probe")
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(path, renamed)
        sync_dir(dirpath)
        os.unlink(renamed)


def _unlink(path: str) -> None:
    """The file, link or directory `path` is gone; what a link points to stays."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _object_size(fs: Any, path: str) -> int:
    info = fs.info(path)
    if info["type"] == "directory":
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    return int(info["size"])
