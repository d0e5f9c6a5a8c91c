"""Ranks that Lightning spawns: the process that has spawned them leaves with their code, and no write is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

import lightning_ft as ft
from lightning_ft import exit_codes
from lightning_ft._preemption import leaving
from tests.distributed.spawned import STEP

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.distributed


def spawner(*codes: int) -> Any:
    """A trainer whose ranks have ended with these codes."""
    launcher: Any = object.__new__(_MultiProcessingLauncher)
    launcher.procs = [SimpleNamespace(join=lambda: None, exitcode=code) for code in codes]
    return SimpleNamespace(strategy=SimpleNamespace(launcher=launcher))


@pytest.mark.parametrize("code", exit_codes.ALL)
def test_every_code_of_ours_is_passed_on(code: int) -> None:
    for exception in (ProcessExitedException("", 0, 0, code), KeyboardInterrupt()):
        with pytest.raises(SystemExit) as left:
            leaving.leave_with_spawned(spawner(0, code), exception)
        assert left.value.code == code


def test_no_other_code_is() -> None:
    for exception in (ProcessExitedException("", 0, 0, 1), ProcessRaisedException("", 0, 0), KeyboardInterrupt()):
        leaving.leave_with_spawned(spawner(0, 1), exception)
    launched_by_others: Any = SimpleNamespace(strategy=SimpleNamespace(launcher=None))
    leaving.leave_with_spawned(launched_by_others, KeyboardInterrupt())


def test_all_are_all() -> None:
    codes = {value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    assert set(exit_codes.ALL) == codes


def ended(place: Path, strategy: str, way: str) -> tuple[int, str]:
    """The exit code of the process that was started, and what all of them have said."""
    command = [sys.executable, "-m", "tests.distributed.spawned", str(place), strategy, way]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False, start_new_session=True
    )
    return run.returncode, run.stdout + run.stderr


WAYS = {
    "diverged": (exit_codes.DIVERGED, "rank 1: loss nan in batch 4"),
    "hung": (exit_codes.HUNG, "late: rank 1"),
    "lost": (exit_codes.PEER_LOST, "rank 1 ends, since rank 0 failed: ZeroDivisionError: on rank 0"),
    "failed": (1, "ZeroDivisionError: on rank 1"),
    "interrupted": (exit_codes.INTERRUPTED, "Ctrl-C: saving and stopping after step"),
    "killed": (1, f"terminated with signal {signal.SIGKILL.name}"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "way"), [*(("ddp_fork", way) for way in WAYS), ("ddp_spawn", "diverged")])
def test_the_code_of_the_ranks_is_that_of_the_process_that_has_spawned_them(
    strategy: str, way: str, tmp_path: Path
) -> None:
    code, said = ended(tmp_path, strategy, way)
    expected, words = WAYS[way]
    assert code == expected, said
    assert words in said, said
    assert "went on" not in said
    good = ft.last_good(str(tmp_path))
    assert good is not None
    assert good.manifest is not None
    assert good.manifest.step >= (STEP - 1 if way == "killed" else STEP), said
    assert ("LIGHTNING_FT_SKIP_BATCHES=4" in said) is (way in ("diverged", "failed", "lost"))
