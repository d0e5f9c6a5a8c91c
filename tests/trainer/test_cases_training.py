"""Optimizers, schedulers, loops, callbacks and metrics go on as they stood."""

from __future__ import annotations

import logging
import os
import signal
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric

import lightning_ft as ft
from lightning_ft import events
from lightning_ft._history.event_file import DIRECTORY as EVENTS
from lightning_ft._names import LOCK_NAME
from lightning_ft.testing import assert_resume_exact
from tests.trainer import cases as c
from tests.trainer import scenarios as s

every_step = partial(c.trainer, every=1)
plain_at_epoch_end = partial(s.plain_trainer, every=5)  # 5 batches per epoch


def test_plain_lightning_is_exact_at_an_epoch_end(tmp_path: Path) -> None:
    """The control: with nothing special and no random draws, what fails below does not fail."""
    assert_resume_exact(plain_at_epoch_end, c.Small, c.quiet_data, kill_at=6, root=tmp_path)


# -- C1 and C2 ---------------------------------------------------------------------------------------------------


class Twins(c.Small):
    """Two layers of one shape, registered in any order, with gradients that differ."""

    def __init__(self, order: str = "ab", size: int = s.FEATURES, trained: str = "ab") -> None:
        super().__init__()
        del self.net
        self.layers = nn.ModuleDict({name: nn.Linear(s.FEATURES, size) for name in order})
        self.trained = trained
        self.net = self.both

    def both(self, x: Tensor) -> Tensor:
        return (self.layers["a"](x) + 3 * self.layers["b"](x)).mean(1, keepdim=True)

    def configure_optimizers(self) -> Any:
        parameters = [p for name, layer in self.layers.items() if name in self.trained for p in layer.parameters()]
        return torch.optim.Adam(parameters, lr=1e-2)


def moments(module: Twins, trainer: L.Trainer) -> dict[str, Tensor]:
    states = trainer.optimizers[0].state
    return {f"{name} {key}": v for name, p in module.named_parameters() for key, v in states[p].items()}


@pytest.mark.filterwarnings("ignore")
def test_c1_moments_follow_the_names(tmp_path: Path) -> None:
    trainer = c.trainer(str(tmp_path / "whole"), max_steps=9)
    whole = Twins()
    trainer.fit(whole, *c.plain_data())
    expected = moments(whole, trainer)
    c.trainer(str(tmp_path / "part"), max_steps=6).fit(Twins(), *c.plain_data())
    turned, trainer = Twins("ba"), c.trainer(str(tmp_path / "part"), max_steps=9)
    trainer.fit(turned, *c.plain_data(), ckpt_path="last")
    assert trainer.global_step == 9
    for name, value in moments(turned, trainer).items():
        assert torch.equal(value, expected[name]), name
    assert all(torch.equal(v, whole.state_dict()[k]) for k, v in turned.state_dict().items())


