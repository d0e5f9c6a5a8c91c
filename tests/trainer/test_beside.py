"""What of Lightning's may stand beside the callback: a run that is killed and restarted is the one that is not.

Trainers that save nothing (`fast_dev_run`, `barebones`) are in test_lifecycle.py.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as lightnings
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.tuner import Tuner

import lightning_ft as ft
from lightning_ft import testing
from lightning_ft.testing import assert_resume_exact
from tests.trainer import scenarios as s


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
    "learning rate monitor": (lambda place: [LearningRateMonitor("step")], {"logger": CSVLogger}),
    "stochastic weight averaging": (lambda _: [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)], {}),
    "finetuning": (lambda _: [FreezeFirst()], {}),
    "timer": (lambda _: [Timer(duration={"hours": 1})], {}),
    "time of the trainer": (lambda _: [], {"max_time": "00:01:00:00"}),
    "accumulation by schedule": (lambda _: [GradientAccumulationScheduler({0: 1, 1: 2})], {}),
    "tqdm bar": (lambda _: [TQDMProgressBar()], {"enable_progress_bar": True}),
    "rich bar": (lambda _: [RichProgressBar()], {"enable_progress_bar": True}),
    "all together": (lightnings_own, {"enable_progress_bar": True, "logger": TensorBoardLogger}),
    "limited": (lambda _: [], {"limit_train_batches": 5, "limit_val_batches": 1}),
    "limited to a part": (lambda _: [], {"limit_train_batches": 0.7, "limit_val_batches": 0.5}),
    "overfit": (lambda _: [], {"overfit_batches": 5}),
    "overfit to a part": (lambda _: [], {"overfit_batches": 0.7}),
    "no validation": (lambda _: [], {"limit_val_batches": 0}),
    "validation within epochs": (lambda _: [], {"val_check_interval": 3, "check_val_every_n_epoch": None}),
    "no sanity check": (lambda _: [], {"num_sanity_val_steps": 0}),
    "loaders made anew": (lambda _: [], {"reload_dataloaders_every_n_epochs": 1}),
    "loaders made anew now and then": (lambda _: [], {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 4}),
    "clipped gradients": (lambda _: [], {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    "detected anomalies": (lambda _: [], {"detect_anomaly": True}),
    "deterministic": (lambda _: [], {"deterministic": True, "benchmark": False}),
}
if hasattr(lightnings, "EMAWeightAveraging"):  # since Lightning 2.6
    MATRIX["weight averaging"] = (lambda _: [lightnings.EMAWeightAveraging(decay=0.8)], {})


class Module(L.LightningDataModule):
    """Whose loaders Lightning asks for, again if it is told to."""

    def train_dataloader(self) -> Any:
        return s.shuffled()[0]

    def val_dataloader(self) -> Any:
        return s.val_loader()


def trainer(dirpath: str, name: str) -> L.Trainer:
    callbacks, arguments = MATRIX[name]
    place = Path(dirpath).parent
    logger = arguments.get("logger", CSVLogger)(place / "logs")
    L.seed_everything(1, verbose=False)
    return L.Trainer(
        callbacks=[*callbacks(place), ft.FaultTolerantCheckpoint(dirpath, every_n_train_steps=2)],
        plugins=[ft.FaultTolerantCheckpointIO(async_save=False)], default_root_dir=place, log_every_n_steps=1,
        **{**s.COMMON, "max_epochs": 3, **arguments, "logger": logger},
    )  # fmt: skip


@pytest.mark.parametrize("name", MATRIX)
def test_killed_it_is_the_same_run(name: str, tmp_path: Path) -> None:
    compared = assert_resume_exact(
        partial(trainer, name=name), Net if name == "finetuning" else s.Net, Module, kill_at=11, root=tmp_path
    )
    assert compared.steps > 11
    assert 0 < compared.replayed < 11  # so the second start went on from a checkpoint
    assert compared.validations > 0 or name == "no validation"


def events(place: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows of all starts: of a step that was logged twice, both have to be the same."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, dict[int, float]] = {}
    for version in sorted(place.glob("logs/lightning_logs/version_*")):
        accumulator = EventAccumulator(str(version), size_guidance={"scalars": 0})
        accumulator.Reload()
        for tag in accumulator.Tags()["scalars"]:
            if not tag.startswith("ft/"):
                for event in accumulator.Scalars(tag):
                    assert found.setdefault(tag, {}).setdefault(event.step, event.value) == event.value, (tag, event)
    return found


def test_tensorboard_shows_what_it_would_without_the_kills(tmp_path: Path) -> None:
    """From the step on with which a start goes on; what the dead process had logged and not written is its own."""
    assert_resume_exact(partial(trainer, name="all together"), s.Net, Module, kill_at=[7, 11], root=tmp_path)
    expected, found = events(tmp_path / "uninterrupted"), events(tmp_path / "restarted")
    assert found.keys() == expected.keys() >= {"loss_step", "loss_epoch", "val", "lr-Adam"}
    for tag, values in found.items():
        assert values.items() <= expected[tag].items(), tag
        assert {step for step in expected[tag] if step >= 10} <= values.keys(), tag


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


# -- before and after a fit, with the same trainer -------------------------------------------------------------------


class Sized(L.LightningDataModule):
    """With a batch size that can be found."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(s.Numbers(), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return s.val_loader()


