"""Three ranks: exact where DDP keeps one order of its sums, and said to be otherwise where it does not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_ft._fit import loops
from lightning_ft.testing import assert_resume_exact
from tests.trainer import scenarios as s


class Backwards(L.LightningModule):
    """Parameters are declared in another order than their gradients become ready."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(32, 1)
        self.middle = nn.Linear(32, 32)
        self.first = nn.Linear(s.FEATURES, 32)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.last(self.middle(self.first(batch[1]).relu()).relu()).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def three(dirpath: str, *, find_unused: bool) -> L.Trainer:
    strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=find_unused)
    return s.trainer(dirpath, every=1, strategy=strategy, devices=3, max_epochs=2, limit_val_batches=0)


@pytest.mark.slow
def test_three_ranks_with_one_order_are_exact(tmp_path: Path) -> None:
    make_trainer = partial(three, find_unused=True)
    make_data = partial(s.loader, shuffle=True)
    assert_resume_exact(make_trainer, Backwards, make_data, kill_at=2, world_size=3, root=tmp_path)


@pytest.mark.parametrize(("world_size", "find_unused", "notes"), [(2, False, 0), (3, True, 0), (3, False, 1)])
def test_a_restart_with_another_order_is_noted(world_size: int, find_unused: bool, notes: int) -> None:
    class Strategy:
        model: Any = torch.nn.parallel.DistributedDataParallel.__new__(torch.nn.parallel.DistributedDataParallel)

    class Trainer:
        strategy = Strategy()

    vars(Strategy.model)["find_unused_parameters"] = find_unused
    found = loops.inexact_reductions(Trainer(), world_size)  # type: ignore[arg-type]
    assert len(found) == notes
