"""Two ranks: each goes on with its own data, random state and metrics."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from lightning_ft.testing import assert_resume_exact
from tests.trainer import cases as c
from tests.trainer import scenarios as s
from tests.trainer.test_cases_random import Noisy, NoisyCallback
from tests.trainer.test_cases_training import Measured

pytestmark = pytest.mark.distributed

TWO: dict[str, Any] = {"strategy": "ddp", "devices": 2}
ddp = partial(c.trainer, **TWO)
plain_ddp = partial(s.plain_trainer, **TWO)
exact = partial(c.exact, world_size=2)


def rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


@pytest.mark.parametrize("workers", [0, 2])
def test_ddp_killed_within_and_between_epochs(workers: int, tmp_path: Path) -> None:
    # 4 batches of 4 for each of the ranks, saved every 2; killed at a last batch, at a first one, within, and twice
    make_trainer = partial(ddp, every=2, callbacks=(s.Ema,), val_check_interval=3)
    make_data = partial(s.shuffled, workers)
    exact(make_trainer, s.Net, make_data, kill_at=[4, 5, 7], root=tmp_path, replayed=2 * (2 + 1 + 1))


# -- A2 ----------------------------------------------------------------------------------------------------------


def sampled(workers: int, injected: bool = True) -> Any:
    """40 items, 5 batches of 4 for each rank; the sampler is Lightning's or the user's."""
    if injected:
        return c.plain_data(40, shuffle=True, num_workers=workers)
    dataset = c.Plain(40)
    sampler: Any = DistributedSampler(dataset, 2, rank())
    return DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=workers), c.plain_loader(6, 3)


@pytest.mark.parametrize("injected", [True, False], ids=["injected", "own"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a2_the_epoch_of_the_sampler(workers: int, injected: bool, tmp_path: Path) -> None:
    make_data = partial(sampled, workers, injected)
    exact(partial(ddp, every=5), c.Small, make_data, kill_at=[6, 13], root=tmp_path, replayed=2 * (1 + 3))


def test_a2_plain_lightning_uses_the_order_of_the_first_epoch(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"step 6( on rank 1)?: (output|batch) differs"):
        assert_resume_exact(
            partial(plain_ddp, every=5), c.Small, partial(sampled, 2), kill_at=6, root=tmp_path, world_size=2
        )


# -- A4 ----------------------------------------------------------------------------------------------------------


class Places(c.Positioned):
    """Reads from a place of each rank's own, as a loader over files does, and its state says which."""

    def __init__(self) -> None:
        super().__init__(6, 100 * rank())

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "first": self.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.first = state["first"]


def test_a4_each_rank_loads_its_own_state(tmp_path: Path) -> None:
    log = tmp_path / "log"
    exact(ddp, partial(c.Small, log), Places, kill_at=[5, 8], root=tmp_path, replayed=2 * (2 + 2))
    for process in c.notes(log):
        assert len({ids[0] >= 200 for _, _, ids in process}) == 1  # no rank ever sees items of the other


@pytest.mark.parametrize("workers", [0, 1])
def test_a4_torchdata(workers: int, tmp_path: Path) -> None:
    make_data = partial(c.stateful, 48, shuffle=True, num_workers=workers)
    exact(ddp, partial(c.Small, tmp_path / "log"), make_data, kill_at=[5, 8], root=tmp_path, replayed=2 * (2 + 2))


def test_a4_plain_lightning_loads_the_state_of_rank_0(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"step 4: (weights|output|batch) differs"):
        assert_resume_exact(plain_ddp, c.Small, Places, kill_at=5, root=tmp_path, world_size=2)


# -- A19 ---------------------------------------------------------------------------------------------------------


