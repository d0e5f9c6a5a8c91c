"""Where the bytes of one file go, and the file object in front of it: bytes in, hashed on the way, one error kept."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

import xxhash

from lightning_ft._hang import headway

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

# Smaller writes are gathered to this size. Far below that of `_disk.archive`, whose pieces would be copied here once
# more.
BUFFER_BYTES = 64 << 10
# Upper limit of one hash or system call: a failure, or a thread waiting for the GIL, is not kept for long.
CHUNK_BYTES = 16 << 20


class Sink(ABC):
    """One file that is being made, in order; nobody takes it for finished before `publish`.

    Thread: one for all methods, any. Each blocks on the disk or the store, and raises what that raises.
    """

    @abstractmethod
    def append(self, view: memoryview) -> None:
        """`view` is taken: it may be overwritten."""

    def complete(self) -> None:  # noqa: B027 - not abstract: an upload may be complete only when it is published
        """Every byte is with the system or the store; nothing is promised about its durability."""

    @abstractmethod
    def publish(self, total_bytes: int) -> None:
        """The file is durable and has this size: a local one under the name it was made with, an object under its own.

        Raises:
            SaveError: The store holds another size.
        """

    @abstractmethod
    def discard(self) -> None:
        """Nothing is left of what was not published; may be repeated, and does nothing to what was."""


class HashedFile:
    """A file for `torch.save` whose bytes go into a sink, hashed.

    As a context manager it aborts unless finished, and raises the storage's own error in place of what the writer
    made of it.

    Memory: `BUFFER_BYTES`; a larger memoryview is hashed and passed on in place, without a copy here.

    Thread: one, any.

    Args:
        path: Its final name, for messages.
        attempt: The name that it has now, for messages.
        sink: Where the bytes go; is the file's own.
    """

    HELD_BACK_BYTES = 0
    """So many at the end are not passed on: no store lets us go back to change them."""

    def __init__(self, path: str, attempt: str, sink: Sink) -> None:
        self.path = path
        self.attempt = attempt
        self.failure: Exception | None = None
        self._sink = sink
        self._hash = xxhash.xxh3_128()
        self._pending = bytearray()
        self._size_bytes = 0  # hashed and passed on

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """All of `data` is taken; returns its length in bytes, never less."""
        view = memoryview(data).cast("B")
        size_bytes = view.nbytes
        if len(self._pending) + size_bytes <= BUFFER_BYTES:
            self._pending += view
            return size_bytes
        with self._own_error():
            passed_on_bytes = size_bytes - self.HELD_BACK_BYTES
            if passed_on_bytes < 0:
                self._pending += view
                self._put_pending()
            else:
                pending, self._pending = self._pending, bytearray(view[passed_on_bytes:])
                self._put(memoryview(pending))
                for start in range(0, passed_on_bytes, CHUNK_BYTES):
                    self._put(view[start : min(start + CHUNK_BYTES, passed_on_bytes)])
        return size_bytes

    def tell(self) -> int:
        """How many bytes were written."""
        return self._size_bytes + len(self._pending)

    def flush(self) -> None:
        """Nothing changed: `torch.save` calls it, where it writes the archive; durability comes at the end."""

    def abort(self) -> None:
        """Nothing is left of what was not finished; does nothing to what was."""
        self._sink.discard()

    def _put_pending(self) -> None:
        """Of what was gathered, only what is held back remains."""
        at = len(self._pending) - self.HELD_BACK_BYTES
        pending, self._pending = self._pending, self._pending[max(0, at) :]
        self._put(memoryview(pending)[: max(0, at)])

    def _put(self, view: memoryview) -> None:
        self._hash.update(view)
        self._sink.append(view)
        headway.made()
        self._size_bytes += view.nbytes

    @contextlib.contextmanager
    def _own_error(self) -> Iterator[None]:
        """What the storage raises is remembered: every write after it, and the end, raise it again."""
        if self.failure is not None:
            raise self.failure
        try:
            yield
        except Exception as error:
            self.failure = error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.abort()
        except Exception as aborting:
            if error is None:
                raise
            logger.warning("%s: could not clean up %s: %s", self.path, self.attempt, aborting)
        if isinstance(error, Exception) and self.failure is not None and error is not self.failure:
            raise self.failure
