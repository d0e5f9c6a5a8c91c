"""Models whose loss goes bad on a given item, and trainings of them; everything importable by fresh processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from torchmetrics import MeanMetric

import lightning_ft as ft
from tests.trainer import cases as c
from tests.trainer import scenarios as s

BATCHES = 8  # of 4 items, in an epoch of 32


class Net(L.LightningModule):
    """Dropout, BatchNorm, Adam, a scheduler per step, an epoch mean; the loss of some batches is bad.

    Args:
        bad: Of batches with these items.
        factor: What the loss is multiplied by there.
        at: Of the batches with these numbers in the run.
        rank: Only on this rank.
        through: "loss" or, so that the loss itself stays finite, its "gradient".
    """

    def __init__(
        self,
        *bad: int,
        factor: float = float("nan"),
        at: tuple[int, ...] = (),
        rank: int | None = None,
        through: str = "loss",
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(
            nn.Linear(s.FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)
        )
        self.mean = MeanMetric()
        self.bad, self.at, self.factor, self.rank, self.through = set(bad), at, factor, rank, through
        self.trained: list[list[int]] = []

    def is_bad(self, batch: Any) -> bool:
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        found = self.bad & set(batch[0].flatten().int().tolist()) or number in self.at
        return bool(found) and self.rank in (None, self.global_rank)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trained.append(batch[0].flatten().int().tolist())
        out = self.net(batch[1])
        if self.is_bad(batch) and self.through == "gradient":
            out.register_hook(lambda gradient: gradient * self.factor)
        loss = (out - batch[1].sum(1, keepdim=True)).pow(2).mean()
        if self.is_bad(batch) and self.through == "loss":
            loss = loss * self.factor
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch[0]))
        self.mean(loss.detach() if bool(torch.isfinite(loss)) else 1e6)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Plateau(Net):
    """A scheduler that looks at the loss after every step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=1, threshold=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step", "monitor": "loss_step", "strict": False},
        }


class Gan(s.Gan):
    """Two optimizers by hand; the loss of one of them is bad for batches with the item `bad`."""

    def __init__(self, bad: int, which: str) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.bad, self.which = bad, which

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.losses += 1
        if self.is_bad and self.losses == {"critic": 1, "generator": 2}[self.which]:
            loss = loss * float("nan")
        super().manual_backward(loss, *args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.losses = 0
        self.is_bad = self.bad in batch[0].flatten().tolist()
        return super().training_step(batch, batch_idx)


class Without(Sampler[int]):
    """Another sampler's items but those of batches with one of `items`: as if the data had not had those batches."""

    def __init__(self, length: int, items: tuple[int, ...], batch_size: int = 4) -> None:
        self.length, self.items, self.batch_size = length, items, batch_size

    def _order(self) -> list[int]:
        order = torch.randperm(self.length, generator=torch.Generator().manual_seed(5)).tolist()
        batches = [order[i : i + self.batch_size] for i in range(0, self.length, self.batch_size)]
        return [i for batch in batches if not set(batch) & set(self.items) for i in batch]

    def __iter__(self) -> Iterator[int]:
        return iter(self._order())

    def __len__(self) -> int:
        return len(self._order())


def data(*without: int, workers: int = 0, length: int = 4 * BATCHES) -> DataLoader[Any]:
    """Items that depend on nothing, in one order; without the batches that hold these items."""
    return DataLoader(c.Plain(length), batch_size=4, sampler=Without(length, without), num_workers=workers)


def trainer(dirpath: Any, guard: Any = None, **kwargs: Any) -> L.Trainer:
    guards = () if guard is None else (guard,)
    ours = {"every_n_train_steps": 2, "guards": guards, **kwargs.pop("ft_args", {})}
    L.seed_everything(1, verbose=False)
    callbacks = [*kwargs.pop("callbacks", []), ft.FaultTolerantCheckpoint(dirpath, **ours)]
    plugins = [ft.FaultTolerantCheckpointIO(async_save=False)]
    return L.Trainer(**{**s.COMMON, "max_epochs": 2, "plugins": plugins, **kwargs}, callbacks=callbacks)


def fit(dirpath: Any, guard: Any = None, model: Any = None, loader: Any = None, val: Any = None, **kwargs: Any) -> Any:
    """The module and the trainer after the fit; and the error that ended it, if one did."""
    model = Net() if model is None else model
    made = trainer(dirpath, guard, **kwargs)
    try:
        made.fit(model, data() if loader is None else loader, val, ckpt_path="last")
    except ft.DivergenceError as error:
        return model, made, error
    return model, made, None


def end_of(model: L.LightningModule, trainer: L.Trainer) -> dict[str, Any]:
    """Everything that a run has come to, to be compared bit by bit."""
    return {
        "weights": {k: v.clone() for k, v in model.state_dict().items()},
        "optimizers": [o.state_dict() for o in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "steps": trainer.global_step,
        "random": torch.random.get_rng_state(),
        "logged step": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "metrics": {k: v for k, v in trainer.callback_metrics.items() if k.endswith("_epoch") or k == "mean"},
    }
