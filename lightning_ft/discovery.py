"""Which checkpoints a directory holds, which of them are good, and which one to continue from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_ft._names import SUFFIX, join, normalise, parse_checkpoint_name, split
from lightning_ft.errors import (
    CheckpointError,
    ConfigurationError,
    CorruptCheckpointError,
    NoUsableCheckpointError,
)
from lightning_ft.events import PassedOver, emit
from lightning_ft.manifest import CheckpointInfo
from lightning_ft.storage import Storage

Depth = Literal["full", "size", "listed"]

_DEPTHS = ("full", "size", "listed")
_FOREIGN = "no manifest: written by plain Lightning or another tool"
# What the plugin writes for callers that are no `FaultTolerantCheckpoint`: no state of a run to continue.
_NO_RUN = ""
_MISSING = "missing"
_LOOKS_AGAIN = 3


@dataclass(frozen=True)
class Selection:
    """What a directory offers to continue from. Three cases: chosen, empty, or only unusable checkpoints."""

    chosen: CheckpointInfo | None
    """The newest good checkpoint of the newest run."""
    passed_over: tuple[tuple[str, str], ...]
    """Paths that were looked at before it and cannot be used, each with the reason."""
    foreign: tuple[CheckpointInfo, ...]
    """Other checkpoints: of plain Lightning, of a `ModelCheckpoint` of the run; never chosen here."""
    empty: bool
    """Whether there is no checkpoint of any run of ours at all, good or bad."""


def list_checkpoints(
    dirpath: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> list[CheckpointInfo]:
    """Every `*.ckpt` in `dirpath`, newest first as the manifests say, those with a problem last.

    Only manifests are read. Modification times are never looked at, names only to order equal manifests.

    Raises:
        OSError: The directory cannot be listed; one that does not exist is empty.
    """
    storage = Storage(storage_options)
    dirpath = normalise(dirpath)
    infos = [
        _examine(storage, join(dirpath, name))
        for name in storage.listdir(dirpath)
        if name.endswith(SUFFIX) and not name.startswith(".")
    ]
    good = sorted((info for info in infos if info.problem is None), key=_newness, reverse=True)
    return good + [info for info in infos if info.problem is not None]


def _newness(info: CheckpointInfo) -> tuple[tuple[int, int, int], int, str]:
    parsed = parse_checkpoint_name(info.name)
    # Equal manifests: a copy under another name. Ours come first, a second version before the first.
    return (info.order, -1 if parsed is None else parsed[1], info.name)


def verify(
    path: str | os.PathLike[str], depth: Depth = "full", storage_options: Mapping[str, Any] | None = None
) -> CheckpointInfo:
    """What `path` is; its `problem` is None exactly if it is good to this depth.

    Args:
        path: A checkpoint.
        depth: "listed": the manifest is there, sealed, and of a known format. "size": the file also has the
            size that was written; of a single file, the manifest cannot be read without seeing that.
            "full": every bit is as it was written.
        storage_options: For `fsspec`, used with URLs only.

    Raises:
        ConfigurationError: There is no such depth.
    """
    if depth not in _DEPTHS:
        raise ConfigurationError(f"depth={depth!r}: one of {', '.join(_DEPTHS)} is needed")
    storage = Storage(storage_options)
    info = _examine(storage, normalise(path))
    if depth != "full":
        return info
    verified = _compare_digest(storage, info)
    for _ in range(_LOOKS_AGAIN):
        if verified.problem is None:
            break
        again = _examine(storage, info.path)
        if again.manifest == info.manifest:
            break
        # Replaced while it was read (a ``last.ckpt`` is, at every save): the manifest was of one file, the bytes of
        # the next.
        info, verified = again, _compare_digest(storage, again)
    return verified


def _examine(storage: Storage, path: str) -> CheckpointInfo:
    """What the end of the file says; everything that is wrong with this one file becomes its problem."""
    name = split(path)[1]
    try:
        manifest, size_bytes = storage.read_manifest(path)
    except (CheckpointError, OSError) as error:
        return CheckpointInfo(path, name, 0, None, _problem(error))
    return CheckpointInfo(path, name, size_bytes, manifest, None if manifest else _FOREIGN)


def _compare_digest(storage: Storage, info: CheckpointInfo) -> CheckpointInfo:
    """`info`, with a problem if the data is not what was written."""
    if info.manifest is None:
        return info
    try:
        digest = storage.read_digest(info.path, info.manifest.size_bytes)
    except (CheckpointError, OSError) as error:
        return replace(info, problem=_problem(error))
    if digest != info.manifest.digest:
        return replace(info, problem="data is damaged: its digest does not match the manifest")
    return info


def _problem(error: CheckpointError | OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return _MISSING
    if isinstance(error, IsADirectoryError):
        return "a directory, not a single-file checkpoint"
    if isinstance(error, CorruptCheckpointError):
        return error.reason
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def select(
    dirpath: str | os.PathLike[str], depth: Depth = "full", storage_options: Mapping[str, Any] | None = None
) -> Selection:
    """The newest checkpoint of the newest run that is good to this depth, and what was passed over for it.

    The newest run is the one of the newest manifest that can be read: an older run is never continued in
    place of one that is broken. No state of any file makes this raise.

    Ranks: zero; the answer is broadcast. Blocks on: reading the chosen checkpoint once, if `depth` is "full".

    Raises:
        OSError: The directory cannot be listed.
    """
    selection = _select(dirpath, depth, storage_options)
    for _ in range(_LOOKS_AGAIN):
        # What is gone since it was listed was rotated away by a living run, which has committed a newer one.
        if not any(reason == _MISSING for _, reason in selection.passed_over):
            break
        selection = _select(dirpath, depth, storage_options)
    for path, reason in selection.passed_over:
        emit(PassedOver(path, reason))
    return selection


def _select(dirpath: str | os.PathLike[str], depth: Depth, storage_options: Mapping[str, Any] | None) -> Selection:
    infos = list_checkpoints(dirpath, storage_options)
    readable = [info for info in infos if _run_of(info) is not None]
    # By its name, for want of anything else: of a truncated file nothing tells what it was.
    damaged = [info for info in infos if info.problem is not None and parse_checkpoint_name(info.name)]
    foreign = tuple(info for info in infos if info not in readable and info not in damaged)
    passed_over = [(info.path, info.problem or "") for info in damaged]
    run_id = _run_of(readable[0]) if readable else None
    chosen = None
    for candidate in readable:
        if _run_of(candidate) != run_id:
            continue
        verified = verify(candidate.path, depth, storage_options)
        if verified.problem is None:
            chosen = verified
            break
        passed_over.append((candidate.path, verified.problem))
    if chosen is None:
        passed_over += [
            (info.path, f"belongs to the older run {_run_of(info)}") for info in readable if _run_of(info) != run_id
        ]
    return Selection(chosen, tuple(passed_over), foreign, empty=not readable and not damaged)


def _run_of(info: CheckpointInfo) -> str | None:
    """The run that can be continued from the checkpoint, None if there is none.

    What other callbacks save is in the middle of things: a restart from it would leave out a validation, or a step of
    a scheduler.
    """
    if info.problem is not None or info.manifest is None or info.manifest.run_id == _NO_RUN:
        return None
    if info.manifest.boundary == "none":
        return None
    return info.manifest.run_id


def last_good(
    dirpath: str | os.PathLike[str], depth: Depth = "full", storage_options: Mapping[str, Any] | None = None
) -> CheckpointInfo | None:
    """The checkpoint to continue from, None if the directory holds none of this package.

    Raises:
        NoUsableCheckpointError: There are checkpoints, none is usable; to start over is a person's decision.
        OSError: The directory cannot be listed.
    """
    selection = select(dirpath, depth, storage_options)
    if selection.chosen is None and not selection.empty:
        raise NoUsableCheckpointError(normalise(dirpath), selection.passed_over)
    return selection.chosen


def next_start(infos: Iterable[CheckpointInfo]) -> int:
    """The ordinal of a start that supersedes every checkpoint listed; 1 is the first."""
    return 1 + max((info.manifest.start for info in infos if info.manifest is not None), default=0)
