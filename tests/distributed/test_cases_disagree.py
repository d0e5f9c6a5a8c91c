"""K2: ranks that disagree on a metric, on the time or on the directory save all the same, or say why they do not."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import lightning_ft as ft
from tests import ranks
from tests.ranks import Rank
from tests.trainer import scenarios as s

pytestmark = pytest.mark.distributed


class OwnMetric(s.Net):
    """Each rank has another value, and the best one at another time."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        value = super().validation_step(batch, batch_idx)
        step = self.trainer.global_step
        self.log("own", float(step if self.global_rank == 0 else -step), sync_dist=False)
        return value


def best_of_each(rank: Rank) -> tuple[list[str], int]:
    best = partial(ModelCheckpoint, rank.root / "best", monitor="own", filename="{step}-{own:.1f}", save_top_k=1)
    trainer = s.ddp(str(rank.root / "checkpoints"), every=2, callbacks=(best,), max_epochs=2)
    trainer.fit(OwnMetric(), *s.shuffled())
    return sorted(path.name for path in (rank.root / "best").iterdir()), trainer.global_step


def test_k2_a_metric_that_differs_between_ranks(tmp_path: Path) -> None:
    first, second = ranks.values(best_of_each, tmp_path)
    assert first == second == (["step=4-own=4.0.ckpt"], 8)


def metric_of_one_rank(rank: Rank) -> str:
    """What is monitored is not there on rank 1, which Lightning finds out there alone, in the middle of a save."""

    class Net(s.Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.global_rank == 0:
                self.log("own", 1.0, sync_dist=False)

    best = partial(ModelCheckpoint, rank.root / "best", monitor="own")
    trainer = s.ddp(str(rank.root / "checkpoints"), every=1, callbacks=(best,), max_steps=8)
    try:
        trainer.fit(Net(), *s.shuffled())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing failed")


def test_k2_a_metric_that_one_rank_has_not(tmp_path: Path) -> None:
    errors = ranks.values(metric_of_one_rank, tmp_path)
    assert "MisconfigurationException" in errors[1]
    assert errors[0].startswith("PeerLostError: rank 1 failed: MisconfigurationException")


class Jumps(Callback):
    """The clock of this process goes ahead by hours with every batch; not while anybody waits, who then gave up."""

    def __init__(self) -> None:
        now, self.ahead_secs = time.monotonic, 0.0
        time.monotonic = lambda: self.ahead_secs + now()

    def on_train_batch_start(self, *args: Any) -> None:
        self.ahead_secs += 7200.0


def clocks(rank: Rank) -> list[str]:
    """The clock of rank 1 is not that of rank 0, by which a save would never be due."""
    arguments = {"train_time_interval": timedelta(hours=1), "every_n_train_steps": None, "save_on_train_end": False}
    own = (Jumps,) if rank.number else ()
    trainer = s.ddp(str(rank.root / "checkpoints"), ft_args=arguments, max_steps=8, callbacks=own)
    trainer.fit(s.Net(), *s.shuffled())
    return sorted(path.name for path in (rank.root / "checkpoints").glob("*.ckpt"))


def test_k2_clocks_that_differ(tmp_path: Path) -> None:
    assert ranks.values(clocks, tmp_path) == [[], []]


def directories(rank: Rank, of_rank_1: str | None) -> str:
    dirpath: Any = str(rank.root / "0") if rank.number == 0 else of_rank_1 and str(rank.root / of_rank_1)
    trainer = s.ddp(dirpath, default_root_dir=str(rank.root), max_steps=8)
    try:
        trainer.fit(s.Net(), *s.shuffled())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing failed")


@pytest.mark.parametrize("of_rank_1", ["1", None])
def test_k2_directories_that_differ(of_rank_1: str | None, tmp_path: Path) -> None:
    errors = ranks.values(directories, tmp_path, of_rank_1)
    for error in errors:
        assert error.startswith("ConfigurationError: "), errors
        assert "rank 1" in error
    assert ft.last_good(str(tmp_path / "0")) is None
