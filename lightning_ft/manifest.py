"""The manifest: what a checkpoint says about itself, and how it is sealed.

The file format is the contract (see FORMAT.md), the classes are not. A single-file checkpoint is an ordinary
zip archive as `torch.save` writes it; its archive comment is the manifest as JSON. `digest` covers every byte
before the end-of-archive record, the seal covers that record and the comment, so no bit is uncovered. Of a directory
the manifest is a file of its own, with size and digest of every other one; its seal covers the whole of it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import xxhash

from lightning_ft._names import FORMAT_VERSION, parse_checkpoint_name, split
from lightning_ft.errors import CorruptCheckpointError, ManifestError, UnsupportedFormatError

EOCD_BYTES = 22
EOCD_SIGNATURE = b"PK\x05\x06"
MAX_COMMENT_BYTES = 65535
MAX_LEVELS = 50
TAIL_BYTES = EOCD_BYTES + MAX_COMMENT_BYTES

# Features that a reader must understand to use a checkpoint rightly; none so far.
KNOWN_FEATURES: frozenset[str] = frozenset()

DIRECTORY_MANIFEST = "manifest.json"
"""The manifest of a checkpoint that is a directory, and what makes it one."""
METADATA = ".metadata"
"""What every directory of DCP has, that of plain Lightning too: the table of its tensors."""
REST = "meta.pt"
"""What Lightning writes beside it: everything that is neither weights nor optimizer state."""
MAX_MANIFEST_BYTES = 64 << 20
"""Of a directory; it has about 100 bytes per file."""

_MAGIC = b'"lightning_ft":'
_SEAL = re.compile(rb'"seal":"([0-9a-f]{32})"\}\Z')
_SEAL_KEY = b'"seal":"'
_SEAL_ENDING_BYTES = 32 + len(b'"}')


@dataclass(frozen=True)
class FileRecord:
    """One file of a directory, as it was written."""

    size_bytes: int
    digest: str
    """xxh3-128 of all its bytes, hexadecimal."""


@dataclass(frozen=True)
class Manifest:
    """What one checkpoint says about itself; on disk, the names of the fields are the keys."""

    generation: str
    """Identity of this save, never used twice (uuid, 32 hexadecimal digits)."""
    run_id: str
    """Identity of the run: every checkpoint that continues another one carries the same."""
    start: int
    """How many times training into this directory was started; a later start supersedes an earlier one."""
    step: int
    """Optimizer steps taken."""
    batch: int
    """Batches trained in total; grows by one per batch, also within a gradient accumulation."""
    epoch: int
    """Epochs finished since the run began."""
    reason: str
    """Why it was saved: "periodic", "epoch_end", "train_end", "user", ..."""
    boundary: str
    """Where in the loop: "step", "epoch" or "none"."""
    created: str
    """ISO 8601, UTC. For people: clocks of different machines never decide anything."""
    size_bytes: int
    """Number of bytes before the end-of-archive record; of a directory, of all `files`."""
    digest: str
    """xxh3-128 of these bytes, hexadecimal; of a directory, see `digest_of_files`."""
    parent: str | None = None
    """Generation that training was resumed from."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of the software that wrote it; for people."""
    topology: dict[str, int | str] = field(default_factory=dict)
    """The number of processes and the like."""
    metrics: dict[str, float | int] = field(default_factory=dict)
    """Timings and the like, for people."""
    requires: tuple[str, ...] = ()
    """Features that a reader must understand to use this checkpoint rightly."""
    format: int = FORMAT_VERSION
    """Version of the format it is written in."""
    files: dict[str, FileRecord] = field(default_factory=dict)
    """Of a directory: every file in it by its name, but for the manifest itself. Empty for a single file."""

    def is_exclusive(self, path: str) -> bool:
        """Whether it must not take the place of another one at `path`; other callbacks write over their own files."""
        return self.boundary != "none" and parse_checkpoint_name(split(path)[1]) is not None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_str(value: object) -> bool:
    return isinstance(value, str)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


