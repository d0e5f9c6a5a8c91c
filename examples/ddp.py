"""Two ranks with DDP, each of which writes its share of every checkpoint.

    python examples/ddp.py

Kill it, or one rank of it, and run it again. What two ranks have saved also restarts one or four: change `devices`.
To start over: rm -r runs/ddp
"""

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
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    """Train, or continue to train."""
    L.seed_everything(1)
    inputs = torch.randn(960, 16)
    targets = inputs[:, :4].prod(dim=1, keepdim=True)
    model = Regression()
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        callbacks=[ft.FaultTolerantCheckpoint("runs/ddp", every_n_train_steps=10)],
        # Without this line rank 0 writes one file; with it the ranks write a directory together.
        plugins=[ft.FaultTolerantCheckpointIO(layout="sharded")],
    )
    # Lightning deals the samples out to the ranks; a restart knows what each of them has had.
    trainer.fit(model, DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True), ckpt_path="last")
    if trainer.is_global_zero:
        total = sum(parameter.double().sum() for parameter in model.parameters())
        print(f"step {trainer.global_step}, sum of the weights {total:.17g}")


if __name__ == "__main__":
    main()
