"""An epoch over several numbers of ranks, in one process: every sample once, in the documented order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _loaders import Items, LazyStateful, Stream, disturb_global_state, limited, plain, set_epoch, through_a_file
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ft._data import deal
from lightning_ft._data.elastic import Change, DataRank
from lightning_ft._data.tracked import track
from lightning_ft.dataloading import Tracker
from lightning_ft.errors import TopologyError

LENGTH = 24
Make = Callable[[int, int, int], Any]  # rank, ranks, batch size -> loader


def distributed(rank: int, ranks: int, batch_size: int, **kwargs: Any) -> Any:
    sampler: Any = DistributedSampler(Items(LENGTH), ranks, rank, seed=3)  # type: ignore[arg-type]
    return DataLoader(Items(LENGTH), batch_size=batch_size, sampler=sampler, **kwargs)


def as_lightning_does(make_sampler: Callable[[], Any], rank: int, ranks: int, batch_size: int, **kwargs: Any) -> Any:
    """A loader with the sampler on one rank, and what Lightning makes of it on several."""
    sampler, dataset = make_sampler(), Items(LENGTH)
    if ranks > 1 and isinstance(sampler, (RandomSampler, SequentialSampler)):
        shuffle = isinstance(sampler, RandomSampler)
        sampler = DistributedSampler(dataset, ranks, rank, shuffle=shuffle, seed=1)  # type: ignore[arg-type]
    elif ranks > 1:
        sampler = DistributedSamplerWrapper(sampler, num_replicas=ranks, rank=rank, seed=1)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, **kwargs)


class OwnOrder(Sampler[int]):
    """Draws from a generator of its own and from the global ones, and counts its passes."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(11)
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        order = torch.randperm(LENGTH, generator=self.generator)[torch.randperm(LENGTH)]
        yield from order.roll(self.passes).tolist()

    def __len__(self) -> int:
        return LENGTH


def of(make_sampler: Callable[[], Any]) -> Make:
    return lambda rank, ranks, size: as_lightning_does(make_sampler, rank, ranks, size)


SAMPLERS: dict[str, Make] = {
    "distributed": distributed,
    "random": of(lambda: RandomSampler(Items(LENGTH))),
    "random with a generator": of(lambda: RandomSampler(Items(LENGTH), generator=torch.Generator().manual_seed(5))),
    "sequential": of(lambda: SequentialSampler(Items(LENGTH))),
    "weighted": of(lambda: WeightedRandomSampler([float(i + 1) for i in range(LENGTH)], LENGTH, replacement=False)),
    "own": of(OwnOrder),
    "workers": lambda rank, ranks, size: as_lightning_does(
        lambda: RandomSampler(Items(LENGTH)), rank, ranks, size, num_workers=1, persistent_workers=True
    ),
}


class Ranks:
    """The ranks of one start, each with a loader and its tracker."""

    def __init__(self, make: Make, size: int, batch_size: int, root_seed: int = 1) -> None:
        self.loaders, self.trackers = [], []
        for rank in range(size):
            tracker = Tracker(0, root_seed, rank, True, ranks=size)
            self.loaders.append(track(make(rank, size, batch_size), tracker))
            self.trackers.append(tracker)

    def resume(self, states: list[Any]) -> Ranks:
        change = Change(len(states), len(self.trackers), "a.ckpt", {})
        for rank, tracker in enumerate(self.trackers):
            state = through_a_file(states[min(rank, len(states) - 1)])
            tracker.resume(state, change if change.saved != change.present else None)
        return self

    def train(self, epoch: int, batches: int | None = None) -> list[Any]:
        """Samples in the order of the epoch: batch by batch and in each, rank by rank in turn."""
        by_rank = []
        for loader in self.loaders:
            set_epoch(loader, epoch)
            by_rank.append([plain(b[0]) for b in limited(loader, batches)])
            disturb_global_state(7)
        merged = []
        for batch in zip(*by_rank, strict=True):
            merged += [i for row in zip(*batch, strict=True) for i in row]
        return merged

    def states(self) -> list[Any]:
        return [through_a_file(t.position(epoch_over=False)) for t in self.trackers]


