"""A layer under the `os` calls of this process that logs what they do to the files below one directory."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tests.crash.model import ROOT, Disk, Name, Names, Operation, Size, Sync, Write


class Recording:
    """Everything that was done below `root`, in order.

    Concurrent calls are logged in the order in which they were made; each is over before the next begins.

    Args:
        root: Exists; what is in it is durable.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._lock = threading.RLock()
        self._inodes = {root: ROOT}  # of every path that is there now
        self._descriptors: dict[int, tuple[int, str]] = {}
        self._next = 1
        self.log: list[Operation] = []
        self.base = Disk()
        self.directories: set[int] = set()
        """Inodes of those that were made."""
        for place, directories, files in os.walk(root):
            for name in directories + files:
                path = f"{place}/{name}"
                self.base.names[self._name(path)] = inode = self._new(path)
                if name in files:
                    with open(path, "rb") as file:
                        self.base.files[inode] = file.read()

    def _new(self, path: str) -> int:
        inode = self._inodes[path] = self._next
        self._next += 1
        return inode

    def _name(self, path: str) -> Name:
        directory, _, name = path.rpartition("/")
        return self._inodes[directory], name

    def _ours(self, path: Any) -> bool:
        return isinstance(path, str) and (path == self._root or path.startswith(self._root + "/"))

    def _full(self, path: Any, descriptor: int | None) -> Any:
        """`path`, which may be below an open directory."""
        if descriptor is None or descriptor not in self._descriptors:
            return path
        return f"{self._descriptors[descriptor][1]}/{path}"

    def _file(self, descriptor: int) -> int | None:
        found = self._descriptors.get(descriptor)
        return None if found is None else found[0]

    # -- the calls; each gets the original and its arguments -----------------------------------------------------

    def _open(self, original: Any, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        descriptor: int = original(path, flags, *args, **kwargs)
        path = self._full(path, kwargs.get("dir_fd"))
        if self._ours(path) and not os.path.isdir(path):
            made = path not in self._inodes
            inode = self._new(path) if made else self._inodes[path]
            self._descriptors[descriptor] = inode, path
            if made:
                assert flags & os.O_CREAT
                self.log.append(Names(((self._name(path), inode),)))
            if flags & os.O_TRUNC:
                self.log.append(Size(inode, 0))
        elif self._ours(path):
            self._descriptors[descriptor] = self._inodes[path], path
        return descriptor

    def _close(self, original: Any, descriptor: int) -> None:
        self._descriptors.pop(descriptor, None)
        original(descriptor)

    def _write(self, original: Any, descriptor: int, data: Any) -> int:
        inode = self._file(descriptor)
        assert inode is None or os.lseek(descriptor, 0, os.SEEK_CUR) == 0, "a second `os.write` to one file"
        written: int = original(descriptor, data)
        if inode is not None:
            self.log.append(Write(inode, 0, bytes(memoryview(data)[:written])))
        return written

    def _pwrite(self, original: Any, descriptor: int, data: Any, offset: int) -> int:
        written: int = original(descriptor, data, offset)
        if (inode := self._file(descriptor)) is not None:
            self.log.append(Write(inode, offset, bytes(memoryview(data)[:written])))
        return written

    def _ftruncate(self, original: Any, descriptor: int, size_bytes: int) -> None:
        original(descriptor, size_bytes)
        if (inode := self._file(descriptor)) is not None:
            self.log.append(Size(inode, size_bytes))

    def _fsync(self, original: Any, descriptor: int) -> None:
        original(descriptor)
        if (inode := self._file(descriptor)) is not None:
            self.log.append(Sync(inode))

    def _rename(self, original: Any, old: str, new: str) -> None:
        original(old, new)
        if self._ours(old):
            name = self._name(old)
            inode = self._inodes.pop(old)
            self._inodes[new] = inode
            below = [path for path in self._inodes if path.startswith(old + "/")]
            self._inodes |= {new + path[len(old) :]: self._inodes.pop(path) for path in below}
            self.log.append(Names(((self._name(new), inode), (name, None))))

    def _unlink(self, original: Any, path: str, *args: Any, **kwargs: Any) -> None:
        original(path, *args, **kwargs)
        path = self._full(path, kwargs.get("dir_fd"))
        if self._ours(path):
            self.log.append(Names(((self._name(path), None),)))
            del self._inodes[path]

    def _mkdir(self, original: Any, path: str, *args: Any, **kwargs: Any) -> None:
        original(path, *args, **kwargs)
        if self._ours(path):
            inode = self._new(path)
            self.directories.add(inode)
            self.log.append(Names(((self._name(path), inode),)))

    @contextlib.contextmanager
    def recording(self) -> Iterator[Recording]:
        """What any thread of this process does through `os` is logged."""
        calls = {
            "open": self._open, "close": self._close, "write": self._write, "pwrite": self._pwrite,
            "ftruncate": self._ftruncate, "fsync": self._fsync, "replace": self._rename, "rename": self._rename,
            "unlink": self._unlink, "remove": self._unlink, "rmdir": self._unlink, "mkdir": self._mkdir,
        }  # fmt: skip
        originals = {name: getattr(os, name) for name in calls}

        def locked(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                with self._lock:
                    return calls[name](originals[name], *args, **kwargs)

            return call

        try:
            for name in calls:
                setattr(os, name, locked(name))
            yield self
        finally:
            for name, original in originals.items():
                setattr(os, name, original)
