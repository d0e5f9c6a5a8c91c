"""Checkpoints in an object store, with a local directory in front.

    python examples/s3.py s3://bucket/run1 /scratch/run1

Every save goes to the local directory; every fourth is uploaded from there, in the background. A restart on the same
machine takes the newest local one; on another machine, or after the disk was lost, what is in the store.

Credentials and endpoint come from where boto3 takes them: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL.
"""

import sys

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


def main(url: str, local_dirpath: str) -> None:
    """Train, or continue to train."""
    L.seed_everything(1)
    inputs = torch.randn(960, 16)
    targets = inputs[:, :4].prod(dim=1, keepdim=True)
    model = Regression()
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        callbacks=[
            ft.FaultTolerantCheckpoint(
                url, every_n_train_steps=20, local_dirpath=local_dirpath, local_every_n_train_steps=5
            )
        ],
        # A request that takes longer, with its repetitions, has failed. Other options go to s3fs.
        plugins=[ft.FaultTolerantCheckpointIO(storage_options={"deadline_secs": 60})],
    )
    trainer.fit(model, DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True), ckpt_path="last")
    total = sum(parameter.double().sum() for parameter in model.parameters())
    print(f"step {trainer.global_step}, sum of the weights {total:.17g}")


if __name__ == "__main__":
    main(*sys.argv[1:])
