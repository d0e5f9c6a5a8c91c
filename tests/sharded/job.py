"""A training for sharded strategies: uneven shards, dropout, momentum, a schedule; everything at module level.

Kinds of strategies: ``fsdp`` (FSDP1), ``fsdp2`` (`fully_shard`) and ``tp`` (`fully_shard` and tensor parallel on a mesh
of two dimensions), each with ``-sharded`` or ``-full`` checkpoints; ``ddp``, and ``ddp-sharded`` with parallel writes.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn

import lightning_ft as ft
from tests.sharded import plain
from tests.trainer import scenarios as s

KINDS = ("fsdp-sharded", "fsdp-full", "fsdp2-sharded", "fsdp2-full")
WIDTH = 6


class Block(nn.Module):
    """Rows that two, three and four ranks cannot share evenly; a layer to shard by columns and one by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.b(torch.relu(self.a(x))))


class Net(L.LightningModule):
    """Two sharded blocks in a sharded whole, an optimizer by name, a schedule per step."""

    def __init__(self, optimizer: str = "adamw", rows: int = 5) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.net = nn.Sequential(
            nn.Linear(s.FEATURES, WIDTH), Block(), Block(), nn.Linear(WIDTH, rows), nn.Linear(rows, 1)
        )
        self.sharded = False

    def configure_model(self) -> None:
        if self.sharded or not isinstance(self.trainer.strategy, ModelParallelStrategy):
            return
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh, blocks = self.device_mesh, [m for m in self.net if isinstance(m, Block)]
        assert mesh is not None
        if mesh["tensor_parallel"].size() > 1:
            for block in blocks:
                parallelize_module(block, mesh["tensor_parallel"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
        for part in (*blocks, self.net):  # not the module itself, whose forward Lightning does not call
            fully_shard(part, mesh=mesh["data_parallel"])
        self.sharded = True

    def on_fit_start(self) -> None:
        torch.manual_seed(7 + int(self.trainer.distributed_sampler_kwargs["rank"]))  # other draws on every rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[1]).pow(2).mean() + 0.01 * torch.rand(())
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch[1]), sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        value = self.net(batch[1]).mean()
        self.log("val", value, batch_size=len(batch[1]), sync_dist=True)
        return value

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            optimizer: Any = torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def ours(kind: str, ranks: int) -> Strategy:
    """Our strategy of that kind, by the arguments of Lightning's."""
    if kind.startswith("ddp"):
        return DDPStrategy(process_group_backend="gloo")
    made = ft.FSDPStrategy if kind.startswith("fsdp-") else ft.ModelParallelStrategy
    return made(**plain.arguments(kind, ranks, Block))


def plugin(kind: str, **kwargs: Any) -> ft.FaultTolerantCheckpointIO:
    """Saves of that kind."""
    return ft.FaultTolerantCheckpointIO(layout="sharded" if kind == "ddp-sharded" else "file", **kwargs)


def world_size(kind: str) -> int:
    return 4 if kind.startswith("tp") else 2


def rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def trainer(dirpath: str, kind: str, ranks: int | None = None, **kwargs: Any) -> L.Trainer:
    """Saves every second step; 4 batches of 4 per rank and epoch with two ranks, validated after every third."""
    ranks = world_size(kind) if ranks is None else ranks
    arguments = {"every": 2, "devices": ranks, "val_check_interval": 3, "plugins": [plugin(kind)], **kwargs}
    return s.trainer(dirpath, strategy=ours(kind, ranks), **arguments)


def plain_trainer(dirpath: str, kind: str, ranks: int | None = None, **kwargs: Any) -> L.Trainer:
    """The same with plain Lightning."""
    ranks = world_size(kind) if ranks is None else ranks
    arguments = {"every": 2, "devices": ranks, "val_check_interval": 3, **kwargs}
    return s.plain_trainer(dirpath, strategy=plain.strategy(kind, ranks, Block), **arguments)


data = partial(s.shuffled, 0)
