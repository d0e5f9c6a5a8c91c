"""An example in a fresh process, as a user starts it, which can be killed at its saves."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
from pathlib import Path

from lightning_ft import events, testing

EXAMPLES = Path(__file__).parents[2] / "examples"
WITHIN_SECS = 240.0


def run(
    name: str, *args: str, place: Path, environment: dict[str, str] | None = None, kill_at: int | None = None
) -> str:
    """The last line that the example `name` prints, run in the directory `place`; empty if it was killed.

    Args:
        name: Of the file.
        args: Its arguments.
        place: Where it runs.
        environment: Added to this process's.
        kill_at: Killed when it has saved so often.
    """
    place.mkdir(exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(testing.PRELOADED)
    process = context.Process(target=_run, args=(name, args, place, environment or {}, kill_at))
    process.start()
    process.join(WITHIN_SECS)
    if process.is_alive():
        process.kill()
        process.join()
    output = (place / "output").read_text()
    expected = 0 if kill_at is None else -signal.SIGKILL
    assert process.exitcode == expected, f"{name} {args}: exit code {process.exitcode}, not {expected}\n{output}"
    return output.splitlines()[-1] if kill_at is None else ""


def _run(name: str, args: tuple[str, ...], place: Path, environment: dict[str, str], kill_at: int | None) -> None:
    # As in a process that was not started by this module, so that workers of loaders are forked.
    multiprocessing.set_start_method("fork", force=True)
    os.chdir(place)
    os.environ.update(environment)
    sys.argv = [str(EXAMPLES / name), *args]
    commits = 0

    def note(event: events.Event) -> None:
        nonlocal commits
        commits += isinstance(event, events.Committed)
        if commits == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    events.observe(note)
    with open("output", "w", buffering=1) as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        runpy.run_path(sys.argv[0], run_name="__main__")
