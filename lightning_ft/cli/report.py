"""`lightning-ft report`: what became of a run, in the terminal, as a page, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lightning_ft.cli import options
from lightning_ft.cli.exits import Code, Failure, reported
from lightning_ft.cli.options import AsJson, StorageOptions
from lightning_ft.cli.output import Output
from lightning_ft.report import figure, page, words
from lightning_ft.report.summary import Summary, summarise
from lightning_ft.storage import Storage


def add_to(app: typer.Typer) -> None:
    """`app` has the command."""
    app.command("report", short_help="Restarts, lost work, goodput, and how often to save", epilog=EPILOG)(report)


EPILOG = """\b
Words:
  useful   from the first step to the last one that was not trained again,
           less the time in which saves stopped training
  lost     from there to the end of a start that was killed; and what a start
           went back from (DivergenceGuard's rollback)
  stalled  training stood still for a save
  down     from the end of a start to the beginning of the next one, unless the
           run had finished
  start-up from the beginning of the process to the first batch
  goodput  useful time / time in which the run was up, or down

All of it can be worked out by hand from the files in ft_events/, beside the
checkpoints: JSON lines, one file per start. A killed start ends with its last
line, which is at most a second old (after ten hours of it, ten seconds; in a
store, a minute).

\b
Examples:
  lightning-ft report runs/1
  lightning-ft report runs/1 --html report.html --png report.png
  lightning-ft report s3://bucket/run1 --json | jq .goodput

\b
JSON:
  dirpath, goodput, restarts, failures, lost_steps, lost_secs, stalled_secs,
  startup_secs, down_secs, useful_secs, elapsed_secs, steps_per_sec, starts:
  [...], saves: [...], writes, recommendation, checkpoints, wrote: [path]

\b
Exit code: 0; 3 if there are no event files; 5 if FILE cannot be written; 6 if
--png needs matplotlib. All: lightning-ft --help
"""


@reported("report")
def report(
    url: Annotated[str, typer.Argument(metavar="URL", help="A directory, local or in a store.")],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as one page for a browser.")
    ] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Write its picture.")] = None,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> Code:
    """Say what became of the newest run in a directory: starts, saves, lost work, goodput, and how often to save."""
    chosen = options.storage_options(storage_option)
    dirpath = options.location(url, chosen, "URL")
    storage = Storage(chosen)
    options.directory(storage, dirpath, "URL")
    if png is not None and not figure.available():
        raise Failure("--png: matplotlib is missing: pip install 'lightning-ft[plot]'", Code.NOT_INSTALLED)
    summary = summarise(dirpath, storage)
    if not summary.timeline.starts:
        raise Failure(f"URL: {dirpath} has no event files (ft_events/*.jsonl) of a run", Code.NOTHING)
    wrote = _write(summary, html, png)
    output = Output(as_json)
    output.document("report", **summary.document(), wrote=wrote)
    _say(output, summary, wrote)
    return Code.FINE


def _write(summary: Summary, html: Path | None, png: Path | None) -> list[str]:
    wrote = []
    if html is not None:
        picture = figure.svg(summary) if figure.available() else None
        # A name of a directory that is no UTF-8 has no place in a page as it is.
        _put("--html", html, page.page(summary, picture).encode("utf-8", "backslashreplace"))
        wrote.append(str(html))
    if png is not None:
        _put("--png", png, figure.png(summary))
        wrote.append(str(png))
    return wrote


def _put(option: str, path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise Failure(f"{option}: {path} cannot be written: {error.strerror}", Code.STORAGE) from error


def _say(output: Output, summary: Summary, wrote: list[str]) -> None:
    output.line(summary.dirpath, "bold")
    output.line()
    for name, value in words.figures(summary):
        output.line(f"{name:<20} {value}")
    output.line()
    heads, rows = words.table(summary)
    output.table(heads, rows, frozenset(heads[1:-1]))
    for line in words.endings(summary):
        output.line(line)
    output.line()
    for line in words.advice(summary):
        output.line(line)
    for path in wrote:
        output.line(f"wrote {path}", "dim")
