"""Bytes on their way into a local file, past the page cache, while the next ones are made and hashed.

The kernel's cache is no use to a checkpoint: nobody reads it back soon, copying into it costs time of a processor,
and what it holds goes to the disk at the latest moment, when `fsync` waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
from collections import deque
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

# Direct I/O needs lengths and places that are multiples of the block size of disk and file system; none has a larger
# one that accepts direct I/O at all, and one that did would refuse the write, which is then made without.
ALIGN_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
FALLOC_FL_KEEP_SIZE = 1
# A reservation that fails for another reason says nothing about the writes to come.
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class DiskBuffers:
    """The memory through which saves go to the disk: at most `count` buffers outlive a save, for the next one.

    Aligned to, and if possible made of, huge pages: a disk takes a limited number of pieces per request, and a piece
    is a run of memory without a gap. It makes writing faster by a third.

    Thread: any. There is no lock, which a fork could copy in its locked state.
    """

    def __init__(self, buffer_bytes: int, count: int) -> None:
        assert buffer_bytes % ALIGN_BYTES == 0
        self.buffer_bytes = buffer_bytes
        self.count = count
        self.allocated = 0
        self._idle: deque[Bytes] = deque(maxlen=count)

    def take(self) -> Bytes:
        """A buffer that is the caller's until `give_back`."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        self.allocated += 1
        # Private: a forked process must not write into what this one is sending to the disk.
        memory = mmap.mmap(-1, self.buffer_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        start = -whole.ctypes.data % HUGE_PAGE_BYTES
        return whole[start : start + self.buffer_bytes]

    def give_back(self, buffer: Bytes) -> None:
        """The next save may take `buffer`."""
        self._idle.append(buffer)


# Of 8 MiB the disk is as fast as of 32 MiB. One is filled and one written; the others even out which of the two is
# ahead, and let the disk go on while a thread waits for the interpreter.
BUFFERS = DiskBuffers(8 << 20, 4)


class DiskStream:
    """What is given to `write` is in the file after `finish`, in order and nothing else; never after `close` alone.

    `write` returns when the bytes are copied; a thread of the stream's own takes full buffers to the disk. Less than a
    buffer in all needs neither that thread nor direct I/O. Where direct I/O is refused, at whatever moment, the stream
    goes on through the page cache.

    An error of that thread is raised by the next `write` or by `finish`, and again by every one after it.

    Memory: `BUFFERS`, shared by one stream after the other. Threads: one for all methods, any; and its own.

    Args:
        fd: Of an empty file open for writing; stays the caller's, and keeps its position.
        path: For messages.
        expected_bytes: At least so many will be written. The room for them is reserved at once where the file system
            can do that, so that a full disk is noticed before anything is written.

    Raises:
        OSError: There is no room for `expected_bytes`.
    """

    def __init__(self, fd: int, path: str, expected_bytes: int | None = None) -> None:
        self._fd = fd
        self._path = path
        self._buffers = BUFFERS
        self._taken: list[Bytes] = []
        self._free: SimpleQueue[Bytes] = SimpleQueue()
        self._full: SimpleQueue[tuple[Bytes, int] | None] = SimpleQueue()
        self._filling: Bytes | None = None
        self._filled_bytes = 0  # of the buffer that is being filled
        self._handed_over_bytes = 0
        self._thread: threading.Thread | None = None
        self._started = False
        self._direct = False
        self._abandoned = False
        self._error: BaseException | None = None
        # Reserving more from time to time, without knowing the size, was tried: no faster beyond doubt, and a disk
        # that is too small is noticed no earlier.
        large = expected_bytes is not None and expected_bytes >= self._buffers.buffer_bytes
        self._reserved_bytes = expected_bytes if large and _reserve(fd, path, expected_bytes or 0) else None

    def write(self, view: memoryview) -> None:
        """`view` is copied and on its way. Blocks on: the disk, once all buffers are full."""
        self._raise_error()
        left = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
        while left.size:
            if self._filling is None:
                self._filling = self._next_buffer()
            # numpy lets other threads run while it copies.
            room = self._filling[self._filled_bytes :][: left.size]
            room[:] = left[: room.size]
            left = left[room.size :]
            self._filled_bytes += room.size
            if self._filled_bytes == self._filling.size:
                if not self._started:
                    self._start()
                self._hand_over()

    def finish(self) -> None:
        """Everything written is in the file, which has exactly that size; nothing is durable yet. No thread is left."""
        self._raise_error()
        if self._filled_bytes:
            self._hand_over()
        self._stop()
        self._raise_error()
        if self._reserved_bytes is not None:
            os.ftruncate(self._fd, self._handed_over_bytes)  # also gives back what was reserved and not needed

    def close(self) -> None:
        """No thread and no buffer is kept, and what is not yet written will not be. May be repeated."""
        self._abandoned = True
        self._stop()

    def _next_buffer(self) -> Bytes:
        if len(self._taken) < self._buffers.count and self._free.empty():
            self._taken.append(self._buffers.take())
            return self._taken[-1]
        buffer = self._free.get()
        self._raise_error()
        return buffer

    def _hand_over(self) -> None:
        assert self._filling is not None
        piece, self._filling = self._filling[: self._filled_bytes], None
        if self._thread is not None:
            self._full.put((piece, self._handed_over_bytes))
        else:
            self._settle(piece, self._handed_over_bytes)
            self._raise_error()
        self._handed_over_bytes += self._filled_bytes
        self._filled_bytes = 0

    def _start(self) -> None:
        self._started = True
        self._go_direct()
        if self._reserved_bytes is not None:
            # Writes that do not move the end of the file are a little cheaper.
            os.ftruncate(self._fd, self._reserved_bytes)
        # A daemon, like the thread that writes checkpoints, without which it would wait for ever.
        thread = threading.Thread(target=self._run, name="lightning-ft-disk", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # Python 3.12 starts no thread while the interpreter ends, which is when the last saves are written.
            logger.debug("%s: written without a thread: %s", self._path, error)
        else:
            self._thread = thread

    def _stop(self) -> None:
        if self._thread is not None:
            self._full.put(None)
            self._thread.join()
            self._thread = None
        self._filling, self._filled_bytes = None, 0
        while self._taken:
            self._buffers.give_back(self._taken.pop())

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # -- the stream's own thread, if it has one ------------------------------------------------------------------

    def _run(self) -> None:
        while (full := self._full.get()) is not None:
            self._settle(*full)

    def _settle(self, piece: Bytes, offset: int) -> None:
        """`piece` is written, or there is an error to raise; its buffer is free either way."""
        try:
            if self._error is None and not self._abandoned:
                self._put(piece, offset)
        except BaseException as error:  # whatever it is: the other thread waits for a buffer, and hears of it there
            self._error = error
        self._free.put(piece)

    def _put(self, piece: Bytes, offset: int) -> None:
        """`piece` is in the file at `offset`."""
        while piece.size:
            aligned_bytes = piece.size // ALIGN_BYTES * ALIGN_BYTES
            if self._direct and not aligned_bytes:
                self._go_buffered("the end of the file is no whole block")
            try:
                whole = piece[:aligned_bytes] if self._direct else piece
                put_bytes = os.pwrite(self._fd, whole.data, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._go_buffered(str(error))
                continue
            if put_bytes % ALIGN_BYTES and self._direct:
                # A signal, a quota or a network file system may take less than it was given.
                self._go_buffered("a write was cut short within a block")
            piece, offset = piece[put_bytes:], offset + put_bytes

    def _go_direct(self) -> None:
        # Not at open: a file system that refuses it there may have made the file.
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | os.O_DIRECT)
        except OSError as error:
            logger.debug("%s: no direct I/O: %s", self._path, error)
        else:
            self._direct = True

    def _go_buffered(self, why: str) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self._direct = False
        logger.debug("%s: no direct I/O from here on: %s", self._path, why)


def _reserve(fd: int, path: str, size_bytes: int) -> bool:
    """Whether the file, still empty, has room for `size_bytes`.

    Not `os.posix_fallocate`: where the file system cannot reserve, the C library writes to every block in its place.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):
        return False
    room = os.fstatvfs(fd)
    free_blocks = room.f_bfree if os.geteuid() == 0 else room.f_bavail  # root may use what is set aside
    # Asked for too much, a file system takes all there is before it refuses, and others find the disk full meanwhile.
    # Some that know no limit say that they have no blocks at all.
    if room.f_blocks and free_blocks * room.f_frsize < size_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
    place, length = ctypes.c_int64(0), ctypes.c_int64(size_bytes)
    if libc.fallocate(fd, FALLOC_FL_KEEP_SIZE, place, length) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_ROOM:
        raise OSError(code, os.strerror(code), path)
    logger.debug("%s: no room reserved: %s", path, os.strerror(code))
    return False
