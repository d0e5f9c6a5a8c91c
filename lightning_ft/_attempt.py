"""A checkpoint being written: bytes in, hashed on the way, one commit or nothing."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import xxhash
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from lightning_ft._direct import DiskStream
from lightning_ft._names import attempt_name, join, split
from lightning_ft.errors import ManifestError, SaveError
from lightning_ft.events import DataSynced, DataWritten, Renamed, emit
from lightning_ft.manifest import EOCD_BYTES, Manifest, seal

logger = logging.getLogger(__name__)

# Smaller writes are gathered to this size. Far below that of `_archive`, whose pieces would be copied once more here.
BUFFER_BYTES = 64 << 10
# Upper limit of one hash or system call: a failure, or a thread waiting for the GIL, is not kept for long.
CHUNK_BYTES = 16 << 20


def sync_dir(dirpath: str) -> None:
    """The names in `dirpath` are as durable as the file system can make them."""
    fd = os.open(dirpath, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network and FUSE file systems cannot sync a directory: there is nothing that we could wait for.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        logger.warning("%s: this file system cannot sync a directory (%s)", dirpath, error)
    finally:
        os.close(fd)


def make_dirs(dirpath: str) -> None:
    """`dirpath` exists, and a power loss does not take the directories made here, files included."""
    if os.path.isdir(dirpath):
        return
    parent = os.path.dirname(dirpath)
    if parent != dirpath:
        make_dirs(parent)
    os.makedirs(dirpath, exist_ok=True)
    sync_dir(parent)


def hold(fd: int, *, wait: bool = False) -> bool:
    """As long as `fd` is open, nobody else can hold its file; False if somebody does, or the file system cannot tell.

    Blocks on: with `wait`, whoever holds it.

    A lock of the open file, which the kernel drops when the last process that has it is gone, SIGKILL included: it
    tells an attempt that is being written from one that nobody will ever finish.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False  # an attempt is as good without; what cannot be held is never taken for abandoned
    return True


class Attempt(ABC):
    """A checkpoint being written: a file for `_serialise.save`, invisible under its final name until `commit`.

    As a context manager it aborts unless committed, and raises the storage's own error in place of what
    the writer of the archive made of it. The last 22 bytes are always held back, because at commit the end-of-archive
    record must be replaced by one that carries the manifest, and no store lets us go back.

    Memory: `BUFFER_BYTES`; a larger memoryview is hashed and passed on in place, without a copy here.

    Thread: one, any.
    """

    def __init__(self, path: str, attempt: str) -> None:
        self.path = path
        self.attempt = attempt
        self.failure: Exception | None = None
        self._hash = xxhash.xxh3_128()
        self._pending = bytearray()
        self._size_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """All of `data` is taken; returns its length in bytes, never less."""
        view = memoryview(data).cast("B")
        size_bytes = view.nbytes
        if len(self._pending) + size_bytes <= BUFFER_BYTES:
            self._pending += view
            return size_bytes
        with self._own_error():
            if size_bytes < EOCD_BYTES:
                self._pending += view
                self._put_pending()
            else:
                pending, self._pending = self._pending, bytearray(view[-EOCD_BYTES:])
                self._put(memoryview(pending))
                for start in range(0, size_bytes - EOCD_BYTES, CHUNK_BYTES):
                    self._put(view[start : min(start + CHUNK_BYTES, size_bytes - EOCD_BYTES)])
        return size_bytes

    def flush(self) -> None:  # noqa: B027 - not abstract: no attempt has anything to do here
        """Nothing changed: `torch.save` calls it, where it writes the archive; durability comes with `commit`."""

    def commit(self, make_manifest: Callable[[int, str], Manifest]) -> Manifest:
        """The checkpoint is whole and durable under its final name, or this raises.

        Thread: writer. Blocks on: the disk or the store.
        On disk after: the checkpoint. After an error nothing under the final name, or, if only the last sync
        failed, the whole checkpoint.

        Args:
            make_manifest: Called with the size and the digest of everything before the end-of-archive record.

        Raises:
            SaveError: What was written is no zip archive, the manifest is too long, or the store holds
                another size than was uploaded.
            OSError: A write failed, now or earlier. Stores raise their client's own classes besides.
        """
        with self._own_error():
            self._put_pending()
        manifest = make_manifest(self._size_bytes, self._hash.hexdigest())
        assert (manifest.size_bytes, manifest.digest) == (self._size_bytes, self._hash.hexdigest())
        try:
            ending = seal(bytes(self._pending), manifest)
        except ManifestError as error:
            raise SaveError(f"{self.path}: {error}", self.path, manifest.step) from error
        with self._own_error():
            self._write_all(memoryview(ending))
            self._complete()
        total_bytes = self._size_bytes + len(ending)
        emit(DataWritten(self.path, self.attempt, total_bytes))
        self._publish(total_bytes)
        return manifest

    @abstractmethod
    def abort(self) -> None:
        """Nothing is left of an attempt that was not committed; does nothing after a commit."""

    @abstractmethod
    def _write_all(self, view: memoryview) -> None: ...

    def _complete(self) -> None:  # noqa: B027 - not abstract: an upload is complete only when it is published
        """Every byte is in the attempt, and nothing is promised about its durability."""

    @abstractmethod
    def _publish(self, total_bytes: int) -> None: ...

    def _put_pending(self) -> None:
        """Of what was gathered, only the last 22 bytes are held back."""
        pending, self._pending = self._pending, self._pending[-EOCD_BYTES:]
        self._put(memoryview(pending)[:-EOCD_BYTES])

    def _put(self, view: memoryview) -> None:
        self._hash.update(view)
        self._write_all(view)
        self._size_bytes += view.nbytes

    @contextlib.contextmanager
    def _own_error(self) -> Iterator[None]:
        """What the storage raises is remembered: every write after it, and the commit, raise it again."""
        if self.failure is not None:
            raise self.failure
        try:
            yield
        except Exception as error:
            self.failure = error
            raise

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.abort()
        except Exception as aborting:
            if error is None:
                raise
            logger.warning("%s: could not clean up %s: %s", self.path, self.attempt, aborting)
        if isinstance(error, Exception) and self.failure is not None and error is not self.failure:
            raise self.failure


