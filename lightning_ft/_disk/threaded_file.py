"""A local file whose large reads are shared by several threads."""

from __future__ import annotations

import io
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# What one system call reads: also the longest that a thread goes on after another one has failed.
PIECE_BYTES = 1 << 20
# Ranks of one machine load at the same time, each with as many threads.
MAX_THREADS = 4


def usable_threads() -> int:
    """How many threads read; not more than this process may run at once."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_THREADS, cpus)


class ThreadedFile(io.BufferedReader):
    """What ``open(path, "rb")`` gives, but a large `readinto` is shared by several threads.

    Memory that was never touched is handed out by the kernel page by page, which takes longer than copying a file's
    cached bytes into it. `torch.load` allocates every tensor anew, so it spends its time there, in one thread.

    Blocks on: `readinto`, until no thread touches the buffer any more, also when it raises: the buffer is the
    caller's, who may free it. The threads end with `close`.

    Args:
        path: A name, or a descriptor, which belongs to this object then.
    """

    def __init__(self, path: str | int) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._threads = usable_threads()
        super().__init__(io.FileIO(path))

    def readinto(self, buffer: Any, /) -> int:
        """`buffer` is filled up to the end of the file; returns the number of bytes."""
        view = memoryview(buffer).cast("B")
        if self._threads < 2 or view.nbytes < 2 * PIECE_BYTES:
            return super().readinto(view)
        start = self.tell()
        count = self._share(view, start)
        self.seek(start + count)
        return count

    def _share(self, view: memoryview, start: int) -> int:
        pieces = deque(range(0, view.nbytes, PIECE_BYTES))
        ends: list[int] = []  # where the file turned out to end, relative to `start`
        fd = self.fileno()

        def work() -> None:
            try:
                while True:
                    at = pieces.popleft()
                    size_bytes = min(PIECE_BYTES, view.nbytes - at)
                    count = _fill(fd, view[at : at + size_bytes], start + at)
                    if count < size_bytes:
                        ends.append(at + count)
            except IndexError:
                return  # no piece is left
            except BaseException:
                pieces.clear()  # the others stop, too
                raise

        try:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="lightning-ft-read")
            others = [self._pool.submit(work) for _ in range(self._threads - 1)]
            work()
            for other in others:
                if not other.cancel():  # one that has not begun finds nothing left
                    other.result()
        except BaseException:
            pieces.clear()
            self._end_threads()
            raise
        return min(ends, default=view.nbytes)

    def close(self) -> None:
        """The file is closed and no thread is left."""
        try:
            self._end_threads()
        finally:
            super().close()

    def _end_threads(self) -> None:
        """No thread is left, however often the wait for them is interrupted."""
        interrupt: BaseException | None = None
        while self._pool is not None:
            try:
                self._pool.shutdown(cancel_futures=True)
                self._pool = None
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _fill(fd: int, view: memoryview, offset: int) -> int:
    """`view` holds the bytes at `offset`, as many as there are; returns how many."""
    done = 0
    while done < view.nbytes:
        count = os.preadv(fd, [view[done:]], offset + done)
        if not count:
            break
        done += count
    return done
