"""A store behind an fsspec URL, asked in the ways that every file system of fsspec knows.

`_stores.s3` knows S3 better. Others (`gcs`, `az`, ...) go this way: untested, as none of them runs on the test
machines.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from glob import has_magic
from typing import Any

from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from lightning_ft._disk.attempt import Attempt
from lightning_ft._disk.directory import DirectoryAttempt
from lightning_ft._disk.sink import Sink
from lightning_ft._names import deleted_name, join, split
from lightning_ft._stores.calls import Calls
from lightning_ft._stores.directory import StoreDirectoryAttempt
from lightning_ft._stores.ranged_file import RangedFile
from lightning_ft.errors import SaveError
from lightning_ft.events import DataSynced, DeleteHidden, emit
from lightning_ft.manifest import DIRECTORY_MANIFEST, TAIL_BYTES, Manifest

# Ends of files that are fetched at the same time.
TAILS_AT_ONCE = 16


@dataclass(frozen=True)
class Entry:
    """One name in a listing."""

    name: str
    version: str
    """Changes with the content (an ETag); empty where the store tells nothing of the kind."""


class ObjectStore:
    """Files behind one URL's file system. Nothing is remembered: a cached listing hides other writers.

    Thread: one. Every method blocks on the store, up to the deadline for each call it makes, and raises what
    `Calls.call` raises.
    """

    def __init__(self, fs: Any, deadline_secs: float) -> None:
        self.fs = fs
        self.calls = Calls(fs, deadline_secs)

    # -- reading -------------------------------------------------------------------------------------------------

    def entries(self, dirpath: str) -> list[Entry]:
        """What is in `dirpath`, in any order; none if it does not exist."""
        self.fs.invalidate_cache()
        try:
            found = self.calls.call(dirpath, "ls", dirpath, detail=False)
        except FileNotFoundError:
            return []
        own = self.fs._strip_protocol(dirpath).strip("/")
        keys = [str(key).strip("/") for key in found]
        # Some stores list a placeholder object of the directory itself.
        return [Entry(key.rpartition("/")[2], "") for key in keys if key != own]

    def exists(self, path: str) -> bool:
        """Whether there is something at `path`; a store that does not answer raises and is not "no"."""
        try:
            # fsspec's own `exists` turns every error into False.
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def is_unfinished(self, path: str) -> bool:
        """Whether `path`, beside which there is a marker, is a directory without a manifest, or not there at all."""
        return not self.exists(join(path, DIRECTORY_MANIFEST)) and not self.is_file(path)

    def is_file(self, path: str) -> bool:
        """Whether `path` is one file, and no directory."""
        try:
            return bool(self.info(path)["type"] != "directory")
        except FileNotFoundError:
            return False

    def info(self, path: str) -> dict[str, Any]:
        """Type and size of `path`, and what else the file system tells."""
        self.fs.invalidate_cache()
        found: dict[str, Any] = self.calls.call(path, "info", path)
        return found

    def size(self, path: str) -> int:
        """Size in bytes of the file `path`."""
        info = self.info(path)
        if info["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return int(info["size"])

    def tail(self, path: str) -> tuple[bytes, int]:
        """The last bytes of `path`, all that can hold a manifest, and the size of the file."""
        size_bytes = self.size(path)
        if not size_bytes:
            return b"", 0
        start = max(0, size_bytes - TAIL_BYTES)
        return self.calls.call(path, "cat_file", path, start=start, end=size_bytes), size_bytes

    def tails(self, paths: Iterable[str]) -> Iterator[tuple[str, tuple[bytes, int] | Exception]]:
        """For each path what `tail` returns or raises, in order."""
        for path in paths:
            try:
                yield path, self.tail(path)
            except Exception as error:
                yield path, error

    def sizes(self, path: str) -> dict[str, int]:
        """Name and size in bytes of every file in the directory `path`; none if it does not exist."""
        self.fs.invalidate_cache()
        try:
            found = self.calls.call(path, "ls", path, detail=True)
        except FileNotFoundError:
            return {}
        files = [(str(info["name"]).rpartition("/")[2], info) for info in found if info["type"] == "file"]
        return {name: int(info["size"]) for name, info in files if name}

    def open_read(self, path: str) -> RangedFile:
        """The bytes of `path`, to be closed by the caller."""
        size_bytes = self.size(path)
        if self.calls.asynchronous:
            return RangedFile(
                path,
                size_bytes,
                lambda begin, end: self.calls.start(lambda: self.fs._cat_file(path, start=begin, end=end)),
                lambda coming: self.calls.finish(coming, path),
                _cancel,
            )
        # One range at a time, when it is wanted: not every client may be used by several threads.
        return RangedFile(
            path,
            size_bytes,
            lambda begin, end: partial(self.fs.cat_file, path, start=begin, end=end),
            lambda fetch: self.calls.run(path, fetch),
            lambda fetch: None,
        )

    # -- writing -------------------------------------------------------------------------------------------------

    def open_attempt(self, path: str, expected_bytes: int | None) -> Attempt:
        """A checkpoint can be written; nothing is visible."""
        return ObjectAttempt(self, path)

    def open_directory(self, path: str, token: str, leads: bool) -> DirectoryAttempt:
        """Files of a checkpoint directory can be written; see `Storage.open_directory`."""
        return StoreDirectoryAttempt(self, path, token, leads)

    def open_sink(self, path: str, expected_bytes: int | None = None) -> Sink:
        """An object can be written; nothing is visible."""
        return FileObject(self, path)

    def remove(self, path: str) -> None:
        """Nothing of `path`, a file or a directory, is left; raises FileNotFoundError if there was nothing."""
        if self.info(path)["type"] != "directory":
            self.remove_file(path)
            return
        dirpath, name = split(path)
        marker = join(dirpath, deleted_name(name, secrets.token_hex(8)))
        self.mark(marker)
        with contextlib.suppress(FileNotFoundError):  # not every directory has one
            self.remove_file(join(path, DIRECTORY_MANIFEST))
        emit(DeleteHidden(path))
        self.remove_tree(path)
        self.unmark(marker)

    def remove_file(self, path: str) -> None:
        """The object `path` is gone; raises FileNotFoundError if there was none, and the store says so."""
        self.calls.call(path, "rm_file", path)

    def remove_unfinished(self, path: str) -> None:
        """Nothing of `path` is left if it is a directory without a manifest: left of a save or a deletion."""
        if self.is_unfinished(path):
            with contextlib.suppress(FileNotFoundError):
                self.remove_tree(path)

    def put(self, path: str, data: bytes) -> None:
        """The small object `path` is `data`."""
        self.calls.call(path, "pipe_file", path, data)

    def replace(self, path: str, data: bytes) -> None:
        """The object `path` is `data`; one before it was there until then."""
        self.put(path, data)

    def mark(self, path: str) -> None:
        """There is an object `path` with nothing to read: its name says it all."""
        self.put(path, b"lightning_ft")

    def unmark(self, path: str) -> None:
        """The marker `path` is gone."""
        with contextlib.suppress(FileNotFoundError):
            self.remove_file(path)

    def make_directory(self, path: str) -> None:
        """Files can be made in `path`, in file systems that have directories."""
        self.calls.call(path, "makedirs", path, exist_ok=True)

    def create_manifest(self, path: str, sealed: bytes, manifest: Manifest) -> None:
        """The manifest of a directory is there, whole: the commit.

        Raises:
            SaveError: There is one of another save already.
        """
        if manifest.is_exclusive(split(path)[0]) and self.exists(path):
            raise SaveError(f"{split(path)[0]}: there is another checkpoint of this name, which was not touched", path)
        self.write(path, memoryview(sealed))

    def write(self, path: str, data: memoryview) -> None:
        """The object `path` is `data`, of any size, in place of what it was: to readers at once, or not at all."""
        sink = self.open_sink(path, data.nbytes)
        try:
            sink.append(data)
            sink.complete()
            sink.publish(data.nbytes)
        finally:
            sink.discard()

    def remove_tree(self, path: str) -> None:
        """Nothing of `path` is left."""
        if not has_magic(path):
            self.calls.call(path, "rm", path, recursive=True)
            return
        # `rm` takes it for a pattern, and `lr=[01]` for the directory of another run.
        found = self.calls.call(path, "find", path, withdirs=True, detail=True)
        for key, info in sorted(found.items(), reverse=True):
            with contextlib.suppress(FileNotFoundError):  # an empty directory that was only a part of names
                self.calls.call(path, "rmdir" if info["type"] == "directory" else "rm_file", key)

    def remove_leftover(self, path: str, unfinished: str | None) -> None:
        """What a killed process left behind the marker `path` is gone, and the marker with it.

        Args:
            path: A marker, or a probe.
            unfinished: What the marker stands for; None of a probe.
        """
        if unfinished is not None:
            self.remove_unfinished(unfinished)
        self.remove_tree(path)

    def remove_abandoned(self, dirpath: str) -> list[str]:
        """Uploads into `dirpath` that are old are ended; returns their final names."""
        return self.remove_uploads(dirpath)

    def remove_uploads(self, dirpath: str) -> list[str]:
        """Unfinished uploads of killed processes into `dirpath` are gone; returns their final names."""
        return []

    def probe(self, path: str) -> None:
        """A file at `path` was written and deleted."""
        self.put(path, b"probe")
        self.remove_file(path)


def _cancel(coming: Any) -> None:
    coming.cancel()


class FileObject(Sink):
    """An upload through a file object of fsspec, which the store publishes, whole or not at all, at close."""

    def __init__(self, store: ObjectStore, path: str) -> None:
        self.path = path
        self._store = store
        self._published = False
        # The memory file system publishes at open; its file object alone, at commit.
        self._stream: Any = (
            MemoryFile(store.fs, store.fs._strip_protocol(path))
            if isinstance(store.fs, MemoryFileSystem)
            else self._bounded(lambda: store.fs.open(path, "wb"))
        )

    def _bounded(self, function: Callable[[], Any]) -> Any:
        return self._store.calls.run(self.path, function)

    def append(self, view: memoryview) -> None:
        while view.nbytes:
            view = view[self._bounded(partial(self._stream.write, view)) :]

    def publish(self, total_bytes: int) -> None:
        publish = self._stream.commit if isinstance(self._stream, MemoryFile) else self._stream.close
        self._bounded(publish)
        self._published = True
        stored_bytes = self._store.size(self.path)
        if stored_bytes != total_bytes:
            self._store.calls.call(self.path, "rm_file", self.path)
            raise SaveError(
                f"{self.path}: {total_bytes} bytes were uploaded, the store holds {stored_bytes}",
                self.path,
            )

    def discard(self) -> None:
        if self._published or isinstance(self._stream, MemoryFile):
            return
        if isinstance(self._stream, AbstractBufferedFile):
            try:
                self._bounded(self._stream.discard)
            finally:
                # Otherwise the garbage collector closes it, and so publishes half a checkpoint.
                self._stream.closed = True
        else:
            self._bounded(self._stream.close)
            self._store.calls.call(self.path, "rm_file", self.path)
        self._published = True


class ObjectAttempt(Attempt):
    """A checkpoint of one file, straight to its final name."""

    def __init__(self, store: ObjectStore, path: str) -> None:
        super().__init__(path, path, store.open_sink(path))

    def _publish(self, total_bytes: int) -> None:
        with self._own_error():
            self._sink.publish(total_bytes)  # The commit.
        emit(DataSynced(self.path, self.attempt))
