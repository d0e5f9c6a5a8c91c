"""I9: Lightning's own launcher leaves rank 0 the time that it needs when another of its processes has failed."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

import lightning_ft as ft
from lightning_ft import exit_codes
from lightning_ft._ranks import launched
from tests.distributed.test_exceptions import STEP

ROOT = Path(__file__).parents[2]


@pytest.mark.distributed
def test_i9_rank_0_finishes_its_write(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.distributed.launched", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert run.returncode == exit_codes.PEER_LOST, run.stderr
    assert run.stderr.count("ZeroDivisionError: in training_step of rank 1") >= 2  # at once, and by Python at the end
    assert "rank 0 ends, since rank 1 failed: ZeroDivisionError" in run.stderr
    good = ft.last_good(str(tmp_path))
    assert good is not None
    assert good.name == f"step={STEP:08}.ckpt"


class Idle(_ChildProcessObserver):
    """Looks at nothing until it is told to."""

    def __init__(self, pid: int) -> None:
        super().__init__(0, [SimpleNamespace(pid=pid)])  # type: ignore[list-item]
        self.end = threading.Event()
        self.done: list[str] = []

    def run(self) -> None:
        self.end.wait()

    def _terminate_all(self) -> None:
        self.done.append("kill")


def trainer_of(observer: Idle) -> Any:
    launcher: Any = object.__new__(_SubprocessScriptLauncher)
    launcher.procs = observer._child_processes
    return SimpleNamespace(strategy=SimpleNamespace(launcher=launcher))


def test_what_is_written_comes_before_the_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "ENDS_SECS", 0.01)
    mine, other = Idle(1), Idle(2)
    mine.start()
    other.start()
    try:
        undo = launched.be_patient(trainer_of(mine), threading.Event(), lambda: mine.done.append("written"))
        mine._terminate_all()
        other._terminate_all()
        assert mine.done == ["written", "kill"]
        assert other.done == ["kill"]  # of another launch
        undo()
        mine._terminate_all()
        assert mine.done == ["written", "kill", "kill"]
    finally:
        for observer in (mine, other):
            observer.end.set()
            observer.join()


def test_processes_that_somebody_else_starts_are_not_ours() -> None:
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(launcher=None))
    launched.be_patient(trainer, threading.Event(), lambda: None)()
