"""`lightning-ft prune`: old checkpoints are deleted, by the rules of the rotation and with its care."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from lightning_ft._disk.lock import DirectoryLock
from lightning_ft._inspection.pruning import Pruning, plan_pruning
from lightning_ft._names import is_local, split
from lightning_ft._words import size
from lightning_ft.cli import options
from lightning_ft.cli.exits import Code, Failure, reported
from lightning_ft.cli.options import AsJson, Depth, StorageOptions
from lightning_ft.cli.output import STYLE_OF_STATE, Output, count, printable, progress_bar
from lightning_ft.retention import Retention
from lightning_ft.storage import Storage


def add_to(app: typer.Typer) -> None:
    """`app` has the command."""
    app.command("prune", short_help="Delete old checkpoints, by the rules of the rotation", epilog=EPILOG)(prune)


EPILOG = """\b
What is never deleted: the checkpoint that a restart would take; a file that
is broken or cannot be read; a file of plain Lightning, of another tool,
under a name of your own, or of another run than the newest. Only what was
read and found good counts among the N to keep, so N good ones stay if there
are N.

A directory in which a training runs is refused. Object stores have no
locks: there, see to it yourself that none does.

\b
Examples:
  lightning-ft prune runs/1 --keep-last 3 --dry-run
  lightning-ft prune runs/1 --keep-last 1 --keep-every-n-train-steps 10000
  lightning-ft prune s3://bucket/run1 --keep-last 3 --yes --json

\b
JSON:
  dirpath, dry_run, newest, decisions: [path, keep, why, size_bytes], deleted:
  [path], freed_bytes, failed: [path, reason]

\b
Exit code: 0 if nothing is left to delete (with --dry-run: said what would
be); 1 if no checkpoint is good, a file could not be deleted, or you said
no; 3 if there is no checkpoint of ours; 4 if a training uses the directory.
All: lightning-ft --help
"""


@reported("prune")
def prune(
    url: Annotated[str, typer.Argument(metavar="URL", help="A directory, local or in a store.")],
    keep_last: Annotated[int, typer.Option(metavar="N", help="The newest N good checkpoints stay; at least 1.")],
    keep_every_n_train_steps: Annotated[
        int | None, typer.Option(metavar="K", help="The first one at or after each multiple of K steps stays, too.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Say what would be deleted, and why; no more.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    verify: Annotated[
        Depth, typer.Option(help="How carefully those to keep are looked at before others go. full: every byte.")
    ] = Depth.FULL,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> Code:
    """Delete old checkpoints of the newest run, as the training itself would: by the package's own retention policy."""
    chosen = options.storage_options(storage_option)
    dirpath = options.location(url, chosen, "URL")
    retention = Retention(keep_last, keep_every_n_train_steps)
    storage = Storage(chosen)
    output = Output(as_json)
    options.directory(storage, dirpath, "URL")
    if not (dry_run or yes) and (as_json or not sys.stdin.isatty()):
        raise Failure("nobody can be asked here: say --yes, or --dry-run; nothing was deleted", Code.USAGE)
    plan = _plan(dirpath, retention, verify, chosen, as_json)
    if plan.newest is None:
        raise Failure(f"URL: {dirpath} has no checkpoint of a run of this package; nothing was deleted", Code.NOTHING)
    _show(output, plan)
    if dry_run or not plan.to_delete:
        _document(output, plan, dry_run, [], [])
        output.line()
        output.line("Nothing was deleted: --dry-run." if dry_run else "There is nothing to delete.", "bold")
        return Code.FINE
    if not yes and not _agreed(f"\nDelete {count(len(plan.to_delete), 'checkpoint')}?"):
        output.line("Nothing was deleted.", "bold")
        return Code.BAD
    return _delete(output, plan, retention, verify, chosen, asked=not yes)


def _agreed(question: str) -> bool:
    return typer.confirm(question)


def _plan(dirpath: str, retention: Retention, verify: Depth, chosen: dict[str, Any], as_json: bool) -> Pruning:
    with progress_bar("verifying what stays", as_json) as progress:
        return plan_pruning(
            dirpath, retention, verify.value, chosen,
            progress,
        )  # fmt: skip


def _delete(
    output: Output, plan: Pruning, retention: Retention, verify: Depth, chosen: dict[str, Any], asked: bool
) -> Code:
    """What was agreed to and is still to go, judged anew under the lock, is gone."""
    lock = DirectoryLock(plan.dirpath)
    lock.acquire()
    try:
        # The lock was not held while files were read and a person thought: a scheduler may have restarted the run, and
        # ended it. Without a person that was not long, and nothing is read again: a run that starts now is refused.
        agreed = {path: _generation(plan, path) for path in plan.to_delete}
        now = _plan(plan.dirpath, retention, verify if asked else Depth.SIZE, chosen, output.as_json)
        paths = [path for path in now.to_delete if path in agreed and _generation(now, path) == agreed[path]]
        plan = now if asked else plan
        deleted, failed = _remove(Storage(chosen), paths)
    finally:
        lock.release()
    _document(output, plan, False, deleted, failed)
    output.line()
    for path, reason in failed:
        print(printable(f"lightning-ft prune: could not delete {path}: {reason}"), file=sys.stderr)
    freed_bytes = sum(plan.size_bytes(path) for path in deleted)
    output.line(f"Deleted {count(len(deleted), 'checkpoint')}, {size(freed_bytes)}.", "bold")
    return Code.BAD if failed else Code.FINE


def _generation(plan: Pruning, path: str) -> str | None:
    """Which save is under the name: a run that went back may have used it again."""
    manifest = plan.infos[path].manifest
    return manifest.generation if manifest is not None else None


def _remove(storage: Storage, paths: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    deleted, failed = [], []
    for path in paths:
        try:
            storage.remove(path)
        except Exception as error:  # stores have errors of their own classes; the others may still go
            failed.append((path, f"{type(error).__name__}: {error}"))
        else:
            deleted.append(path)
    return deleted, failed


def _show(output: Output, plan: Pruning) -> None:
    rows: list[list[Any]] = []
    for decision in plan.decisions:
        word = "keep" if decision.keep else "delete"
        info = plan.infos[decision.path]
        step = str(info.manifest.step) if info.manifest is not None else "-"
        held = size(info.size_bytes) if info.size_bytes else "-"
        rows.append([(word, STYLE_OF_STATE[word]), info.name, step, held, decision.why])
    output.table(("", "file", "step", "size", "why"), rows, frozenset({"step", "size"}))
    output.line()
    total = sum(plan.size_bytes(path) for path in plan.to_delete)
    kept = len(plan.decisions) - len(plan.to_delete)
    assert plan.newest is not None
    output.line(
        f"{count(len(plan.to_delete), 'checkpoint')} to delete ({size(total)}), {kept} to keep;"
        f" a restart takes {split(plan.newest.path)[1]}.",
        "bold",
    )
    if not is_local(plan.dirpath):
        output.line("Object stores have no locks: make sure that no training writes there.", "yellow")


def _document(output: Output, plan: Pruning, dry_run: bool, deleted: list[str], failed: list[tuple[str, str]]) -> None:
    output.document(
        "prune",
        dirpath=plan.dirpath,
        dry_run=dry_run,
        newest=plan.newest.path if plan.newest is not None else None,
        decisions=[
            {"path": d.path, "keep": d.keep, "why": d.why, "size_bytes": plan.size_bytes(d.path)}
            for d in plan.decisions
        ],
        deleted=deleted,
        freed_bytes=sum(plan.size_bytes(path) for path in deleted),
        failed=[{"path": path, "reason": reason} for path, reason in failed],
    )
