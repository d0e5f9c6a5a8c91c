"""A checkpoint that is a directory, being written by several ranks: files in, one commit or nothing.

==========================  ==================================================  ====================================
Step (in this order)        Local directory: true on disk after it              Object store: true after it
==========================  ==================================================  ====================================
`Storage.open_directory`    an empty hidden directory                           a marker beside the final name
`FileAttempt.finish` ...    one more durable file in it                         one more object under the final name
`commit`: manifest          the manifest is in it; file by file durable         the same
`commit`: publish           renamed, and the name durable                       the manifest, and no marker
==========================  ==================================================  ====================================

What has no manifest is no checkpoint of ours, so nothing counts before the last step.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace

from lightning_ft._disk.disk_file import DiskFile, hold, local_sizes, make_dirs, remove_local, sync_dir
from lightning_ft._disk.sink import HashedFile, Sink
from lightning_ft._names import attempt_name, deleted_name, join, split
from lightning_ft.errors import ManifestError, SaveError
from lightning_ft.events import DataSynced, DataWritten, FileSynced, FileWritten, Renamed, emit
from lightning_ft.manifest import (
    DIRECTORY_MANIFEST,
    FileRecord,
    Manifest,
    digest_of_files,
    is_plain_name,
    seal_directory,
)

_log = logging.getLogger(__name__)

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# A kernel, a C library or a file system that cannot exchange two names.
_NO_EXCHANGE = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM})


class FileAttempt(HashedFile):
    """One file of a directory: a file for `torch.save` that is gone again unless it is finished.

    Thread: one, any.
    """

    def __init__(self, path: str, attempt: str, name: str, sink: Sink) -> None:
        super().__init__(path, attempt, sink)
        self.name = name

    def finish(self) -> FileRecord:
        """The file is durable inside the attempt; its name is with the commit of the directory.

        Blocks on: the disk or the store.

        Raises:
            SaveError: The store holds something else than was uploaded.
            OSError: A write failed, now or earlier. Stores raise their client's own classes besides.
        """
        with self._own_error():
            self._put_pending()
            self._sink.complete()
        emit(FileWritten(self.path, self.name, self._size_bytes))
        with self._own_error():
            self._sink.publish(self._size_bytes)
        emit(FileSynced(self.path, self.name))
        return FileRecord(self._size_bytes, self._hash.hexdigest())


class DirectoryAttempt(ABC):
    """A directory being written, found by every rank under the same name, no checkpoint before `commit`.

    Thread: one, any.

    Attributes:
        path: The final name.
        attempt: Where it is until then.
    """

    def __init__(self, path: str, attempt: str) -> None:
        self.path = path
        self.attempt = attempt

    def open_file(self, name: str, expected_bytes: int | None = None) -> FileAttempt:
        """The file `name` of the directory can be written; it is not there, or of a try that was given up.

        Ranks: any, each with names of its own.

        Args:
            name: Without a slash.
            expected_bytes: About so many will be written; see `Storage.open_attempt`.
        """
        if not is_plain_name(name):
            raise ValueError(f"{name!r}: no name for a file of a checkpoint directory")
        return FileAttempt(self.path, self.attempt, name, self._open_sink(name, expected_bytes))

    def commit(self, manifest: Manifest) -> Manifest:
        """The checkpoint is whole and durable under its final name, or this raises; the attempt is over.

        Ranks: zero, after every rank has finished its files. Thread: writer. Blocks on: the disk or the store.
        On disk after: the checkpoint. After an error what had the final name before, in a store nothing; or, if only
        the last sync failed, the whole checkpoint.

        Args:
            manifest: With all `files`; its size and digest are set here.

        Raises:
            SaveError: Another file is there than `files` has, or one of another size, or none; or the name is taken.
            OSError: A write failed. Stores raise their client's own classes besides.
        """
        size_bytes = sum(record.size_bytes for record in manifest.files.values())
        manifest = replace(manifest, size_bytes=size_bytes, digest=digest_of_files(manifest.files))
        problem = mismatch(manifest.files, self._sizes())
        if problem is not None:
            raise SaveError(f"{self.path}: not all of it was written: {problem}", self.path, manifest.step)
        try:
            sealed = seal_directory(manifest)
        except ManifestError as error:
            raise SaveError(f"{self.path}: {error}", self.path, manifest.step) from error
        self._publish(manifest, sealed)
        return manifest

    @abstractmethod
    def abort(self) -> None:
        """Nothing of the attempt is left; does nothing after a commit.

        Ranks: zero, after every other one has let go of it.
        """

    @abstractmethod
    def close(self) -> None:
        """This rank has nothing more to write. Ranks: all but zero. May be repeated."""

    @abstractmethod
    def _open_sink(self, name: str, expected_bytes: int | None) -> Sink: ...

    @abstractmethod
    def _sizes(self) -> dict[str, int]: ...

    @abstractmethod
    def _publish(self, manifest: Manifest, sealed: bytes) -> None: ...


def mismatch(files: Mapping[str, FileRecord], sizes: Mapping[str, int], *, exactly: bool = True) -> str | None:
    """What tells a directory of files of these `sizes` from the one with `files`; None: nothing.

    Args:
        files: As a manifest says.
        sizes: As a listing says; that of the manifest itself is not looked at.
        exactly: Whether nothing else may be there.
    """
    for name, record in files.items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != record.size_bytes:
            return f"{name} has {sizes[name]} bytes, {record.size_bytes} were written"
    others = sorted(set(sizes) - set(files) - {DIRECTORY_MANIFEST})
    return f"{others[0]} is of no rank" if others and exactly else None


class LocalDirectoryAttempt(DirectoryAttempt):
    """A hidden directory beside the target, held by every process that writes into it.

    Args:
        path: The final name.
        token: 16 hexadecimal digits, the same on every rank.
    """

    def __init__(self, path: str, token: str) -> None:
        self._dirpath, name = split(path)
        super().__init__(path, join(self._dirpath, attempt_name(name, token)))
        make_dirs(self._dirpath)
        self._fd: int | None = self._open()
        self._committed = False

    def _open(self) -> int:
        """The descriptor of the attempt, held; the first rank makes it."""
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.attempt)
            try:
                fd = os.open(self.attempt, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue
            hold(fd, wait=True, shared=True)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(self.attempt)):
                    return fd
            os.close(fd)  # in the moment before it was held, another process took it for abandoned

    def _open_sink(self, name: str, expected_bytes: int | None) -> Sink:
        return DiskFile(join(self.attempt, name), expected_bytes)

    def _sizes(self) -> dict[str, int]:
        return local_sizes(self.attempt)

    def _publish(self, manifest: Manifest, sealed: bytes) -> None:
        file = DiskFile(join(self.attempt, DIRECTORY_MANIFEST))
        try:
            file.append(memoryview(sealed))
            file.complete()
            emit(DataWritten(self.path, self.attempt, manifest.size_bytes + len(sealed)))
            file.publish(len(sealed))
        finally:
            file.discard()
        sync_dir(self.attempt)
        emit(DataSynced(self.path, self.attempt))
        replaced = self._rename(manifest)
        self._committed = True
        self.close()
        emit(Renamed(self.path))
        sync_dir(self._dirpath)  # The commit: from here on the checkpoint survives everything.
        if replaced is not None:
            try:
                remove_local(replaced)
            except FileNotFoundError:
                pass  # another process took it for abandoned
            except OSError as error:  # no reason to call the save failed: it is committed
                _log.warning("%s: %s stays until the next start: %s", self.path, replaced, error)

    def _rename(self, manifest: Manifest) -> str | None:
        """The attempt has its final name; returns the hidden one of what had that before."""
        if not os.path.lexists(self.path):
            os.rename(self.attempt, self.path)
            return None
        if manifest.is_exclusive(self.path):
            raise SaveError(
                f"{self.path}: there is another checkpoint of this name, which was not touched",
                self.path,
                manifest.step,
            )
        if _exchange(self.attempt, self.path):
            return self.attempt
        # A kill in between leaves neither under the name: the old one is then deleted at the next start.
        hidden = join(self._dirpath, deleted_name(split(self.path)[1], secrets.token_hex(8)))
        os.rename(self.path, hidden)
        try:
            os.rename(self.attempt, self.path)
        except BaseException:
            os.rename(hidden, self.path)
            raise
        return hidden

    def abort(self) -> None:
        self.close()
        if not self._committed:
            with contextlib.suppress(FileNotFoundError):
                remove_local(self.attempt)

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def _exchange(path: str, other: str) -> bool:
    """The two names have changed places, in one step; False if that is unknown here."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), path, None, other)