@pytest.mark.filterwarnings("ignore")
def test_c1_plain_lightning_gives_moments_to_the_wrong_layer(tmp_path: Path) -> None:
    first = s.plain_trainer(str(tmp_path), max_steps=6)
    saved = Twins()
    first.fit(saved, *c.plain_data())
    turned, second = Twins("ba"), s.plain_trainer(str(tmp_path), max_steps=6)
    second.fit(turned, *c.plain_data(), ckpt_path=str(tmp_path / "last.ckpt"))
    before, after = moments(saved, first), moments(turned, second)
    assert torch.equal(after["layers.a.weight exp_avg"], before["layers.b.weight exp_avg"])
    assert torch.equal(after["layers.b.weight exp_avg"], before["layers.a.weight exp_avg"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("other", [{"order": "bac"}, {"size": 4}, {"trained": "b"}], ids=["names", "shape", "group"])
def test_c1_other_parameters_are_refused(other: Any, tmp_path: Path) -> None:
    make_trainer = partial(c.trainer, str(tmp_path))
    make_trainer(max_steps=3).fit(Twins(), *c.plain_data())
    changed, trainer = Twins(**other), make_trainer(max_steps=6)
    with pytest.raises((ft.RestoreError, RuntimeError)):
        trainer.fit(changed, *c.plain_data(), ckpt_path="last")
    assert trainer.fit_loop.epoch_loop.batch_progress.current.started in (0, 3)


class WideMomentum(torch.optim.Optimizer):
    """Momentum in 32 bits for parameters in 16."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=torch.float32))
                momentum.mul_(0.9).add_(p.grad.float())
                p.copy_(p.float() - group["lr"] * momentum)
        return loss


class Half(c.Small):
    def __init__(self) -> None:
        super().__init__()
        self.net.to(torch.bfloat16)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0], batch[1].bfloat16()

    def configure_optimizers(self) -> Any:
        return WideMomentum(self.parameters())


def test_c2_wide_state_of_narrow_parameters(tmp_path: Path) -> None:
    c.exact(c.trainer, Half, c.plain_data, kill_at=[5, 8], root=tmp_path, replayed=2 + 2)


def test_c2_plain_lightning_narrows_the_state(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"step 6: (weights|optimizer state) differs"):
        assert_resume_exact(plain_at_epoch_end, Half, c.quiet_data, kill_at=6, root=tmp_path)


# -- C5: accumulation --------------------------------------------------------------------------------------------


def test_c5_saves_wait_for_the_end_of_an_accumulation(tmp_path: Path) -> None:
    # windows of 4, a validation within one of them, epochs of 8
    make_trainer = partial(every_step, accumulate_grad_batches=4, val_check_interval=5)
    make_data = partial(c.plain_data, 32, shuffle=True)
    c.exact(make_trainer, c.Small, make_data, kill_at=[6, 11, 12], root=tmp_path, replayed=2 + 3 + 4)


def test_c5_accumulation_cut_by_the_epochs_end(tmp_path: Path) -> None:
    make_trainer = partial(every_step, accumulate_grad_batches=2)  # 2, 2, 1
    make_data = partial(c.plain_data, shuffle=True)
    c.exact(make_trainer, c.Small, make_data, kill_at=[2, 4, 6, 8], root=tmp_path, replayed=2 + 2 + 1 + 1)


class ManualAccumulation(c.Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        self.manual_backward(outputs["loss"])
        if (batch_idx + 1) % 3 == 0 or self.trainer.is_last_batch:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return {**outputs, "loss": outputs["loss"].detach()}


def test_c5_accumulation_by_hand(tmp_path: Path) -> None:
    # windows of 3, 3, 2; the restarts are within them, with the gradients that were there
    kills = [3, 5, 9, 14]
    make_data = partial(c.plain_data, 32, shuffle=True)
    c.exact(every_step, ManualAccumulation, make_data, kill_at=kills, root=tmp_path, replayed=len(kills))


def plain_within_window(dirpath: str) -> L.Trainer:
    L.seed_everything(1, verbose=False)
    checkpoint = ModelCheckpoint(dirpath, save_last=True, save_on_train_epoch_end=False)
    options = {"accumulate_grad_batches": 4, "val_check_interval": 5, "max_epochs": 1}
    return L.Trainer(**s.COMMON, callbacks=[checkpoint], **options)


def stateful_data(length: int = 32) -> Any:
    return c.stateful(length, generator=torch.Generator()), c.quiet_data()[1]


def test_c5_plain_lightning_loses_gradients(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="step 8: weights differs"):
        assert_resume_exact(plain_within_window, c.Small, stateful_data, kill_at=6, root=tmp_path)


# -- C7 and C8: schedules ----------------------------------------------------------------------------------------


def scheduled(name: str, module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.5)
    plateau = partial(lr_scheduler.ReduceLROnPlateau, optimizer, patience=0, threshold=0.5)
    config: dict[str, Any] = {
        "step per epoch": lambda: {"scheduler": lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "epoch"},
        "multistep": lambda: {"scheduler": lr_scheduler.MultiStepLR(optimizer, [3, 5, 11]), "interval": "step"},
        "every third step": lambda: {
            "scheduler": lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step", "frequency": 3,
        },
        "cosine": lambda: {"scheduler": lr_scheduler.CosineAnnealingLR(optimizer, 15), "interval": "step"},
        "warm-up, then cosine per epoch": lambda: {
            "scheduler": lr_scheduler.SequentialLR(
                optimizer,
                [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)],
                [1],
            ),
            "interval": "epoch",
        },
        "one cycle": lambda: {
            "scheduler": lr_scheduler.OneCycleLR(
                optimizer, 0.1, total_steps=int(module.trainer.estimated_stepping_batches)
            ),
            "interval": "step",
        },
        "plateau of val": lambda: {"scheduler": plateau(), "monitor": "val"},
        "plateau of train": lambda: {"scheduler": plateau(), "monitor": "loss_epoch"},
        "plateau per step": lambda: {"scheduler": plateau(), "monitor": "loss_step", "interval": "step"},
    }[name]()  # fmt: skip
    return {"optimizer": optimizer, "lr_scheduler": config}


SCHEDULES = [
    "step per epoch", "multistep", "every third step", "cosine", "warm-up, then cosine per epoch", "one cycle",
    "plateau of val", "plateau of train", "plateau per step",
]  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_c7_learning_rates(name: str, tmp_path: Path) -> None:
    # restarts after a batch, after a validation, at an epoch's end, after a first batch
    kills = [4, 5, 6, 7, 11]
    make_model = partial(c.Variant, partial(scheduled, name))
    make_data = partial(c.plain_data, shuffle=True)
    c.exact(every_step, make_model, make_data, kill_at=kills, root=tmp_path, replayed=len(kills))


@pytest.mark.filterwarnings("ignore")
def test_c8_another_length_is_said_and_never_overrun_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model = partial(c.Variant, partial(scheduled, "one cycle"))
    c.trainer(str(tmp_path), max_epochs=2).fit(make_model(), *c.plain_data())
    longer = c.trainer(str(tmp_path), max_epochs=3)
    with caplog.at_level(logging.WARNING, "lightning_ft"), pytest.raises(ValueError, match="Tried to step 11 times"):
        longer.fit(make_model(), *c.plain_data(), ckpt_path="last")
    assert "max_epochs was 2 and is 3" in caplog.text


# -- C10 and C11: callbacks --------------------------------------------------------------------------------------


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=1e-2)


class Finetuned(c.Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def test_c10_unfrozen_layers_stay_unfrozen(tmp_path: Path) -> None:
    make_trainer = partial(every_step, callbacks=(Unfreeze,))
    kills = [3, 6, 8, 11, 12]  # before the unfreezing at 5, at it, after it
    c.exact(make_trainer, Finetuned, c.plain_data, kill_at=kills, root=tmp_path, replayed=len(kills))


def test_c10_plain_lightning_freezes_again(tmp_path: Path) -> None:
    make_trainer = partial(plain_at_epoch_end, callbacks=(Unfreeze,))
    with pytest.raises(AssertionError, match=r"step 11: (weights|requires_grad) differs"):
        assert_resume_exact(make_trainer, Finetuned, c.quiet_data, kill_at=11, root=tmp_path)


class Counter(Callback):
    """Two of these are told apart by their names alone."""

    def __init__(self, name: str, every: int) -> None:
        self.name = name
        self.every = every
        self.count = 0

    @property
    def state_key(self) -> str:
        return f"Counter {self.name}"

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += self.every

    def on_validation_end(self, *args: Any) -> None:
        self.count *= 2

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def stopping(monitor: str, patience: int, **kwargs: Any) -> Any:
    return partial(EarlyStopping, monitor, patience=patience, min_delta=10.0, **kwargs)


def test_c11_patience_and_callbacks_of_one_type(tmp_path: Path) -> None:
    counters = partial(Counter, "a", 1), partial(Counter, "b", 100)
    # the second looks for a validation made before the restart
    at_epoch_end = [stopping(m, 9, mode="max", check_on_train_epoch_end=True) for m in ("loss_epoch", "val")]
    callbacks = (stopping("val", 9), *at_epoch_end, *counters)
    make_trainer = partial(every_step, callbacks=callbacks)
    kills = [2, 5, 6, 7, 12]
    c.exact(make_trainer, c.Small, c.plain_data, kill_at=kills, root=tmp_path, replayed=len(kills))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("per_validation", [True, False], ids=["within the epoch", "at the epoch's end"])
def test_c11_an_early_stop_is_the_end(per_validation: bool, tmp_path: Path) -> None:
    callback = stopping("val", 2) if per_validation else stopping("loss_epoch", 2, check_on_train_epoch_end=True)
    make_trainer = partial(every_step, callbacks=(callback,), max_epochs=6)
    compared = c.exact(make_trainer, c.Small, c.plain_data, kill_at=[6, 9, 12], root=tmp_path, replayed=3)
    assert compared.steps == (14 if per_validation else 15)
    assert_finished(partial(make_trainer, compared.dirpath), c.Small, c.plain_data, tmp_path / "again")


def assert_finished(make_trainer: Any, make_model: Any, make_data: Any, trace: Path) -> None:
    """The same command once more trains nothing, validates nothing, and changes nothing on disk."""
    made = make_trainer()
    directory = Path(made.checkpoint_callbacks[-1].dirpath)
    before = listing(directory)
    records = c.recorded(make_trainer, make_model, make_data, trace)
    assert [key for key in records if key[0] in ("step", "validation")] == []
    assert listing(directory) == before


def listing(directory: Path) -> dict[str, int]:
    """Everything but the lock, which says who is at work here, and what is written down about each start."""
    return {p.name: p.stat().st_mtime_ns for p in directory.iterdir() if p.name not in (LOCK_NAME, EVENTS)}


# -- C12 and C13: manual optimization ----------------------------------------------------------------------------


def test_c12_two_optimizers_count_batches(tmp_path: Path) -> None:
    make_trainer = partial(c.trainer, every=2, max_epochs=2, ft_args={"keep_last": -1})
    make_data = partial(c.plain_data, shuffle=True)
    compared = c.exact(make_trainer, s.Gan, make_data, kill_at=[5, 8], root=tmp_path, replayed=1 + 2)
    assert [info.name for info in ft.list_checkpoints(compared.dirpath)] == [
        f"step={step:08d}.ckpt" for step in (10, 8, 6, 4, 2)
    ]


@pytest.mark.filterwarnings("ignore")
def test_c12_plain_lightning_counts_optimizers(tmp_path: Path) -> None:
    every_second = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    L.Trainer(**s.COMMON, callbacks=[every_second], max_epochs=2).fit(s.Gan(), c.plain_loader())  # 10 batches
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step={n}.ckpt" for n in (12, 16, 20, 4, 8)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", [s.Gan, c.Small], ids=["manual", "automatic"])
def test_c13_saves_by_time(module: Any, tmp_path: Path) -> None:
    seen: list[events.Event] = []
    stop = events.observe(seen.append)
    always = {"train_time_interval": timedelta(microseconds=1), "keep_last": -1}
    try:
        c.trainer(str(tmp_path), every=None, max_epochs=1, ft_args=always).fit(module(), *c.plain_data())
    finally:
        stop()
    assert len([e for e in seen if isinstance(e, events.Committed)]) == 5
    assert len(ft.list_checkpoints(tmp_path)) == 5


@pytest.mark.filterwarnings("ignore")
def test_c13_plain_lightning_never_saves_by_time_in_manual_optimization(tmp_path: Path) -> None:
    always = ModelCheckpoint(tmp_path, train_time_interval=timedelta(microseconds=1), save_top_k=-1)
    L.Trainer(**s.COMMON, callbacks=[always], max_epochs=2).fit(s.Gan(), c.plain_loader())
    assert list(tmp_path.iterdir()) == []


class ScoredGan(s.Gan):
    """What is monitored depends on the weights alone."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.critic(batch[1]).mean(), batch_size=len(batch[1]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("staging", ["overlap", "blocking"])
def test_c14_the_best_file_scores_what_it_says(staging: Any, tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path / "best", "{step}", monitor="val", save_top_k=-1)
    plugin = ft.FaultTolerantCheckpointIO(staging=staging)
    made = s.trainer(str(tmp_path / "run"), every=1, max_epochs=2, callbacks=(lambda: best,), plugins=[plugin])
    made.fit(ScoredGan(), *c.plain_data())
    assert len(best.best_k_models) == 2  # validated after 4 of 5 batches
    for path, score in best.best_k_models.items():
        scored = ScoredGan()
        scored.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        (result,) = L.Trainer(**s.COMMON).validate(scored, c.plain_loader(6, 3), verbose=False)
        assert result["val"] == float(score)


# -- C16: finished runs ------------------------------------------------------------------------------------------

ENDS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "epochs": ({"max_epochs": 2}, {"max_epochs": 4}),
    "steps within an epoch": ({"max_steps": 7}, {"max_steps": 12}),
    "steps at an epoch's end": ({"max_steps": 10}, {"max_steps": 15}),
    "first batch of an epoch": ({"max_steps": 6}, {"max_steps": 15}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("val_check_interval", [4, 1.0])
@pytest.mark.parametrize("end", ENDS)
def test_c16_a_finished_run_and_a_longer_one(end: str, val_check_interval: Any, tmp_path: Path) -> None:
    unlimited = {"max_epochs": 100, "val_check_interval": val_check_interval}
    shorter, longer = ({**unlimited, **limits} for limits in ENDS[end])
    make_data = partial(c.plain_data, shuffle=True)
    model = partial(c.Variant, partial(scheduled, "plateau of train"))
    make = partial(c.trainer, str(tmp_path / "parts"), every=3)
    whole = c.recorded(
        partial(c.trainer, str(tmp_path / "whole"), every=3, **longer), model, make_data, tmp_path / "whole.jsonl"
    )
    first = c.recorded(partial(make, **shorter), model, make_data, tmp_path / "first.jsonl")
    assert_finished(partial(make, **shorter), model, make_data, tmp_path / "again.jsonl")
    second = c.recorded(partial(make, **longer), model, make_data, tmp_path / "second.jsonl")
    steps = [key[1] for key in second if key[0] == "step"]
    assert steps[0] == 1 + max(key[1] for key in first if key[0] == "step")  # nothing is trained again
    assert {**first, **second} == whole


# -- C17: validations --------------------------------------------------------------------------------------------


class DieOnce(Callback):
    """Kills the process in a hook of the validation at a batch, the first time it gets there."""

    def __init__(self, hook: str, batch: int, marker: str) -> None:
        self.batch = batch
        self.marker = marker
        setattr(self, hook, self.die)

    def die(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.batch and not trainer.sanity_checking and not os.path.exists(self.marker):
            os.close(os.open(self.marker, os.O_CREAT))
            os.kill(os.getpid(), signal.SIGKILL)


def dying(dirpath: str, hook: str, batch: int, make_trainer: Any, **kwargs: Any) -> L.Trainer:
    callbacks = (partial(DieOnce, hook, batch, f"{dirpath}.died"),) if "restarted" in dirpath else ()
    return make_trainer(dirpath, callbacks=callbacks, **kwargs)  # type: ignore[no-any-return]


NEVER = 1_000_000  # the callback kills, not the harness
HOOKS = ["on_validation_start", "on_validation_batch_end", "on_validation_end"]


@pytest.mark.parametrize("hook", HOOKS)
def test_c17_killed_in_a_validation(hook: str, tmp_path: Path) -> None:
    make_trainer = partial(dying, hook=hook, batch=4, make_trainer=c.trainer, every=2)
    c.exact(make_trainer, c.Small, c.plain_data, kill_at=NEVER, root=tmp_path, replayed=2)


class Silent(c.Small):
    def log(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_c17_plain_lightning_loses_a_validation(tmp_path: Path) -> None:
    make_trainer = partial(dying, hook="on_validation_start", batch=4, make_trainer=s.plain_trainer, every=4)
    with pytest.raises(AssertionError, match="has validation at step 4"):
        assert_resume_exact(make_trainer, Silent, partial(stateful_data, 20), kill_at=NEVER, root=tmp_path)


VALIDATIONS: dict[str, dict[str, Any]] = {
    "several per epoch": {"val_check_interval": 2},
    "fraction": {"val_check_interval": 0.5},
    "each epoch": {"val_check_interval": 1.0},
    "every second epoch": {"val_check_interval": 1.0, "check_val_every_n_epoch": 2},
    "every second epoch, twice": {"val_check_interval": 2, "check_val_every_n_epoch": 2},
    "across epochs": {"val_check_interval": 7, "check_val_every_n_epoch": None},
}


@pytest.mark.parametrize("when", VALIDATIONS)
def test_c17_validations_are_the_same(when: str, tmp_path: Path) -> None:
    make_trainer = partial(every_step, max_epochs=4, **VALIDATIONS[when])
    kills = [3, 5, 6, 8, 11, 12]
    make_data = partial(c.plain_data, shuffle=True)
    compared = c.exact(make_trainer, c.Small, make_data, kill_at=kills, root=tmp_path, replayed=len(kills))
    assert compared.validations > 0


@pytest.mark.parametrize("when", ["several per epoch", "across epochs"])
def test_c17_validations_of_a_stream(when: str, tmp_path: Path) -> None:
    make_trainer = partial(every_step, max_epochs=3, **VALIDATIONS[when])
    kills = [3, 7, 8, 9]
    compared = c.exact(make_trainer, c.Small, stream_data, kill_at=kills, root=tmp_path, replayed=len(kills))
    assert compared.validations > 0


def stream_data() -> Any:
    return c.stream(c.StatefulStream), c.plain_loader(6, 3)


# -- C18: metrics of an epoch ------------------------------------------------------------------------------------


class Measured(c.Small):
    """Everything that accumulates over an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.logged = MeanMetric()
        self.unlogged = SumMetric()
        self.collection = MetricCollection({"mean": MeanMetric(), "max": MaxMetric()}, prefix="collection ")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        value = outputs["loss"].detach() + batch_idx
        for reduction in ("mean", "max", "min", "sum"):
            self.log(f"epoch {reduction}", value, on_step=False, on_epoch=True, reduce_fx=reduction, batch_size=4)
        if batch_idx == 0:
            self.log("first batch", value, on_step=False, on_epoch=True, batch_size=4)
        if batch_idx == 3:
            self.log("late batch", value, on_step=True, on_epoch=True, batch_size=4)
        self.logged(value)
        self.log("metric", self.logged, on_step=True, on_epoch=True)
        self.unlogged.update(value)
        self.collection.update(value)
        self.log_dict(dict(self.collection), on_step=False, on_epoch=True)
        return outputs

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("validated", batch[1].mean() + self.global_step, batch_size=3)
        return super().validation_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.log("unlogged", self.unlogged.compute())
        self.unlogged.reset()


def test_c18_epoch_metrics(tmp_path: Path) -> None:
    kills = [2, 4, 5, 6, 7, 13]
    make_data = partial(c.plain_data, shuffle=True)
    c.exact(every_step, Measured, make_data, kill_at=kills, root=tmp_path, replayed=len(kills))


def test_c18_plain_lightning_forgets_the_first_part(tmp_path: Path) -> None:
    make_trainer = partial(s.plain_trainer, every=3)
    with pytest.raises(AssertionError, match="the end of epoch 0: metrics differs"):
        assert_resume_exact(make_trainer, Measured, partial(stateful_data, 20), kill_at=4, root=tmp_path)


# -- C19: loggers ------------------------------------------------------------------------------------------------


class Recording(Logger):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        c.note(self.path, step, {k: float(v).hex() for k, v in metrics.items()})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def logging_trainer(dirpath: str, path: Path, make_trainer: Any = every_step, **kwargs: Any) -> L.Trainer:
    return make_trainer(dirpath, logger=Recording(path), log_every_n_steps=1, **kwargs)  # type: ignore[no-any-return]


def test_c19_logged_steps_follow_the_saved_one(tmp_path: Path) -> None:
    path = tmp_path / "logged"
    make_trainer = partial(logging_trainer, path=path, accumulate_grad_batches=2)
    c.exact(make_trainer, Measured, c.plain_data, kill_at=[3, 6, 9], root=tmp_path, replayed=1 + 1 + 2)
    # how long a save took is logged too, and differs
    whole, *parts = [[line for line in part if not any(k.startswith("ft/") for k in line[1])] for part in c.notes(path)]
    # every part logs a stretch of what the uninterrupted run logs, and the last one its end
    for part in parts:
        assert part in [whole[i : i + len(part)] for i in range(len(whole))]
    assert whole[-len(parts[-1]) :] == parts[-1]
    assert [part[0][0] for part in parts] == [0, 1, 3, 4]
    marked = [[line for line in part if "ft/resumed_at_step" in line[1]] for part in c.notes(path)]
    # Logged steps count from 0: the first one after a restart is the one that is marked.
    assert marked == [[], [], *([[n, {"ft/resumed_at_step": float(n).hex()}]] for n in (1, 3, 4))]


# -- C21: budgets of time -----------------------------------------------------------------------------------------


class PerRun(Timer):
    """What `Trainer(max_time=...)` is, over all starts; on its clock every batch takes a second."""

    seconds = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.seconds += 1

    def time_elapsed(self, stage: str = "train") -> float:
        return self._offset + self.seconds


class PerJob(PerRun):
    """Begins anew in every start."""

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "trained"), [(PerRun, [5, 0, 4]), (PerJob, [5, 5, 5])], ids=["run", "job"])
def test_c21_a_budget_of_the_run_and_one_of_the_job(kind: Any, trained: list[int], tmp_path: Path) -> None:
    budgets = [5, 5, 9] if kind is PerRun else [5, 5, 5]
    for start, (seconds, expected) in enumerate(zip(budgets, trained, strict=True)):
        timer = partial(kind, timedelta(seconds=seconds))
        make_trainer = partial(c.trainer, str(tmp_path / "run"), callbacks=(timer,))
        lines = c.recorded(make_trainer, c.Small, c.plain_data, tmp_path / f"{start}.jsonl")
        assert len([key for key in lines if key[0] == "step"]) == expected


# -- more optimizers and callbacks -------------------------------------------------------------------------------


def lbfgs(module: Any) -> Any:
    return torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3, history_size=4)


def test_lbfgs(tmp_path: Path) -> None:
    c.exact(c.trainer, partial(c.Variant, lbfgs), c.plain_data, kill_at=[5, 8], root=tmp_path, replayed=2 + 2)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradient_clipping(algorithm: str, tmp_path: Path) -> None:
    make_trainer = partial(c.trainer, gradient_clip_val=0.1, gradient_clip_algorithm=algorithm)
    c.exact(make_trainer, c.Small, c.plain_data, kill_at=[5, 8], root=tmp_path, replayed=2 + 2)


AVERAGES: dict[str, Any] = {
    "ema": partial(EMAWeightAveraging, decay=0.8),
    "ema later": partial(EMAWeightAveraging, decay=0.8, update_starting_at_step=4),
    "swa": partial(StochasticWeightAveraging, swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=2),
}


@pytest.mark.parametrize("average", AVERAGES)
def test_averages_of_weights(average: str, tmp_path: Path) -> None:
    make_trainer = partial(every_step, callbacks=(AVERAGES[average],), max_epochs=4)
    kills = [3, 5, 6, 8, 11, 13, 17]
    make_data = partial(c.plain_data, shuffle=True)
    c.exact(make_trainer, c.Small, make_data, kill_at=kills, root=tmp_path, replayed=len(kills))


class Normed(c.Small):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(4))


def test_the_extra_epoch_of_stochastic_weight_averaging_is_refused(tmp_path: Path) -> None:
    averaging = partial(StochasticWeightAveraging, swa_lrs=1e-2, swa_epoch_start=1)
    make_trainer = partial(every_step, callbacks=(averaging,), max_epochs=2)
    # the third epoch updates batch norm statistics, in one accumulation; the restart is at its beginning
    with pytest.raises(AssertionError, match=r"RestoreError.*\n.*SWALR"):
        assert_resume_exact(make_trainer, Normed, c.plain_data, kill_at=12, root=tmp_path)


class EndsEpochs(c.Small):
    """Ends its epochs before the data does, and skips some steps."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 - self.current_epoch else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else outputs


@pytest.mark.parametrize("workers", [0, 2])
def test_epochs_ended_by_the_module(workers: int, tmp_path: Path) -> None:
    make_trainer = partial(every_step, val_check_interval=2)
    make_data = partial(c.plain_data, 32, shuffle=True, num_workers=workers)
    assert_resume_exact(make_trainer, EndsEpochs, make_data, kill_at=[2, 4, 6, 7, 8, 10], root=tmp_path)


# -- the user's own ModelCheckpoint ------------------------------------------------------------------------------


def own_best(trainer: L.Trainer) -> Any:
    best = next(c for c in trainer.checkpoint_callbacks if not isinstance(c, ft.FaultTolerantCheckpoint))
    assert isinstance(best, ModelCheckpoint)
    scores = sorted(float(score).hex() for score in best.best_k_models.values())
    assert all(os.path.exists(path) for path in [*best.best_k_models, best.best_model_path, best.last_model_path])
    assert best.best_model_score is not None
    return scores, float(best.best_model_score).hex()


def with_best(dirpath: str, log: Path, **kwargs: Any) -> L.Trainer:
    best = partial(ModelCheckpoint, dirpath + "-best", monitor="val", save_top_k=2, save_last=True)
    made = c.trainer(dirpath, callbacks=(best, partial(c.Noted, log, own_best)), **kwargs)
    events.observe(lambda event: c.note(log, event.path) if isinstance(event, events.Resumed) else None)
    return made


def test_the_users_best_checkpoints_beside_ours(tmp_path: Path) -> None:
    log = tmp_path / "log"
    make_trainer = partial(with_best, log=log, every=3, val_check_interval=2)
    make_data = partial(c.plain_data, 24, shuffle=True)
    # validated, and so saved by the other one, at 2, 4, 6 and so on: its last.ckpt is always younger than ours
    compared = c.exact(make_trainer, c.Small, make_data, kill_at=[5, 9, 11], root=tmp_path, replayed=2 + 3 + 2)
    (expected,), *parts = c.notes(log)
    resumed = [Path(path).name for path, *_ in parts]
    assert resumed == [f"step={step:08d}.ckpt" for step in (3, 6, 9)]
    assert parts[-1][-1] == expected
    assert os.path.exists(f"{compared.dirpath}-best/last.ckpt")


OWN_SAVES: dict[str, dict[str, Any]] = {
    "after batches": {"every_n_train_steps": 1},
    "after validations": {"monitor": "val"},
    "after epochs": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("when", OWN_SAVES)
def test_resumed_from_a_file_of_the_users_own(when: str, tmp_path: Path) -> None:
    def make_trainer(name: str, **kwargs: Any) -> L.Trainer:
        own = partial(ModelCheckpoint, tmp_path / f"own {name}", filename="{step}", save_top_k=-1, **OWN_SAVES[when])
        return c.trainer(str(tmp_path / name), max_epochs=2, callbacks=(own,), **kwargs)

    make_data = partial(c.plain_data, shuffle=True)
    whole = c.recorded(partial(make_trainer, "whole"), c.Small, make_data, tmp_path / "whole.jsonl", None)
    files = sorted((tmp_path / "own whole").iterdir())
    assert len(files) >= 2
    for file in files:
        step = int(file.stem.removeprefix("step="))
        trace = tmp_path / f"{step}.jsonl"
        rest = c.recorded(partial(make_trainer, f"from {step}"), c.Small, make_data, trace, str(file))
        steps = [key for key in rest if key[0] == "step"]
        assert steps == [("step", n) for n in range(step + 1, 11)], f"from step {step}"
        for key in steps:
            assert rest[key]["batch"] == whole[key]["batch"], f"from step {step}"
            assert rest[key]["weights"] == whole[key]["weights"], f"from step {step}"
