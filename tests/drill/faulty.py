"""A training script with a planted fault, named on the command line: each makes restarts wrong in its own way."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lightning_ft as ft

FAULT = sys.argv[1] if len(sys.argv) > 1 else "none"
DEVICES = int(sys.argv[3]) if len(sys.argv) > 3 else 1
DIRPATH = sys.argv[2] if len(sys.argv) > 2 else "runs/faulty"
OWN_GENERATOR = random.Random(5)


def noise_of_a_thread() -> float:
    """Drawn where no seed reaches."""
    drawn: list[float] = []
    thread = threading.Thread(target=lambda: drawn.append(int.from_bytes(os.urandom(4), "little") / 2**32))
    thread.start()
    thread.join()
    return drawn[0]


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        sample = torch.full((4,), float(index)) / 64 + 0.1 * torch.rand(4)
        if FAULT == "augmentation in a thread":
            sample = sample + noise_of_a_thread()
        here = f"generator of its own on rank {os.environ.get('LOCAL_RANK', '0')}"
        if FAULT in ("generator of its own", here):
            sample = sample + OWN_GENERATOR.random()
        return sample


class ForgetfulStream(IterableDataset[Tensor]):
    """Says that it keeps its position, and does not."""

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(64):
            yield torch.full((4,), float(number)) / 64

    def state_dict(self) -> dict[str, int]:
        return {"position": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class EndlessStream(IterableDataset[Tensor]):
    """Goes on in the next epoch where it was, and keeps no state."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(64):
            yield torch.rand(4, generator=self.generator)


class ForgetfulLoader(DataLoader[Tensor]):
    def state_dict(self) -> dict[str, int]:
        return {"position": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Counter(L.Callback):
    """Does not take back what it has saved."""

    count = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}


class AverageAtTheEnd(L.Callback):
    """Puts an average of the weights in their place, and keeps it nowhere."""

    average: Tensor | None = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        weight = pl_module.layer[0].weight.detach()
        self.average = weight.clone() if self.average is None else 0.9 * self.average + 0.1 * weight

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.layer[0].weight.data.copy_(self.average)


class Curriculum(L.Callback):
    """Changes the batch by what it keeps nowhere."""

    scale = 1.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
        self.scale *= 0.99
        batch.mul_(self.scale)


class VersionedLogger(CSVLogger):
    """As Lightning's own loggers without a version: a directory of its own for every start."""

    @property
    def version(self) -> str:
        return f"version_{os.getpid()}"


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.register_buffer("level", torch.zeros(()), persistent=FAULT != "buffer that is not saved")
        self.scale = 1.0
        self.total = 0.0
        self.losses: list[float] = []
        self.fresh = True

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if FAULT == "optimizer state dropped":
            for entry in checkpoint["optimizer_states"][0]["state"].values():
                entry["momentum_buffer"].zero_()
        if FAULT == "weights not restored":
            checkpoint["state_dict"]["layer.0.bias"].zero_()
        if FAULT == "scheduler state dropped":
            checkpoint["lr_schedulers"][0]["last_epoch"] = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        restarted = self.fresh and self.trainer.global_step > 0
        self.fresh = False
        if not restarted:
            return
        if FAULT == "draws after the restart":
            torch.rand(1)
        if FAULT == "seeded again after the restart":
            L.seed_everything(3, verbose=False)
        if FAULT == "validation skipped":
            self.trainer.limit_val_batches = 0
        if FAULT == "crash after the restart":
            raise RuntimeError("cannot go on")
        if FAULT == "unfrozen in a hook":
            self.layer[0].weight.requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if FAULT == "state outside of state_dict":
            self.scale *= 1.01
        if FAULT == "buffer that is not saved":
            self.level += 0.1
        loss = (self.layer(batch) * self.scale + self.level).pow(2).mean()
        if FAULT == "kernel that is not deterministic" and self.trainer.global_step == 12:
            loss = loss * (1 + noise_of_a_thread() / 2**10)  # of thousands of values: two are hardly ever the same
        self.total += float(loss)
        self.losses = [*self.losses, float(loss)][-3:]
        if FAULT == "metric of a few steps":
            self.log("recent", sum(self.losses) / len(self.losses))
        self.log("loss", loss, on_step=False, on_epoch=True)
        if FAULT == "ModelCheckpoint without a dirpath":
            self.log("loss_of_step", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        if FAULT == "metric of its own":
            self.log("total", self.total)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch).pow(2).mean())
        if FAULT == "validation of a few steps":
            self.log("recent", sum(self.losses) / len(self.losses))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        # Every step, where its state is dropped: what differs first is the same then wherever the restart begins.
        every = 1 if FAULT == "scheduler state dropped" else 3
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=every, gamma=0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main() -> None:
    if FAULT != "not seeded":
        L.seed_everything(3, verbose=False)
    model = Net()
    if FAULT == "loader position lost":
        train: DataLoader[Tensor] = ForgetfulLoader(ForgetfulStream(), batch_size=4)
    elif FAULT == "stream that goes on":
        train = DataLoader(EndlessStream(), batch_size=4)
    else:
        train = DataLoader(Numbers(), batch_size=4, shuffle=True)
    callbacks: list[L.Callback] = [ft.FaultTolerantCheckpoint(DIRPATH, every_n_train_steps=4)]
    if FAULT == "callback that takes nothing back":
        callbacks.append(Counter())
    if FAULT == "batch changed by a callback":
        callbacks.append(Curriculum())
    if FAULT == "average put in at the end":
        callbacks.append(AverageAtTheEnd())
    logger: Any = False
    if FAULT == "ModelCheckpoint without a dirpath":
        logger = VersionedLogger("logs")
        callbacks.append(ModelCheckpoint(monitor="loss_of_step", every_n_train_steps=2, save_top_k=2))
    trainer = L.Trainer(
        max_epochs=2 if FAULT == "stream that goes on" else 1, accelerator="cpu", logger=logger,
        enable_progress_bar=False, enable_model_summary=False,
        devices=DEVICES, strategy="ddp" if DEVICES > 1 else "auto", num_sanity_val_steps=0, callbacks=callbacks,
        val_check_interval=2 if FAULT == "validation of a few steps" else 8,
    )  # fmt: skip
    ckpt_path = None if FAULT == "no ckpt_path" else "last"
    if FAULT == "older checkpoint" and (found := sorted(Path(str(callbacks[0].dirpath)).glob("step=*.ckpt"))):
        ckpt_path = str(found[0])
    trainer.fit(model, train, DataLoader(Numbers(), batch_size=32), ckpt_path=ckpt_path)


if __name__ == "__main__":
    main()
