"""A file system in user space that hands every call on to a directory, and makes chosen ones fail.

``python -m tests.crash.faultfs BACKING MOUNTPOINT RULES``: mounted until it is unmounted (``fusermount3 -u``). RULES is
a file of JSON, read again when it changes: a list, of which the first rule that fits and is not used up acts::

    {"op": "flush", "path": "*.attempt", "errno": 28, "after": 2, "times": 1, "short": 1000}

``op`` is a method of `FaultFS`, ``flush`` being close(2), whose error reaches the caller as on NFS; ``errno`` is
what it fails with, ``short`` is how many bytes a write takes instead; the first ``after`` calls are left alone, and so
are those after ``times`` more.
"""

from __future__ import annotations

import fnmatch
import json
import os
import sys
import threading
import time
from typing import Any

from mfusepy import FUSE, FuseOSError, Operations

_STAT = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino", "st_blocks")
_STATVFS = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_frsize", "f_namemax")


class Rules:
    """What is to fail."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._version: tuple[int, int] | None = None
        self._rules: list[dict[str, Any]] = []
        self._hits: list[int] = []
        self._lock = threading.Lock()

    def apply(self, op: str, path: str) -> int | None:
        """Raises the error of the rule that acts, or returns how many bytes are to be taken; None: all."""
        with self._lock:
            rule = self._acting(op, path)
        if rule is None:
            return None
        if "errno" in rule:
            raise FuseOSError(rule["errno"])
        if "while" in rule:  # there is this file
            while os.path.exists(rule["while"]):
                time.sleep(0.02)
            return None
        return int(rule["short"])

    def _acting(self, op: str, path: str) -> dict[str, Any] | None:
        self._read()
        for number, rule in enumerate(self._rules):
            if rule["op"] != op or not fnmatch.fnmatch(path, rule.get("path", "*")):
                continue
            self._hits[number] += 1
            first = rule.get("after", 0)
            if not first < self._hits[number] <= first + rule.get("times", sys.maxsize):
                continue
            return rule
        return None

    def _read(self) -> None:
        found = os.stat(self._path)
        version = found.st_mtime_ns, found.st_ino
        if version != self._version:
            with open(self._path) as file:
                self._rules = json.load(file)
            self._hits = [0] * len(self._rules)
            self._version = version


class FaultFS(Operations):  # type: ignore[misc]
    """`root`, with the faults of `rules`."""

    use_ns = True

    def __init__(self, root: str, rules: Rules) -> None:
        self._root = root
        self._rules = rules

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        try:
            found = os.lstat(self._root + path) if fh is None else os.fstat(fh)
        except OSError as error:
            raise FuseOSError(error.errno) from error
        times = {name: getattr(found, name + "_ns") for name in ("st_atime", "st_mtime", "st_ctime")}
        return {name: getattr(found, name) for name in _STAT} | times

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._root + path)]

    def open(self, path: str, flags: int) -> int:
        self._rules.apply("open", path)
        return os.open(self._root + path, flags & ~os.O_DIRECT)  # libfuse's buffers are not aligned

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._rules.apply("create", path)
        return os.open(self._root + path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data[: self._rules.apply("write", path)], offset)

    def flush(self, path: str, fh: int) -> int:
        self._rules.apply("flush", path)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._rules.apply("fsync", path)
        os.fsync(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._rules.apply("fsyncdir", path)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        self._rules.apply("truncate", path)
        os.truncate(self._root + path if fh is None else fh, length)

    def rename(self, old: str, new: str, flags: int = 0) -> None:
        self._rules.apply("rename", new)
        os.rename(self._root + old, self._root + new)

    def unlink(self, path: str) -> None:
        self._rules.apply("unlink", path)
        os.unlink(self._root + path)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._root + path, mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._root + path)

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._root + path)
        return {name: getattr(found, name) for name in _STATVFS}


if __name__ == "__main__":
    FUSE(FaultFS(sys.argv[1], Rules(sys.argv[3])), sys.argv[2], foreground=True)
