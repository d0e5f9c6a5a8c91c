"""Whole runs on a device, and what is to be in their files."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ft as ft
from lightning_ft._copying.staging import Staged, Stager
from lightning_ft._names import KEY
from tests.devices import scenarios as s
from tests.trainer import runs

WIDTH = s.WIDTH
STEPS = 6


class FakeAcc(Accelerator):
    """Lightning's view of the device."""

    def setup_device(self, device: torch.device) -> None: ...

    def teardown(self) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    parse_devices = staticmethod(lambda devices: [0])
    get_parallel_devices = staticmethod(lambda devices: [torch.device("fakeacc", 0)])
    auto_device_count = staticmethod(lambda: 1)
    is_available = staticmethod(lambda: True)
    name = staticmethod(lambda: "fakeacc")


class Net(L.LightningModule):
    """BatchNorm, a frozen layer, Adam, a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.frozen(self.net(batch[0])).pow(2).mean()

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, foreach=False, fused=False)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ChangesItself(Net):
    """One that also changes a parameter in the forward pass of its fourth step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 3:
            with torch.no_grad():
                self.net[3].weight.add_(1)
        return super().training_step(batch, batch_idx)


class StepFirst(Callback):
    """The writer asks for a snapshot only after the next optimizer step: until then nothing waits but the device."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._stepped = threading.Condition()
        self._steps = 0
        stage, wait = Stager.stage, Staged.wait
        staged_at: dict[Staged, int] = {}

        def stage_(stager: Stager, *args: Any) -> Staged:
            staged = stage(stager, *args)
            staged_at[staged] = self._steps
            return staged

        def wait_(staged: Staged) -> Any:
            with self._stepped:
                assert self._stepped.wait_for(lambda: self._steps > staged_at[staged], runs.WAIT_SECS)
            return wait(staged)

        patch.setattr(Stager, "stage", stage_)
        patch.setattr(Staged, "wait", wait_)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._reached(trainer.global_step)

    def on_train_end(self, trainer: Any, *args: Any) -> None:
        self._reached(STEPS + 1)

    def _reached(self, steps: int) -> None:
        with self._stepped:
            self._steps = steps
            self._stepped.notify_all()


class Boundaries(Callback):
    """What `torch.save` would keep at the end of each step, by step; each copy blocks."""

    def __init__(self) -> None:
        self.saved: dict[int, dict[str, Any]] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        optimizers = [optimizer.state_dict() for optimizer in trainer.optimizers]
        self.saved[trainer.global_step] = s.saved({"state_dict": module.state_dict(), "optimizer_states": optimizers})


def train(
    dirpath: Path, *callbacks: Callback, model: type[Net] = Net, ckpt_path: str | None = None, **plugin: Any
) -> Net:
    """The module after a fit that saves every step, on the accelerator that torch has."""
    L.seed_everything(1, verbose=False)
    module = model()
    trained = torch.accelerator.current_accelerator()
    assert trained is not None
    where: dict[str, Any] = {"accelerator": "gpu", "devices": 1}
    if trained.type == "fakeacc":
        where = {"accelerator": FakeAcc(), "strategy": SingleDeviceStrategy(device=torch.device("fakeacc", 0))}
    ours = ft.FaultTolerantCheckpoint(dirpath, every_n_train_steps=1, keep_last=-1)
    trainer = L.Trainer(
        **where, max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks, ours], plugins=[ft.FaultTolerantCheckpointIO(**plugin)],
    )  # fmt: skip
    data = torch.randn(4 * STEPS, 8, device="cpu")
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size=4), ckpt_path=ckpt_path)
    assert trainer.global_step == STEPS
    return module


def files(dirpath: Path) -> dict[int, dict[str, Any]]:
    """The checkpoints by step; only good ones are there."""
    infos = ft.list_checkpoints(str(dirpath))
    assert [ft.verify(info.path).problem for info in infos] == [None] * len(infos)
    loaded = [torch.load(info.path, weights_only=True) for info in reversed(infos)]
    return {checkpoint["global_step"]: checkpoint for checkpoint in loaded}


def without_ids(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What two equal runs have in common."""
    ours = {k: v for k, v in checkpoint[KEY].items() if k not in ("generation", "run_id", "parent")}
    callbacks = {k: v for k, v in checkpoint["callbacks"].items() if "ModelCheckpoint" not in k}
    return {**checkpoint, KEY: ours, "callbacks": callbacks}


def expected(dirpath: Path) -> dict[int, dict[str, Any]]:
    """The files of a run in which nothing is copied late, compared with what was there at the boundaries."""
    boundaries = Boundaries()
    train(dirpath, boundaries, async_save=False, staging="blocking")
    found = files(dirpath)
    assert list(found) == list(range(1, STEPS + 1))
    for step, checkpoint in found.items():
        there = boundaries.saved[step]
        s.assert_same({key: checkpoint[key] for key in there}, there)
    weights = {checkpoint["state_dict"]["net.3.weight"].numpy().tobytes() for checkpoint in found.values()}
    assert len(weights) == STEPS
    return found


def assert_files(dirpath: Path, expected: dict[int, dict[str, Any]]) -> None:
    """There are the files of the run that `expected` is of, equal to the last bit but for what names a run."""
    found = files(dirpath)
    assert list(found) == list(expected)
    for step, checkpoint in found.items():
        s.assert_same(without_ids(checkpoint), without_ids(expected[step]))
