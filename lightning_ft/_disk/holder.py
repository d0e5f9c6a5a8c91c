"""Who writes into a directory at the moment, asked without a lock of one's own."""

from __future__ import annotations

import fcntl
import os
import struct

from lightning_ft._names import LOCK_NAME, is_local, join, normalise

# `struct flock` of Linux: type, whence, start, length, process.
_FLOCK = struct.Struct("@hhlli4x")


def holder(dirpath: str) -> str | None:
    """The process that holds the directory's lock, as it called itself; None if none does, or nobody can tell.

    Nothing is locked, so that a training that starts at this moment is not refused. Not to be called by the process
    that holds the lock: closing a file drops all locks that the process has on it.
    """
    dirpath = normalise(dirpath)
    if not is_local(dirpath):
        return None
    try:
        fd = os.open(join(dirpath, LOCK_NAME), os.O_RDONLY)
    except OSError:
        return None  # no training ever wrote here, or it is not for us to see
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, process = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        if kind == fcntl.F_UNLCK:
            return None
        name = os.pread(fd, 256, 0).decode("utf-8", "replace").strip()
        return name or f"process {process}"
    except OSError:
        return None  # a file system without locks
    finally:
        os.close(fd)
