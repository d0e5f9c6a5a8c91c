r"""The smallest use: run it, kill it with Ctrl-\ or `kill -9`, and run it again.

However often it is killed, the last line it prints is the same as without any kill.
To start over: rm -r runs/minimal
"""

import time

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_ft as ft


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        time.sleep(0.02)  # slow enough to be killed by hand
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    """Train, or continue to train."""
    L.seed_everything(1)
    inputs = torch.randn(1600, 16)
    targets = inputs[:, :4].prod(dim=1, keepdim=True)
    model = Regression()
    trainer = L.Trainer(
        max_epochs=10,
        accelerator="cpu",
        logger=False,
        callbacks=[ft.FaultTolerantCheckpoint("runs/minimal", every_n_train_steps=20)],
    )
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
    trainer.fit(model, loader, ckpt_path="last")
    total = sum(parameter.double().sum() for parameter in model.parameters())
    print(f"step {trainer.global_step}, sum of the weights {total:.17g}")


if __name__ == "__main__":
    main()