CHAINS = {
    "2-1-2": [(2, 2, 2), (1, 2, 4), (2, 2, None)],
    "1-2": [(1, 2, 5), (2, 1, None)],
    "2-1": [(2, 3, 2), (1, 4, None)],
    "2-4-3": [(2, 1, 3), (4, 1, 3), (3, 1, None)],
    "1-4-4": [(1, 2, 2), (4, 1, 2), (4, 1, None)],  # unchanged within what was dealt out anew
    "3-1-3-2": [(3, 1, 2), (1, 1, 3), (3, 1, 1), (2, 3, None)],
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sample_once_in_one_order(name: str, chain: str) -> None:
    starts = CHAINS[chain]
    epoch = 2
    expected = []
    seen = []
    states: list[Any] = []
    for number, (size, batch_size, batches) in enumerate(starts):
        disturb_global_state(number)
        ranks = Ranks(SAMPLERS[name], size, batch_size, root_seed=1 + number)
        if number:
            ranks.resume(states)
        else:
            ranks.train(epoch - 1)  # a pass before this one
            whole = Ranks(SAMPLERS[name], size, batch_size)
            whole.train(epoch - 1)
            expected = whole.train(epoch)
        seen += ranks.train(epoch, batches)
        states = ranks.states()
    assert seen == expected
    assert sorted(seen) == list(range(LENGTH))


@pytest.mark.parametrize("name", ["own", "random with a generator", "workers"])
def test_the_next_epoch_is_that_of_this_number_of_ranks(name: str) -> None:
    whole = Ranks(SAMPLERS[name], 1, 2)
    orders = [whole.train(epoch) for epoch in range(3)]
    begun = Ranks(SAMPLERS[name], 1, 2)
    begun.train(0)
    begun.train(1, 3)
    ranks = Ranks(SAMPLERS[name], 2, 2).resume(begun.states())
    ranks.train(1)
    assert sorted(ranks.train(2)) == list(range(LENGTH))
    back = Ranks(SAMPLERS[name], 1, 2).resume(begun.states())  # and back on the number that saved it
    back.train(1)
    assert back.train(2) == orders[2]
    if name == "own":  # its sequence of passes goes on
        assert ranks.loaders[0].sampler.dataset._sampler.passes == 3


def test_the_rest_is_filled_up_or_cut_at_the_end_only() -> None:
    begun = Ranks(distributed, 2, 2)
    begun.train(0, 5)  # 20 samples, 4 are left
    ranks = Ranks(distributed, 3, 1).resume(begun.states())
    assert ranks.trackers[0].batches_left() == (8, 2)
    order = deal.draw(begun.states()[0]["deal"]["order"])
    assert ranks.train(0) == [*order[20:], *order[:2]]
    dropping = Ranks(lambda r, n, size: distributed(r, n, size, drop_last=True), 1, 3).resume(begun.states())
    assert dropping.trackers[0].batches_left() == (8, 1)
    assert dropping.train(0) == order[20:23]


def test_without_batching() -> None:
    def single(rank: int, ranks: int, _: int) -> Any:
        sampler: Any = DistributedSampler(Items(LENGTH), ranks, rank)  # type: ignore[arg-type]
        return DataLoader(Items(LENGTH), batch_size=None, sampler=sampler)

    begun = Ranks(single, 2, 1)
    for loader in begun.loaders:
        list(limited(loader, 5))
    resumed = Ranks(single, 4, 1).resume(begun.states())
    assert resumed.trackers[0].batches_left() == (6, 4)  # 10 of 24 are trained
    order = deal.draw(begun.states()[0]["deal"]["order"])
    assert [int(i[0]) for i in resumed.loaders[1]] == [order[11], order[15], order[19], order[23]]


def test_augmentation_does_not_repeat_that_of_the_first_batches() -> None:
    def noise(ranks: Ranks, batches: int | None) -> list[float]:
        return [v for loader in ranks.loaders for b in limited(loader, batches) for v in b[1].tolist()]

    begun = Ranks(SAMPLERS["sequential"], 1, 2)
    first = noise(begun, 6)
    once, again = (noise(Ranks(SAMPLERS["sequential"], 2, 2).resume(begun.states()), None) for _ in range(2))
    assert once == again
    assert len({*first, *once}) == LENGTH


# -- what is refused ---------------------------------------------------------------------------------------------


def batches_of_its_own(*_: int) -> Any:
    return DataLoader(Items(LENGTH), batch_sampler=Pairs())


class Pairs(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2 * i, 2 * i + 1] for i in range(LENGTH // 2)])

    def __len__(self) -> int:
        return LENGTH // 2


class OwnDealing(DistributedSampler[Any]):
    pass


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "stateful": (lambda: LazyStateful(), lambda: LazyStateful(), "keeps a state of its own"),
    "torchdata": (
        lambda: StatefulDataLoader(Items(LENGTH), batch_size=2),
        lambda: StatefulDataLoader(Items(LENGTH), batch_size=2),
        "keeps a state of its own",
    ),
    "stream": (lambda: DataLoader(Stream(LENGTH)), lambda: DataLoader(Stream(LENGTH)), "is no map-style loader"),
    "batch sampler": (batches_of_its_own, batches_of_its_own, "its batch sampler Pairs makes batches"),
    "not dealt out": (
        lambda: DataLoader(Items(LENGTH), shuffle=True),
        lambda: DataLoader(Items(LENGTH), shuffle=True),
        "its sampler RandomSampler is no DistributedSampler",
    ),
    "own dealing": (
        lambda: DataLoader(Items(LENGTH), shuffle=True),
        lambda: DataLoader(Items(LENGTH), sampler=OwnDealing(Items(LENGTH), 2, 0)),  # type: ignore[arg-type]
        "its sampler OwnDealing deals samples out in a way of its own",
    ),
    "other replicas": (
        lambda: DataLoader(Items(LENGTH)),
        lambda: distributed(0, 4, 2),
        "its sampler deals out to 4 replicas, of which this is 0, and the run has 2 data-parallel ranks",
    ),
    "other sampler": (
        lambda: DataLoader(Items(LENGTH), sampler=OwnOrder()),
        lambda: distributed(0, 2, 2),
        r"its order was drawn by another sampler \(OwnOrder; now none of the user's\)",
    ),
    "other length": (
        lambda: DataLoader(Items(LENGTH - 2)),
        lambda: distributed(0, 2, 2),
        "its order had 22 samples, and now has 24",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_within_an_epoch(name: str) -> None:
    make, make_now, reason = REFUSED[name]
    tracker = Tracker(0, 1, 0, True)
    twin = track(make(), tracker)
    list(limited(twin, 3))
    state = through_a_file(tracker.position(epoch_over=False))
    present = Tracker(0, 1, 0, True, ranks=2)
    track(make_now(), present)
    with pytest.raises(TopologyError, match=reason) as refused:
        present.resume(state, Change(1, 2, "a.ckpt", {}))
    assert "Saved: 1 rank" in str(refused.value)
    assert "now: 2 ranks" in str(refused.value)


def test_a_position_without_a_description_of_its_order() -> None:
    begun = Ranks(distributed, 2, 2)
    begun.train(0, 2)
    (state, _) = begun.states()
    del state["deal"]
    with pytest.raises(TopologyError, match="did not note the order"):
        Ranks(distributed, 1, 2).resume([state, state])


# -- the end of an epoch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [batches_of_its_own, lambda *_: DataLoader(Stream(LENGTH), batch_size=2)])
def test_at_the_end_of_an_epoch_a_pass_begins_anew(make: Any) -> None:
    tracker = Tracker(0, 1, 0, True)
    twin = track(make(), tracker)
    whole = [plain(b[0]) for b in twin]
    state = through_a_file(tracker.position(epoch_over=True))
    present = Tracker(0, 1, 0, True, ranks=2)
    resumed = track(make(), present)
    present.resume(state, Change(1, 2, "a.ckpt", {}))
    assert [plain(b[0]) for b in resumed] == whole
    assert present.passes == 2


def test_a_state_of_its_own_at_the_end_of_an_epoch() -> None:
    """torchdata's is of use within a pass only; another one belongs to its rank, as far as anybody knows."""

    def make() -> Any:
        disturb_global_state(0)  # its sampler is seeded when it is made
        return StatefulDataLoader(Items(LENGTH), batch_size=2, shuffle=True)

    tracker = Tracker(0, 1, 0, True)
    twin = track(make(), tracker)
    first, second = ([plain(b[0]) for b in limited(twin, LENGTH // 2)] for _ in range(2))
    begun = Tracker(0, 1, 0, True)
    twin = track(make(), begun)
    list(limited(twin, LENGTH // 2))
    state = through_a_file(begun.position(epoch_over=True))
    present = Tracker(0, 2, 0, True, ranks=2)
    resumed = track(make(), present)
    present.resume(state, Change(1, 2, "a.ckpt", {}))
    assert [plain(b[0]) for b in resumed] == second != first

    tracker = Tracker(0, 1, 0, True)
    list(track(LazyStateful(), tracker))
    present = Tracker(0, 1, 0, True, ranks=2)
    track(LazyStateful(), present)
    with pytest.raises(TopologyError, match="keeps a state of its own"):
        present.resume(tracker.position(epoch_over=True), Change(1, 2, "a.ckpt", {}))


def test_a_batch_sampler_of_torch_is_known_whatever_its_loader_says() -> None:
    loader: Any = DataLoader(Items(LENGTH), batch_sampler=BatchSampler(RandomSampler(Items(LENGTH)), 5, drop_last=True))
    described = deal.describe(loader, 1, DataRank())
    assert (described["batch_size"], described["order"]["kind"]) == (5, "random")
