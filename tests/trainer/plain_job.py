"""A job of plain Lightning: continues from a checkpoint in a process that cannot import lightning_ft.

``python plain_job.py CHECKPOINT '{"max_epochs": 3}'`` prints, as JSON, what was trained. Nothing here may import
lightning_ft, nor a module that does.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Blocked:
    """A finder that refuses the package, as if it were not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "lightning_ft":
            raise ImportError(f"{name} is blocked")


class Data(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(i)]), torch.tensor([i / 10, i % 7 / 7, 1.0])


class Model(L.LightningModule):
    """8 batches per epoch, Adam, a scheduler per epoch, a logged mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.epochs: list[int] = []
        self.steps: list[int] = []
        self.rates: list[float] = []
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.epochs.append(self.current_epoch)
        self.steps.append(self.global_step)
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        loss = self.layer(batch[1]).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.global_step)
        self.log("val", self.layer(batch[1]).pow(2).mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(Data(), batch_size=4, shuffle=True), DataLoader(Data(), batch_size=32)


def report(trainer: L.Trainer, model: Model) -> dict[str, Any]:
    return {
        "epochs": model.epochs,
        "steps": model.steps,
        "rates": model.rates,
        "validated": model.validated,
        "global_step": trainer.global_step,
        "current_epoch": trainer.current_epoch,
        "ours": sorted(name for name in sys.modules if name.startswith("lightning_ft")),
    }


if __name__ == "__main__":
    sys.meta_path.insert(0, Blocked())  # type: ignore[arg-type]
    try:
        import lightning_ft
    except ImportError:
        lightning_ft = None
    assert lightning_ft is None, "the package can be imported: this proves nothing"
    # Several in one process, since importing Lightning takes longer than training.
    reports = []
    for checkpoint, arguments in json.loads(sys.argv[1]):
        L.seed_everything(7, verbose=False)
        model, trainer = Model(), L.Trainer(**QUIET, enable_checkpointing=False, **arguments)
        trainer.fit(model, *loaders(), ckpt_path=checkpoint)
        reports.append(report(trainer, model))
    print("REPORT", json.dumps(reports))
