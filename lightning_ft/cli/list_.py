"""`lightning-ft list`: what is there, what of it is good, and what a restart would take."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timezone
from typing import Annotated, Any

import typer

from lightning_ft._inspection.survey import Row, Survey, age_secs, checkpoint_paths, survey, total_size
from lightning_ft._names import split
from lightning_ft._words import size
from lightning_ft.cli import options
from lightning_ft.cli.exits import Code, reported
from lightning_ft.cli.options import AsJson, Depth, StorageOptions
from lightning_ft.cli.output import STYLE_OF_STATE, Output, age, count, progress_bar
from lightning_ft.storage import Storage

_LEFTOVERS = ("attempt", "deleted", "probe")
_HEADS = ("", "file", "step", "epoch", "age", "size", "saved", "run", "state", "note")
_RIGHT = frozenset({"step", "epoch", "age", "size"})
_RUN_DIGITS = 8


def add_to(app: typer.Typer) -> None:
    """`app` has the command."""
    app.command("list", short_help="What is there, and what a restart would take", epilog=EPILOG)(list_checkpoints)


EPILOG = """\b
States:
  good        every byte is as it was written (only with --verify full)
  unverified  manifest and size are right; its data were not read
  broken      damaged or cut off; the note says where
  newer       intact, but for a later version of lightning-ft
  unreadable  the storage refused to show it
  foreign     of plain Lightning or another tool: no manifest, never deleted
  attempt     left by a save that was killed, or being written right now
  deleted     left by a deletion that was killed

\b
Examples:
  lightning-ft list runs/1
  lightning-ft list runs/1 --verify full
  lightning-ft list s3://bucket/run1 --storage-option anon=true
  lightning-ft list runs/1 --json | jq -r .last.path

\b
JSON:
  dirpath, depth, checkpoints: [path, name, state, note, taken, size_bytes,
  age_secs, manifest: null or the keys of FORMAT.md], leftovers: [path, name,
  state, note, size_bytes], in_use_by: null or a process, in_front_of:
  null or the dirpath for which this is the local directory, last: {outcome:
  resumes, starts_fresh or fails, path, why, passed_over: [path, reason]}

\b
Exit code: 0 if "last" has something to take and nothing is broken; 1 if a
file is broken or "last" fails; 3 if there is no checkpoint. All: lightning-
ft --help
"""


@reported("list")
def list_checkpoints(
    url: Annotated[str, typer.Argument(metavar="URL", help="A directory, local or in a store.")],
    verify: Annotated[
        Depth,
        typer.Option(
            help="size: manifest and size of every file (fast). full: every byte of every file is read and compared."
        ),
    ] = Depth.SIZE,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> Code:
    """List checkpoints, newest first, and say which one ckpt_path="last" takes and why.

    The arrow marks that one. "Newest" is what the manifests say, never a date or a name. Ages come from the clocks of
    the machines that saved. A run with a second, local directory looks into both of them: list both; the local one
    says whose it is.
    """
    chosen = options.storage_options(storage_option)
    dirpath = options.location(url, chosen, "URL")
    storage = Storage(chosen)
    options.directory(storage, dirpath, "URL")

    def total() -> int:
        return total_size(storage, checkpoint_paths(storage, dirpath))

    with progress_bar("reading", as_json or verify is Depth.SIZE, total) as progress:
        found = survey(dirpath, verify.value, chosen, progress)
    _answer(Output(as_json), found, _now())
    checkpoints = [row for row in found.rows if row.state not in _LEFTOVERS]
    if not checkpoints:
        return Code.NOTHING
    return Code.BAD if found.outcome == "fails" or any(row.bad for row in checkpoints) else Code.FINE


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _answer(output: Output, found: Survey, now: datetime) -> None:
    checkpoints = [row for row in found.rows if row.state not in _LEFTOVERS]
    leftovers = [row for row in found.rows if row.state in _LEFTOVERS]
    last = {
        "outcome": found.outcome,
        "path": found.taken,
        "why": found.why,
        "passed_over": [{"path": path, "reason": reason} for path, reason in found.passed_over],
    }
    output.document(
        "list",
        dirpath=found.dirpath,
        depth=found.depth,
        checkpoints=[_entry(row, now) for row in checkpoints],
        leftovers=[_leftover(row) for row in leftovers],
        in_use_by=found.in_use_by,
        in_front_of=found.in_front_of,
        last=last,
    )
    held = f" and {count(len(leftovers), 'leftover')}" if leftovers else ""
    output.line(f"{found.dirpath}: {count(len(checkpoints), 'checkpoint')}{held}", "bold")
    if found.in_use_by is not None:
        output.line(f"In use: {found.in_use_by} writes here.", "yellow")
    if found.in_front_of is not None:
        output.line(f"The local directory of {found.in_front_of}: a restart looks there, too. List both.", "yellow")
    output.line()
    if checkpoints:
        output.table(_HEADS, [_cells(row, now) for row in checkpoints], _RIGHT)
        output.line()
    if leftovers:
        output.table(("leftover", "size", "state", "note"), [_leftover_cells(row) for row in leftovers], _RIGHT)
        output.line()
    for text, style in _verdict(found):
        output.line(text, style)


def _verdict(found: Survey) -> list[tuple[str, str]]:
    """What "last" does, as a person says it."""
    lines = []
    if found.outcome == "resumes" and found.taken is not None:
        lines.append((f'ckpt_path="last" takes {split(found.taken)[1]}: {found.why}.', "bold"))
    elif found.outcome == "starts_fresh":
        lines.append((f'ckpt_path="last" starts from the beginning: {found.why}.', "bold"))
    else:
        lines.append((f'ckpt_path="last" fails: {found.why}. Repair them or move them away.', "bold red"))
    lines += [(f"  passed over: {split(path)[1]}: {reason}", "yellow") for path, reason in found.passed_over]
    if found.depth == "size" and found.outcome == "resumes":
        lines.append(("Its data were not read here; the restart will. --verify full reads every file now.", "dim"))
    return lines


def _cells(row: Row, now: datetime) -> list[Any]:
    manifest = row.manifest
    facts = (
        ["-", "-", "-"] if manifest is None else [str(manifest.step), str(manifest.epoch), age(age_secs(manifest, now))]
    )
    return [
        "->" if row.taken else "",
        row.name,
        *facts,
        size(row.size_bytes),
        manifest.reason if manifest is not None else "-",
        (manifest.run_id[:_RUN_DIGITS] or "-") if manifest is not None else "-",
        (row.state, STYLE_OF_STATE[row.state]),
        row.note,
    ]


def _leftover_cells(row: Row) -> list[Any]:
    return [row.name, size(row.size_bytes), (row.state, STYLE_OF_STATE[row.state]), row.note]


def _entry(row: Row, now: datetime) -> dict[str, Any]:
    return {
        "path": row.path,
        "name": row.name,
        "state": row.state,
        "note": row.note,
        "taken": row.taken,
        "size_bytes": row.size_bytes,
        "age_secs": age_secs(row.manifest, now),
        "manifest": dataclasses.asdict(row.manifest) if row.manifest is not None else None,
    }


def _leftover(row: Row) -> dict[str, Any]:
    return {
        "path": row.path, "name": row.name, "state": row.state, "note": row.note, "size_bytes": row.size_bytes
    }  # fmt: skip
