"""A training with everything that makes an exact restart hard: handwritten digits, bundled with scikit-learn.

    python examples/digits.py

Dropout and BatchNorm, augmentation drawn from three random generators inside two worker processes, shuffling,
validation in the middle of an epoch, a learning rate that changes with every step, and means over the epoch.
Kill it at any moment and start the same command again. To start over: rm -r runs/digits
"""

import random
from typing import Any

import lightning as L
import numpy as np
import torch
import torchmetrics
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lightning_ft as ft

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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
            image = torch.roll(image, (random.randint(-1, 1), random.randint(-1, 1)), dims=(0, 1))
            image = image + torch.from_numpy(np.random.normal(0.0, 0.05, size=(8, 8)).astype(np.float32))
            image = image * (0.8 + 0.4 * torch.rand(()))
        return image.unsqueeze(0), self.labels[index], index


class SmallCNN(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        first = (nn.Conv2d(1, 16, kernel_size=3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        second = (nn.Conv2d(16, 32, kernel_size=3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
        head = (nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))
        self.layers = nn.Sequential(*first, *second, nn.Dropout(0.25), *head)
        self.val_accuracy = torchmetrics.classification.MulticlassAccuracy(num_classes=10)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.val_accuracy(self.layers(batch[0]), batch[1])
        self.log("val_accuracy", self.val_accuracy, on_step=False, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main(dirpath: str = "runs/digits", *callbacks: L.Callback) -> None:
    """Train, or continue to train."""
    torch.set_num_threads(1)
    L.seed_everything(1)
    digits = load_digits()
    train = Digits(digits.images[:-357], digits.target[:-357], augment=True)
    val = Digits(digits.images[-357:], digits.target[-357:], augment=False)
    trainer = L.Trainer(
        max_epochs=3,
        val_check_interval=0.5,
        accelerator="cpu",
        deterministic=True,
        logger=False,
        callbacks=[ft.FaultTolerantCheckpoint(dirpath, every_n_train_steps=10, keep_last=3), *callbacks],
    )
    model = SmallCNN()
    loader = DataLoader(train, batch_size=32, shuffle=True, num_workers=2)
    trainer.fit(model, loader, DataLoader(val, batch_size=128), ckpt_path="last")
    total = sum(parameter.double().sum() for parameter in model.parameters())
    print(f"step {trainer.global_step}, sum of the weights {total:.17g}")


if __name__ == "__main__":
    main()
