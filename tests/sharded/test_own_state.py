"""What each rank has for itself, and a checkpoint holds as rank 0 has it: said, by name, when a fit saves first."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

import lightning_ft as ft
from tests.ranks import Rank, values
from tests.sharded.models import WIDTH, Net, trainer

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]


class Normed(Net):
    """Running statistics of the samples of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(WIDTH, affine=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([self.norm(batch[0])], batch_idx)


class Kept(L.Callback):
    """Has a tensor for its state, and a clock."""

    def __init__(self, tensor: Tensor, clock: float) -> None:
        self.tensor, self.clock = tensor, clock

    def state_dict(self) -> dict[str, Any]:
        return {"clock": self.clock, "kept": {"average": [self.tensor]}}


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "ranks differ" in record.getMessage():
            self.texts.append(record.getMessage())


def said(rank: Rank) -> dict[str, list[str]]:
    heard = Heard()
    logging.getLogger("lightning_ft").addHandler(heard)
    found = {}
    for kind in ("fsdp.sharded", "fsdp.full", "mp.sharded", "mp.full"):
        for name, module, tensor in (
            ("same", Net(), torch.ones(2)),
            ("other", Normed(), torch.full((2,), rank.number)),
        ):
            callback = ft.FaultTolerantCheckpoint(rank.root / f"{kind} {name}", every_n_train_steps=1)
            kept = Kept(tensor, float(rank.number))
            trainer(kind, rank.world_size, rank.root, 3, kept, callback).fit(module)
            found[f"{kind} {name}"], heard.texts = heard.texts, []
    return found


def test_c2_what_differs_between_ranks_is_named_once(tmp_path: Path) -> None:
    on_zero, on_one = values(said, tmp_path)
    assert not any(on_one.values())
    for case, texts in on_zero.items():
        assert len(texts) == case.endswith("other"), texts
    for text in (text for texts in on_zero.values() for text in texts):
        assert "buffer norm.running_mean, buffer norm.running_var, state of callback Kept:" in text
