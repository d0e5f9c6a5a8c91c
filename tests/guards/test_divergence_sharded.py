"""Sharded strategies: a bad loss on one rank stops all, or takes them back to a sharded checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_ft as ft
from lightning_ft._divergence.left_out import VARIABLE
from lightning_ft._state.digest import digest
from tests.ranks import Rank, values
from tests.sharded import job

pytestmark = pytest.mark.distributed

BAD = 3


class Net(job.Net):
    def __init__(self, rank: int | None = None) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.rank = rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        return loss * float("nan") if number == BAD and self.rank == self.global_rank else loss


def fit(dirpath: Path, kind: str, guard: Any, model: Any) -> Any:
    guards = () if guard is None else (guard,)
    trainer = job.trainer(str(dirpath), kind, ft_args={"guards": guards}, max_epochs=2)
    train, val = job.data()
    try:
        trainer.fit(model, train, val, ckpt_path="last")
    except ft.DivergenceError as error:
        return trainer, error
    return trainer, None


def end_of(trainer: Any) -> str:
    weights = {n: getattr(p, "_local_tensor", p).detach().clone() for n, p in trainer.strategy.model.named_parameters()}
    return digest([weights, trainer.global_step, torch.random.get_rng_state()]) or ""


def train(rank: Rank, kind: str) -> dict[str, Any]:
    root = rank.root
    _, error = fit(root / "stop", kind, ft.DivergenceGuard(), Net(rank=1))
    back, none = fit(root / "back", kind, ft.DivergenceGuard(action="rollback"), Net(rank=1))
    os.environ[VARIABLE] = str(BAD)
    asked, _ = fit(root / "asked", kind, None, Net())
    del os.environ[VARIABLE]
    return {"error": vars(error), "none": none, "back": end_of(back), "asked": end_of(asked)}


SLOW = {"fsdp-full", "fsdp2-sharded"}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow if k in SLOW else ()) for k in job.KINDS])
def test_j3_sharded(kind: str, tmp_path: Path) -> None:
    found = values(train, tmp_path, kind)
    assert str(found[0]["error"]) == str(found[1]["error"])
    error = found[0]["error"]
    assert error["batch"] == BAD
    assert Path(error["restart_from"]).name == "step=00000002.ckpt"
    assert ft.verify(error["emergency"]).problem is None
    for of_rank in found:
        assert of_rank["none"] is None
        assert of_rank["back"] == of_rank["asked"]
