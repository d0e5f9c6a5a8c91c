"""What of Lightning's may stand beside the callback: a run that crashed and restarted ends as one that did not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger

import lightning_ft as ft
from tests.trainer import scenarios as s


class Crashed(Exception):
    pass


class Crash(Callback):
    """After so many batches of this process."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def on_train_batch_end(self, *args: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise Crashed


class FreezeFirst(BaseFinetuning):
    """The first layer learns from the second epoch on."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


class Net(s.Net):
    """Without a scheduler, which could not know of the parameters that are added."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def averaging() -> Callback:
    return StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)


def lightnings_own(place: Path) -> list[Callback]:
    return [
        ModelCheckpoint(place / "best", monitor="val", save_last=True),
        EarlyStopping("val", patience=2),
        LearningRateMonitor("step"),
        Timer(duration={"hours": 1}),
        TQDMProgressBar(),
    ]


MATRIX: dict[str, tuple[Callable[[Path], list[Callback]], dict[str, Any]]] = {
    "model checkpoint": (lambda place: [ModelCheckpoint(place / "best", monitor="val", save_top_k=2)], {}),
    "early stopping": (lambda _: [EarlyStopping("val", patience=1, min_delta=10.0)], {"max_epochs": 4}),
    "learning rate monitor": (lambda _: [LearningRateMonitor("step")], {}),
    "weight averaging": (lambda _: [EMAWeightAveraging(decay=0.8)], {}),
    "stochastic weight averaging": (lambda _: [averaging()], {}),
    "finetuning": (lambda _: [FreezeFirst()], {}),
    "timer": (lambda _: [Timer(duration={"hours": 1})], {}),
    "accumulation by schedule": (lambda _: [GradientAccumulationScheduler({0: 1, 1: 2})], {}),
    "rich bar": (lambda _: [RichProgressBar()], {"enable_progress_bar": True}),
    "all together": (lightnings_own, {"enable_progress_bar": True}),
    "limited": (lambda _: [], {"limit_train_batches": 5, "limit_val_batches": 1}),
    "overfit": (lambda _: [], {"overfit_batches": 5}),
    "no validation": (lambda _: [], {"limit_val_batches": 0}),
    "validation within epochs": (lambda _: [], {"val_check_interval": 3, "check_val_every_n_epoch": None}),
    "loaders made anew": (lambda _: [], {"reload_dataloaders_every_n_epochs": 1}),
    "clipped gradients": (lambda _: [], {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    "detected anomalies": (lambda _: [], {"detect_anomaly": True}),
    "deterministic": (lambda _: [], {"deterministic": True, "benchmark": False}),
}


def fit(place: Path, name: str, *more: Callback) -> tuple[L.Trainer, L.LightningModule]:
    callbacks, arguments = MATRIX[name]
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        callbacks=[*callbacks(place), ft.FaultTolerantCheckpoint(place / "ours", every_n_train_steps=2), *more],
        logger=CSVLogger(place / "logs"), default_root_dir=place,
        plugins=[ft.FaultTolerantCheckpointIO(async_save=False)],
        **{
            "max_epochs": 3, "accelerator": "cpu", "enable_model_summary": False, "enable_progress_bar": False,
            "log_every_n_steps": 1, **arguments,
        },
    )  # fmt: skip
    model = Net() if name == "finetuning" else s.Net()
    trainer.fit(model, *s.shuffled(), ckpt_path="last")
    return trainer, model


def outcome(trainer: L.Trainer, model: L.LightningModule) -> dict[str, Any]:
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    metrics = {f"metric {key}": value for key, value in trainer.callback_metrics.items()}
    return {**state, **metrics, "steps": torch.tensor([trainer.global_step, trainer.current_epoch])}


@pytest.mark.parametrize("name", MATRIX)
def test_after_a_crash_it_ends_as_without(name: str, tmp_path: Path) -> None:
    expected = outcome(*fit(tmp_path / "a", name))
    with pytest.raises(Crashed):
        fit(tmp_path / "b", name, Crash(7))
    found = outcome(*fit(tmp_path / "b", name))
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []


@pytest.mark.parametrize("finder", [BatchSizeFinder, LearningRateFinder])
def test_what_trains_at_every_start_is_refused(finder: type[Callback], tmp_path: Path) -> None:
    trainer = L.Trainer(
        callbacks=[finder(), ft.FaultTolerantCheckpoint(tmp_path)], accelerator="cpu", logger=False, max_epochs=1
    )
    model = s.Net()
    model.batch_size = 4  # which the one asks for
    with pytest.raises(ft.ConfigurationError, match=f"{finder.__name__} trains at every start"):
        # The one refuses loaders that are given to `fit` by itself.
        trainer.fit(model, datamodule=L.LightningDataModule.from_datasets(s.Numbers(), batch_size=4))


def test_validate_test_and_predict_before_and_after(tmp_path: Path) -> None:
    """With the same trainer: they change nothing of the fit, and are not saved."""

    class Whole(s.Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test", self.net(self.features(batch)).mean() + torch.rand(()))

        def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(self.features(batch))

    def whole(place: Path, crash: bool) -> dict[str, Any]:
        L.seed_everything(1, verbose=False)
        more = [Crash(7)] if crash else []
        trainer = L.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_model_summary=False, enable_progress_bar=False,
            callbacks=[ft.FaultTolerantCheckpoint(place, every_n_train_steps=2), *more],
        )  # fmt: skip
        model, (train, val) = Whole(), s.shuffled()
        trainer.validate(model, val, verbose=False)
        trainer.test(model, val, verbose=False)
        trainer.predict(model, val)
        trainer.fit(model, train, val, ckpt_path="last")
        found = outcome(trainer, model)
        trainer.test(model, val, verbose=False)
        trainer.predict(model, val)
        after = model.state_dict()
        assert all(torch.equal(found[key], value) for key, value in after.items())
        return found

    expected = whole(tmp_path / "a", False)
    with pytest.raises(Crashed):
        whole(tmp_path / "b", True)
    found = whole(tmp_path / "b", False)
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
