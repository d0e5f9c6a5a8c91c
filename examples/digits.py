"""A training with everything that makes an exact restart hard: handwritten digits, bundled with scikit-learn.

Dropout and BatchNorm, augmentation drawn from three random generators inside two worker processes, shuffling,
validation in the middle of an epoch, a learning rate that changes with every step, and means over the epoch.

    python examples/digits.py --dirpath runs/digits

Kill it at any moment and start the same command again.
"""

import argparse
import json
import os
import random
import signal
from typing import Any

import lightning as L
import numpy as np
import torch
import torchmetrics
import xxhash
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset

import lightning_ft as ft

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
VALIDATION_SAMPLES = 357


class Digits(Dataset[tuple[torch.Tensor, int, int]]):
    """Images of 8x8 pixels with their label and their number; augmented if asked."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, augment: bool) -> None:
        self.images = torch.as_tensor(images / 16.0, dtype=torch.float32)
        self.labels = labels.tolist()
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        image = self.images[index]
        if self.augment:
            # One generator each, since each of the three must continue where it was.
            shift = (random.randint(-1, 1), random.randint(-1, 1))
            image = torch.roll(image, shift, dims=(0, 1))
            image = image + torch.from_numpy(np.random.normal(0.0, 0.05, size=(8, 8)).astype(np.float32))
            image = image * (0.8 + 0.4 * torch.rand(()))
        return image.unsqueeze(0), self.labels[index], index


class SmallCNN(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, kernel_size=3, padding=1),
            torch.nn.BatchNorm2d(16),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, kernel_size=3, padding=1),
            torch.nn.BatchNorm2d(32),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Dropout(0.25),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * 4 * 4, 64),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(64, 10),
        )
        self.val_accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=10)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        images, labels, _ = batch
        loss = torch.nn.functional.cross_entropy(self.layers(images), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels, _ = batch
        self.val_accuracy(self.layers(images), labels)
        self.log("val_accuracy", self.val_accuracy, on_step=False, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1e-2, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Trace(L.Callback):
    """Appends what happened to a file, one JSON line each, and kills the process when told to."""

    def __init__(self, path: str | None, kill_at_step: int | None) -> None:
        self.kill_at_step = kill_at_step
        # Unbuffered: a line that was written survives a SIGKILL.
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if path else None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        if self.file is not None:
            self._write(
                "batch",
                trainer,
                batch_idx=batch_idx,
                ids=batch[2].tolist(),
                loss=outputs["loss"].item().hex(),
                lr=trainer.optimizers[0].param_groups[0]["lr"].hex(),
                weights=_digest(pl_module),
            )
        if trainer.global_step == self.kill_at_step:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._write("validation", trainer, accuracy=_metric(trainer, "val_accuracy"))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write("epoch", trainer, mean_loss=_metric(trainer, "train_loss_epoch"))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write("end", trainer, weights=_digest(pl_module))

    def _write(self, kind: str, trainer: L.Trainer, **values: Any) -> None:
        if self.file is not None:
            line = {"kind": kind, "step": trainer.global_step, "epoch": trainer.current_epoch, **values}
            os.write(self.file, json.dumps(line).encode() + b"\n")


def _metric(trainer: L.Trainer, name: str) -> str:
    return float(trainer.callback_metrics[name]).hex()


def _digest(module: torch.nn.Module) -> str:
    """Return the digest of all parameters and buffers."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    """Train, or continue to train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dirpath", default="runs/digits", help="where the checkpoints are (%(default)s)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", metavar="FILE", help="append one JSON line per batch")
    parser.add_argument("--kill-at-step", type=int, metavar="N", help="SIGKILL this process after step N")
    args = parser.parse_args()

    torch.set_num_threads(1)
    L.seed_everything(args.seed)
    digits = load_digits()
    train = Digits(digits.images[:-VALIDATION_SAMPLES], digits.target[:-VALIDATION_SAMPLES], augment=True)
    val = Digits(digits.images[-VALIDATION_SAMPLES:], digits.target[-VALIDATION_SAMPLES:], augment=False)
    trainer = L.Trainer(
        max_epochs=args.epochs,
        val_check_interval=0.5,
        accelerator="cpu",
        deterministic=True,
        logger=False,
        enable_progress_bar=args.trace is None,
        callbacks=[
            ft.FaultTolerantCheckpoint(args.dirpath, every_n_train_steps=10, keep_last=3),
            Trace(args.trace, args.kill_at_step),
        ],
    )
    trainer.fit(
        SmallCNN(),
        DataLoader(train, batch_size=32, shuffle=True, num_workers=2),
        DataLoader(val, batch_size=128),
        ckpt_path="last",
    )


if __name__ == "__main__":
    main()
