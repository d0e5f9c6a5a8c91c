"""One writer per directory, for as long as its process lives."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import threading

from lightning_ft._names import LOCK_NAME, is_local, join, normalise
from lightning_ft.errors import DirectoryInUseError

logger = logging.getLogger(__name__)

_NOT_LOCKABLE = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
_CONFLICT = frozenset({errno.EACCES, errno.EAGAIN})

# Directories locked by this process, by device and inode: a record lock never conflicts within one process.
# The process id is part of the value because a forked child inherits the dictionary and not the lock.
_held: dict[tuple[int, int], int] = {}
_registry_lock = threading.Lock()


class DirectoryLock:
    """While held, no other process and no other lock of this one can hold `dirpath`.

    A POSIX record lock: the kernel drops it when the process ends, SIGKILL included, so nothing stale is ever
    left behind, and forked loader workers do not inherit it. Object stores have no locks: there, holding
    means nothing.
    """

    def __init__(self, dirpath: str) -> None:
        self.dirpath = normalise(dirpath)
        self._fd: int | None = None
        self._key: tuple[int, int] | None = None

    def acquire(self) -> None:
        """The directory exists and is held, or its holder is named.

        Ranks: zero. Thread: main. Blocks on: nothing.
        On disk after: the lock file with process id and host; it stays when the lock is released.

        Raises:
            DirectoryInUseError: Held by another process, or by another lock of this one.
        """
        if not is_local(self.dirpath):
            return
        os.makedirs(self.dirpath, exist_ok=True)
        status = os.stat(self.dirpath)
        key = (status.st_dev, status.st_ino)
        with _registry_lock:
            # Asked before the file is opened: closing any descriptor of it would drop the lock held already.
            if _held.get(key) == os.getpid():
                raise DirectoryInUseError(
                    f"{self.dirpath} is in use by another trainer of this process ({os.getpid()});"
                    " wait until its fit() has returned, or give each trainer a directory of its own"
                )
            self._fd = self._lock()
            self._key = key
            _held[key] = os.getpid()

    def _lock(self) -> int:
        """The descriptor of the locked lock file, with our identity in it."""
        path = join(self.dirpath, LOCK_NAME)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _CONFLICT:
                    holder = os.pread(fd, 256, 0).decode("utf-8", "replace").strip() or "an unknown process"
                    raise DirectoryInUseError(
                        f"{self.dirpath} is in use by {holder}: it writes checkpoints there;"
                        " end it, or use another directory"
                    ) from None
                if error.errno not in _NOT_LOCKABLE:
                    raise
                # Refusing to train on such a mount would be worse than trusting that one job runs there.
                logger.warning(
                    "%s: the file system has no locks (%s); a second process could write there",
                    self.dirpath,
                    error,
                )
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def release(self) -> None:
        """The directory is free for others; does nothing if it is not held.

        Thread: main. On disk after: the lock file stays. Removing it would let two processes hold two files.
        """
        fd, self._fd = self._fd, None
        key, self._key = self._key, None
        if fd is None or key is None:
            return
        with _registry_lock:
            if _held.get(key) == os.getpid():
                del _held[key]
            os.close(fd)
