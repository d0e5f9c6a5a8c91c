"""A vote within a validation: noticed soon, on all ranks alike, and the restart runs that validation."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

import lightning_ft as ft
from lightning_ft._fit import guarding
from lightning_ft._fit.watch import Request, Watches
from lightning_ft._vote import validation
from lightning_ft.state import Progress
from tests.asked import Asked
from tests.trainer import runs
from tests.trainer import scenarios as s


class AskedAgain(Asked):
    """Notes where it asks for the end."""

    def __init__(self) -> None:
        super().__init__()
        self.decided_at: list[int] = []

    def decide(self, votes: Mapping[str, int], progress: Progress) -> Request | None:
        if not votes.get("asked"):
            return None
        if progress.step not in self.decided_at:  # it is asked again when training ends
            self.decided_at.append(progress.step)
        return Request("asked")


class Signal(Callback):
    """Tells the watch in the validation after `step` steps, at its batch `batch`; -1: never."""

    def __init__(self, step: int = -1, batch: int = -1) -> None:
        self.watch = AskedAgain()
        self.at = step, batch
        self.batches: list[tuple[int, int]] = []
        self.ends: list[int] = []

    def on_validation_batch_start(
        self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        self.batches.append((trainer.global_step, batch_idx))
        if self.at == (trainer.global_step, batch_idx):
            self.watch.known = True

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        self.ends.append(trainer.global_step)


class Noisy(runs.Line):
    """Draws random numbers in training and in validation, and keeps a schedule that follows the validation."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[str] = []
        self.seen: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) + torch.rand(()) * self.layer.weight.sum()
        self.losses.append(float(loss.detach()).hex())
        self.log("train", loss.detach(), on_epoch=True, on_step=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        value = self.layer(batch[1]).pow(2).mean() + torch.rand(())
        self.seen.append(float(value).hex())
        self.log("val", value, batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val", "interval": self.interval, "strict": False},
        }

    interval = "epoch"


def _fit(
    patch: pytest.MonkeyPatch,
    dirpath: Path,
    signal: Signal,
    ckpt_path: Any = None,
    model: Any = None,
    **kwargs: Any,
) -> tuple[L.Trainer, Any]:
    def watches(*_: Any) -> Watches:
        return Watches([signal.watch])

    patch.setattr(guarding, "watches", watches)
    callbacks = kwargs.pop("callbacks", [])
    saver = ft.FaultTolerantCheckpoint(dirpath, every_n_epochs=100, save_on_train_end=False)
    trainer = runs.trainer(signal, *callbacks, saver, **{"max_epochs": 3, **kwargs})
    model = runs.fit(trainer, model or Noisy(), ckpt_path, s.loader(shuffle=True), s.loader(shuffle=True))
    return trainer, model


def _end(trainer: L.Trainer, model: Any) -> dict[str, Any]:
    return {
        "weights": {k: v.tolist() for k, v in model.state_dict().items()},
        "optimizer": repr(trainer.optimizers[0].state_dict()),
        "metrics": {k: float(v).hex() for k, v in trainer.callback_metrics.items()},
        "schedule": repr(trainer.lr_scheduler_configs[0].scheduler.state_dict()),
        "step": (trainer.global_step, trainer.current_epoch),
        "random": torch.rand(3).tolist(),
    }


# Where validations are: in the middle of an epoch of 8 batches, and at its end.
@pytest.mark.parametrize(
    ("step", "interval", "every"), [(4, "step", 4), (8, "epoch", 8), (16, "epoch", 8), (12, "epoch", 4)]
)
def test_a_validation_is_left_soon_and_the_restart_runs_it(
    step: int, interval: str, every: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Noisy, "interval", interval)
    monkeypatch.setattr(validation, "_MOST_BATCHES", 1)
    kwargs = {"val_check_interval": every, "num_sanity_val_steps": 2}
    whole = Signal()
    trainer, model = _fit(monkeypatch, tmp_path / "whole", whole, **kwargs)
    expected = _end(trainer, model)

    first = Signal(step, 2)
    trainer, begun = _fit(monkeypatch, tmp_path / "run", first, **kwargs)
    assert trainer.global_step == step
    assert first.watch.decided_at == [step]
    assert first.batches[-1] == (step, 3)  # cast after batch 2, heard after batch 3
    assert step not in first.ends
    (info,) = ft.list_checkpoints(str(tmp_path / "run"))
    assert info.manifest.step == step
    assert info.manifest.reason == "stop"

    second = Signal()
    trainer, ended = _fit(monkeypatch, tmp_path / "run", second, ckpt_path="last", **kwargs)
    assert begun.losses + ended.losses == model.losses
    left = [at for at, batch in second.batches if batch == 0]
    assert left == [at for at, batch in whole.batches[2:] if batch == 0 and at >= step]
    assert ended.seen == model.seen[-len(ended.seen) :]
    assert second.ends == [at for at in whole.ends if at >= step]
    assert _end(trainer, ended) == expected


# -- a validation that is not left -------------------------------------------------------------------------------


class Keeps(Noisy):
    """Saves what only it knows."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = len(self.seen)


class Swaps(Callback):
    """Validates other weights than it trains, and leaves no trace of that in their versions."""

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for parameter in module.parameters():
            parameter.data.add_(1.0)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for parameter in module.parameters():
            parameter.data.sub_(1.0)


class Counts(Noisy):
    """Counts its validation batches in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.count += 1


@pytest.mark.parametrize(
    ("model", "kwargs"),
    [
        (Keeps, {}),
        (Counts, {}),
        (Noisy, {"callbacks": [Swaps()]}),
        (Noisy, {"accumulate_grad_batches": 3, "max_steps": 100}),
        (Noisy, {"max_steps": 4}),
    ],
    ids=["adds to checkpoints", "changes a buffer", "changes weights", "within an accumulation", "the last one"],
)
def test_a_validation_whose_start_cannot_be_saved_runs_to_its_end(
    model: Any, kwargs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was asked for happens when it is over; within an accumulation, when that is."""
    monkeypatch.setattr(validation, "_MOST_BATCHES", 1)
    step = 4 if "accumulate_grad_batches" not in kwargs else 1
    signal = Signal(step, 2)
    trainer, _ = _fit(monkeypatch, tmp_path, signal, model=model(), val_check_interval=4, **kwargs)
    assert [at for at, batch in signal.batches if at == step and batch == 7] == [step]
    assert signal.ends[-1] == step
    (info,) = ft.list_checkpoints(str(tmp_path))
    assert trainer.global_step == info.manifest.step == (step if step == 4 else 2)


# -- a real signal -----------------------------------------------------------------------------------------------


class Terminated(Noisy):
    """Is sent SIGTERM in the middle of the validation after `step` steps."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if (self.global_step, batch_idx) == (self.step, 2) and not self.trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_within_a_validation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process leaves with the documented code, saved, and its restart is exact."""
    monkeypatch.setattr(validation, "_MOST_BATCHES", 1)

    def fit(name: str, make: Callable[[], Noisy], **kwargs: Any) -> dict[str, Any]:
        saver = ft.FaultTolerantCheckpoint(
            tmp_path / name, every_n_epochs=100, save_on_train_end=False, guards=[ft.PreemptionGuard()]
        )
        trainer = runs.trainer(saver, max_epochs=3)
        models.append(make())
        runs.fit(trainer, models[-1], kwargs.get("ckpt_path"), s.loader(shuffle=True), s.loader(shuffle=True))
        return _end(trainer, models[-1])

    models: list[Noisy] = []
    expected = fit("whole", Noisy)
    with pytest.raises(SystemExit) as left:
        fit("run", partial(Terminated, 16))
    assert left.value.code == ft.exit_codes.PREEMPTED
    assert fit("run", Noisy, ckpt_path="last") == expected
    whole, begun, ended = models
    assert len(begun.losses) == 16
    assert len(begun.seen) == 2 + 8 + 4  # the sanity check, one validation and half of another
    assert begun.losses + ended.losses == whole.losses
    assert begun.seen[:-4] + ended.seen == whole.seen