class LocalAttempt(Attempt):
    """A hidden file in the target directory: across file systems the rename would be a copy.

    Memory: the buffers of `DiskStream` besides. A write that fails may be heard of only at a later one.

    Args:
        path: The final name.
        expected_bytes: At least so many will be written; without room for them nothing is.
    """

    def __init__(self, path: str, expected_bytes: int | None = None) -> None:
        self._dirpath, name = split(path)
        super().__init__(path, join(self._dirpath, attempt_name(name, secrets.token_hex(8))))
        self._fd: int | None = None
        self._stream: DiskStream | None = None
        with self._own_error():
            make_dirs(self._dirpath)
            self._fd = self._create()
            try:
                self._stream = DiskStream(self._fd, self.attempt, expected_bytes)
            except BaseException:
                self.abort()
                raise

    def _create(self) -> int:
        """The descriptor of the empty attempt, held."""
        while True:
            fd = os.open(self.attempt, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            hold(fd, wait=True)
            if os.path.exists(self.attempt):
                return fd
            os.close(fd)  # in the moment before it was held, another process took it for abandoned

    def _write_all(self, view: memoryview) -> None:
        assert self._stream is not None, "written after commit or abort"
        self._stream.write(view)

    def _complete(self) -> None:
        assert self._stream is not None
        self._stream.finish()

    def _publish(self, total_bytes: int) -> None:
        with self._own_error():
            assert self._fd is not None
            os.fsync(self._fd)
            # Network file systems report a full disk at close, so it comes before the rename.
            self._close()
        emit(DataSynced(self.path, self.attempt))
        with self._own_error():
            os.replace(self.attempt, self.path)
        emit(Renamed(self.path))
        with self._own_error():
            sync_dir(self._dirpath)  # The commit: from here on the checkpoint survives everything.

    def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()  # First: its thread may be writing to the descriptor, whose number could soon be another's.
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def abort(self) -> None:
        try:
            self._close()
        finally:
            # Renamed by a commit, or aborted before.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.attempt)


class ObjectAttempt(Attempt):
    """An upload straight to the final key, which the store publishes, whole or not at all, at close."""

    def __init__(self, fs: Any, path: str) -> None:
        super().__init__(path, path)
        self._fs = fs
        self._published = False
        with self._own_error():
            # The memory file system publishes at open; its file object alone, at commit.
            self._stream = (
                MemoryFile(fs, fs._strip_protocol(path)) if isinstance(fs, MemoryFileSystem) else fs.open(path, "wb")
            )

    def _write_all(self, view: memoryview) -> None:
        while view.nbytes:
            view = view[self._stream.write(view) :]

    def _publish(self, total_bytes: int) -> None:
        with self._own_error():
            publish = self._stream.commit if isinstance(self._stream, MemoryFile) else self._stream.close
            publish()  # The commit.
            self._published = True
            self._fs.invalidate_cache()
            stored_bytes = self._fs.info(self.path)["size"]
            if stored_bytes != total_bytes:
                self._fs.rm_file(self.path)
                raise SaveError(
                    f"{self.path}: {total_bytes} bytes were uploaded, the store holds {stored_bytes}",
                    self.path,
                )
        emit(DataSynced(self.path, self.attempt))

    def abort(self) -> None:
        if self._published or isinstance(self._stream, MemoryFile):
            return
        if isinstance(self._stream, AbstractBufferedFile):
            try:
                self._stream.discard()
            finally:
                # Otherwise the garbage collector closes it, and so publishes half a checkpoint.
                self._stream.closed = True
        else:
            self._stream.close()
            self._fs.rm_file(self.path)
        self._published = True
