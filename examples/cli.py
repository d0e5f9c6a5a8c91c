"""`LightningCLI`, with everything about fault tolerance in a file.

    python examples/cli.py fit --config examples/cli.yaml

The same command starts and restarts it. Any value can be given on the command line too:
--trainer.callbacks.init_args.dirpath=runs/other. To start over: rm -r runs/cli
"""

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self, width: int = 64, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(width, 1)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.layers(inputs), targets)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Products(L.LightningDataModule):
    def __init__(self, samples: int = 960, batch_size: int = 16) -> None:
        super().__init__()
        self.samples = samples
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        inputs = torch.randn(self.samples, 16, generator=torch.Generator().manual_seed(1))
        self.data = TensorDataset(inputs, inputs[:, :4].prod(dim=1, keepdim=True))

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(self.data, batch_size=self.batch_size, shuffle=True)


def main() -> None:
    """Train, or continue to train, as the command line says."""
    # Lightning writes the configuration down at every start, and refuses to do it twice unless it may overwrite.
    cli = LightningCLI(Regression, Products, save_config_kwargs={"overwrite": True})
    total = sum(parameter.double().sum() for parameter in cli.model.parameters())
    print(f"step {cli.trainer.global_step}, sum of the weights {total:.17g}")


if __name__ == "__main__":
    main()
