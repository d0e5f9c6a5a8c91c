"""Terminal recordings of this documentation: what real programs write to a terminal, as pictures.

``make recordings`` makes them all anew (three minutes). A program runs in a pseudo-terminal; pyte, a terminal emulator,
is fed with its bytes, and rich draws the screen that is left. Nothing is written by hand.
"""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import json
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINES = 200
"""Of the terminal: more than a recorded program writes, so that nothing scrolls away."""


@dataclass(frozen=True)
class Recording:
    """One picture."""

    title: str
    """The command, as a reader would type it."""
    command: Sequence[str]
    columns: int
    before: Callable[[Path], None] = lambda directory: None
    """What is done in the directory before."""
    code: int = 0
    """With which the command ends."""
    made: str = ""
    """A picture that the command has made itself, and that is kept too."""


def killed_twice(directory: Path) -> None:
    """`examples/minimal.py` has been killed twice, and has come to its end at the third start."""
    command = [sys.executable, "examples/minimal.py"]
    with (directory / "output").open("wb") as output:
        for after in (250, 550):
            with subprocess.Popen(command, cwd=directory, env=environment(), stdout=output, stderr=output) as training:
                while training.poll() is None:
                    step = trained(directory)
                    if step > after and step % 20 > 9:  # so that there is something to be trained again
                        break
                    time.sleep(0.05)
                training.kill()
            if training.returncode != -signal.SIGKILL:
                raise subprocess.CalledProcessError(training.returncode, command)
        subprocess.run(command, cwd=directory, env=environment(), stdout=output, stderr=output, check=True)


def trained(directory: Path) -> int:
    """How many steps the newest start has trained, as far as its file of events tells."""
    starts = sorted(directory.glob("runs/minimal/ft_events/*.jsonl"))
    lines = starts[-1].read_text().splitlines(keepends=True) if starts else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return max((event["step"] for event in events if event["event"] == "progress"), default=0)


def damaged(directory: Path) -> None:
    """The same, and a bit of the newest checkpoint has flipped."""
    killed_twice(directory)
    newest = directory / "runs" / "minimal" / "step=00001000.ckpt"
    with zipfile.ZipFile(newest) as archive:
        tensors = [record for record in archive.infolist() if "/data/" in record.filename]
        largest = max(tensors, key=lambda record: record.file_size)
        data = archive.read(largest)
    content = bytearray(newest.read_bytes())
    content[content.index(data) + len(data) // 2] ^= 1
    newest.write_bytes(content)


RECORDINGS = {
    "demo": Recording("make demo", [sys.executable, str(ROOT / "examples" / "demo.py")], 124),
    "drill": Recording(
        "lightning-ft drill --steps 60 -- python examples/minimal.py",
        [sys.executable, *shlex.split("-m lightning_ft drill --steps 60 -- python examples/minimal.py")],
        108,
    ),
    "report": Recording(
        "lightning-ft report runs/minimal --png report.png",
        [sys.executable, *shlex.split("-m lightning_ft report runs/minimal --png report.png")],
        124,
        killed_twice,
        made="report.png",
    ),
    "list": Recording(
        "lightning-ft list runs/minimal --verify full",
        [sys.executable, *shlex.split("-m lightning_ft list runs/minimal --verify full")],
        124,
        damaged,
        code=1,
    ),
}


def main() -> None:
    """Make the recordings that are named on the command line, or all."""
    for name in sys.argv[1:] or RECORDINGS:
        recording = RECORDINGS[name]
        print(recording.title, flush=True)
        with tempfile.TemporaryDirectory() as elsewhere:
            os.symlink(ROOT / "examples", Path(elsewhere, "examples"))
            recording.before(Path(elsewhere))
            written = run(recording.command, recording.columns, elsewhere, recording.code)
            if recording.made:
                shutil.copy(Path(elsewhere, recording.made), DOCS)
        (DOCS / f"{name}.svg").write_text(drawn(written, recording.columns, recording.title, name))


def environment() -> dict[str, str]:
    """Return that of a terminal, in which `python` is the one that runs this."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "CI")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**kept, "PATH": path, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}


def run(command: Sequence[str], columns: int, directory: str, code: int = 0) -> bytes:
    """Run a program in a terminal, in `directory`, and return all that it wrote.

    Raises:
        subprocess.CalledProcessError: It did not end with `code`; what it wrote is its output.
    """
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    with subprocess.Popen(
        command, cwd=directory, env=environment(), stdin=its, stdout=its, stderr=its, start_new_session=True
    ) as process:
        os.close(its)
        written = bytearray()
        while piece := _read(ours):
            written += piece
    os.close(ours)
    if process.returncode != code:
        raise subprocess.CalledProcessError(process.returncode, command, bytes(written))
    return bytes(written)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError as error:
        if error.errno == errno.EIO:  # how Linux says that nobody has the other end open any more
            return b""
        raise


def drawn(written: bytes, columns: int, title: str, name: str) -> str:
    """Return the picture of the screen after all that was `written` to it, down to the last line that has anything."""
    screen = pyte.Screen(columns, LINES)
    pyte.ByteStream(screen).feed(written)
    lines = [_line(screen, number) for number in range(LINES)]
    while lines and not lines[-1].plain.strip():
        lines.pop()
    console = Console(width=columns, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(line, no_wrap=True, overflow="ignore", crop=False)
    picture = console.export_svg(title=title, unique_id=name)
    # Rich asks a server for a font; without it the picture is the same in the reader's own.
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)


def _line(screen: pyte.Screen, number: int) -> Text:
    cells = [screen.buffer[number][column] for column in range(screen.columns)]
    text = Text()
    for style, alike in itertools.groupby(cells, key=_style):
        text.append("".join(cell.data for cell in alike), style)
    text.rstrip()
    return text


def _style(cell: pyte.screens.Char) -> Style:
    return Style(
        color=_colour(cell.fg), bgcolor=_colour(cell.bg), bold=cell.bold, italic=cell.italics,
        underline=cell.underscore, strike=cell.strikethrough, reverse=cell.reverse,
    )  # fmt: skip


def _colour(name: str) -> str | None:
    """Return what rich calls a colour of pyte's; None for that of the terminal."""
    if name == "default":
        return None
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    return name.replace("brown", "yellow").replace("bright", "bright_")


if __name__ == "__main__":
    main()
