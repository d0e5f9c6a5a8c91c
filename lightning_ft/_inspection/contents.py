"""What is inside a checkpoint, file or directory: tables of contents, and pickles as descriptions. Needs no torch."""

from __future__ import annotations

import errno
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO

from lightning_ft._inspection.descriptions import (
    DescriptionError,
    Path,
    TensorDescription,
    bytes_of,
    describe,
    dotted,
    leaves,
)
from lightning_ft.errors import CorruptCheckpointError
from lightning_ft.manifest import METADATA, TAIL_BYTES, Manifest, parse_tail
from lightning_ft.storage import Storage

# What `zipfile` raises for bytes that make no sense to it.
_NONSENSE = (
    zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, RuntimeError, OverflowError, struct.error, zlib.error
)  # fmt: skip
# A pickle is read as a whole. Those of checkpoints have some KiB, with very many tensors some MiB.
MAX_PICKLE_BYTES = 1 << 30


@dataclass(frozen=True)
class Contents:
    """A checkpoint, looked into without loading it."""

    path: str
    size_bytes: int
    manifest: Manifest | None
    """None: written by plain Lightning or another tool."""
    root: Any
    """What the file holds: containers, plain values, `TensorDescription` and `Placeholder`."""
    unknown: frozenset[str]
    """Globals of the pickle that stand in `root` as placeholders."""
    records: Mapping[str, zipfile.ZipInfo]
    """Entries of the archive by their names without the folder: `data.pkl`, `data/0`, ..."""

    @cached_property
    def leaves(self) -> list[tuple[Path, Any]]:
        """Every value with its path."""
        return list(leaves(self.root))

    @cached_property
    def tensors(self) -> list[tuple[str, TensorDescription]]:
        """Every tensor with its dotted name, in the order of the file."""
        return [(dotted(path), leaf) for path, leaf in self.leaves if isinstance(leaf, TensorDescription)]

    @property
    def step(self) -> int | None:
        """Optimizer steps taken, as manifest or content say."""
        return self.manifest.step if self.manifest is not None else self._number("global_step")

    @property
    def epoch(self) -> int | None:
        """Epoch, as manifest or content say."""
        return self.manifest.epoch if self.manifest is not None else self._number("epoch")

    def _number(self, key: str) -> int | None:
        value = self.root.get(key) if isinstance(self.root, dict) else None
        return value if isinstance(value, int) else None


def read_contents(storage: Storage, path: str) -> Contents:
    """What `path` is and holds. Memory: that of its pickle and of its table of contents.

    Raises:
        CheckpointError: It is damaged where it was read, or no checkpoint of torch.
        OSError: It cannot be read.
    """
    with storage.open_read(path) as file:
        size_bytes, manifest = read_tail(file, path)
        with opened(file, path) as archive:
            records = records_of(archive)
            data = read_record(archive, records, "data.pkl", path)
    try:
        root, unknown = describe(data)
        contents = Contents(path, size_bytes, manifest, root, unknown, records)
        _ = contents.leaves
    except DescriptionError as error:
        raise CorruptCheckpointError(path, f"data.pkl cannot be read: {error}") from error
    return contents


@dataclass(frozen=True)
class TensorInPieces:
    """A tensor of a directory of shards."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: int
    """In so many it lies in the files."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return bytes_of(self.dtype, self.shape)


def read_table(storage: Storage, path: str) -> list[TensorInPieces]:
    """Every tensor in the directory of shards `path`, in the order of its table; nothing of the table is executed.

    Raises:
        CorruptCheckpointError: There is no table that can be read.
        OSError: It cannot be read.
    """
    with storage.open_file(path, METADATA) as file:
        data = file.read(MAX_PICKLE_BYTES)
    try:
        root, _ = describe(data)
        entries = root.state["state_dict_metadata"].items()
        return [_in_pieces(name, entry.state) for name, entry in entries if entry.state and "size" in entry.state]
    except (DescriptionError, AttributeError, KeyError, TypeError, ValueError) as error:  # it has another form
        raise CorruptCheckpointError(path, f"{METADATA} cannot be read: {type(error).__name__}: {error}") from error


def _in_pieces(name: Any, entry: dict[str, Any]) -> TensorInPieces:
    properties = entry["properties"].state  # a tuple since torch 2.2
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    shape = tuple(entry["size"])
    if not all(isinstance(extent, int) for extent in shape):
        raise DescriptionError(f"{name} has the shape {shape}")
    return TensorInPieces(str(name), str(dtype).rpartition(".")[2], shape, len(entry["chunks"]))


def read_tail(file: BinaryIO, path: str) -> tuple[int, Manifest | None]:
    """Size and manifest of the open file, which no longer changes for this reader even if it is replaced."""
    size_bytes = file.seek(0, 2)
    file.seek(max(0, size_bytes - TAIL_BYTES))
    return size_bytes, parse_tail(file.read(TAIL_BYTES), size_bytes, path)


@contextmanager
def opened(file: BinaryIO, path: str) -> Iterator[zipfile.ZipFile]:
    """The archive in `file`; damage that its reader notices is an error of ours.

    One that was written without checksums is read without.

    Raises:
        CorruptCheckpointError: See above.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            if not has_checksums(archive):
                for info in archive.infolist():
                    info.CRC = None  # type: ignore[assignment]  # so that `zipfile` compares nothing
            yield archive
    except _NONSENSE as error:
        raise CorruptCheckpointError(path, f"the archive is damaged: {error}") from error
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A local file cannot be sought to where a damaged offset points: before its beginning, or beyond 2^63 bytes.
        raise CorruptCheckpointError(path, "the archive is damaged: an offset lies outside of any file") from error


def has_checksums(archive: zipfile.ZipFile) -> bool:
    """Whether the records have some: ``torch.serialization.set_crc32_options(False)`` leaves zeros."""
    return any(info.CRC for info in archive.infolist())


def records_of(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The entries by their names without the folder, which is another in every archive of torch."""
    return {info.filename.partition("/")[2] or info.filename: info for info in archive.infolist()}


def read_record(archive: zipfile.ZipFile, records: Mapping[str, zipfile.ZipInfo], name: str, path: str) -> bytes:
    """The bytes of a small record, which its checksum confirms.

    Raises:
        CorruptCheckpointError: It is not there, too large, or its checksum does not match.
    """
    info = records.get(name)
    if info is None:
        raise CorruptCheckpointError(path, f"a zip archive without {name}: no checkpoint of torch")
    if info.file_size > MAX_PICKLE_BYTES:
        raise CorruptCheckpointError(path, f"{name} has {info.file_size} bytes, more than a pickle of a checkpoint")
    return archive.read(info)
