"""Runs that are killed and started again on other numbers of ranks, and what each of their processes notes down."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import CatMetric, MeanMetric

from lightning_ft import testing
from lightning_ft._state.digest import digest
from tests.trainer import cases as c
from tests.trainer import scenarios as s

LENGTH = 24


class Telling(L.LightningModule):
    """Notes every batch, validation and epoch of its rank, and what it was given to begin with. Draws in every step."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(s.FEATURES, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1))
        self.mean = MeanMetric()
        self.seen = CatMetric()
        self.file = log

    def note(self, kind: str, **values: Any) -> None:
        c.note(self.file, {"kind": kind, "rank": self.global_rank, **values})

    def state(self) -> list[Any]:
        weights = {n: v for n, v in self.state_dict().items() if n.startswith("net")}
        return [digest(weights), digest([o.state_dict() for o in self.trainer.optimizers])]

    def on_train_start(self) -> None:
        self.note("start", state=self.state(), step=self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, dict):
            members = {name: part[0].flatten().int().tolist() for name, part in batch.items()}
            self.note("members", epoch=self.current_epoch, **members)
            batch = batch["a"]
        ids = batch[0].flatten()
        drawn = float(torch.rand(()))
        augmented = batch[2].flatten().tolist() if len(batch) > 2 else []
        self.note(
            "batch", epoch=self.current_epoch, batch=batch_idx, ids=ids.int().tolist(), drawn=drawn,
            augmented=augmented, last=bool(self.trainer.is_last_batch),
        )  # fmt: skip
        for reduction in ("mean", "max", "min"):
            self.log(
                f"ids {reduction}", getattr(ids, reduction)(), on_step=False, on_epoch=True, reduce_fx=reduction,
                batch_size=len(ids), sync_dist=True,
            )  # fmt: skip
        if batch_idx == 0:
            self.log("once", ids[0], on_step=False, on_epoch=True, batch_size=1, sync_dist=True)
        self.mean.update(ids)
        self.seen.update(ids)
        self.log("torchmetric", self.mean, on_step=False, on_epoch=True)
        return (self.net(batch[1]) - batch[1].sum(1, keepdim=True)).pow(2).mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.note("stepped", state=self.state(), step=self.global_step)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.note("validation", epoch=self.current_epoch, step=self.global_step)

    def on_train_epoch_end(self) -> None:
        values = {k: float(v) for k, v in self.trainer.callback_metrics.items()}
        self.note("epoch", epoch=self.current_epoch, metrics=values, seen=sorted(self.seen.compute().int().tolist()))
        self.seen.reset()

    def on_train_end(self) -> None:
        self.note("end", state=self.state(), step=self.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Augmented(c.Plain):
    """Every item with a draw of its own."""

    def __getitem__(self, i: int) -> Any:
        return (*super().__getitem__(i), torch.rand(1))


def data(batch_size: int, length: int = LENGTH, **kwargs: Any) -> Any:
    train = DataLoader(Augmented(length), batch_size=batch_size, **{"shuffle": True, **kwargs})
    return train, c.plain_loader(8, 1)


def own_sampler(kind: Any, batch_size: int) -> Any:
    """With a sampler of the user's, which Lightning wraps for several ranks."""
    return data(batch_size, shuffle=None, sampler=kind(LENGTH))


def of_torch(batch_size: int) -> Any:
    """With a DistributedSampler of the user's, on whatever number of ranks."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    sampler: Any = DistributedSampler(range(LENGTH), ranks, rank, seed=5)  # type: ignore[arg-type]
    return data(batch_size, shuffle=None, sampler=sampler)


def two(batch_size: int) -> Any:
    """The shorter one is cycled within an epoch."""
    return {"a": data(batch_size)[0], "b": data(batch_size, LENGTH // 2)[0]}, data(batch_size)[1]


def trainer(dirpath: str, ranks: int, **kwargs: Any) -> L.Trainer:
    several: dict[str, Any] = {"strategy": "ddp", "devices": ranks} if ranks > 1 else {"devices": 1}
    return c.trainer(dirpath, **{"every": 1, "max_epochs": 2, "val_check_interval": 0.5, **several, **kwargs})


@dataclass(frozen=True)
class Start:
    """One start of a story.

    Args:
        ranks: How many.
        batch_size: Of each.
        kill_at: Batch number, counted over the whole run, at whose end the run is killed; None: it ends by itself.
        data: Makes the loaders, given the batch size.
        trainer: Further arguments of the trainer.
    """

    ranks: int
    batch_size: int
    kill_at: int | None = None
    data: Callable[..., Any] = data
    trainer: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Told:
    """What one start noted, per rank; of a killed one without the batch at whose end it was killed: it is not saved."""

    ranks: list[list[dict[str, Any]]]
    killed: bool

    def of(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        found = [n for n in self.ranks[rank] if n["kind"] == kind]
        # It was killed before it could note "stepped".
        return found[:-1] if self.killed and kind in ("batch", "members") else found

    def ids(self, epoch: int, kind: str = "batch", name: str = "ids") -> list[int]:
        """Samples in the order of the epoch: batch by batch, and in each, rank by rank in turn."""
        by_rank = [[n[name] for n in self.of(kind, r) if n["epoch"] == epoch] for r in range(len(self.ranks))]
        return [i for batch in zip(*by_rank, strict=True) for row in zip(*batch, strict=True) for i in row]


def tell(root: Path, starts: list[Start], make_model: Any = Telling) -> list[Told]:
    """Every start has run in fresh processes, in one directory, each from the last checkpoint; all that was noted."""
    told = []
    for number, start in enumerate(starts):
        log = root / f"{number}.notes"
        root.mkdir(parents=True, exist_ok=True)
        run = testing._Run(
            partial(trainer, ranks=start.ranks, **start.trainer), partial(make_model, log),
            partial(start.data, start.batch_size), str(root / "checkpoints"), str(root / f"{number}"), None,
            start.kill_at, start.ranks, testing._free_port(), multiprocessing.get_start_method(),
        )  # fmt: skip
        testing._start(run, timedelta(minutes=2))
        notes = [n for process in c.notes(log) for n in process]
        by_rank = [[n for n in notes if n["rank"] == rank] for rank in range(start.ranks)]
        told.append(Told(by_rank, start.kill_at is not None))
    return told


def dump(told: list[Told]) -> str:
    """All of it, to be compared."""
    return json.dumps([t.ranks for t in told])
