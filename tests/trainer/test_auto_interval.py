"""``every_n_train_steps="auto"`` in real runs: measured, said, remembered, and without an effect on the training."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import lightning_ft as ft
from lightning_ft._fit.surprises import announce_first_save
from lightning_ft._history import interval
from lightning_ft.state import Progress
from lightning_ft.testing import assert_resume_exact
from lightning_ft.triggers import Trigger
from tests.trainer import scenarios as s


def trainer(dirpath: Any, epochs: int = 1, **kwargs: Any) -> L.Trainer:
    arguments: dict[str, Any] = {"plugins": [ft.FaultTolerantCheckpointIO(async_save=False)], **kwargs}
    return L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_model_summary=False, enable_progress_bar=False,
        callbacks=[ft.FaultTolerantCheckpoint(dirpath, every_n_train_steps="auto", keep_last=-1)], **arguments,
    )  # fmt: skip


def fit(dirpath: Path, **kwargs: Any) -> list[tuple[int, str]]:
    """The steps and reasons of what is in the directory after the fit."""
    L.seed_everything(1)
    trainer(dirpath, **kwargs).fit(s.Net(), *s.shuffled(), ckpt_path="last")
    manifests = [info.manifest for info in ft.list_checkpoints(dirpath)]
    return sorted((manifest.step, manifest.reason) for manifest in manifests if manifest is not None)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "a checkpoint is saved every" in r.message]


def test_a_short_run_is_saved_at_its_end_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert fit(tmp_path) == [(8, "train_end")]
    assert "the first one 60.0 s from now" in caplog.text
    assert "earlier starts" not in caplog.text
    assert not any("the run has" in r.message for r in caplog.records)  # that nothing will be due


@pytest.mark.parametrize(("interval_secs", "first"), [(600, "60.0 s"), (5, "5.0 s")])
def test_the_first_save_is_announced_once(interval_secs: int, first: str, caplog: pytest.LogCaptureFixture) -> None:
    trigger = Trigger.of("auto", None, timedelta(seconds=interval_secs))
    with caplog.at_level(logging.INFO):
        announce_first_save("/runs/1", trigger, None, Progress(0, 0, 0, False, False), earlier=False)
    (line,) = caplog.messages
    assert line == f"lightning_ft: checkpoints are saved to /runs/1: the first one {first} from now"


def test_saves_follow_the_clock_and_the_decision_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interval, "LEAST_SECS", 1e-6)
    monkeypatch.setattr(interval, "MOST_SECS", 1e-6)  # what a save takes decides: shorter than an epoch here
    with caplog.at_level(logging.INFO):
        saved = fit(tmp_path, epochs=2)
    assert saved[0] == (1, "time")
    assert len(said(caplog)) >= 1
    assert "saves follow each other no faster than they are written" in said(caplog)[0]


def test_the_next_start_knows_what_saves_cost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path)
    assert said(caplog) == []
    caplog.clear()
    with caplog.at_level(logging.INFO):
        fit(tmp_path, epochs=2)
    assert len(said(caplog)) == 1


def test_another_plugin_measures_nothing(tmp_path: Path) -> None:
    with pytest.raises(ft.ConfigurationError, match='every_n_train_steps="auto": only FaultTolerantCheckpointIO'):
        fit(tmp_path, plugins=[AsyncCheckpointIO()])


def often(dirpath: str) -> L.Trainer:
    interval.LEAST_SECS = interval.MOST_SECS = 1e-6  # in this fresh process
    return s.trainer(dirpath, ft_args={"every_n_train_steps": "auto"})


def test_a_restart_is_exact_wherever_the_clock_has_saved(tmp_path: Path) -> None:
    assert_resume_exact(often, s.Net, s.shuffled, kill_at=[6, 11], root=tmp_path)


class Saves(Callback):
    """Writes down on every rank when it took part in a save."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self.path.open("a") as file:
            file.write("a start\n")

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        with self.path.open("a") as file:
            file.write(f"{trainer.global_step}\n")


def often_on_rank_zero(dirpath: str) -> L.Trainer:
    """Asked for its own opinion, rank 1 would never save."""
    rank = os.environ["LOCAL_RANK"]
    interval.LEAST_SECS = interval.MOST_SECS = 1e-6 if rank == "0" else 1e9
    made = s.ddp(dirpath, ft_args={"every_n_train_steps": "auto"})
    made.callbacks.insert(0, Saves(Path(dirpath).parent / f"saves.rank{rank}"))
    return made


@pytest.mark.distributed
def test_rank_zero_decides_for_all_and_a_restart_is_exact(tmp_path: Path) -> None:
    compared = assert_resume_exact(
        often_on_rank_zero, s.Net, s.shuffled, kill_at=[4, "Committed", 9], root=tmp_path, world_size=2
    )
    assert compared.validations > 0
    for run, starts in (("uninterrupted", 1), ("restarted", 4)):
        zero, one = ((tmp_path / run / f"saves.rank{rank}").read_text().split("a start\n")[1:] for rank in (0, 1))
        assert len(zero) == len(one) == starts
        assert zero[-1] == one[-1]  # of starts that were killed, one rank may have been a step ahead
        assert len(zero[-1].split()) >= 2, zero
