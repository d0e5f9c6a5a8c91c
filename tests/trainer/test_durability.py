"""What a run shows of its own safety, in Lightning's progress bars and in the log, and that it changes nothing else."""

from __future__ import annotations

import logging
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback, ProgressBar, RichProgressBar, TQDMProgressBar

import lightning_ft as ft
from lightning_ft._fit.durability_watch import IN_BAR
from tests.trainer import scenarios as s

INSTANT = timedelta(microseconds=1)


class Shown(Callback):
    """What the bar was asked for after each batch, and what everybody else saw."""

    def __init__(self) -> None:
        self.bar: list[dict[str, Any]] = []
        self.others: set[str] = set()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.progress_bar_callback is not None:
            self.bar.append(dict(trainer.progress_bar_callback.get_metrics(trainer, pl_module)))
        self.others |= {*trainer.callback_metrics, *trainer.logged_metrics, *trainer.progress_bar_metrics}


def fit(dirpath: Path, bar: Callback | None, shown: Shown, epochs: int = 1, **arguments: Any) -> L.Trainer:
    L.seed_everything(1)
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_model_summary=False,
        enable_progress_bar=bar is not None, plugins=[ft.FaultTolerantCheckpointIO(async_save=False)],
        callbacks=[*([] if bar is None else [bar]), ft.FaultTolerantCheckpoint(dirpath, **arguments), shown],
    )  # fmt: skip
    trainer.fit(s.Net(), *s.shuffled(), ckpt_path="last")
    return trainer


@pytest.mark.parametrize("bar_type", [TQDMProgressBar, RichProgressBar])
def test_the_bar_shows_the_newest_durable_step(
    tmp_path: Path, bar_type: type[ProgressBar], capsys: pytest.CaptureFixture[str]
) -> None:
    bar, shown = bar_type(), Shown()
    trainer = fit(tmp_path, bar, shown, every_n_train_steps=3)
    steps = [re.split(r"[ (]", str(metrics[IN_BAR]))[0] for metrics in shown.bar]
    assert steps == ["nothing", "nothing", "nothing", "3", "3", "3", "6", "6"]
    assert IN_BAR not in shown.others
    assert IN_BAR not in bar.get_metrics(trainer, trainer.lightning_module)
    assert not {"get_metrics", "on_train_end", "teardown"} & set(vars(bar))
    if isinstance(bar, RichProgressBar):
        assert bar._metric_component is not None
        last = str(bar._metric_component._metrics[IN_BAR])
        assert bar.progress is not None
        assert not bar.progress.live.is_started
        assert " " not in last  # where it would break the line
    else:
        out = capsys.readouterr().out
        assert f"{IN_BAR}=6 (" in out
        last = out.rpartition(f"{IN_BAR}=")[2]
        assert bar.train_progress_bar.disable  # as Lightning leaves it
    assert last.startswith("8")  # that of the end, durable when no batch is left to show it


def test_a_bar_of_the_users_own_hears_of_each_epoch_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Own(TQDMProgressBar):
        epochs = 0

        def on_train_epoch_end(self, *args: Any) -> None:
            self.epochs += 1
            super().on_train_epoch_end(*args)

    bar = Own()
    fit(tmp_path, bar, Shown(), epochs=2, every_n_train_steps=3)
    assert bar.epochs == 2
    assert capsys.readouterr().out.rpartition(f"{IN_BAR}=")[2].startswith("16 (")


def test_after_a_restart_it_begins_with_the_step_that_is_there(tmp_path: Path) -> None:
    fit(tmp_path, None, Shown(), every_n_train_steps=3)
    shown = Shown()
    fit(tmp_path, TQDMProgressBar(), shown, epochs=2, every_n_train_steps=100)
    assert {str(metrics[IN_BAR]).partition(" ")[0] for metrics in shown.bar} == {"8"}


def test_a_bar_with_such_a_value_of_its_own_keeps_it(tmp_path: Path) -> None:
    class Own(TQDMProgressBar):
        def get_metrics(self, *args: Any) -> dict[str, Any]:
            return {**super().get_metrics(*args), IN_BAR: "mine"}

    shown = Shown()
    fit(tmp_path, Own(), shown, every_n_train_steps=3)
    assert {metrics[IN_BAR] for metrics in shown.bar} == {"mine"}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "lightning_ft._fit.durability_watch"]


def test_a_warning_when_nothing_becomes_durable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fit(tmp_path, None, Shown(), every_n_train_steps=1000, warn_if_not_durable_after=INSTANT)
    said = warnings_of(caplog)
    assert said
    assert f"nothing has become durable in {tmp_path} for" in said[0]
    assert "no save was due" in said[0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"warn_if_not_durable_after": None},
        {},  # half an hour
        {
            "warn_if_not_durable_after": INSTANT,
            "train_time_interval": timedelta(hours=2),
        },  # which is what was asked for
    ],
)
def test_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, arguments: dict[str, Any]) -> None:
    with caplog.at_level(logging.WARNING):
        fit(tmp_path, None, Shown(), every_n_train_steps=1000, **arguments)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("value", [30, timedelta(0), timedelta(seconds=-1), "30m"])
def test_a_time_it_cannot_have(value: Any) -> None:
    with pytest.raises(ft.ConfigurationError, match="warn_if_not_durable_after="):
        ft.FaultTolerantCheckpoint("runs/1", warn_if_not_durable_after=value)
