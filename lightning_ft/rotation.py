"""Rotation: after a checkpoint has committed, the ones the policy gives up are deleted. Runs in the writer thread."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_ft import discovery, events, retention
from lightning_ft._names import split
from lightning_ft._saving.read_back import read_back
from lightning_ft.errors import CorruptCheckpointError
from lightning_ft.manifest import CheckpointInfo, Manifest
from lightning_ft.storage import Storage

_log = logging.getLogger(__name__)


class Trust:
    """Which checkpoints of a run are known to be good to the last bit: those that this process has read.

    For rotation with ``verify_after_write="full"``: what a process before this one has written, or what has decayed,
    must not be counted unseen. Everything is read once.

    Thread: writer.
    """

    def __init__(self, storage_options: Mapping[str, Any] | None) -> None:
        self._storage = Storage(storage_options)
        self._problems: dict[str, str | None] = {}

    def read(self, manifest: Manifest) -> None:
        """The checkpoint with this manifest was read back."""
        self._problems[manifest.generation] = None

    def seen(
        self,
        infos: Sequence[CheckpointInfo],
        policy: retention.Retention,
        run_id: str,
        given_up: frozenset[str] = frozenset(),
    ) -> list[CheckpointInfo]:
        """`infos`, those with a problem that count for `policy` and turn out to be damaged.

        Blocks on: reading what of them was never read, down to the last that is needed.
        """
        seen, good = list(infos), 0
        listed = {info.manifest.generation for info in infos if info.manifest is not None}
        self._problems = {key: value for key, value in self._problems.items() if key in listed}
        for index in sorted(range(len(seen)), key=lambda i: (seen[i].order, seen[i].path), reverse=True):
            info = seen[index]
            if good == policy.keep_last or policy.keep_last == -1:
                break
            if retention.untouchable(info, run_id) is not None or info.manifest is None:
                continue
            if info.manifest.generation in given_up:
                continue
            problem = self._read(info.path, info.manifest)
            if problem is None:
                good += 1
            else:
                seen[index] = replace(info, problem=problem)
        return seen

    def _read(self, path: str, manifest: Manifest) -> str | None:
        """What is wrong with it, read now or before. A store that does not answer raises, and is asked again."""
        if manifest.generation not in self._problems:
            try:
                read_back(self._storage, path, manifest, "full")
            except CorruptCheckpointError as error:
                self._problems[manifest.generation] = error.reason
            else:
                self.read(manifest)
        return self._problems[manifest.generation]


def rotate(
    dirpath: str,
    newest: str,
    run_id: str,
    policy: retention.Retention,
    storage_options: Mapping[str, Any] | None,
    committed: Manifest,
    *,
    pinned: frozenset[str] = frozenset(),
    given_up: frozenset[str] = frozenset(),
    trust: Trust | None = None,
    damaged: Collection[str] = (),
) -> list[str]:
    """`dirpath` holds what `policy` keeps of run `run_id`, judged from a fresh listing.

    Returns the names that were deleted. None is unless `newest` is listed and good. A file that cannot be deleted
    stays, with a warning: one too many is no danger to the run.

    Thread: writer. On disk after: at least `policy.keep_last` good checkpoints, once so many were made. Good is what
    the listing says, that is manifest and size; with `trust`, what was read.

    Args:
        dirpath: The directory.
        newest: Path of the checkpoint committed last.
        run_id: The run whose checkpoints may be deleted.
        policy: What to keep.
        storage_options: For `fsspec`, used with URLs only.
        committed: The manifest of `newest`.
        pinned: Paths that are kept whatever the policy says.
        given_up: Generations that do not count, see `retention.plan`.
        trust: What was read of the directory so far, `newest` included.
        damaged: Generations that were read before and found damaged, whatever their manifests say.
    """
    storage = Storage(storage_options)
    try:
        infos = [_judged(info, damaged) for info in discovery.list_checkpoints(dirpath, storage_options)]
        if trust is not None:
            trust.read(committed)
            infos = trust.seen(infos, policy, run_id, given_up)
    except Exception as error:  # stores have errors of their own classes
        _log.warning("no rotation after %s: cannot look through %s: %s", newest, dirpath, error)
        events.emit(events.DeleteSkipped(dirpath, f"{type(error).__name__}: {error}"))
        return []
    removed = []
    for decision in retention.plan(infos, policy, run_id, newest, pinned, given_up):
        if decision.keep:
            continue
        try:
            storage.remove(decision.path)
        except Exception as error:
            _log.warning("could not remove %s: %s", decision.path, error)
            events.emit(events.DeleteSkipped(decision.path, f"{type(error).__name__}: {error}"))
        else:
            removed.append(split(decision.path)[1])
    return removed


def _judged(info: CheckpointInfo, damaged: Collection[str]) -> CheckpointInfo:
    if info.problem is None and info.manifest is not None and info.manifest.generation in damaged:
        return replace(info, problem="found damaged when it was read before")
    return info
