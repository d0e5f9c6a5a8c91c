"""What a directory holds, what of it is good, and what `ckpt_path="last"` makes of it: for people. Decides nothing.

The decision is that of `discovery.select`, which a restart asks too.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from lightning_ft import discovery
from lightning_ft._disk.holder import holder
from lightning_ft._fit.local_tier import origin
from lightning_ft._inspection.check import Finding, check_all
from lightning_ft._names import SUFFIX, is_local, join, normalise, parse_leftover
from lightning_ft._restart.fallback import last_of_others
from lightning_ft.manifest import CheckpointInfo, Manifest
from lightning_ft.storage import Storage

Outcome = Literal["resumes", "starts_fresh", "fails"]
Depth = Literal["size", "full"]

_LEFTOVERS = {
    "attempt": "left by a save that was killed; removed at the next start",
    "deleted": "left by a deletion that was killed; removed at the next start",
    "probe": "left by the test write at start; removed at the next start",
}
_LOOKS_AGAIN = 3
_PARTS_SHOWN = 3


@dataclass(frozen=True)
class Row:
    """One file of the directory."""

    path: str
    name: str
    state: str
    """As in `_inspection.check.Finding`, and "attempt", "deleted", "probe" for what killed processes left."""
    size_bytes: int
    manifest: Manifest | None
    note: str
    """What a person should know of it; may be empty."""
    taken: bool = False
    """Whether ``ckpt_path="last"`` takes it."""

    @property
    def bad(self) -> bool:
        """Whether it is known not to be what it should be."""
        return self.state in ("broken", "newer", "unreadable")


@dataclass(frozen=True)
class Survey:
    """A directory at one moment."""

    dirpath: str
    depth: Depth
    rows: tuple[Row, ...]
    """Newest first, as the manifests say; then what has no manifest; then leftovers."""
    outcome: Outcome
    """What ``ckpt_path="last"`` does."""
    taken: str | None
    why: str
    passed_over: tuple[tuple[str, str], ...]
    """What it looks at before and cannot use, with the reasons."""
    in_use_by: str | None
    """The process that writes there now, None if there is none or nobody can tell."""
    in_front_of: str | None
    """The directory or URL for which this is the local one; a restart of that run looks into both."""


def survey(
    dirpath: str,
    depth: Depth = "size",
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> Survey:
    """What is in `dirpath`.

    Blocks on: reading every manifest; with `depth` "full" every byte, and those of the chosen one twice.

    Args:
        dirpath: A directory.
        depth: How carefully each file is looked at. A restart looks at the one that it takes in full.
        storage_options: For `fsspec`, used with URLs only.
        progress: Called with the number of bytes read since the last call.

    Raises:
        OSError: The directory cannot be listed.
    """
    storage = Storage(storage_options)
    dirpath = normalise(dirpath)
    infos, selection = _look(dirpath, depth, storage_options)
    unusable: list[tuple[str, str]] = []
    taken = selection.chosen.path if selection.chosen is not None else None
    outcome: Outcome = "resumes"
    if taken is None and selection.empty:
        taken, unusable = last_of_others(selection, depth, storage_options)
    if taken is None:
        outcome = "fails" if selection.passed_over or unusable else "starts_fresh"
    passed_over = (*selection.passed_over, *unusable)
    # What has a problem already is looked at once more: the listing does not say whose fault it is.
    again = [info.path for info in infos if depth == "full" or info.problem is not None]
    findings = {f.path: f for f in check_all(storage, again, depth, progress)}
    reasons = dict(passed_over)
    rows = [_row(info, findings.get(info.path), taken, selection, reasons) for info in infos]
    rows = [row for row in rows if row.state != "missing"]  # rotated away since it was listed
    why = _why(selection, taken, outcome, reasons)
    in_use_by = holder(dirpath)
    leftovers = _leftovers(storage, dirpath, in_use_by)
    in_front_of = origin(dirpath) if is_local(dirpath) else None
    return Survey(dirpath, depth, (*rows, *leftovers), outcome, taken, why, passed_over, in_use_by, in_front_of)


def _look(
    dirpath: str, depth: Depth, storage_options: Mapping[str, Any] | None
) -> tuple[list[CheckpointInfo], discovery.Selection]:
    """A listing and a selection that agree: a living run commits and rotates between the two."""
    for _ in range(_LOOKS_AGAIN):
        infos = discovery.list_checkpoints(dirpath, storage_options)
        selection = discovery.select(dirpath, depth, storage_options)
        if selection.chosen is None or any(info.path == selection.chosen.path for info in infos):
            break
    return infos, selection


def _row(
    info: CheckpointInfo,
    finding: Finding | None,
    taken: str | None,
    selection: discovery.Selection,
    reasons: Mapping[str, str],
) -> Row:
    if finding is None:
        state = "foreign" if info.manifest is None else "unverified"
        row = Row(info.path, info.name, state, info.size_bytes, info.manifest, "")
    else:
        # The state that a finding has for a directory is about single files; here it is somebody else's checkpoint.
        state = "foreign" if finding.state == "directory" else finding.state
        manifest = finding.manifest or info.manifest
        note = finding.problem or ""
        parts = ", ".join(damage.part for damage in finding.damages[:_PARTS_SHOWN] if damage.reason != note)
        row = Row(
            info.path, info.name, state, finding.size_bytes or info.size_bytes, manifest,
            f"{note} (in {parts})" if parts else note,
        )  # fmt: skip
    if info.path == taken:
        return replace(row, taken=True, note=row.note or 'ckpt_path="last" takes this one')
    if row.note:
        return row
    return replace(row, note=_note(row, selection, reasons))


def _note(row: Row, selection: discovery.Selection, reasons: Mapping[str, str]) -> str:
    """Why ``ckpt_path="last"`` does not take what seems good; empty where the order says it all."""
    if row.path in reasons:
        return reasons[row.path]
    if row.manifest is None:
        return 'by plain Lightning or another tool; "last" takes ours first'
    if row.manifest.reason == "emergency":
        return 'the state when the loss had gone bad, to look into; "last" does not take it'
    if not row.manifest.run_id or row.manifest.boundary == "none":
        return 'saved by another callback or by hand; "last" does not take it'
    chosen = selection.chosen
    if chosen is not None and chosen.manifest is not None and row.manifest.run_id != chosen.manifest.run_id:
        return "of an older run"
    return ""


def _why(selection: discovery.Selection, taken: str | None, outcome: Outcome, reasons: Mapping[str, str]) -> str:
    if outcome == "starts_fresh":
        others = len(selection.foreign)
        return f"no checkpoint of ours among {others} of other tools" if others else "there is no checkpoint"
    if outcome == "fails":
        return f"{len(reasons)} checkpoint(s) and none of them can be used"
    if selection.chosen is None or selection.chosen.manifest is None:
        return f"there is none of ours, and {taken} is the last one of a ModelCheckpoint"
    manifest = selection.chosen.manifest
    passed = f", after {len(reasons)} that cannot be used" if reasons else ""
    return f"the newest of the newest run{passed}: start {manifest.start}, batch {manifest.batch}, step {manifest.step}"


def _leftovers(storage: Storage, dirpath: str, in_use_by: str | None) -> list[Row]:
    rows = []
    for name in storage.listdir(dirpath):
        leftover = parse_leftover(name)
        if leftover is None:
            continue
        path = join(dirpath, name)
        try:
            size_bytes = (
                sum(storage.sizes(path).values()) if is_local(path) and os.path.isdir(path) else storage.size(path)
            )
        except OSError as error:
            if is_local(path) and not os.path.lexists(path):
                continue  # finished, or removed, since it was listed
            size_bytes, problem = 0, f"; it cannot be looked at: {error}"
        else:
            problem = ""
        note = _LEFTOVERS[leftover.kind]
        if in_use_by is not None:
            note = "perhaps of the training that is running; else it goes at the next start"
        rows.append(Row(path, name, leftover.kind, size_bytes, None, note + problem))
    return rows


def age_secs(manifest: Manifest | None, now: datetime) -> float | None:
    """How long ago it was saved, by the clock of the machine that saved it; None if it does not say."""
    if manifest is None:
        return None
    try:
        age = (now - datetime.fromisoformat(manifest.created)).total_seconds()
    except (TypeError, ValueError):
        return None
    return age if math.isfinite(age) else None


def checkpoint_paths(storage: Storage, dirpath: str) -> list[str]:
    """Every file of `dirpath` that has a checkpoint's name, ours or not, in the order of their names."""
    dirpath = normalise(dirpath)
    names = storage.listdir(dirpath)
    return [join(dirpath, name) for name in names if name.endswith(SUFFIX) and not name.startswith(".")]


def total_size(storage: Storage, paths: Iterable[str]) -> int:
    """Bytes of those that can be asked; for a progress bar."""
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):  # what is wrong with it is said where it is read
            total += storage.size(path) if storage.is_file(path) else sum(storage.sizes(path).values())
    return total
