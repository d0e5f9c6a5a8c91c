"""A script that saves with `ModelCheckpoint`, before and after it was changed to this package.

    python examples/from_model_checkpoint.py before
    python examples/from_model_checkpoint.py after

Run the first for a while, kill it, and go on with the second: it continues from the `last.ckpt` that is there, and from
its own checkpoints as soon as there is one. To start over: rm -r runs/migrated
"""

import sys
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_ft as ft


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def before() -> list[Any]:
    """Saves every 20 steps, one file over the other, and the best model. A restart repeats or skips data."""
    return [
        ModelCheckpoint("runs/migrated", filename="newest", every_n_train_steps=20, save_last=True),
        ModelCheckpoint("runs/migrated", filename="best", monitor="loss_epoch"),
    ]


def after() -> list[Any]:
    """The same rhythm. What restarts is ours, exactly and never written over; what is *best* stays Lightning's."""
    return [
        ft.FaultTolerantCheckpoint("runs/migrated/restart", every_n_train_steps=20),
        # With `save_last`, so that `last.ckpt` is found while there is nothing of ours; not needed from then on.
        ModelCheckpoint("runs/migrated", filename="best", monitor="loss_epoch", save_last=True),
    ]


def main(callbacks: list[Any], epochs: int = 4) -> None:
    """Train, or continue to train."""
    L.seed_everything(1)
    inputs = torch.randn(960, 16)
    targets = inputs[:, :4].prod(dim=1, keepdim=True)
    model = Regression()
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, callbacks=callbacks)
    trainer.fit(model, DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True), ckpt_path="last")
    total = sum(parameter.double().sum() for parameter in model.parameters())
    print(f"step {trainer.global_step}, sum of the weights {total:.17g}")


if __name__ == "__main__":
    main({"before": before, "after": after}[sys.argv[1]](), *map(int, sys.argv[2:]))
