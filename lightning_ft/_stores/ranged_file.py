"""A file in a store, read in ranges: several on their way at once, few in memory, none for a handful of bytes."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from lightning_ft.errors import StorageError

# What one request reads. `torch.load` asks for a few bytes at a time, and for each tensor at once.
BLOCK_BYTES = 4 << 20
# Blocks on their way ahead of the reader; and those kept: the reader's, and the one with the archive's directory.
BLOCKS_AHEAD = 6
BLOCKS_KEPT = 2


class RangedFile(io.RawIOBase):
    """What ``open(path, "rb")`` gives, for a store: reads may end short only at the end of the file.

    The first read at a place fetches one block; when the next block is wanted too, those after it are fetched ahead.

    Memory: `BLOCKS_AHEAD` + `BLOCKS_KEPT` blocks. Thread: one.

    Args:
        path: For messages.
        size_bytes: Of the file.
        start: ``start(begin, end)`` begins to fetch this range and returns what `finish` takes.
        finish: Gives the bytes, exactly as many as were asked for, or raises.
        cancel: Ends a fetch that nobody will wait for.
        check: Called with the index and the bytes of each block that has arrived.
    """

    def __init__(
        self,
        path: str,
        size_bytes: int,
        start: Callable[[int, int], Any],
        finish: Callable[[Any], bytes],
        cancel: Callable[[Any], object],
        check: Callable[[int, bytes], None] | None = None,
    ) -> None:
        super().__init__()
        self.name = path
        self.size_bytes = size_bytes
        self.check = check
        self._start = start
        self._finish = finish
        self._cancel = cancel
        self._position = 0
        self._last_block = -2
        self._coming: dict[int, Any] = {}
        self._here: OrderedDict[int, bytes] = OrderedDict()

    @property
    def held_blocks(self) -> int:
        """How many blocks are in memory or on their way."""
        return len(self._coming) + len(self._here)

    def next_bytes(self, limit: int) -> memoryview:
        """The next bytes, at least one and at most `limit`, without a copy; none at the end of the file."""
        limit = min(limit, self.size_bytes - self._position)
        if limit <= 0:
            return memoryview(b"")
        index, offset = divmod(self._position, BLOCK_BYTES)
        piece = memoryview(self._block(index, last_wanted=(self._position + limit - 1) // BLOCK_BYTES))
        piece = piece[offset : offset + limit]
        self._position += piece.nbytes
        return piece

    def readinto(self, buffer: Any, /) -> int:
        """`buffer` is filled up to the end of the file; returns the number of bytes."""
        view = memoryview(buffer).cast("B")
        done = 0
        while done < view.nbytes and (piece := self.next_bytes(view.nbytes - done)):
            view[done : done + piece.nbytes] = piece
            done += piece.nbytes
        return done

    def read(self, size: int | None = -1, /) -> bytes:
        """`size` bytes, or what is left; fewer only at the end of the file."""
        left = max(0, self.size_bytes - self._position)
        size = left if size is None or size < 0 else min(size, left)
        piece = self.next_bytes(size)
        if piece.nbytes == size:
            return bytes(piece)
        buffer = bytearray(size)
        buffer[: piece.nbytes] = piece
        self.readinto(memoryview(buffer)[piece.nbytes :])
        return bytes(buffer)

    def _block(self, index: int, last_wanted: int) -> bytes:
        if index != self._last_block or (index not in self._coming and index not in self._here):
            sequential = index == self._last_block + 1
            last = max(last_wanted, index + BLOCKS_AHEAD if sequential else 0)
            last = min(last, index + BLOCKS_AHEAD, (self.size_bytes - 1) // BLOCK_BYTES)
            self._last_block = index
            for far in [other for other in self._coming if not index <= other <= index + BLOCKS_AHEAD]:
                self._cancel(self._coming.pop(far))
            for wanted in range(index, last + 1):
                if wanted not in self._coming and wanted not in self._here:
                    begin = wanted * BLOCK_BYTES
                    self._coming[wanted] = self._start(begin, min(begin + BLOCK_BYTES, self.size_bytes))
        if index in self._coming:
            data = self._finish(self._coming.pop(index))
            expected_bytes = min(BLOCK_BYTES, self.size_bytes - index * BLOCK_BYTES)
            if len(data) != expected_bytes:
                message = f"{self.name}: {len(data)} bytes came of {expected_bytes}"
                raise StorageError(message, self.name, transient=True)
            if self.check is not None:
                self.check(index, data)
            self._here[index] = data
        else:
            self._here.move_to_end(index)
        while len(self._here) > BLOCKS_KEPT:
            self._here.popitem(last=False)
        return self._here[index]

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """The next read begins there."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"{self.name}: seek to {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Where the next read begins."""
        return self._position

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def forget(self) -> None:
        """Nothing is on its way, and nothing is kept: what is read next is fetched."""
        for coming in self._coming.values():
            self._cancel(coming)
        self._coming.clear()
        self._here.clear()
        self._last_block = -2

    def close(self) -> None:
        """Nothing is on its way, and nothing is kept."""
        self.forget()
        super().close()