def _is_list_of_str(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def is_plain_name(name: object) -> bool:
    """Whether a file of a directory may have this name: one of the directory itself, and not that of its manifest."""
    return isinstance(name, str) and name not in ("", ".", "..", DIRECTORY_MANIFEST) and not set(name) & set("/\\\0")


def _is_files(value: object) -> bool:
    return isinstance(value, dict) and all(
        is_plain_name(name)
        and isinstance(record, dict)
        and _is_int(record.get("size_bytes"))
        and _is_str(record.get("digest"))
        for name, record in value.items()
    )


_CHECKS: dict[str, tuple[Callable[[object], bool], str]] = {
    "format": (_is_int, "an integer"),
    "generation": (_is_str, "a string"),
    "run_id": (_is_str, "a string"),
    "start": (_is_int, "an integer"),
    "step": (_is_int, "an integer"),
    "batch": (_is_int, "an integer"),
    "epoch": (_is_int, "an integer"),
    "reason": (_is_str, "a string"),
    "boundary": (_is_str, "a string"),
    "created": (_is_str, "a string"),
    "size_bytes": (_is_int, "an integer"),
    "digest": (_is_str, "a string"),
    "parent": (lambda value: value is None or _is_str(value), "a string or null"),
    "versions": (_is_mapping, "an object"),
    "topology": (_is_mapping, "an object"),
    "metrics": (_is_mapping, "an object"),
    "requires": (_is_list_of_str, "a list of strings"),
    "files": (_is_files, "an object of plain names, each with size_bytes and digest"),
}
_OPTIONAL = frozenset({"parent", "versions", "topology", "metrics", "requires", "files"})


def digest_of_files(files: Mapping[str, FileRecord]) -> str:
    """One digest that stands for all of `files`: of a line per file, in the order of their names."""
    lines = "".join(f"{files[name].digest} {files[name].size_bytes} {json.dumps(name)}\n" for name in sorted(files))
    return xxhash.xxh3_128_hexdigest(lines.encode("ascii"))


def to_json(manifest: Manifest) -> str:
    """The manifest as one line of ASCII JSON."""
    values: dict[str, object] = {"lightning_ft": "checkpoint"}
    values.update((item.name, getattr(manifest, item.name)) for item in fields(manifest))
    # JSON has no word for NaN and infinity, and a number for people must not make a save fail.
    values["metrics"] = {name: value for name, value in manifest.metrics.items() if math.isfinite(value)}
    values["files"] = {name: asdict(record) for name, record in manifest.files.items()}
    if not manifest.files:
        del values["files"]
    try:
        return json.dumps(values, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ManifestError(f"manifest of step {manifest.step} cannot be written as JSON: {error}") from error


def from_json(text: str) -> Manifest:
    """The manifest that `to_json` wrote; keys that this version does not know are ignored.

    Raises:
        UnsupportedFormatError: The format is newer, or a required feature is unknown.
        ManifestError: This is no JSON object, keys are missing, or values are of the wrong kind.
    """
    try:
        values = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"manifest is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ManifestError("manifest is not a JSON object")
    _refuse_newer(values)
    _refuse_nested(values, MAX_LEVELS)
    missing = [name for name in _CHECKS if name not in values and name not in _OPTIONAL]
    if missing:
        raise ManifestError(f"manifest lacks {', '.join(missing)}")
    known: dict[str, Any] = {name: values[name] for name in _CHECKS if name in values}
    wrong = [f"{name} is not {_CHECKS[name][1]}" for name, value in known.items() if not _CHECKS[name][0](value)]
    if wrong:
        raise ManifestError(f"manifest is malformed: {', '.join(wrong)}")
    if "requires" in known:
        known["requires"] = tuple(known["requires"])
    if "files" in known:
        known["files"] = {name: FileRecord(r["size_bytes"], r["digest"]) for name, r in known["files"].items()}
    return Manifest(**known)


def _finite(text: str) -> float:
    """JSON has no other numbers, and `json` of Python takes them and writes them again."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number of JSON")
    return value


def _refuse_nested(value: object, levels: int) -> None:
    """Whoever walks over the manifest later comes to an end."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if children and not levels:
        raise ManifestError(f"manifest is malformed: nested deeper than {MAX_LEVELS} levels")
    for child in children:
        _refuse_nested(child, levels - 1)


def _refuse_newer(values: Mapping[str, object]) -> None:
    """The format and every required feature are known; checked before anything else is looked at."""
    version, requires = values.get("format"), values.get("requires", [])
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"format {version} is newer than {FORMAT_VERSION}, the newest this lightning-ft reads; upgrade it"
        )
    if isinstance(requires, list):
        unknown = [str(name) for name in requires if name not in KNOWN_FEATURES]
        if unknown:
            raise UnsupportedFormatError(
                f"needs {', '.join(unknown)}, which this lightning-ft does not know; upgrade it"
            )


def seal(eocd: bytes, manifest: Manifest) -> bytes:
    """The bytes that must end the file in place of `eocd`: the same record, now with the sealed manifest.

    Args:
        eocd: The 22 bytes of an end-of-central-directory record without a comment.
        manifest: Its `size_bytes` and `digest` are those of everything before that record.

    Raises:
        ManifestError: `eocd` is no such record, or the manifest is too long for a zip comment.
    """
    if len(eocd) != EOCD_BYTES or not eocd.startswith(EOCD_SIGNATURE) or eocd[-2:] != b"\0\0":
        raise ManifestError("the archive does not end in an end-of-archive record without a comment")
    blank = _blank(manifest)
    if len(blank) > MAX_COMMENT_BYTES:
        raise ManifestError(
            f"manifest of step {manifest.step} takes {len(blank)} bytes, a zip comment holds"
            f" {MAX_COMMENT_BYTES}: record fewer versions, topology entries or metrics"
        )
    return _sealed(eocd[:-2] + len(blank).to_bytes(2, "little") + blank)


def seal_directory(manifest: Manifest) -> bytes:
    """What the manifest of a directory holds on disk."""
    return _sealed(_blank(manifest))


def _blank(manifest: Manifest) -> bytes:
    return (to_json(manifest)[:-1] + f',"seal":"{"0" * 32}"}}').encode("ascii")


def _sealed(blank: bytes) -> bytes:
    """`blank`, which ends in an empty seal, with the seal of all of it."""
    return blank[:-_SEAL_ENDING_BYTES] + xxhash.xxh3_128_hexdigest(blank).encode("ascii") + b'"}'


def _require_seal(record: bytes, path: str) -> None:
    match = _SEAL.search(record)
    if match is None:
        raise CorruptCheckpointError(path, "manifest is damaged: it does not end in a seal")
    if _sealed(record[:-_SEAL_ENDING_BYTES] + b"0" * 32 + b'"}') != record:
        raise CorruptCheckpointError(path, "manifest is damaged: its seal does not match")


def parse_directory(text: bytes, path: str) -> Manifest:
    """The manifest of a directory, from what its file holds.

    Args:
        text: All of it.
        path: The directory, for messages.

    Raises:
        CorruptCheckpointError: A broken seal.
        UnsupportedFormatError: Intact, but written by a newer version.
        ManifestError: The seal holds, yet the manifest is malformed.
    """
    _require_seal(text, path)
    manifest = from_json(text.decode("utf-8", "backslashreplace"))
    total_bytes = sum(record.size_bytes for record in manifest.files.values())
    if (manifest.size_bytes, manifest.digest) != (total_bytes, digest_of_files(manifest.files)):
        raise ManifestError("manifest is malformed: size_bytes and digest are not those of its files")
    return manifest


def parse_tail(tail: bytes, total_bytes: int, path: str) -> Manifest | None:
    """The manifest in the last bytes of a file, or None if the file is a zip archive of somebody else.

    The seal is checked before anything in the manifest is believed, whatever its format version.

    Args:
        tail: The last `min(total_bytes, TAIL_BYTES)` bytes.
        total_bytes: Size of the whole file.
        path: For messages.

    Raises:
        CorruptCheckpointError: Truncated, no zip archive, a broken seal, or of another size than sealed.
        UnsupportedFormatError: Intact, but written by a newer version.
        ManifestError: The seal holds, yet the manifest is malformed.
    """
    record = _find_end_record(tail)
    if record is None:
        raise CorruptCheckpointError(path, "truncated or not a zip archive")
    comment = record[EOCD_BYTES:]
    # Either mark makes it ours, so that damage to one of them cannot pass the file off as foreign.
    if _MAGIC not in comment and _SEAL_KEY not in comment:
        return None
    _require_seal(record, path)
    # Ours are ASCII; those of later versions may not be, and are to be told from damaged ones.
    manifest = from_json(comment.decode("utf-8", "backslashreplace"))
    size_bytes = total_bytes - len(record)
    if manifest.size_bytes != size_bytes:
        raise CorruptCheckpointError(path, f"has {size_bytes} bytes of data, {manifest.size_bytes} were written")
    return manifest


def _find_end_record(tail: bytes) -> bytes | None:
    """The end-of-archive record with its comment, which must reach exactly to the end of `tail`."""
    offset = tail.rfind(EOCD_SIGNATURE)
    while offset != -1:
        end = offset + EOCD_BYTES
        if end <= len(tail) and end + int.from_bytes(tail[end - 2 : end], "little") == len(tail):
            return tail[offset:]
        # Also found inside a comment of somebody else, or inside the data.
        offset = tail.rfind(EOCD_SIGNATURE, 0, offset + len(EOCD_SIGNATURE) - 1)
    return None


@dataclass(frozen=True)
class CheckpointInfo:
    """What is known of one checkpoint file without reading its data."""

    path: str
    """Where it is: a path or URL."""
    name: str
    """The last part of `path`."""
    size_bytes: int
    """Of the file; of a directory, of all files in it."""
    manifest: Manifest | None
    """What it says about itself; None if it has no manifest that can be read."""
    problem: str | None
    """Why it is not good, None if it is, to the depth that was asked for."""

    @property
    def order(self) -> tuple[int, int, int]:
        """What is newer compares greater; without a manifest, older than everything.

        The start comes first: after going back to an earlier step, the counters are smaller, the state newer.
        """
        if self.manifest is None:
            return (-1, -1, -1)
        return (self.manifest.start, self.manifest.batch, self.manifest.step)
