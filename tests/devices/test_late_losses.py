"""Losses on a device: read when they have arrived, never waited for within a step, all known before a save."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_ft as ft
from lightning_ft._divergence import late_losses
from lightning_ft._divergence.late_losses import LateLosses, Seen
from tests.devices import fakeacc, fits
from tests.devices.fakeacc import on_fakeacc

STEPS = 12
add = LateLosses.add
PLACE = Seen(1, 1, range(1, 2), 0, ())


def at(batch: int) -> Seen:
    return replace(PLACE, batch=batch)


def waits() -> int:
    return int(fakeacc.controls.counts()["waits"])


@on_fakeacc
def test_nothing_is_waited_for_and_nothing_is_lost() -> None:
    device = torch.device("fakeacc", 0)
    losses = [torch.tensor(value).to(device) for value in (1.5, 2.5, math.inf, 4.5)]
    late = LateLosses(device)
    fakeacc.controls.set_lazy(True)
    before = waits()
    for batch, loss in enumerate(losses, 1):
        late.add(loss, at(batch), 2.0)
        assert [seen.batch for seen in late.arrived()] == list(range(1, batch))[-1:]  # a kernel waits for those before
    assert waits() == before
    late.wait()
    (last,) = late.arrived()
    assert (last.batch, last.value) == (4, 9.0)


@on_fakeacc
def test_what_could_not_be_read_is_known_to_have_been_bad() -> None:
    device = torch.device("fakeacc", 0)
    late = LateLosses(device)
    bad, good = torch.tensor(math.nan).to(device), torch.tensor(1.0).to(device)
    late.add(bad, at(1), 1.0)
    for batch in range(2, late_losses.PLACES + 2):  # nobody reads until its place is needed again
        late.add(good, at(batch), 1.0)
    late.wait()
    found = list(late.arrived())
    assert [seen.batch for seen in found] == list(range(2, late_losses.PLACES + 2))
    assert math.isnan(found[0].value)
    assert all(seen.value == 1.0 for seen in found[1:])
    late.forget()
    late.add(good, at(100), 1.0)
    late.wait()
    assert [seen.value for seen in late.arrived()] == [1.0]


class Net(fits.Net):
    """The loss is bad at some batches."""

    def __init__(self, *bad: int, factor: float = math.nan) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.bad, self.factor = bad, factor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * self.factor if batch_idx + 1 in self.bad else loss


class Waits(Callback):
    """How often the main thread waits for the device from the start of one batch to that of the next."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.counts.append(waits())

    @property
    def per_step(self) -> list[int]:
        return [b - a for a, b in zip(self.counts, self.counts[1:], strict=False)]


def train(
    dirpath: Path,
    guard: ft.DivergenceGuard | None,
    model: Any,
    every: int = 4,
    *callbacks: Callback,
    steps: int = STEPS,
) -> Any:
    L.seed_everything(1, verbose=False)
    guards = () if guard is None else (guard,)
    ours = ft.FaultTolerantCheckpoint(dirpath, every_n_train_steps=every, keep_last=1, guards=guards)
    trainer = L.Trainer(
        accelerator=fits.FakeAcc(), strategy=SingleDeviceStrategy(device=torch.device("fakeacc", 0)), max_epochs=1,
        logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[*callbacks, ours],
    )  # fmt: skip
    data = torch.randn(4 * steps, 8, generator=torch.Generator().manual_seed(2), device="cpu")
    try:
        trainer.fit(model, DataLoader(TensorDataset(data), batch_size=4), ckpt_path="last")
    except ft.DivergenceError as error:
        return trainer, error
    return trainer, None


def weights_are_finite(path: Any) -> bool:
    state = torch.load(path, weights_only=True)["state_dict"]
    return all(bool(torch.isfinite(value).all()) for value in state.values())


@on_fakeacc
def test_a_step_waits_no_more_with_the_guard_than_without(tmp_path: Path) -> None:
    counted = []
    for name, guard in (("without", None), ("with", ft.DivergenceGuard(max_loss=1e9, spike_sigmas=100))):
        fakeacc.controls.set_lazy(True)
        step = Waits()
        train(tmp_path / name, guard, Net(), 100, step)
        counted.append(step.per_step)
        fakeacc.controls.set_lazy(False)
    assert counted[0] == counted[1]


