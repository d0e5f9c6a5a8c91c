"""D14: a checkpoint that loads, and crashes the run a little later, does not catch a job that restarts by itself."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

import lightning_ft as ft
from lightning_ft._names import STARTS_NAME
from lightning_ft._restart import starts
from lightning_ft.storage import Storage
from tests import ranks
from tests.trainer import runs
from tests.trainer import scenarios as s
from tests.trainer.runs import Line, first_run, fit, trainer


def counted(dirpath: Path | str) -> list[int]:
    """What is counted, of each checkpoint."""
    return [of.starts for of in starts.read(Storage(), str(dirpath)).counts.values()]


class Raises(Callback):
    """Before the first step of the fit."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_train_batch_start(self, *args: Any) -> None:
        raise self.error


class Poisoned(Line):
    """Something got into its state at step 5 of the first start, and kills any process that has it at step 7."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first
        self.poison = False

    def on_train_batch_start(self, *args: Any) -> None:
        if self.first and self.global_step == 5:
            self.poison = True
        if self.poison and self.global_step == 7:
            self.trainer.strategy.checkpoint_io.drain()  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["poison"] = self.poison

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.poison = checkpoint["poison"]


def start(rank: ranks.Rank, dirpath: str, first: bool) -> tuple[int, list[int], str]:
    """One start of the same command: the last step, the steps made, and what was said."""
    said: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("lightning_ft").addHandler(Listening())
    model = Poisoned(first)
    callback = ft.FaultTolerantCheckpoint(dirpath, every_n_train_steps=3, max_restarts_without_progress=2)
    fit(trainer(callback, max_steps=8, max_epochs=-1), model, "last")
    return model.trainer.global_step, [step[1] for step in model.steps], "\n".join(said)


@pytest.mark.slow
def test_d14_a_run_gets_past_a_poisoned_checkpoint(tmp_path: Path) -> None:
    dirpath = str(tmp_path / "checkpoints")
    codes = []
    for number in range(3):
        (outcome,) = ranks.run(start, tmp_path / str(number), dirpath, number == 0, world_size=1)
        codes.append(outcome.exit_code)
        if number:
            assert counted(dirpath) == [number]
    assert codes == [-signal.SIGKILL] * 3
    assert runs.names(dirpath) == ["step=00000003.ckpt", "step=00000006.ckpt"]
    (last,) = ranks.run(start, tmp_path / "last", dirpath, False, world_size=1)
    assert last.exit_code == 0, last.error
    step, made, said = last.value
    assert (step, made) == (8, [3, 4, 5, 6, 7])
    assert "step=00000006.ckpt: the run was started from it 2 times and has not saved a newer one" in said
    assert counted(dirpath) == [2], "what was given up stays so while it is there"
    assert ft.last_good(dirpath).manifest.step == 8  # type: ignore[union-attr]


def test_a_crash_before_a_save_counts_and_a_save_forgives(tmp_path: Path) -> None:
    first_run(tmp_path, every_n_train_steps=2, max_steps=4, save_on_train_end=False)
    assert not (tmp_path / STARTS_NAME).exists()
    for crashes in (1, 2):
        with pytest.raises(ZeroDivisionError):
            fit(trainer(again(tmp_path), Raises(ZeroDivisionError("crash"))), ckpt_path="last")
        assert counted(tmp_path) == [crashes]
    fit(trainer(again(tmp_path), max_steps=6), ckpt_path="last")
    assert not (tmp_path / STARTS_NAME).exists()


def again(dirpath: Path, **kwargs: Any) -> ft.FaultTolerantCheckpoint:
    return ft.FaultTolerantCheckpoint(dirpath, **{"every_n_train_steps": 2, **kwargs})


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(75)], ids=["ctrl-c", "preempted"])
def test_an_end_that_was_asked_for_does_not_count(tmp_path: Path, error: BaseException) -> None:
    first_run(tmp_path, max_steps=4)
    with pytest.raises(SystemExit):
        fit(trainer(again(tmp_path), Raises(error)), ckpt_path="last")
    assert counted(tmp_path) == []


def test_a_refused_restart_does_not_count(tmp_path: Path) -> None:
    first_run(tmp_path, max_steps=4)
    for _ in range(4):
        with pytest.raises(ft.RestoreError):
            fit(trainer(again(tmp_path), max_steps=6), data=DataLoader(s.Numbers(), batch_size=2), ckpt_path="last")
    assert counted(tmp_path) == []


def test_a_finished_run_that_is_started_again_does_not_count(tmp_path: Path) -> None:
    first_run(tmp_path, max_steps=4)
    for _ in range(4):
        fit(trainer(again(tmp_path), max_steps=4), ckpt_path="last")
    assert counted(tmp_path) == []


def test_a_path_is_never_overruled_and_not_counted(tmp_path: Path) -> None:
    first_run(tmp_path, max_steps=6)
    crash(tmp_path, 1)
    path = str(tmp_path / "step=00000006.ckpt")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fit(trainer(again(tmp_path), Raises(ZeroDivisionError("crash"))), ckpt_path=path)
    assert counted(tmp_path) == [1]
    model = fit(trainer(again(tmp_path), max_steps=7), ckpt_path=path)
    assert [step[1] for step in model.steps] == [6]


def crash(dirpath: Path, times: int, **kwargs: Any) -> None:
    for _ in range(times):
        with pytest.raises(ZeroDivisionError):
            fit(trainer(again(dirpath, **kwargs), Raises(ZeroDivisionError("crash")), max_steps=8), ckpt_path="last")


def test_when_all_were_tried_in_vain_the_newest_is_taken_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first_run(tmp_path, max_steps=6)
    crash(tmp_path, 3, max_restarts_without_progress=1)
    assert counted(tmp_path) == [1, 1, 1]
    with caplog.at_level(logging.WARNING):
        model = fit(trainer(again(tmp_path, max_restarts_without_progress=1), max_steps=8), ckpt_path="last")
    assert [step[1] for step in model.steps] == [6, 7]
    assert "started 1 times from" in caplog.text
    assert "something else must be the cause" in caplog.text


def test_what_rotation_deletes_is_no_longer_counted(tmp_path: Path) -> None:
    first_run(tmp_path, max_steps=6, keep_last=2)
    crash(tmp_path, 1, max_restarts_without_progress=1, keep_last=2)
    fit(trainer(again(tmp_path, max_restarts_without_progress=1, keep_last=2), max_steps=8), ckpt_path="last")
    assert runs.names(tmp_path) == ["step=00000006-v1.ckpt", "step=00000008.ckpt"]
    assert not (tmp_path / STARTS_NAME).exists()


def test_a_local_directory_in_front_counts_too(tmp_path: Path) -> None:
    kwargs = {"local_dirpath": tmp_path / "local", "max_restarts_without_progress": 1}
    first_run(tmp_path / "run", max_steps=6, **kwargs)
    crash(tmp_path / "run", 1, **kwargs)
    assert counted(tmp_path / "run") == counted(tmp_path / "local") == [1]
    model = fit(trainer(again(tmp_path / "run", **kwargs), max_steps=8), ckpt_path="last")
    assert next(step[1] for step in model.steps) == 4


def test_in_a_store() -> None:
    with runs.memory() as url:
        first_run(url, max_steps=6)
        crash(url, 1, max_restarts_without_progress=1)  # type: ignore[arg-type]
        assert counted(url) == [1]
        callback = ft.FaultTolerantCheckpoint(url, every_n_train_steps=2, max_restarts_without_progress=1)
        model = fit(trainer(callback, max_steps=8), ckpt_path="last")
        assert next(step[1] for step in model.steps) == 4


def test_validating_is_no_start(tmp_path: Path) -> None:
    first_run(tmp_path, max_steps=4)
    validating: L.Trainer = trainer(again(tmp_path))
    validating.validate(Line(), s.loader(), ckpt_path="last", verbose=False)
    assert counted(tmp_path) == []


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "3"])
def test_an_impossible_limit_is_refused(value: Any) -> None:
    with pytest.raises(ft.ConfigurationError, match="max_restarts_without_progress"):
        ft.FaultTolerantCheckpoint("runs/1", max_restarts_without_progress=value)
