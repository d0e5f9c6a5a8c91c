"""A training script with much in it, all of it sound, or with something wrong at once: what is on the command line."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import time
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ft as ft


class Net(L.LightningModule):
    def __init__(self, lr: float = 0.05, noise: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.lr, self.noise = lr, noise

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss)
        noise = self.noise * (time.time_ns() % 1000) / 1000
        return loss * (1 + noise)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).pow(2).mean())

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.layer(batch[0]).pow(2).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Odd(Net):
    """Whose batches, results and rates are not what they usually are."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        loss = super().training_step([batch["x"]], batch_idx)
        return {"loss": loss, "phase": torch.complex(loss, loss).detach(), "count": torch.tensor(batch_idx)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=torch.tensor(self.lr))


def odd(samples: list[tuple[Tensor, ...]]) -> dict[str, Any]:
    return {"x": torch.stack([x for (x,) in samples]), "function": lambda: None}  # which cannot be pickled


class SavesByItself(L.Callback):
    """A file of the user's own choice, where the fit ends: in the process of the rank."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


def loader(samples: int = 64) -> DataLoader[tuple[Tensor, ...]]:
    numbers = torch.arange(samples * 4).reshape(samples, 4) / samples
    return DataLoader(TensorDataset(numbers), batch_size=4, shuffle=samples == 64)


def trainer(dirpath: str, *callbacks: L.Callback, **kwargs: object) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", val_check_interval=0.5,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1,
        callbacks=[ft.FaultTolerantCheckpoint(dirpath, every_n_train_steps=4), *callbacks],
        **{"max_epochs": 1, "logger": False, **kwargs},
    )  # fmt: skip


def two_processes(root: str) -> None:
    """As in a shell: one training after another."""
    for seed in (1, 2):
        if pid := os.fork():
            _, status = os.waitpid(pid, 0)
            if status:
                os.kill(os.getpid(), signal.SIGKILL)
            continue
        L.seed_everything(seed, verbose=False)
        trainer(f"{root}/{seed}").fit(Net(), loader(), loader(8), ckpt_path="last")
        os._exit(0)


def rich(root: str, model: Net) -> None:
    """Everything at once that could disturb a drill, or that a drill could disturb."""
    guards = (
        ft.PreemptionGuard(),
        ft.DivergenceGuard(action="stop"),
        ft.HangGuard(step_timeout=timedelta(minutes=5), startup_timeout=timedelta(minutes=5)),
    )
    best = ModelCheckpoint(f"{root}/best", monitor="val_loss", save_top_k=1, save_last=True)
    ours = ft.FaultTolerantCheckpoint(
        f"{root}/slow", every_n_train_steps=8, local_dirpath=f"{root}/fast", local_every_n_train_steps=4, guards=guards
    )
    pretrained = L.Trainer(accelerator="cpu", max_steps=2, logger=CSVLogger(f"{root}/logs"), enable_progress_bar=False)
    pretrained.fit(model, loader())
    pretrained.save_checkpoint(f"{root}/pretrained.ckpt")
    main = L.Trainer(
        accelerator="cpu", max_epochs=1, val_check_interval=0.5, logger=CSVLogger(f"{root}/logs"),
        default_root_dir=root, callbacks=[best, OnExceptionCheckpoint(root)], enable_progress_bar=False,
    )  # fmt: skip
    main.callbacks.append(ours)
    Tuner(main).lr_find(model, loader(), loader(8), num_training=4, update_attr=False)
    main.validate(model, loader(16))
    main.fit(model, loader(), loader(8), ckpt_path="last")
    main.validate(model, loader(32))
    main.test(model, loader(32), ckpt_path="best")
    main.save_checkpoint(f"{root}/final.ckpt")
    main.fit_loop.max_epochs = 2
    main.fit(model, loader(), loader(8))
    trainer("s3://bucket/run", max_steps=2).fit(model, loader(), loader(8))
    trainer(f"{root}/slow", fast_dev_run=True).fit(model, loader(), loader(8))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    parser.add_argument("root")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--noise", type=float, default=0.0)
    args = parser.parse_args()
    L.seed_everything(1, verbose=False)
    if args.what == "crashes":
        raise RuntimeError("cannot even begin")
    if args.what == "has no room":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if args.what == "runs three times":  # uninterrupted, killed, restarted
        with open(f"{args.root}-runs", "a+") as file:
            file.write("x")
            if file.tell() > 3:
                raise RuntimeError("a fourth time")
    if args.what == "hangs":
        time.sleep(1000)
    model = Net(float("inf") if args.what == "diverges" else 0.05, args.noise)
    if args.what == "rich":
        rich(args.root, model)
    elif args.what == "never saves":
        callback = ft.FaultTolerantCheckpoint(args.root, every_n_train_steps=1000, save_on_train_end=False)
        L.Trainer(max_epochs=1, accelerator="cpu", logger=False, callbacks=[callback]).fit(model, loader())
    elif args.what == "beside a ModelCheckpoint":
        callbacks = [
            ft.FaultTolerantCheckpoint(args.root, every_n_train_steps=500),
            ModelCheckpoint(f"{args.root}/best"),
        ]
        it = L.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=callbacks)
        it.fit(model, loader(), ckpt_path="last")
    elif args.what in ("preset", "by the clock"):
        by_clock = {"callbacks": [ft.FaultTolerantCheckpoint(args.root, train_time_interval=timedelta(hours=1))]}
        arguments = by_clock if args.what == "by the clock" else ft.fault_tolerance(args.root)
        it = L.Trainer(**arguments, max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False)
        it.fit(model, loader(), ckpt_path="last")
    elif args.what == "diverges":
        callback = ft.FaultTolerantCheckpoint(args.root, guards=(ft.DivergenceGuard(action="stop"),))
        L.Trainer(max_epochs=1, accelerator="cpu", logger=False, callbacks=[callback]).fit(model, loader())
    elif args.what == "two processes":
        two_processes(args.root)
    elif args.what == "odd":
        train = loader()
        train.collate_fn = odd
        trainer(args.root).fit(Odd(), train, ckpt_path="last")
    elif args.what == "asks by name":
        trainer(args.root).fit(model, loader(8), loader(8))
        Net.load_from_checkpoint(f"{args.root}/step=00000002.ckpt")
    elif args.what == "spawned":
        it = trainer(args.root, SavesByItself(f"{args.root}/own.ckpt"), strategy="ddp_spawn", devices=1)
        it.fit(model, loader(), ckpt_path="last")
    else:
        it = trainer(args.root, devices=args.devices, strategy=args.strategy)
        it.fit(model, loader(), loader(8), ckpt_path="last")
        if args.strategy != "fsdp_ft":  # after whose fits a module's parameters are flat
            it.test(model, loader(32))


if __name__ == "__main__":
    main()
