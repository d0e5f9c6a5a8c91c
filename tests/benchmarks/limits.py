"""What this machine does at best with as many bytes as a state has: no checkpoint can be faster than this."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash

# One system call: large enough to cost nothing by itself, small enough to be a piece of any state.
PIECE_BYTES = 8 << 20
_BLOCK_BYTES = 4096


def measure(scratch: str, size_bytes: int, turn: int) -> dict[str, list[float]]:
    """Seconds of each limit; buffers and, for reading, the page cache are warm."""
    size_bytes = max(_BLOCK_BYTES, size_bytes // _BLOCK_BYTES * _BLOCK_BYTES)
    # Mapped memory is aligned to pages, which O_DIRECT asks for.
    source, target = mmap.mmap(-1, size_bytes), mmap.mmap(-1, size_bytes)
    with memoryview(source) as data, memoryview(target) as room:
        fill(data)
        fill(room)
        path = str(Path(scratch, "limit"))
        candidates: dict[str, tuple[int, Callable[[], float]]] = {
            "memcpy_1_secs": (3, lambda: copy(data, room, 1)),
            "memcpy_2_secs": (3, lambda: copy(data, room, 2)),
            "write_secs": (1, lambda: _write(path, data, 0)),
            "direct_secs": (1, lambda: _write(path, data, os.O_DIRECT)),
            "read_secs": (3, lambda: _read(path, data, room)),
            "hash_secs": (3, lambda: _hash(data)),
        }
        names = list(candidates)
        turn %= len(names)
        secs: dict[str, list[float]] = {}
        for name in names[turn:] + names[:turn]:
            repetitions, run = candidates[name]
            if name.startswith("memcpy"):
                run()  # the second thread of the pool is started
            try:
                secs[name] = [run() for _ in range(repetitions)]
            except OSError as error:
                if name != "direct_secs" or error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise
                secs[name] = []  # this file system has no O_DIRECT
            Path(path).unlink(missing_ok=True)
    source.close()
    target.close()
    return secs


def fill(view: memoryview) -> None:
    """`view` has pages of its own, with bytes that no file system could compress away."""
    generator = torch.Generator().manual_seed(0)
    block = torch.randint(256, (min(PIECE_BYTES, view.nbytes),), dtype=torch.uint8, generator=generator).numpy()
    for start in range(0, view.nbytes, PIECE_BYTES):
        piece = view[start : start + PIECE_BYTES]
        piece[:] = block[: piece.nbytes].data


def _pieces(view: memoryview) -> list[memoryview]:
    return [view[start : start + PIECE_BYTES] for start in range(0, view.nbytes, PIECE_BYTES)]


def copy(source: memoryview, target: memoryview, threads: int) -> float:
    """Seconds for a copy, by so many threads of torch's."""
    torch.set_num_threads(threads)
    here, there = torch.frombuffer(source, dtype=torch.uint8), torch.frombuffer(target, dtype=torch.uint8)
    began = time.perf_counter()
    there.copy_(here)
    return time.perf_counter() - began


def _write(path: str, source: memoryview, flag: int) -> float:
    try:
        return write_raw(path, source, flag)
    finally:
        Path(path).unlink(missing_ok=True)


def write_raw(path: str, source: memoryview, flag: int) -> float:
    """Seconds for the bytes of `source`, until they are in the new file `path` and synced."""
    began = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flag, 0o600)
    try:
        for piece in _pieces(source):
            while piece.nbytes:
                piece = piece[os.write(descriptor, piece) :]
        os.fsync(descriptor)
        return time.perf_counter() - began
    finally:
        os.close(descriptor)


def _read(path: str, source: memoryview, target: memoryview) -> float:
    if not os.path.exists(path):
        Path(path).write_bytes(source)  # and so it is in the page cache
    return read(path, target)


def read(path: str, target: memoryview) -> float:
    """Seconds for the bytes of `path`, from its beginning until `target` is full."""
    began = time.perf_counter()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for piece in _pieces(target):
            while piece.nbytes:
                count = os.readv(descriptor, [piece])
                if not count:
                    raise EOFError(f"{path} is shorter than {target.nbytes} bytes")
                piece = piece[count:]
    finally:
        os.close(descriptor)
    return time.perf_counter() - began


def _hash(source: memoryview) -> float:
    began = time.perf_counter()
    state = xxhash.xxh3_128()
    for piece in _pieces(source):
        state.update(piece)
    state.digest()
    return time.perf_counter() - began
