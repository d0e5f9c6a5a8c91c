"""Which checkpoints a directory holds, which of them are good, and which one to continue from."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Literal

from lightning_ft._names import (
    STARTS_NAME,
    SUFFIX,
    is_local,
    join,
    likely_newest,
    normalise,
    parse_checkpoint_name,
    parse_leftover,
    split,
)
from lightning_ft._restart import starts as _starts
from lightning_ft._stores.objects import Entry
from lightning_ft.errors import (
    CheckpointError,
    ConfigurationError,
    CorruptCheckpointError,
    NoUsableCheckpointError,
    StorageError,
)
from lightning_ft.events import PassedOver, emit
from lightning_ft.manifest import CheckpointInfo, Manifest
from lightning_ft.storage import Storage

Depth = Literal["full", "size", "listed"]
Verifying = Callable[[str, Depth, "Mapping[str, Any] | None"], CheckpointInfo]
"""What `verify` does, or something that does it in another way."""

_DEPTHS = ("full", "size", "listed")
_FOREIGN = "no manifest: written by plain Lightning or another tool"
# What the plugin writes for callers that are no `FaultTolerantCheckpoint`: no state of a run to continue.
_NO_RUN = ""
_MISSING = "missing"
_LOOKS_AGAIN = 3

AS_RECORDED = -1
"""Of `give_up_after`: what the run that wrote into the directory had."""

LOOKED_AT_FIRST = 5
"""Of a large directory, so many checkpoints that are last by step, and as many by version, are read at first."""


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
    futile_starts: int = 0
    """So many starts from the chosen one have saved nothing, and so it was with every one before it."""


def list_checkpoints(
    dirpath: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> list[CheckpointInfo]:
    """Every `*.ckpt` in `dirpath`, newest first as the manifests say, those with a problem last.

    Only manifests are read. Modification times are never looked at, names only to order equal manifests. Nothing on
    disk is changed.

    Args:
        dirpath: A directory or URL.
        storage_options: For `fsspec`, used with URLs only.

    Raises:
        OSError: The directory cannot be listed; one that does not exist is empty.
    """
    storage = Storage(storage_options)
    dirpath = normalise(dirpath)
    return _newest_first(_examine_all(storage, dirpath, _candidates(storage, dirpath, storage.entries(dirpath))))


def _candidates(storage: Storage, dirpath: str, entries: Sequence[Entry]) -> list[Entry]:
    """Of these in `dirpath` what may be checkpoints: not what a marker in a store shows to be unfinished."""
    marked = {found.name for entry in entries if (found := parse_leftover(entry.name)) and found.kind != "probe"}
    return [
        entry
        for entry in entries
        if entry.name.endswith(SUFFIX)
        and not entry.name.startswith(".")
        and not (entry.name in marked and not is_local(dirpath) and storage.is_unfinished(join(dirpath, entry.name)))
    ]


def _newest_first(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    infos = list(infos)
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
    verified = _compare(storage, info)
    for _ in range(_LOOKS_AGAIN):
        if verified.problem is None:
            break
        again = _examine(storage, info.path)
        if again.manifest == info.manifest:
            break
        # Replaced while it was read (a ``last.ckpt`` is, at every save): the manifest was of one file, the bytes of
        # the next.
        info, verified = again, _compare(storage, again)
    return verified


def _examine(storage: Storage, path: str) -> CheckpointInfo:
    """What the end of the file says; everything that is wrong with this one file becomes its problem."""
    return _described(path, next(storage.read_manifests([path])))


# What was read of objects, by path and the version that a listing gave: nobody changes an object without changing that.
_known: OrderedDict[tuple[str, str], CheckpointInfo] = OrderedDict()
_MOST_KNOWN = 10_000


def _examine_all(storage: Storage, dirpath: str, entries: Sequence[Entry]) -> list[CheckpointInfo]:
    """`_examine` of each; of a store several at a time, and none a second time while it stays as it is."""
    keys = [(join(dirpath, entry.name), entry.version) for entry in entries]
    found = {key: _known[key] for key in keys if key in _known}
    missing = [key for key in keys if key not in found]
    for key, result in zip(missing, storage.read_manifests([path for path, _ in missing]), strict=True):
        found[key] = _described(key[0], result)
        if key[1] and found[key].manifest is not None:
            _known[key] = found[key]
    while len(_known) > _MOST_KNOWN:
        _known.popitem(last=False)
    return [found[key] for key in keys]


def _described(path: str, result: tuple[Manifest | None, int] | Exception) -> CheckpointInfo:
    name = split(path)[1]
    if isinstance(result, Exception):
        if isinstance(result, StorageError) or not isinstance(result, (CheckpointError, OSError)):
            raise result  # It says nothing of the file.
        return CheckpointInfo(path, name, 0, None, _problem(result))
    manifest, size_bytes = result
    return CheckpointInfo(path, name, size_bytes, manifest, None if manifest else _FOREIGN)


def _compare(storage: Storage, info: CheckpointInfo) -> CheckpointInfo:
    """`info`, with a problem if the data is not what was written."""
    if info.manifest is None:
        return info
    return replace(info, problem=_problem_of_data(storage, info.path, info.manifest, None))


def _problem_of_data(storage: Storage, path: str, manifest: Manifest, names: Iterable[str] | None) -> str | None:
    try:
        storage.compare(path, manifest, names)
    except StorageError:
        raise  # It says nothing of the file.
    except (CheckpointError, OSError) as error:
        return _problem(error)
    return None


def verify_files(
    path: str | os.PathLike[str],
    manifest: Manifest,
    names: Iterable[str],
    storage_options: Mapping[str, Any] | None = None,
) -> str | None:
    """What is wrong with these files of a checkpoint directory, whose names and sizes were looked at; None: nothing.

    Ranks: any; each may read some of the files.
    """
    return _problem_of_data(Storage(storage_options), normalise(path), manifest, names)


def _problem(error: CheckpointError | OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return _MISSING
    if isinstance(error, IsADirectoryError):
        return "a directory without manifest.json or .metadata: no checkpoint"
    if isinstance(error, CorruptCheckpointError):
        return error.reason
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def verify_and_keep(path: str, storage_options: Mapping[str, Any] | None) -> tuple[CheckpointInfo, BinaryIO | None]:
    """As `verify` to the depth "full", of one file in a store; and the very bytes that were compared, to be read.

    What is verified by being fetched need not be fetched again. None if it is not good; else to be closed by the
    caller (see `Storage.open_verified`).
    """
    storage = Storage(storage_options)
    info = _examine(storage, normalise(path))
    if info.problem is not None:
        return info, None
    try:
        file, manifest = storage.open_verified(info.path)
    except StorageError:
        raise  # It says nothing of the file.
    except (CheckpointError, OSError) as error:
        return replace(info, problem=_problem(error)), None
    return replace(info, manifest=manifest), file


def select(
    dirpath: str | os.PathLike[str],
    depth: Depth = "full",
    storage_options: Mapping[str, Any] | None = None,
    verifying: Verifying = verify,
    give_up_after: int | None = AS_RECORDED,
) -> Selection:
    """The newest checkpoint of the newest run that is good to this depth, and what was passed over for it.

    The newest run is the one of the newest manifest that can be read: an older run is never continued in
    place of one that is broken. No state of any file makes this raise.

    Of more than twice `LOOKED_AT_FIRST` checkpoints, only those are read at first that are the last by their names,
    as they were given (`_names.next_name`). The newest of them by its manifest is taken if all of them can be read and
    it is good; if not, all are read. So in a large directory a file that was renamed or brought in from elsewhere is
    not seen as long as the newest of the others is good; `passed_over` and `foreign` have only what was looked at.

    Ranks: zero; the answer is broadcast. Blocks on: reading the chosen checkpoint once, if `depth` is "full".

    Args:
        dirpath: The directory.
        depth: How good: see `verify`.
        storage_options: For `fsspec`, used with URLs only.
        verifying: What looks into a candidate.
        give_up_after: A checkpoint from which a run was started so often without having saved a newer one
            (`_restart.starts`) is passed over, unless that is so with all of them; None: never; default: as the last
            run had it.

    Raises:
        OSError: The directory cannot be listed.
    """
    selection = _select(dirpath, depth, storage_options, verifying, give_up_after)
    for _ in range(_LOOKS_AGAIN):
        # What is gone since it was listed was rotated away by a living run, which has committed a newer one.
        if not any(reason == _MISSING for _, reason in selection.passed_over):
            break
        selection = _select(dirpath, depth, storage_options, verifying, give_up_after)
    for path, reason in selection.passed_over:
        emit(PassedOver(path, reason))
    return selection


def _select(
    dirpath: str | os.PathLike[str],
    depth: Depth,
    storage_options: Mapping[str, Any] | None,
    verifying: Verifying,
    give_up_after: int | None,
) -> Selection:
    storage = Storage(storage_options)
    dirpath = normalise(dirpath)
    listed = storage.entries(dirpath)
    entries = _candidates(storage, dirpath, listed)
    given_up = _given_up(storage, dirpath, listed, give_up_after)
    verified: dict[str, CheckpointInfo] = {}

    def verify_once(info: CheckpointInfo) -> CheckpointInfo:
        if info.path not in verified:
            verified[info.path] = verifying(info.path, depth, storage_options)
        return verified[info.path]

    def verify_unless_given_up(info: CheckpointInfo) -> CheckpointInfo:
        starts = given_up.get(info.manifest.generation) if info.manifest is not None else None
        return verify_once(info) if starts is None else replace(info, problem=futile(starts))

    if len(entries) > 2 * LOOKED_AT_FIRST and not given_up:
        infos = _newest_first(_likely_newest(storage, dirpath, entries))
        if infos and run_of(infos[0]) is not None and infos[-1].problem is None:
            newest = verify_once(infos[0])
            if newest.problem is None:
                foreign = tuple(info for info in infos if run_of(info) is None)
                return Selection(newest, (), foreign, empty=False)
    infos = _newest_first(_examine_all(storage, dirpath, entries))
    selection = _choose(infos, verify_unless_given_up)
    if selection.chosen is not None or not given_up:
        return selection
    # Then it is not the checkpoints. To go on from the newest loses least, and a run is never begun anew unasked.
    selection = _choose(infos, verify_once)
    manifest = selection.chosen.manifest if selection.chosen is not None else None
    return replace(selection, futile_starts=given_up.get(manifest.generation, 0) if manifest is not None else 0)


def _given_up(storage: Storage, dirpath: str, listed: Sequence[Entry], after: int | None) -> dict[str, int]:
    """By generation, how often a run was started in vain from what is not to be started from any more."""
    if after is None or not any(entry.name == STARTS_NAME for entry in listed):
        return {}
    starts = _starts.read(storage, dirpath)
    return starts.given_up(starts.limit if after == AS_RECORDED else after)


def futile(starts: int) -> str:
    """Why a checkpoint is passed over from which so many starts have saved nothing."""
    return f"the run was started from it {starts} times and has not saved a newer one"


def _likely_newest(storage: Storage, dirpath: str, entries: Iterable[Entry]) -> list[CheckpointInfo]:
    """The few among which the newest is, as far as names tell."""
    by_name = {entry.name: entry for entry in entries}
    return _examine_all(storage, dirpath, [by_name[name] for name in likely_newest(by_name, LOOKED_AT_FIRST)])


def _choose(infos: Sequence[CheckpointInfo], verify_once: Callable[[CheckpointInfo], CheckpointInfo]) -> Selection:
    readable = [info for info in infos if run_of(info) is not None]
    # By its name, for want of anything else: of a truncated file nothing tells what it was.
    damaged = [info for info in infos if info.problem is not None and parse_checkpoint_name(info.name)]
    foreign = tuple(info for info in infos if info not in readable and info not in damaged)
    passed_over = [(info.path, info.problem or "") for info in damaged]
    run_id = run_of(readable[0]) if readable else None
    chosen = None
    for candidate in readable:
        if run_of(candidate) != run_id:
            continue
        verified = verify_once(candidate)
        if verified.problem is None:
            chosen = verified
            break
        passed_over.append((candidate.path, verified.problem))
    if chosen is None:
        passed_over += [
            (info.path, f"belongs to the older run {run_of(info)}") for info in readable if run_of(info) != run_id
        ]
    return Selection(chosen, tuple(passed_over), foreign, empty=not readable and not damaged)


def run_of(info: CheckpointInfo) -> str | None:
    """The id of the run that can be continued from the checkpoint, None if there is none.

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

    What ``ckpt_path="last"`` takes, except where a checkpoint is passed over because starts from it have crashed.
    Nothing on disk is changed.

    Args:
        dirpath: A directory or URL.
        depth: How carefully a checkpoint is looked at before it counts as good: see `verify`.
        storage_options: For `fsspec`, used with URLs only.

    Raises:
        NoUsableCheckpointError: There are checkpoints, none is usable; to start over is a person's decision.
        OSError: The directory cannot be listed.
    """
    selection = select(dirpath, depth, storage_options)
    if selection.chosen is None and not selection.empty:
        raise NoUsableCheckpointError(normalise(dirpath), selection.passed_over)
    return selection.chosen


def start_of(dirpath: str, storage_options: Mapping[str, Any] | None = None) -> tuple[set[str], int]:
    """The names in `dirpath` (checkpoints, the file of `_restart.starts`), and the ordinal of a start after all those.

    Reads as few of them as `select` does; the start of the newest is the greatest.

    Raises:
        OSError: The directory cannot be listed.
    """
    storage = Storage(storage_options)
    dirpath = normalise(dirpath)
    listed = storage.entries(dirpath)
    entries = _candidates(storage, dirpath, listed)
    infos: list[CheckpointInfo] = []
    if len(entries) > 2 * LOOKED_AT_FIRST:
        infos = _likely_newest(storage, dirpath, entries)
    if not infos or any(info.problem is not None for info in infos):
        infos = _examine_all(storage, dirpath, entries)
    names = {entry.name for entry in entries} | {entry.name for entry in listed if entry.name == STARTS_NAME}
    return names, next_start(infos)


def next_start(infos: Iterable[CheckpointInfo]) -> int:
    """The ordinal of a start that supersedes every checkpoint listed; 1 is the first."""
    return 1 + max((info.manifest.start for info in infos if info.manifest is not None), default=0)
