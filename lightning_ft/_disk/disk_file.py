"""A new file of a local directory, and what makes files and names there durable."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat

from lightning_ft._disk.direct import DiskStream
from lightning_ft._disk.sink import Sink

logger = logging.getLogger(__name__)


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


def remove_local(path: str) -> None:
    """The file, link or directory `path` is gone; what a link points to stays."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def local_sizes(dirpath: str) -> dict[str, int]:
    """Name and size in bytes of every file in `dirpath`."""
    sizes = {}
    for name in os.listdir(dirpath):
        # Opened and not only asked: a network file system then shows what another machine has written.
        fd = os.open(f"{dirpath}/{name}", os.O_RDONLY | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        if stat.S_ISREG(status.st_mode):
            sizes[name] = status.st_size
    return sizes


def hold(fd: int, *, wait: bool = False, shared: bool = False) -> bool:
    """As long as `fd` is open, nobody else can hold its file; False if somebody does, or the file system cannot tell.

    Blocks on: with `wait`, whoever holds it.

    A lock of the open file, which the kernel drops when the last process that has it is gone, SIGKILL included: it
    tells an attempt that is being written from one that nobody will ever finish.

    Args:
        fd: An open file or directory.
        wait: For whoever holds it now.
        shared: Others may hold it, too, if they share it as well.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False  # an attempt is as good without; what cannot be held is never taken for abandoned
    return True


class DiskFile(Sink):
    """A new local file, on its way past the page cache.

    Memory: the buffers of `DiskStream`. A write that fails may be heard of only at a later one.

    Args:
        path: Where it is made; there is none.
        expected_bytes: At least so many will be written; without room for them nothing is.
        held: Whether it is held (see `hold`) until it is published.
    """

    def __init__(self, path: str, expected_bytes: int | None = None, *, held: bool = False) -> None:
        self.path = path
        self._published = False
        self._stream: DiskStream | None = None
        self._fd: int | None = self._create(held)
        try:
            self._stream = DiskStream(self._fd, path, expected_bytes)
        except BaseException:
            self.discard()
            raise

    def _create(self, held: bool) -> int:
        """The descriptor of the empty file."""
        while True:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            if not held:
                return fd
            hold(fd, wait=True)
            if os.path.exists(self.path):
                return fd
            os.close(fd)  # in the moment before it was held, another process took it for abandoned

    def append(self, view: memoryview) -> None:
        assert self._stream is not None, "written after the end"
        self._stream.write(view)

    def complete(self) -> None:
        assert self._stream is not None
        self._stream.finish()

    def publish(self, total_bytes: int) -> None:
        """The bytes are durable; its name is when its directory was synced."""
        assert self._fd is not None
        os.fsync(self._fd)
        # Network file systems report a full disk at close, so it comes before anything that follows.
        self._close()
        self._published = True

    def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()  # First: its thread may be writing to the descriptor, whose number could soon be another's.
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def discard(self) -> None:
        if self._published:
            return
        try:
            self._close()
        finally:
            with contextlib.suppress(FileNotFoundError):  # discarded before
                os.unlink(self.path)
