"""The zip archive that a checkpoint is, byte for byte as torch's own writer lays it out, in few and large writes.

torch's writer calls the file it writes to about five times per record, and each call waits for the interpreter, which
the training thread has, and takes it away from that. It also reads a whole record for its checksum before the first
byte of it goes out, so that reading, hashing and writing a large one do not overlap.

::

    record  | local header | "FB" field up to the alignment | data | checksum and size |     (the last not if empty)
    end     | central directory | zip64 end record | zip64 locator | end-of-archive record (22 bytes) |

Nothing is compressed. The checksum follows the data: it is known when the last piece of it has gone out. Readers find
the data by the central directory, or, as `torch.load` can, by reckoning: then every field must have its usual length.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import Protocol

import xxhash

# What is smaller goes out together: a call per record costs more than copying it.
GATHER_BYTES = 1 << 20
# Checksum, hash and copy of one piece while the disk writes the one before; other threads run meanwhile.
SLICE_BYTES = 4 << 20

_U16_MAX, _U32_MAX = 0xFFFF, 0xFFFFFFFF
# torch writes an empty time, version 0, and names in UTF-8 (0x800); 0x8 says that the checksum follows the data.
_UTF8, _CHECKSUM_FOLLOWS = 0x800, 0x8
_LOCAL = struct.Struct("<4s2xH18xHH")  # flags, length of the name, of the extra fields
_CENTRAL = struct.Struct("<4s4xH6x3L2H10xL")  # flags, checksum, size twice, lengths of name and extra, offset
_FOLLOWING, _FOLLOWING_64 = struct.Struct("<4s3L"), struct.Struct("<4sL2Q")
_END_64, _LOCATOR, _END = struct.Struct("<4sQ2H8x4Q"), struct.Struct("<4s4xQL"), struct.Struct("<4s4x2H2L2x")
_MADE_BY, _NEEDS = 0x031E, 0x002D  # of the zip64 end record
_FIELD = struct.Struct("<2sH")


class Sink(Protocol):
    """Where an archive goes: what `write` was given it has copied or written when it returns."""

    def write(self, data: memoryview, /) -> int: ...


def write_archive(
    sink: Sink,
    records: Iterable[tuple[str, memoryview]],
    alignment_bytes: int = 64,
    serialization_id: str | None = None,
) -> None:
    """`sink` was given a whole archive of `records` and the two that torch's writer adds, in this order.

    Memory: `GATHER_BYTES`; a record of that size or larger is passed on in place.

    Args:
        sink: What it raises is passed on, and it is not written to again.
        records: Names, unique and without the folder, and bytes.
        alignment_bytes: Every record's data begins at a multiple of it.
        serialization_id: What tells one file from another where torch reports the loading of files; None: made of
            names and checksums, as torch does, but with another hash: torch's is that of a C++ library.
    """
    archive = _Archive(sink, alignment_bytes)
    for name, data in records:
        archive.add(name, data)
    archive.add("version", memoryview(b"3\n"))
    archive.add(".data/serialization_id", memoryview((serialization_id or archive.identity()).encode()))
    archive.end()


class _Archive:
    def __init__(self, sink: Sink, alignment_bytes: int) -> None:
        self._sink = sink
        self._alignment_bytes = alignment_bytes
        # One for the whole archive: fresh memory costs a page fault every 4 KiB.
        self._gather = memoryview(bytearray(GATHER_BYTES))
        self._gathered_bytes = 0
        self._sent_bytes = 0
        self._padding = b"Z" * alignment_bytes
        self._entries: list[tuple[bytes, int, int, int]] = []  # name, offset, size, checksum

    def add(self, name: str, data: memoryview) -> None:
        path = f"archive/{name}".encode()
        size_bytes, offset = data.nbytes, self._sent_bytes + self._gathered_bytes
        # The compressed size is 0 here as every size in the header before it: what counts follows the data.
        extra = _zip64(size_bytes, 0, offset)
        begins = offset + _LOCAL.size + len(path) + len(extra) + _FIELD.size
        padding_bytes = -begins % self._alignment_bytes
        flags = _UTF8 | _CHECKSUM_FOLLOWS if size_bytes else _UTF8
        self._send_small(
            _LOCAL.pack(b"PK\3\4", flags, len(path), len(extra) + _FIELD.size + padding_bytes)
            + path
            + extra
            + _FIELD.pack(b"FB", padding_bytes)
            + self._padding[:padding_bytes]
        )
        checksum = 0
        if size_bytes:
            checksum = self._send(data)
            if extra:
                self._send_small(_FOLLOWING_64.pack(b"PK\7\x08", checksum, size_bytes, size_bytes))
            else:
                self._send_small(_FOLLOWING.pack(b"PK\7\x08", checksum, size_bytes, size_bytes))
        self._entries.append((path, offset, size_bytes, checksum))

    def identity(self) -> str:
        """40 digits of all names and checksums so far."""
        names = xxhash.xxh3_64_intdigest(b"\0".join(path for path, *_ in self._entries))
        checksums = xxhash.xxh3_64_intdigest(struct.pack(f"<{len(self._entries)}L", *(e[3] for e in self._entries)))
        return f"{names:020}{checksums:020}"

    def end(self) -> None:
        begins = self._sent_bytes + self._gathered_bytes
        for path, offset, size_bytes, checksum in self._entries:
            shown_bytes = min(size_bytes, _U32_MAX)
            extra = _zip64(size_bytes, size_bytes, offset)
            self._send_small(
                _CENTRAL.pack(
                    b"PK\1\2", _UTF8 | _CHECKSUM_FOLLOWS if size_bytes else _UTF8, checksum, shown_bytes, shown_bytes,
                    len(path), len(extra), min(offset, _U32_MAX),
                )
                + path
                + extra
            )  # fmt: skip
        ends = self._sent_bytes + self._gathered_bytes
        count, size_bytes = len(self._entries), ends - begins
        shown = min(count, _U16_MAX)
        self._send_small(
            # torch always writes the zip64 records. Their own size does not count the first twelve bytes.
            _END_64.pack(b"PK\6\6", _END_64.size - 12, _MADE_BY, _NEEDS, count, count, size_bytes, begins)
            + _LOCATOR.pack(b"PK\6\7", ends, 1)
            + _END.pack(b"PK\5\6", shown, shown, min(size_bytes, _U32_MAX), min(begins, _U32_MAX))
        )
        self._flush()

    def _send(self, data: memoryview) -> int:
        """`data` is on its way; returns its checksum."""
        if data.nbytes < GATHER_BYTES:
            # First: other threads run while it is reckoned, and the copy finds the bytes in the cache.
            checksum = zlib.crc32(data)
            self._send_small(data)
            return checksum
        self._flush()
        checksum = 0
        for start in range(0, data.nbytes, SLICE_BYTES):
            piece = data[start : start + SLICE_BYTES]
            checksum = zlib.crc32(piece, checksum)
            self._sink.write(piece)
            self._sent_bytes += piece.nbytes
        return checksum

    def _send_small(self, data: bytes | memoryview) -> None:
        end = self._gathered_bytes + len(data)
        if end > GATHER_BYTES:
            self._flush()
            end = len(data)
        self._gather[self._gathered_bytes : end] = data
        self._gathered_bytes = end

    def _flush(self) -> None:
        if self._gathered_bytes:
            self._sink.write(self._gather[: self._gathered_bytes])
            self._sent_bytes += self._gathered_bytes
            self._gathered_bytes = 0


def _zip64(size_bytes: int, stored_bytes: int, offset: int) -> bytes:
    """The extra field for what does not fit into 32 bits; empty if everything does."""
    if size_bytes < _U32_MAX and offset < _U32_MAX:
        return b""
    sizes = struct.pack("<2Q", size_bytes, stored_bytes) if size_bytes >= _U32_MAX else b""
    values = sizes + (struct.pack("<Q", offset) if offset >= _U32_MAX else b"")
    return _FIELD.pack(b"\1\0", len(values)) + values
