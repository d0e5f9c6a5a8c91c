"""What a request to delete old checkpoints comes to: the policy of the rotation, judged from verified files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_ft import discovery
from lightning_ft._inspection.check import check
from lightning_ft._names import STARTS_NAME, join, parse_checkpoint_name
from lightning_ft._restart import starts as _starts
from lightning_ft.errors import NoUsableCheckpointError
from lightning_ft.manifest import CheckpointInfo
from lightning_ft.retention import Decision, Retention, plan
from lightning_ft.storage import Storage


@dataclass(frozen=True)
class Pruning:
    """What would be kept and deleted in one directory, and why."""

    dirpath: str
    newest: CheckpointInfo | None
    """The one that a restart would take; None: there is no checkpoint of ours."""
    decisions: tuple[Decision, ...]
    """One per checkpoint, newest first."""
    infos: Mapping[str, CheckpointInfo]

    @property
    def to_delete(self) -> list[str]:
        """Paths, oldest first: killed on the way, what is left is the newer part."""
        return [decision.path for decision in reversed(self.decisions) if not decision.keep]

    def size_bytes(self, path: str) -> int:
        """Size of one of the files."""
        return self.infos[path].size_bytes


def plan_pruning(
    dirpath: str,
    retention: Retention,
    depth: Literal["size", "full"],
    storage_options: Mapping[str, Any] | None,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> Pruning:
    """What `retention` gives up in a fresh listing of `dirpath`; nothing is deleted here.

    Only what was verified to `depth` counts among those to keep: a broken file does not take the place of a good one,
    and is never deleted itself.

    Blocks on: reading as many checkpoints as are to be kept, newest first, and the newest twice.

    Raises:
        NoUsableCheckpointError: There are checkpoints and none is good: the others are all that is left.
        OSError: The directory cannot be listed.
    """
    storage = Storage(storage_options)
    selection = discovery.select(dirpath, depth, storage_options)
    infos = discovery.list_checkpoints(dirpath, storage_options)
    if selection.chosen is None:
        if not selection.empty:
            raise NoUsableCheckpointError(dirpath, selection.passed_over)
        decisions = [Decision(info.path, True, "no run of this package saved it") for info in infos]
        return Pruning(dirpath, None, tuple(decisions), {info.path: info for info in infos})
    newest = selection.chosen
    assert newest.manifest is not None
    run_id = newest.manifest.run_id
    reasons = dict(selection.passed_over)
    starts = _starts.read(storage, dirpath) if storage.exists(join(dirpath, STARTS_NAME)) else _starts.Starts()
    given_up = frozenset(starts.given_up(starts.limit))
    known = {info.path: "found damaged by the run" for info in infos if _is(info, frozenset(starts.damaged))}
    reasons = {**known, **reasons}
    infos = [
        info if _is(info, given_up) else replace(info, problem=info.problem or reasons.get(info.path)) for info in infos
    ]
    judged, decisions = _judge(storage, infos, retention, run_id, newest.path, depth, progress, given_up)
    return Pruning(dirpath, newest, tuple(decisions), {info.path: info for info in judged})


def _is(info: CheckpointInfo, given_up: frozenset[str]) -> bool:
    return info.manifest is not None and info.manifest.generation in given_up


def _judge(
    storage: Storage,
    infos: list[CheckpointInfo],
    retention: Retention,
    run_id: str,
    newest: str,
    depth: Literal["size", "full"],
    progress: Callable[[int], None],
    given_up: frozenset[str],
) -> tuple[list[CheckpointInfo], list[Decision]]:
    """Every file that stays because it is among the last was read; one that proves broken gives its place away."""
    known = {newest}
    while True:
        decisions = plan(infos, retention, run_id, newest, frozenset(), given_up)
        deletes = any(not decision.keep for decision in decisions)
        # Without the milestones, which stay besides and are not asked what they are worth.
        last = plan(infos, Retention(retention.keep_last), run_id, newest, frozenset(), given_up)
        kept = {decision.path for decision in last if decision.keep}
        open_questions = [
            info
            for info in infos
            if info.path in kept - known
            and info.problem is None
            and info.manifest is not None
            and info.manifest.run_id == run_id
            and parse_checkpoint_name(info.name) is not None
            and not _is(info, given_up)
        ]
        if not deletes or not open_questions or depth != "full":
            return infos, decisions
        info = open_questions[0]
        known.add(info.path)
        finding = check(storage, info.path, depth, progress)
        if finding.state != "good":
            problem = finding.problem or finding.state
            infos = [replace(i, problem=problem) if i.path == info.path else i for i in infos]
