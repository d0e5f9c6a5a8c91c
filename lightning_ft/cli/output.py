"""How answers look: tables and colour for people, plain lines in a pipe, one JSON document for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.text import Text

# Of a person who reads twenty lines at night: green is to be relied on, red is not, yellow is to be known.
STYLE_OF_STATE = {
    "good": "green", "unverified": "", "foreign": "cyan", "broken": "bold red", "newer": "yellow",
    "unreadable": "bold red", "missing": "bold red", "directory": "yellow", "attempt": "yellow", "deleted": "yellow",
    "probe": "yellow", "keep": "", "delete": "bold red",
}  # fmt: skip
_STEPS_OF_AGE = ((60.0, "s"), (60.0, "min"), (24.0, "h"), (float("inf"), "d"))

Cell = str | tuple[str, str]
"""Text, or text with a style."""

# Of a name, of which more is left out on a terminal that is narrower still.
_LEAST_CHARACTERS = 24


class Output:
    """Where the answer of a command goes.

    Args:
        as_json: Only `document` prints anything.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(highlight=False, markup=False, emoji=False)

    def document(self, kind: str, **values: Any) -> None:
        """With ``--json``, stdout has the document; to be called once."""
        if self.as_json:
            print(json.dumps({"command": kind, **values}, indent=2))

    def line(self, text: str = "", style: str = "") -> None:
        """A line, for people only; long ones are left to the terminal."""
        if self.as_json:
            return
        if self.console.is_terminal:
            self.console.print(Text(printable(text), style=style), soft_wrap=True)
        else:
            print(printable(text))

    def table(
        self,
        heads: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        right: frozenset[str] = frozenset(),
        shortened: str | None = None,
    ) -> None:
        """Columns, for people only.

        Where a terminal is too narrow, the middle of what is in the column `shortened` is left out; and then the last
        column goes under its line. In a pipe: one line each, whole, no colour.
        """
        if self.as_json:
            return
        cells = [[(cell, "") if isinstance(cell, str) else cell for cell in row] for row in rows]
        lines = [
            [(head, "bold") for head in heads],
            *([(printable(text), style) for text, style in row] for row in cells),
        ]
        widths = [max(len(line[number][0]) for line in lines) for number in range(len(heads))]
        excess = sum(widths) + 2 * (len(widths) - 1) - self.console.width
        if shortened is not None and self.console.is_terminal and excess > 0:
            number = heads.index(shortened)
            widths[number] = max(_LEAST_CHARACTERS, widths[number] - excess)
            for line in lines[1:]:
                line[number] = (_without_middle(line[number][0], widths[number]), line[number][1])
        folded = self.console.is_terminal and sum(widths) + 2 * (len(widths) - 1) > self.console.width
        for line in lines:
            padded = [
                (text.rjust(width) if head in right else text.ljust(width), style)
                for (text, style), width, head in zip(line, widths, heads, strict=True)
            ]
            if not folded:
                self._print_cells(padded)
                continue
            self._print_cells(padded[:-1])
            text, style = line[-1]
            if text and line is not lines[0]:
                self._print_cells([("   ", ""), (text, style or "dim")])

    def _print_cells(self, cells: Sequence[tuple[str, str]]) -> None:
        if not self.console.is_terminal:
            print("  ".join(text for text, _ in cells).rstrip())
            return
        text = Text("  ").join(Text(cell, style=style) for cell, style in cells)
        text.rstrip()
        self.console.print(text, soft_wrap=True)


@contextmanager
def progress_bar(
    title: str, as_json: bool, total_bytes: Callable[[], int] | None = None
) -> Iterator[Callable[[int], None]]:
    """A bar on stderr counts the bytes that it is called with, from any thread; silent unless that is a terminal.

    Then `total_bytes` is not asked either: it may cost a request per file.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    silent = as_json or not console.is_terminal
    total = total_bytes() if total_bytes is not None and not silent else None
    with Progress(*columns, console=console, transient=True, disable=silent) as progress:
        task = progress.add_task(title, total=total)
        yield lambda size_bytes: progress.advance(task, size_bytes)


def _without_middle(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    tail = (width - 3) * 2 // 3  # names differ at their ends
    return f"{text[: width - 3 - tail]}...{text[-tail:]}"


def printable(text: str) -> str:
    """Without anything that a terminal would obey: names of files and keys may come from anybody."""
    plain = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    encoding = sys.stdout.encoding or "utf-8"
    return plain.encode(encoding, "backslashreplace").decode(encoding)


def age(secs: float | None) -> str:
    """`5 min`, `3 h`, `12 d`; `-` if it is not known, and `in the future` where clocks disagree."""
    if secs is None:
        return "-"
    if secs < -1:
        return "in the future"
    value = max(secs, 0.0)
    for steps, unit in _STEPS_OF_AGE:
        if value < steps:
            return f"{value:.0f} {unit}"
        value /= steps
    raise AssertionError


def count(number: int, what: str) -> str:
    """`1 checkpoint`, `2 checkpoints`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
