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

How a directory is written stands in `_disk.directory`.

URLs go to an `ObjectStore`, paths to a `LocalStore`; both have the same methods, as far as they are used here.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, cast

import fsspec

from lightning_ft._disk.attempt import Attempt
from lightning_ft._disk.directory import DirectoryAttempt, FileAttempt, mismatch
from lightning_ft._disk.local_store import LocalStore
from lightning_ft._names import is_local, join, normalise, parse_leftover, probe_name, split
from lightning_ft._stores.objects import Entry, ObjectStore
from lightning_ft._stores.verified_file import digest_of, open_compared, open_verified
from lightning_ft.errors import CheckpointError, ConfigurationError, CorruptCheckpointError
from lightning_ft.events import (
    AttemptOpened,
    Deleted,
    DeleteSkipped,
    DeleteStarted,
    LeftoverRemoved,
    emit,
)
from lightning_ft.manifest import (
    DIRECTORY_MANIFEST,
    MAX_MANIFEST_BYTES,
    METADATA,
    REST,
    FileRecord,
    Manifest,
    parse_directory,
    parse_tail,
)

logger = logging.getLogger(__name__)

__all__ = ["Attempt", "DirectoryAttempt", "FileAttempt", "Storage"]

# Of one call of a store: long enough for a part of an upload over a slow line and for some repetitions, and short
# enough for a run to hear of a store that does not answer.
DEADLINE_SECS = 60.0
# A month. The clocks of Python end somewhere behind it, in errors that name no cause.
MOST_DEADLINE_SECS = 30 * 24 * 3600.0


