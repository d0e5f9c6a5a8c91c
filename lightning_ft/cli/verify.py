"""`lightning-ft verify`: whether every byte is as it was written, and if not, where."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from lightning_ft._inspection.check import Finding, check_all
from lightning_ft._inspection.survey import checkpoint_paths, total_size
from lightning_ft._words import size
from lightning_ft.cli import options
from lightning_ft.cli.exits import Code, Failure, reported
from lightning_ft.cli.options import AsJson, Depth, StorageOptions
from lightning_ft.cli.output import STYLE_OF_STATE, Output, count, progress_bar
from lightning_ft.storage import Storage

_DAMAGES_SHOWN = 20


def add_to(app: typer.Typer) -> None:
    """`app` has the command."""
    app.command("verify", short_help="Whether every byte is as written; if not, where", epilog=EPILOG)(verify)


EPILOG = """\b
What is compared: a checkpoint of ours with the digest in its manifest; a
file of plain Lightning, state "foreign", with the checksums of its zip
archive (that it was saved completely nothing can tell). Of a damaged file
the records are checked one by one, and the tensors in them are named.

\b
Examples:
  lightning-ft verify runs/1
  lightning-ft verify runs/1/step=00001000.ckpt /backup/step=00001000.ckpt
  lightning-ft verify s3://bucket/run1 --jobs 16
  lightning-ft verify runs/1 --json | jq -r '.files[] | select(.bad) | .path'

\b
JSON:
  depth, files: [path, name, state, bad, problem, size_bytes, damages: [part,
  record, offset, size_bytes, reason]], counts: {STATE: number}

\b
Exit code: 0 if nothing is bad; 1 if a file is broken, unreadable or for a
newer version; 3 if there is nothing to verify. All: lightning-ft --help
"""


@reported("verify")
def verify(
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="Checkpoints, or directories of them.")],
    depth: Annotated[Depth, typer.Option(help="full: every byte. size: manifest and size only.")] = Depth.FULL,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=64, help="Files read at once; each takes some MiB of memory.")
    ] = None,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> Code:
    """Read checkpoints and compare every byte with what was written; name the part that is damaged.

    Memory stays the same whatever the size of the files. Nothing is changed, and nothing in a file is executed.
    """
    chosen = options.storage_options(storage_option)
    storage = Storage(chosen)
    output = Output(as_json)
    paths: list[str] = []
    listed: set[str] = set()
    for url in urls:
        path = options.location(url, chosen, "URL")
        options.existing(storage, path, "URL")
        if storage.is_file(path) or storage.is_sharded(path):
            paths.append(path)
            continue
        inside = checkpoint_paths(storage, path)
        listed.update(inside)
        paths += inside
    if not paths:
        raise Failure(f"URL: there is no checkpoint in {', '.join(urls)}", Code.NOTHING)
    findings = []
    with progress_bar("verifying", as_json or depth is Depth.SIZE, lambda: total_size(storage, paths)) as progress:
        for finding in check_all(storage, paths, depth.value, progress, jobs):
            if finding.state == "missing" and finding.path in listed:
                continue  # rotated away by a running training since it was listed
            findings.append(finding)
    if not findings:
        raise Failure(f"URL: the checkpoints in {', '.join(urls)} are gone by now", Code.NOTHING)
    _answer(output, findings, depth)
    return Code.BAD if any(finding.bad for finding in findings) else Code.FINE


def _answer(output: Output, findings: list[Finding], depth: Depth) -> None:
    counts: dict[str, int] = {}
    for finding in findings:
        counts[finding.state] = counts.get(finding.state, 0) + 1
    output.document("verify", depth=depth.value, files=[_entry(finding) for finding in findings], counts=counts)
    rows: list[list[Any]] = [
        [
            (finding.state, STYLE_OF_STATE[finding.state]),
            finding.path,
            size(finding.size_bytes),
            finding.problem or _remark(finding, depth),
        ]
        for finding in findings
    ]
    output.table(("state", "file", "size", "note"), rows, frozenset({"size"}))
    for finding in findings:
        if [damage.reason for damage in finding.damages] == [finding.problem]:
            continue  # said already
        if finding.damages:
            output.line()
            output.line(f"{finding.path} is damaged in:", "bold")
        for damage in finding.damages[:_DAMAGES_SHOWN]:
            place = ""
            if damage.record is not None:
                place = f" ({damage.record}, {size(damage.size_bytes or 0)} at byte {damage.offset})"
            output.line(f"  {damage.part}{place}: {damage.reason}", "red")
        if len(finding.damages) > _DAMAGES_SHOWN:
            output.line(f"  and {count(len(finding.damages) - _DAMAGES_SHOWN, 'other part')} (--json has all)", "red")
    output.line()
    bad = sum(finding.bad for finding in findings)
    summary = ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))
    output.line(f"{count(len(findings), 'file')}: {summary}", "bold red" if bad else "bold")


def _remark(finding: Finding, depth: Depth) -> str:
    if finding.state == "foreign":
        records = "its records match their own checksums" if depth is Depth.FULL else "its records were not read"
        return f"no manifest of ours; {records}"
    return "" if finding.state == "good" else "its data were not read"


def _entry(finding: Finding) -> dict[str, Any]:
    return {
        "path": finding.path,
        "name": finding.name,
        "state": finding.state,
        "bad": finding.bad,
        "problem": finding.problem,
        "size_bytes": finding.size_bytes,
        "damages": [dataclasses.asdict(damage) for damage in finding.damages],
    }
