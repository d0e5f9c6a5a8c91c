"""A stream of unknown length, read by worker processes.

    python examples/stateful_dataloader.py

Of an iterable dataset nobody but its author can tell where it is. `StatefulDataLoader` (torchdata) asks it, in each of
the workers, and the callback saves and restores the answers. Whatever it draws must follow from these or, as here, from
the sample: where in a stream a random number belongs, nobody else knows.
To start over: rm -r runs/stateful
"""

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import lightning_ft as ft


class Lines(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that can only be read one after the other; each worker takes every n-th of them."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.read = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for number in range(first, self.samples, stride)[self.read :]:
            self.read += 1
            inputs = torch.sin(torch.arange(16.0) * number)
            noise = torch.randn(16, generator=torch.Generator().manual_seed(number))
            yield inputs + 0.1 * noise, inputs[:4].prod(dim=0, keepdim=True)
        self.read = 0

    def state_dict(self) -> dict[str, Any]:
        """What a restart has to know."""
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on behind what was read."""
        self.read = state["read"]


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

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
    model = Regression()
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        callbacks=[ft.FaultTolerantCheckpoint("runs/stateful", every_n_train_steps=20)],
    )
    trainer.fit(model, StatefulDataLoader(Lines(960), batch_size=16, num_workers=2), ckpt_path="last")
    total = sum(parameter.double().sum() for parameter in model.parameters())
    print(f"step {trainer.global_step}, sum of the weights {total:.17g}")


if __name__ == "__main__":
    main()