class Storage:
    """Files of checkpoints at any path or URL.

    Args:
        storage_options: For `fsspec`, used with URLs only. One of them is ours: `deadline_secs` (60), how long a
            single call of a store may take, its repetitions included.

    Raises:
        ConfigurationError: `deadline_secs` is no positive number, or larger than any wait makes sense.
    """

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        self.storage_options = dict(storage_options or {})
        deadline_secs = self.storage_options.pop("deadline_secs", DEADLINE_SECS)
        number = isinstance(deadline_secs, (int, float)) and not isinstance(deadline_secs, bool)
        if not number or not 0 < deadline_secs <= MOST_DEADLINE_SECS:
            raise ConfigurationError(
                f"storage_options: deadline_secs={deadline_secs!r}: must be a number above 0, and at most"
                f" {MOST_DEADLINE_SECS:g}"
            )
        self.deadline_secs = float(deadline_secs)

    def _store(self, path: str) -> LocalStore | ObjectStore:
        """The `LocalStore`, or the `ObjectStore` behind a URL; fsspec keeps one file system per thread and options."""
        if is_local(path):
            return LocalStore()
        options = dict(self.storage_options)
        if "::" in path.partition("://")[0]:
            raise ConfigurationError(
                f"{path}: file systems chained with :: are not supported: what they keep hides what is in the store now"
            )
        if _is_s3(path):
            # Calls are repeated here. botocore, which would do it as well, waits for times drawn from the generator
            # that belongs to the training. And everything read is verified here; some stores give the checksum of a
            # whole object with a part of it, and botocore compares the two.
            configured = fsspec.config.conf.get("s3", {}).get("config_kwargs") or {}
            given = options.get("config_kwargs") or {}
            ours = {"retries": {"max_attempts": 0}, "response_checksum_validation": "when_required"}
            options["config_kwargs"] = {**ours, **configured, **given}
        try:
            fs, _ = fsspec.core.url_to_fs(path, **options)
        except (ImportError, ValueError) as error:
            raise ConfigurationError(f"{path}: no file system for this URL: {error}") from error
        if _is_s3(path) and hasattr(fs, "_call_s3"):
            from lightning_ft._stores.s3 import S3Store

            return S3Store(fs, self.deadline_secs)
        return ObjectStore(fs, self.deadline_secs)

    def open_attempt(self, path: str, expected_bytes: int | None = None) -> Attempt:
        """A checkpoint can be written; its directory exists. See `Attempt` for what is on disk.

        Thread: writer.

        Args:
            path: The final name.
            expected_bytes: At least so many will be written. A local disk that has no room for them is full now, and
                not after most of them have been written.
        """
        path = normalise(path)
        attempt: Attempt = self._store(path).open_attempt(path, expected_bytes)
        try:
            emit(AttemptOpened(path, attempt.attempt))
        except BaseException:
            attempt.abort()
            raise
        return attempt

    def open_directory(self, path: str, token: str, *, leads: bool = False) -> DirectoryAttempt:
        """Files of the checkpoint directory `path` can be written; see `DirectoryAttempt` for what is on disk.

        Ranks: all. Thread: writer. Blocks on: the disk or the store.

        Args:
            path: The final name.
            token: 16 hexadecimal digits of this save, the same on every rank.
            leads: Whether what has the name in a store is refused or, if it is no checkpoint of a run, removed. Of one
                rank, and no other has opened a file before this has returned.
        """
        path = normalise(path)
        attempt: DirectoryAttempt = self._store(path).open_directory(path, token, leads)
        try:
            emit(AttemptOpened(path, attempt.attempt))
        except BaseException:
            attempt.close()
            raise
        return attempt

    def put(self, path: str, data: bytes) -> None:
        """A small file that is no checkpoint is at `path`, new, and holds `data`."""
        path = normalise(path)
        self._store(path).put(path, data)

    def write_object(self, url: str, data: memoryview) -> None:
        """The object at `url`, in a store, is `data`, of any size, in place of what it was: whole, or not at all.

        Blocks on: the store, up to the deadline for each part.
        """
        url = normalise(url)
        store = self._store(url)
        assert isinstance(store, ObjectStore), f"{url}: no URL of a store"
        store.write(url, data)

    def replace(self, path: str, data: bytes) -> None:
        """A small file that is no checkpoint is at `path`, and holds `data`; one before it was there until then."""
        path = normalise(path)
        self._store(path).replace(path, data)

    def remove_file(self, path: str) -> None:
        """The small file `path` is gone; raises FileNotFoundError if there was none, and the storage says so."""
        path = normalise(path)
        self._store(path).remove_file(path)

    def remove(self, path: str) -> None:
        """Nothing of the checkpoint `path` is left; a file or a directory, and already gone is fine.

        Thread: writer. Blocks on: the disk or the store.
        On disk after: nothing. Killed on the way: the whole checkpoint, or data under a hidden name only.
        """
        path = normalise(path)
        emit(DeleteStarted(path))
        try:
            self._store(path).remove(path)
        except FileNotFoundError:
            emit(DeleteSkipped(path, "already gone"))
            return
        emit(Deleted(path))

    def remove_leftovers(self, dirpath: str) -> list[str]:
        """What killed processes left under our hidden names in `dirpath` is gone; returns these paths.

        Ranks: zero. Thread: main, before the first save, holding the directory's lock: an attempt of a living
        process looks the same. Of object stores: what our markers stand for, and uploads that are old.
        """
        dirpath = normalise(dirpath)
        leftovers = {join(dirpath, name): found for name in self.listdir(dirpath) if (found := parse_leftover(name))}
        for path, leftover in leftovers.items():
            # A process that starts at the same time tries the directory out before it finds it locked: its probe may
            # be gone by now.
            with contextlib.suppress(FileNotFoundError):
                unfinished = None if leftover.kind == "probe" else join(dirpath, leftover.name)
                self._store(path).remove_leftover(path, unfinished)
                emit(LeftoverRemoved(path))
        uploads = self._store(dirpath).remove_uploads(dirpath)
        for path in uploads:
            emit(LeftoverRemoved(path))
        return [*leftovers, *uploads]

    def remove_abandoned(self, dirpath: str) -> list[str]:
        """Attempts in `dirpath` that no living process writes are gone; returns their paths.

        For directories that others may be writing to: what is being written, on this machine or on one that shares its
        locks, stays. In a store: uploads that are old. Ranks: zero. Thread: main.
        """
        dirpath = normalise(dirpath)
        try:
            removed = self._store(dirpath).remove_abandoned(dirpath)
        except FileNotFoundError:
            return []  # no such directory
        except OSError as error:  # no reason not to train: they do no harm
            logger.warning("what killed saves have left in %s is not looked for: %s", dirpath, error)
            return []
        for path in removed:
            emit(LeftoverRemoved(path))
        return removed

    def read_manifest(self, path: str) -> tuple[Manifest | None, int]:
        """The manifest of `path`, None if it is somebody else's archive, and its size; reads only the tail.

        Raises:
            CheckpointError: See `parse_tail`.
            OSError: It cannot be read.
        """
        return _returned(next(self.read_manifests([path])))

    def read_manifests(self, paths: Iterable[str]) -> Iterator[tuple[Manifest | None, int] | Exception]:
        """For each path what `read_manifest` returns or raises, in order; of a store several at the same time."""
        paths = [normalise(path) for path in paths]
        if not paths:
            return
        for path, tail in self._store(paths[0]).tails(paths):
            try:
                if isinstance(tail, IsADirectoryError):
                    yield self._read_directory(path)
                elif isinstance(tail, Exception):
                    yield tail
                else:
                    yield parse_tail(*tail, path), tail[1]
            except (CheckpointError, OSError) as error:
                yield error

    def _read_directory(self, path: str) -> tuple[Manifest | None, int]:
        sizes = self.sizes(path)
        if DIRECTORY_MANIFEST not in sizes:
            if METADATA not in sizes:
                raise IsADirectoryError(errno.EISDIR, "a directory without manifest.json or .metadata", path)
            return None, sum(sizes.values())
        if sizes[DIRECTORY_MANIFEST] > MAX_MANIFEST_BYTES:
            raise CorruptCheckpointError(path, f"manifest is damaged: it has {sizes[DIRECTORY_MANIFEST]} bytes")
        with self.open_file(path, DIRECTORY_MANIFEST) as file:
            manifest = parse_directory(file.read(), path)
        problem = mismatch(manifest.files, sizes, exactly=False)
        if problem is not None:
            raise CorruptCheckpointError(path, problem)
        return manifest, sum(sizes.values())

    def is_unfinished(self, path: str) -> bool:
        """Whether `path` in a store is what a kill has left of a save or a deletion, if there is a marker beside it."""
        return self._store(path).is_unfinished(normalise(path))

    def is_sharded(self, path: str) -> bool:
        """Whether `path` is a directory with a checkpoint in it, of ours or of plain Lightning."""
        return not self.is_file(path) and any(self.exists(join(path, name)) for name in (DIRECTORY_MANIFEST, METADATA))

    def refuse_part(self, path: str) -> None:
        """The file `path` is a checkpoint by itself, as far as its name tells.

        Raises:
            CheckpointError: It is one file of a directory that is one.
        """
        directory, name = split(path)
        is_part = name in (DIRECTORY_MANIFEST, METADATA, REST) or name.endswith(".distcp")
        if is_part and self.exists(join(directory, METADATA)):
            raise CheckpointError(f"{path} is one file of a sharded checkpoint: give its directory, {directory}")

    def compare(self, path: str, manifest: Manifest, names: Iterable[str] | None = None) -> None:
        """Every byte of `path` is as `manifest` says; memory: one chunk, of a store a few.

        Args:
            path: A checkpoint.
            manifest: Its own.
            names: Of a directory, the files to compare; None: all.

        Raises:
            CorruptCheckpointError: Something else is there; of a directory, says in which file.
            OSError: It cannot be read.
        """
        if manifest.files:
            chosen = manifest.files if names is None else names
            wrong = next((name for name in chosen if not self.holds(join(path, name), manifest.files[name])), None)
        else:
            wrong = None if self.holds(path, FileRecord(manifest.size_bytes, manifest.digest)) else "data"
        if wrong is not None:
            raise CorruptCheckpointError(path, f"{wrong} is damaged: its digest does not match the manifest")

    def holds(self, path: str, record: FileRecord) -> bool:
        """Whether the bytes of `path` are those of `record`, which is as long.

        Of a store two readings must say that they are not: nothing else checks what comes over the line, and it need
        not be the file that is damaged.

        Raises:
            CorruptCheckpointError: The file is shorter.
        """
        readings = 1 if is_local(path) else 2
        return any(self.read_digest(path, record.size_bytes) == record.digest for _ in range(readings))

    def read_digest(self, path: str, size_bytes: int) -> str:
        """The xxh3-128 of the first `size_bytes` bytes of `path`, hexadecimal; memory: one chunk, of a store a few.

        Raises:
            CorruptCheckpointError: The file is shorter.
        """
        with self.open_read(path) as file:
            digest, missing_bytes = digest_of(file, size_bytes)
        if missing_bytes:
            raise CorruptCheckpointError(path, f"ends {missing_bytes} of {size_bytes} bytes too early")
        return digest

    def open_read(self, path: str) -> BinaryIO:
        """The bytes of `path`, to be closed by the caller; large reads use several threads or requests."""
        path = normalise(path)
        return cast(BinaryIO, self._store(path).open_read(path))

    def open_verified(self, path: str) -> tuple[BinaryIO, Manifest | None]:
        """The bytes of `path`, each compared with its manifest before this returns, and that manifest.

        What is read later is what was compared, whatever happens to `path` or on the way from it. Without a manifest
        (None) nothing could be compared. To be closed by the caller. Of a store, the checkpoint is fetched once, into
        an unnamed file of the system's temporary directory, which ends with this process at the latest; if there is no
        room for it, twice.

        Raises:
            CorruptCheckpointError: It is not what was written.
            CheckpointError: See `parse_tail`.
            OSError: It cannot be read.
        """
        path = normalise(path)
        return open_verified(self.open_read(path), path)

    def open_file(self, path: str, name: str) -> BinaryIO:
        """The bytes of the file `name` of the directory `path`, to be closed by the caller; compared with nothing."""
        return self.open_read(join(normalise(path), name))

    def open_verified_file(self, path: str, name: str, record: FileRecord) -> BinaryIO:
        """The bytes of the file `name` of the directory `path`, each compared before this returns; as `open_verified`.

        Raises:
            CorruptCheckpointError: It is not what was written.
            OSError: It cannot be read.
        """
        file, checkpoint = self.open_file(path, name), normalise(path)
        size_bytes = file.seek(0, os.SEEK_END)
        if size_bytes != record.size_bytes:
            file.close()
            raise CorruptCheckpointError(checkpoint, f"{name} has {size_bytes} bytes, {record.size_bytes} were written")
        return open_compared(file, join(checkpoint, name), record)

    def size(self, path: str) -> int:
        """Size in bytes of the file `path`."""
        path = normalise(path)
        return self._store(path).size(path)

    def sizes(self, path: str) -> dict[str, int]:
        """Name and size in bytes of every file in the directory `path`; none or FileNotFoundError if there is none."""
        path = normalise(path)
        return self._store(path).sizes(path)

    def is_file(self, path: str) -> bool:
        """Whether `path` is one file, and no directory."""
        path = normalise(path)
        return self._store(path).is_file(path)

    def exists(self, path: str) -> bool:
        """Whether there is something at `path`; a storage that does not answer raises and is not "no"."""
        path = normalise(path)
        return self._store(path).exists(path)

    def listdir(self, dirpath: str) -> list[str]:
        """The names in `dirpath`, sorted and fresh; none if it does not exist, any other error is raised."""
        return [entry.name for entry in self.entries(dirpath)]

    def entries(self, dirpath: str) -> list[Entry]:
        """As `listdir`, with what a store tells of the content behind a name."""
        dirpath = normalise(dirpath)
        try:
            return sorted(self._store(dirpath).entries(dirpath), key=lambda entry: entry.name)
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
            self._store(path).probe(path)
        except ConfigurationError:
            raise
        except Exception as error:
            raise ConfigurationError(
                f"checkpoints cannot be written to {dirpath}: {type(error).__name__}: {error}"
            ) from error


def _is_s3(path: str) -> bool:
    return path.partition("://")[0] in ("s3", "s3a")


def _returned(result: tuple[Manifest | None, int] | Exception) -> tuple[Manifest | None, int]:
    if isinstance(result, Exception):
        raise result
    return result