@on_fakeacc
def test_it_stops_a_step_late_and_goes_back_to_what_is_finite(tmp_path: Path) -> None:
    trainer, error = train(tmp_path / "stop", ft.DivergenceGuard(), Net(6))
    assert error is not None
    assert error.batch == 6
    assert trainer.global_step == 7
    assert Path(error.restart_from).name == "step=00000004.ckpt"
    trainer, error = train(tmp_path / "back", ft.DivergenceGuard(action="rollback"), Net(6))
    assert error is None
    assert trainer.global_step == STEPS - 1
    assert all(weights_are_finite(info.path) for info in ft.list_checkpoints(tmp_path / "back"))


@pytest.mark.parametrize("bad", [4, 5])
@on_fakeacc
def test_a_save_waits_for_the_losses_up_to_it(tmp_path: Path, bad: int) -> None:
    # The loss of the very step that is saved (4) is not finite; or that of the step after (5). None arrives by itself.
    arrived, wait = LateLosses.arrived, LateLosses.wait
    waited: set[LateLosses] = set()

    def wait_(late: LateLosses) -> None:
        waited.add(late)
        wait(late)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LateLosses, "wait", wait_)
        patch.setattr(LateLosses, "arrived", lambda late: arrived(late) if late in waited else iter(()))
        patch.setattr(LateLosses, "add", lambda late, *args: (waited.discard(late), add(late, *args)))
        _, error = train(tmp_path, ft.DivergenceGuard(), Net(bad, factor=math.inf), every=2)
    assert error is not None
    assert error.batch == bad
    found = [info for info in ft.list_checkpoints(tmp_path) if info.name.startswith("step=")]
    assert error.restart_from == found[0].path
    assert found[0].manifest is not None
    assert found[0].manifest.batch == (2 if bad == 4 else 4)
    assert all(weights_are_finite(info.path) for info in found)


class SpoilsWeights(Net):
    """The gradients of the batches are bad, and not their losses."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = fits.Net.training_step(self, batch, batch_idx)
        if batch_idx + 1 in self.bad:
            loss.register_hook(lambda gradient: gradient * math.nan)
        return loss


@on_fakeacc
def test_a_checkpoint_with_spoilt_weights_is_looked_into_and_removed(tmp_path: Path) -> None:
    _, error = train(tmp_path, ft.DivergenceGuard(), SpoilsWeights(4), every=2)
    assert error is not None
    assert error.batch == 5
    assert Path(error.restart_from).name == "step=00000002.ckpt"
    assert [info.name for info in ft.list_checkpoints(tmp_path)] == [
        "diverged-step=00000006.ckpt",
        "step=00000002.ckpt",
    ]


@on_fakeacc
def test_the_loss_of_the_last_batch_is_heard_before_its_weights_are_looked_at(tmp_path: Path) -> None:
    # It makes the checkpoint before it suspect; and batches are named by their numbers.
    _, error = train(tmp_path / "loss", ft.DivergenceGuard(), SpoilsWeights(8), steps=9)
    assert error is not None
    assert error.batch == 9
    assert [math.isnan(loss) for (loss,) in error.losses] == [True]
    assert Path(error.restart_from).name == "step=00000004.ckpt"
    assert [info.name for info in ft.list_checkpoints(tmp_path / "loss")] == [
        "diverged-step=00000009.ckpt",
        "step=00000004.ckpt",
    ]
    _, error = train(tmp_path / "weights", ft.DivergenceGuard(), SpoilsWeights(9), steps=9)
    assert error is not None
    assert error.batch == 9
    assert Path(error.restart_from).name == "step=00000008.ckpt"


@on_fakeacc
def test_high_losses_within_patience_are_tolerated_since_their_steps_were_taken(tmp_path: Path) -> None:
    guard = ft.DivergenceGuard(max_loss=1e3, patience=2)
    trainer, error = train(tmp_path / "two", guard, Net(5, 6, factor=1e6))
    assert error is None
    trainer, error = train(tmp_path / "three", guard, Net(5, 6, 7, factor=1e6))
    assert error is not None
    assert error.batch == 5
    assert trainer.global_step == 8


@on_fakeacc
def test_warned_of_it_nothing_that_is_not_finite_is_saved(tmp_path: Path) -> None:
    trainer, error = train(tmp_path, ft.DivergenceGuard(action="warn"), Net(6))
    assert error is None
    assert trainer.global_step == STEPS
    assert all(weights_are_finite(info.path) for info in ft.list_checkpoints(tmp_path))