class Whole(s.Net):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-2

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.net(self.features(batch)).mean() + torch.rand(()))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(self.features(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Kill(Callback):
    def __init__(self, batches: int) -> None:
        self.left = batches

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        tuning = any(getattr(callback, "_early_exit", False) for callback in trainer.callbacks)
        self.left -= not tuning
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def start(function: Callable[..., None], place: Path, code: int, *args: Any) -> Any:
    """What `function(place, *args)` has saved as `found`, in a fresh process that ended with `code`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(testing.PRELOADED)
    place.mkdir(exist_ok=True)
    process = context.Process(target=function, args=(place, *args))
    process.start()
    process.join()
    assert process.exitcode == code
    return torch.load(place / "found") if code == 0 else None


def outcome(trainer: L.Trainer, model: L.LightningModule) -> dict[str, torch.Tensor]:
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    metrics = {f"metric {key}": value for key, value in trainer.callback_metrics.items()}
    random = {"random": torch.get_rng_state()}
    return {**state, **metrics, **random, "steps": torch.tensor([trainer.global_step, trainer.current_epoch])}


def with_stages(place: Path, kills: Iterable[int] = ()) -> None:
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        **s.COMMON, max_epochs=2, limit_test_batches=1, limit_predict_batches=1, default_root_dir=place,
        callbacks=[ft.FaultTolerantCheckpoint(place / "run", every_n_train_steps=2), *map(Kill, kills)],
        plugins=[ft.FaultTolerantCheckpointIO(async_save=False)],
    )  # fmt: skip
    model, (train, val) = Whole(), s.shuffled()
    trainer.validate(model, val, verbose=False)
    trainer.test(model, val, verbose=False)
    assert len(trainer.predict(model, val)) == 1
    trainer.fit(model, train, val, ckpt_path="last")
    found = outcome(trainer, model)
    trainer.validate(model, val, verbose=False)
    trainer.test(model, val, verbose=False)
    found["predicted"] = trainer.predict(model, val)[0]
    assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())
    torch.save(found, place / "found")


def tuned(place: Path, kills: Iterable[int] = ()) -> None:
    """With a `Tuner` before the fit, at every start, which the refusal of its callbacks advises."""
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        **s.COMMON, max_epochs=4, default_root_dir=place,
        callbacks=[ft.FaultTolerantCheckpoint(place / "run", every_n_train_steps=2), *map(Kill, kills)],
        plugins=[ft.FaultTolerantCheckpointIO(async_save=False)],
    )  # fmt: skip
    model, data = Whole(), Sized()
    Tuner(trainer).scale_batch_size(model, datamodule=data, max_trials=2, steps_per_trial=1)
    assert data.batch_size > 2
    assert Tuner(trainer).lr_find(model, datamodule=data, num_training=5, min_lr=1e-4) is not None
    trainer.fit(model, datamodule=data, ckpt_path="last")
    torch.save(outcome(trainer, model), place / "found")


@pytest.mark.parametrize("script", [with_stages, tuned])
def test_stages_before_and_after_the_fit_change_nothing(script: Callable[..., None], tmp_path: Path) -> None:
    expected = start(script, tmp_path / "a", 0)
    start(script, tmp_path / "b", -signal.SIGKILL, [7])
    start(script, tmp_path / "b", -signal.SIGKILL, [4])
    found = start(script, tmp_path / "b", 0)
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
