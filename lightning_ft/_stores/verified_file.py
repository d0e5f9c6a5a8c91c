"""A checkpoint that is read only after every byte of it was compared with its manifest, and then those very bytes."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable
from typing import BinaryIO, cast

import xxhash

from lightning_ft._disk.direct import DiskStream
from lightning_ft._disk.threaded_file import ThreadedFile
from lightning_ft._hang import headway
from lightning_ft._stores.ranged_file import BLOCK_BYTES, RangedFile
from lightning_ft.errors import CorruptCheckpointError, StorageError
from lightning_ft.manifest import TAIL_BYTES, FileRecord, Manifest, parse_tail

_log = logging.getLogger(__name__)

# What is left free of a temporary directory, which others need, too.
SPARE_BYTES = 256 << 20
# What is read of a local file at a time, into the same memory: it is hashed while it is in the processor's cache.
HASHED_BYTES = 1 << 20


def open_verified(file: BinaryIO, path: str) -> tuple[BinaryIO, Manifest | None]:
    """What `Storage.open_verified` says; `file` is closed, or returned to be closed by the caller."""
    try:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, size_bytes - TAIL_BYTES))
        manifest = parse_tail(file.read(TAIL_BYTES), size_bytes, path)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    if manifest is None:
        return file, None
    return open_compared(file, path, FileRecord(manifest.size_bytes, manifest.digest)), manifest


def open_compared(file: BinaryIO, path: str, record: FileRecord) -> BinaryIO:
    """`file`, of which as many bytes as `record` says are known to be those; closed, or returned as `open_verified`."""
    try:
        if not isinstance(file, RangedFile):
            file.seek(0)
            # One that was truncated meanwhile has another digest.
            _compare(digest_of(file, record.size_bytes)[0], record, path)
            file.seek(0)
            return file
        copy = _copied(file, record, path)
        if copy is None:
            return _checked(file, record, path)
    except BaseException:
        file.close()
        raise
    file.close()
    return copy


def _compare(digest: str, record: FileRecord, path: str) -> None:
    if digest != record.digest:
        raise CorruptCheckpointError(path, "data is damaged: its digest does not match the manifest")


def digest_of(
    file: BinaryIO, size_bytes: int, progress: Callable[[int], None] = lambda size_bytes: None
) -> tuple[str, int]:
    """The xxh3-128 of the next `size_bytes` bytes of `file`, hexadecimal, and how many of them there are not.

    Memory: `HASHED_BYTES`; of a store, what its file keeps.
    """
    state, left = xxhash.xxh3_128(), size_bytes
    buffer = memoryview(bytearray(min(HASHED_BYTES, size_bytes)))
    while left:
        chunk = file.next_bytes(left) if isinstance(file, RangedFile) else _filled(file, buffer[:left])
        if not chunk:
            break
        state.update(chunk)
        headway.made()
        left -= chunk.nbytes
        progress(chunk.nbytes)
    return state.hexdigest(), left


def _filled(file: BinaryIO, buffer: memoryview) -> memoryview:
    return buffer[: file.readinto(buffer)]  # type: ignore[attr-defined]


def _copied(file: RangedFile, record: FileRecord, path: str) -> BinaryIO | None:
    """A verified copy in a file without a name, None if there is no room for it."""
    try:
        directory = tempfile.gettempdir()
    except FileNotFoundError as error:  # of the directory, and not of the checkpoint
        _log.info("%s: %s, so it is fetched twice", path, error)
        return None
    if _in_memory(directory):
        _log.info("%s: %s is in memory, so it is fetched twice", path, directory)
        return None
    room = os.statvfs(directory)
    if room.f_bavail * room.f_frsize < file.size_bytes + SPARE_BYTES:
        _log.info("%s: no room for a copy in %s, so it is fetched twice", path, directory)
        return None
    try:
        unnamed = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - closed below
    except OSError as error:
        _log.info("%s: nothing can be written in %s (%s), so it is fetched twice", path, directory, error)
        return None
    with unnamed as spool:
        for last_try in (False, True):
            os.ftruncate(spool.fileno(), 0)
            try:
                digest = _fetch(file, spool.fileno(), record.size_bytes)
            except OSError as error:
                if isinstance(error, StorageError) or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                _log.info("%s: %s is full, so it is fetched twice", path, directory)
                return None
            if digest == record.digest:
                break
            if last_try:
                _compare(digest, record, path)
            # Nothing else checks what comes over the line.
            _log.warning("%s: arrived damaged, and is fetched again", path)
        copy = ThreadedFile(os.dup(spool.fileno()))
    copy.seek(0)
    return cast(BinaryIO, copy)


def _fetch(file: RangedFile, fd: int, hashed_bytes: int) -> str:
    """All of `file` is in the empty file behind `fd`; returns the digest of its first `hashed_bytes` bytes."""
    file.forget()
    file.seek(0)
    state = xxhash.xxh3_128()
    # Past the page cache: writing into that would take longer than fetching.
    stream = DiskStream(fd, file.name, file.size_bytes)
    try:
        while piece := file.next_bytes(BLOCK_BYTES):
            state.update(piece[: max(0, hashed_bytes - file.tell() + piece.nbytes)])
            stream.write(piece)
            headway.made()
        stream.finish()
    finally:
        stream.close()
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~getattr(os, "O_DIRECT", 0))
    return state.hexdigest()


def _in_memory(directory: str) -> bool:
    """Whether a copy there would take as much memory as the checkpoint has bytes."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            mounts = [line.split() for line in file]
    except OSError:  # no such place outside Linux
        return False
    return any(fields[fields.index("-") + 1] in ("tmpfs", "ramfs") for fields in mounts if fields[2] == number)


def _checked(file: RangedFile, record: FileRecord, path: str) -> BinaryIO:
    """`file`, read once, from now on compared block by block with what was read then."""
    digests: dict[int, int] = {}

    def check(index: int, data: bytes) -> None:
        digest = xxhash.xxh3_64_intdigest(data)
        if digests.setdefault(index, digest) != digest:
            raise CorruptCheckpointError(path, f"bytes from {index * BLOCK_BYTES} on arrived damaged")

    file.forget()
    file.check = check
    _compare(digest_of(cast(BinaryIO, file), record.size_bytes)[0], record, path)
    file.seek(0)
    return cast(BinaryIO, file)
