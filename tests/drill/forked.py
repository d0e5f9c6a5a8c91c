"""Drills in this process, of scripts that are forked from a server with torch and Lightning imported already.

To import them takes most of the time of a short run, and a drill has up to four. All else is as in `command.run`.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_ft.drill import engine, runs
from lightning_ft.drill.command import Ended
from lightning_ft.drill.verdict import Outcome
from lightning_ft.testing import PRELOADED


def drill(script: Path, *args: Any, scratch: Path, **options: Any) -> Outcome:
    """The outcome for `python script args`."""
    command = (sys.executable, str(script), *map(str, args))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "run", _run)
        return engine.drill(runs.Drill(command, scratch, **options), lambda title, batches: None)


def _run(
    command: Sequence[str],
    environment: dict[str, str],
    output: Path,
    killed: Path,
    timeout_secs: float,
    watch: Callable[[], None],
) -> Ended:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_script, args=(list(command[1:]), environment, str(output)))
    process.start()
    process.join(timeout_secs)
    code = process.exitcode
    process.kill()
    process.join()
    return Ended(code, killed.exists(), output)


def _script(argv: list[str], environment: dict[str, str], output: str) -> None:
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv[:] = argv
    sys.path[0] = str(Path(argv[0]).parent)
    runpy.run_path(argv[0], run_name="__main__")
