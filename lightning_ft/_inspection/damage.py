"""Where a damaged checkpoint is damaged: which record of the archive, and which tensors lie in it."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from lightning_ft._inspection.contents import opened, read_record, records_of
from lightning_ft._inspection.descriptions import DescriptionError, TensorDescription, describe, dotted, leaves
from lightning_ft.errors import CorruptCheckpointError

CHUNK_BYTES = 1 << 20
_LOCAL_BYTES, _LOCAL_SIGNATURE = 30, b"PK\3\4"
_STORED, _UTF8, _NAMES_SHOWN = 0, 0x800, 3

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Damage:
    """One damaged part of a file."""

    part: str
    """What it is to people: `tensor state_dict.layer.weight`, `data.pkl`, ..."""
    record: str | None
    """The entry of the archive, None for what lies between them."""
    offset: int | None
    """Where it begins in the file, in bytes."""
    size_bytes: int | None
    reason: str


def locate(file: BinaryIO, path: str, progress: Progress) -> list[Damage]:
    """The damaged parts of the archive in `file`, in the order of the file; none if every checksum matches.

    A part outside every record (headers, the gaps between them) has no checksum of its own and is not found here, nor
    is anything in an archive without checksums.
    Memory: `CHUNK_BYTES` and the table of contents. Blocks on: reading the whole file.

    Args:
        file: Open, and read from anywhere.
        path: For messages.
        progress: Called with the number of bytes of records read since the last call.
    """
    try:
        with opened(file, path) as archive:
            records = records_of(archive)
            # The order of the file: reading goes forward only.
            found = [
                (name, info, damage)
                for name, info in sorted(records.items(), key=lambda item: item[1].header_offset)
                if (damage := _record_damage(file, info, progress)) is not None
            ]
            names = _tensors_of_records(archive, records, path) if found else {}
    except CorruptCheckpointError as error:
        return [Damage("table of contents", None, None, None, error.reason)]
    return [Damage(_part(name, names), name, offset, info.file_size, reason) for name, info, (offset, reason) in found]


def _record_damage(file: BinaryIO, info: zipfile.ZipInfo, progress: Progress) -> tuple[int, str] | None:
    """Offset and reason, None if the record is as its checksum says."""
    begins, problem = _data_offset(file, info)
    if problem is not None:
        return info.header_offset, problem
    if info.compress_type != _STORED:
        return begins, "it is compressed, which torch never does"
    if info.CRC is None:
        return None
    checksum, left = 0, info.file_size
    file.seek(begins)
    while left:
        chunk = file.read(min(left, CHUNK_BYTES))
        if not chunk:
            return begins, f"the file ends {left} bytes before it does"
        checksum = zlib.crc32(chunk, checksum)
        left -= len(chunk)
        progress(len(chunk))
    if checksum == info.CRC:
        return None
    following = file.read(8)
    if following == b"PK\7\x08" + struct.pack("<L", checksum):
        return begins, "its checksum in the table of contents is damaged; its data are as they were written"
    return begins, "its data do not match their checksum"


def _data_offset(file: BinaryIO, info: zipfile.ZipInfo) -> tuple[int, str | None]:
    file.seek(info.header_offset)
    header = file.read(_LOCAL_BYTES)
    if len(header) < _LOCAL_BYTES or not header.startswith(_LOCAL_SIGNATURE):
        return info.header_offset, "no header of a record where it should begin"
    name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
    name = file.read(name_bytes)
    if name != info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8 else "cp437", "replace"):
        return info.header_offset, "its header has another name than the table of contents"
    return info.header_offset + _LOCAL_BYTES + name_bytes + extra_bytes, None


def _tensors_of_records(
    archive: zipfile.ZipFile, records: Mapping[str, zipfile.ZipInfo], path: str
) -> dict[str, list[str]]:
    """For each record the names of the tensors in it; empty if the pickle that says so is damaged itself."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    try:
        root, _ = describe(read_record(archive, records, "data.pkl", path))
        for key, leaf in leaves(root):
            if isinstance(leaf, TensorDescription):
                names[f"data/{leaf.storage.key}"].append(dotted(key))
    except (DescriptionError, CorruptCheckpointError, zipfile.BadZipFile):
        return {}  # that data.pkl is damaged is among the findings already
    return names


def _part(record: str, names: Mapping[str, list[str]]) -> str:
    tensors = names.get(record, [])
    if not tensors:
        return record
    more = f" and {len(tensors) - _NAMES_SHOWN} more" if len(tensors) > _NAMES_SHOWN else ""
    return f"tensor {', '.join(tensors[:_NAMES_SHOWN])}{more}"
