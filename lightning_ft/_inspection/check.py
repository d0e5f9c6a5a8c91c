"""One checkpoint, verified, and what is wrong with it to the very part: for the command line, and without torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO, Literal

from lightning_ft._inspection.contents import has_checksums, opened, read_tail
from lightning_ft._inspection.damage import Damage, locate
from lightning_ft._names import is_local, normalise, split
from lightning_ft._stores.verified_file import digest_of
from lightning_ft.errors import CheckpointError, CorruptCheckpointError, UnsupportedFormatError
from lightning_ft.manifest import Manifest
from lightning_ft.storage import Storage

Depth = Literal["size", "full"]
State = Literal["good", "unverified", "foreign", "broken", "newer", "unreadable", "missing", "directory"]

MAX_JOBS = 4


class Interrupted(Exception):
    """The check was given up because the program is to end."""


@dataclass(frozen=True)
class Finding:
    """What one file is.

    `state`: "good" (every byte as written), "unverified" (manifest and size are right, its data were not read),
    "foreign" (no manifest of ours; to depth "full", its records match their own checksums, if it has any), "broken",
    "newer" (for a later version of this package), "unreadable" (the storage refused), "missing", "directory".
    """

    path: str
    name: str
    state: State
    size_bytes: int
    manifest: Manifest | None
    problem: str | None
    damages: tuple[Damage, ...] = ()

    @property
    def bad(self) -> bool:
        """Whether it is known not to be what it should be."""
        return self.state in ("broken", "newer", "unreadable", "missing")


def check(
    storage: Storage,
    path: str,
    depth: Depth = "full",
    progress: Callable[[int], None] = lambda size_bytes: None,
    stop: threading.Event | None = None,
) -> Finding:
    """What `path` is; no state of the file makes this raise.

    The file is opened once: one that is replaced meanwhile (a ``last.ckpt`` is, at every save) is the old one or the
    new one here, and not half of each. Memory: one chunk, and for a damaged file its table of contents.

    Args:
        storage: Where it is.
        path: A file.
        depth: "size": manifest and size. "full": every byte.
        progress: Called with the number of bytes read since the last call.
        stop: Once set, the check ends with `Interrupted`.
    """
    path = normalise(path)
    seen: list[tuple[int, Manifest | None]] = []

    def counted(size_bytes: int) -> None:
        if stop is not None and stop.is_set():
            raise Interrupted
        progress(size_bytes)

    try:
        if storage.is_file(path):
            with storage.open_read(path) as file:
                seen.append(read_tail(file, path))
                return _judge(file, path, *seen[0], depth, counted)
        return _judge_directory(storage, path, depth, counted)
    except Interrupted:
        raise
    except UnsupportedFormatError as error:
        return _finding(path, "newer", str(error))
    except CorruptCheckpointError as error:
        return _finding(path, "broken", error.reason, _ending(error.reason), size_bytes=_size(storage, path))
    except CheckpointError as error:
        return _finding(path, "broken", str(error), size_bytes=_size(storage, path))
    except FileNotFoundError:
        if is_local(path) and os.path.islink(path):
            return _finding(path, "unreadable", f"a link to {os.readlink(path)}, which is not there")
        return _finding(path, "missing", "no such file")
    except IsADirectoryError:
        return _finding(path, "directory", "a directory without manifest.json or .metadata: no checkpoint")
    except Exception as error:
        # Clients of stores have errors of their own classes; others of Python's are mistakes in this program.
        if not isinstance(error, OSError) and type(error).__module__ == "builtins":
            raise
        return _finding(path, "unreadable", f"{type(error).__name__}: {error}")


def _judge_directory(storage: Storage, path: str, depth: Depth, progress: Callable[[int], None]) -> Finding:
    manifest, size_bytes = storage.read_manifest(path)
    name = split(path)[1]
    if manifest is None:
        return Finding(path, name, "foreign", size_bytes, None, "a directory written without any checksum")
    if depth == "size":
        return Finding(path, name, "unverified", size_bytes, manifest, None)
    damages = []
    for file_name, record in manifest.files.items():
        with storage.open_file(path, file_name) as file:
            if _digest(file, record.size_bytes, progress) != record.digest:
                damages.append(Damage(file_name, None, None, None, "its digest does not match the manifest"))
    if damages:
        problem = f"{damages[0].part} is damaged: its digest does not match the manifest"
        return Finding(path, name, "broken", size_bytes, manifest, problem, tuple(damages))
    return Finding(path, name, "good", size_bytes, manifest, None)


def _finding(path: str, state: State, problem: str, damages: tuple[Damage, ...] = (), size_bytes: int = 0) -> Finding:
    return Finding(path, split(path)[1], state, size_bytes, None, problem, damages)


def _ending(reason: str) -> tuple[Damage, ...]:
    part = "manifest" if reason.startswith("manifest") else "end of the file"
    return (Damage(part, None, None, None, reason),)


def _size(storage: Storage, path: str) -> int:
    try:
        return storage.size(path)
    except Exception:  # it was read a moment ago; a size for people is not worth an error
        return 0


def _judge(
    file: BinaryIO,
    path: str,
    size_bytes: int,
    manifest: Manifest | None,
    depth: Depth,
    progress: Callable[[int], None],
) -> Finding:
    name = split(path)[1]
    if depth == "size":
        state: State = "foreign" if manifest is None else "unverified"
        return Finding(path, name, state, size_bytes, manifest, None)
    checksums = _has_checksums(file, path)
    if manifest is not None:
        if _digest(file, manifest.size_bytes, progress) == manifest.digest:
            return Finding(path, name, "good", size_bytes, manifest, None)
        damages = locate(file, path, progress) or [
            Damage(
                "between the records", None, None, None,
                "every tensor and record matches its own checksum: a header, a gap or the table of contents is damaged"
                if checksums else "nobody knows where: it was written without checksums of its records",
            )
        ]  # fmt: skip
        problem = "data is damaged: its digest does not match the manifest"
        return Finding(path, name, "broken", size_bytes, manifest, problem, tuple(damages))
    damages = locate(file, path, progress)
    if damages:
        return Finding(path, name, "broken", size_bytes, None, "a record does not match its checksum", tuple(damages))
    return Finding(path, name, "foreign", size_bytes, None, None if checksums else "written without any checksum")


def _has_checksums(file: BinaryIO, path: str) -> bool:
    try:
        with opened(file, path) as archive:
            return has_checksums(archive)
    except CorruptCheckpointError:
        return True  # what it is otherwise is found below


def _digest(file: BinaryIO, size_bytes: int, progress: Callable[[int], None]) -> str:
    file.seek(0)
    return digest_of(file, size_bytes, progress)[0]  # one that ends early is damaged, and has another


def check_all(
    storage: Storage,
    paths: Sequence[str],
    depth: Depth = "full",
    progress: Callable[[int], None] = lambda size_bytes: None,
    jobs: int | None = None,
) -> Iterator[Finding]:
    """A finding for each of `paths`, in this order, as they become known; several files are read at once.

    Memory: one chunk per job. Given up before its end, it does not wait for a storage that does not answer: threads
    that read end after their chunk.
    """
    jobs = jobs or max(1, min(MAX_JOBS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1))
    stop = threading.Event()
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="lightning-ft-check")
    finished = False
    try:
        for future in [pool.submit(check, storage, path, depth, progress, stop) for path in paths]:
            yield future.result()
        finished = True
    finally:
        stop.set()
        pool.shutdown(wait=finished, cancel_futures=True)