class OwnOrder(Sampler[int]):
    """Draws its orders from a generator of its own, and counts its passes."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.generator = torch.Generator().manual_seed(11)
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        order = torch.randperm(self.length, generator=self.generator).roll(self.passes)
        return iter(order.tolist())

    def __len__(self) -> int:
        return self.length


class StatefulOrder(OwnOrder):
    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]
        self.generator.set_state(state["generator"])


def own_order(kind: Any, workers: int = 0) -> Any:
    dataset = c.Plain(40)
    return DataLoader(dataset, batch_size=4, sampler=kind(40), num_workers=workers), c.plain_loader(6, 3)


@pytest.mark.parametrize("kind", [OwnOrder, StatefulOrder])
def test_a19_a_sampler_that_lightning_wraps(kind: Any, tmp_path: Path) -> None:
    make_data = partial(own_order, kind, 2)
    exact(ddp, c.Small, make_data, kill_at=[5, 8, 12], root=tmp_path, replayed=2 * (2 + 2 + 3))


class GlobalOrder(Sampler[int]):
    """Draws from the global generator, which is the same on all ranks only while nothing else draws from it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length).tolist())

    def __len__(self) -> int:
        return self.length


def global_order() -> Any:
    torch.rand(rank())  # this rank's global generator is no longer where the other's is
    dataset = c.Plain(40)
    return {
        "ordinary": DataLoader(dataset, batch_size=4, sampler=GlobalOrder(40)),
        "torchdata": c.stateful(dataset=dataset, sampler=GlobalOrder(40)),
        "own state": c.Skipping(dataset, batch_size=4, sampler=GlobalOrder(40)),
    }


def test_a19_ranks_share_an_order(tmp_path: Path) -> None:
    log = tmp_path / "log"
    make_trainer = partial(ddp, max_epochs=2)
    exact(make_trainer, partial(c.Small, log), global_order, kill_at=[5, 8], root=tmp_path, replayed=2 * (2 + 2))
    ranks = c.notes(log)[:2]
    for epoch in range(2):
        for name in global_order():
            ids = [i for process in ranks for number, _, ids in process if number == epoch for i in ids[name]]
            assert sorted(ids) == list(range(40)), (epoch, name)


# -- B2 and C18 --------------------------------------------------------------------------------------------------


def seeded_by_rank(dirpath: str, **kwargs: Any) -> L.Trainer:
    return c.trainer(dirpath, seed=1 + rank(), **TWO, **kwargs)


class NoisyNoted(Noisy):
    def __init__(self, log: Path) -> None:
        super().__init__()
        self.file = log

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        c.note(self.file, self.global_rank, float(outputs["torch"]))
        return outputs


def test_b2_each_rank_goes_on_with_its_own_random_state(tmp_path: Path) -> None:
    log = tmp_path / "log"
    make_trainer = partial(seeded_by_rank, callbacks=(NoisyCallback,))
    make_data = partial(c.plain_data, 40, shuffle=True)
    exact(make_trainer, partial(NoisyNoted, log), make_data, kill_at=[5, 7], root=tmp_path, replayed=2 * (2 + 1))
    drawn = [[value for number, value in process if number == r] for process in c.notes(log) for r in (0, 1)]
    sets = [set(values) for values in drawn if values]
    whole = {number: next(p for p in c.notes(log) if p[0][0] == number) for number in (0, 1)}
    assert len(sets) == 2 * 4
    assert not {value for _, value in whole[0]} & {value for _, value in whole[1]}


class MeasuredTogether(Measured):
    """The same metrics, averaged over the ranks."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        synced = not kwargs.get("on_step", False) and "value" not in kwargs  # torchmetrics synchronise themselves
        super().log(*args, **{**kwargs, "sync_dist": synced})


def test_c18_epoch_metrics_of_two_ranks(tmp_path: Path) -> None:
    make_data = partial(c.plain_data, 40, shuffle=True)
    make_trainer = partial(ddp, every=1)
    kills = [3, 5, 6, 7]
    exact(make_trainer, MeasuredTogether, make_data, kill_at=kills, root=tmp_path, replayed=2 * len(kills))
