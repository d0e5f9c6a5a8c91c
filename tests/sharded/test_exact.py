"""Sharded strategies, killed and restarted: every rank does, bit by bit, what it does in the uninterrupted run."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import lightning_ft as ft
from lightning_ft.testing import assert_resume_exact
from tests.sharded import job
from tests.trainer import scenarios as s

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]

# 4 batches per epoch and rank, a save after every second.
KILLS = {"mid_epoch": [3], "last_batch": [4], "first_batch": [5], "twice_in_one_epoch": [6, 7]}
ALL_KILLS = [point for points in KILLS.values() for point in points]
slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        ("fsdp-sharded", "adamw"),
        ("fsdp2-sharded", "adamw"),
        ("ddp-sharded", "sgd"),
        slow("ddp-sharded", "adamw"),
        ("fsdp-full", "sgd"),
        ("fsdp2-full", "sgd"),
        slow("fsdp-sharded", "sgd"),
        slow("fsdp2-sharded", "sgd"),
        slow("fsdp-full", "adamw"),
        slow("fsdp2-full", "adamw"),
    ],
)
def test_exact(kind: str, optimizer: str, tmp_path: Path) -> None:
    compared = assert_resume_exact(
        partial(job.trainer, kind=kind), partial(job.Net, optimizer), job.data,
        kill_at=ALL_KILLS, root=tmp_path, world_size=2,
    )  # fmt: skip
    assert compared.replayed > 0
    assert compared.validations > 0
    for info in ft.list_checkpoints(compared.dirpath):
        assert os.path.isdir(info.path) is kind.endswith("sharded")


@pytest.mark.slow
def test_exact_on_a_mesh_of_two_dimensions(tmp_path: Path) -> None:
    """Four ranks: tensor parallel by two, sharded data parallel by two."""
    make_trainer = partial(job.trainer, kind="tp-sharded")
    assert_resume_exact(make_trainer, job.Net, job.data, kill_at=[3, 5, 6], root=tmp_path, world_size=4)


class Counts(Callback):
    """A state of its own, the same on all ranks: Lightning saves that of rank 0, and it is loaded by all."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches = state_dict["batches"]


def other_options(dirpath: str, kind: str, **kwargs: Any) -> L.Trainer:
    """Copied at once; gradients of two batches; workers; a best model beside it; other state in a callback."""
    best = partial(ModelCheckpoint, f"{dirpath}-best", monitor="val", save_top_k=1, filename="best-{step}")
    return job.trainer(
        dirpath, kind, plugins=[ft.FaultTolerantCheckpointIO(staging="blocking", **kwargs)],
        callbacks=(Counts, best), accumulate_grad_batches=2, every=1,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["fsdp-sharded", "fsdp2-sharded", slow("fsdp-full"), slow("fsdp2-full")])
def test_exact_with_other_options(kind: str, tmp_path: Path) -> None:
    compared = assert_resume_exact(
        partial(other_options, kind=kind), job.Net, partial(s.shuffled, 1), kill_at=[3, 4, 9], root=tmp_path,
        world_size=2,
    )  # fmt: skip
    best = Path(f"{compared.dirpath}-best")
    assert all(ft.verify(str(path)).problem is None for path in best.iterdir())
    assert list(best.iterdir())
