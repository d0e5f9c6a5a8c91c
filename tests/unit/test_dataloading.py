from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from _loaders import (
    LENGTH,
    PLACES,
    Batches,
    Draws,
    EagerStateful,
    Items,
    LazyStateful,
    ManyItems,
    OnePass,
    Run,
    StatefulStream,
    Stream,
    disturb_global_state,
    plain,
    set_epoch,
    through_a_file,
    tracked,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ft.dataloading import Tracker, track
from lightning_ft.errors import RestoreError


def _with_sampler(make: Callable[[Items], Any]) -> Callable[[], Any]:
    def loader() -> Any:
        dataset = Items()
        return DataLoader(dataset, batch_size=3, sampler=make(dataset))

    return loader


def _own_torch() -> Draws:
    generator = torch.Generator().manual_seed(3)
    return Draws(lambda: torch.rand((), generator=generator).item(), generator)


def _own_numpy() -> Draws:
    generator = np.random.default_rng(3)
    return Draws(generator.random, generator)


def _own_numpy_legacy() -> Draws:
    generator = np.random.RandomState(3)
    return Draws(generator.random_sample, generator)


def _own_python() -> Draws:
    generator = random.Random(3)
    return Draws(generator.random, generator)


class _SamplerWithState(RandomSampler):
    """Its order depends on a state that only it knows how to keep."""

    def __init__(self, dataset: Items) -> None:
        super().__init__(dataset)
        self._seen = [0]

    def __iter__(self) -> Any:
        self._seen[0] += 1
        order = list(super().__iter__())
        return iter(order[self._seen[0] :] + order[: self._seen[0]])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen[0]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen[0] = state["seen"]


def _shuffled(dataset: Any = None, cls: Any = DataLoader, **kwargs: Any) -> Callable[[], Any]:
    return lambda: cls(dataset() if dataset else Items(), batch_size=3, shuffle=True, **kwargs)


def _own_generator() -> Any:
    return DataLoader(Items(), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(4))


INDEXED: dict[str, Callable[[], Any]] = {
    "shuffle": _shuffled(),
    "sequential": _with_sampler(SequentialSampler),
    "random": _with_sampler(RandomSampler),
    "random-replacement": _with_sampler(lambda d: RandomSampler(d, replacement=True, num_samples=8)),
    "weighted": _with_sampler(lambda d: WeightedRandomSampler(list(range(1, LENGTH + 1)), 9)),
    "subset": _with_sampler(lambda d: SubsetRandomSampler([1, 3, 5, 7, 9, 10])),
    "distributed": _with_sampler(lambda d: DistributedSampler(d, num_replicas=2, rank=1, seed=3)),
    "global-torch": _with_sampler(lambda d: Draws(lambda: torch.rand(()).item())),
    "global-numpy": _with_sampler(lambda d: Draws(lambda: float(np.random.rand()))),
    "global-python": _with_sampler(lambda d: Draws(random.random)),
    "own-torch": _with_sampler(lambda d: _own_torch()),
    "own-numpy": _with_sampler(lambda d: _own_numpy()),
    "own-numpy-legacy": _with_sampler(lambda d: _own_numpy_legacy()),
    "own-python": _with_sampler(lambda d: _own_python()),
    "sampler-with-state": _with_sampler(_SamplerWithState),
    "loader-generator": _own_generator,
    "batches-list": lambda: DataLoader(Items(), batch_sampler=Batches(list)),
    "batches-tuple": lambda: DataLoader(Items(), batch_sampler=Batches(tuple)),
    "batches-array": lambda: DataLoader(Items(), batch_sampler=Batches(np.array)),
    "batch-sampler-own-generator": lambda: DataLoader(Items(), batch_sampler=BatchSampler(_own_torch(), 3, False)),
    "no-collation": lambda: DataLoader(Items(), batch_size=None, shuffle=True),
    "no-collation-batches": lambda: DataLoader(ManyItems(), batch_size=None, sampler=Draws(random.random)),
    "drop-last": _shuffled(drop_last=True),
    "getitems": _shuffled(ManyItems),
}
OTHER: dict[str, Callable[[], Any]] = {
    "stateful-dataloader": _shuffled(cls=StatefulDataLoader),
    "stateful-dataloader-stream": lambda: StatefulDataLoader(StatefulStream(), batch_size=3),
    "stateful-object-lazy": LazyStateful,
    "stateful-object-eager": EagerStateful,
    "stateful-stream": lambda: DataLoader(StatefulStream(), batch_size=3),
    "stateful-stream-drop-last": lambda: DataLoader(StatefulStream(), batch_size=3, drop_last=True),
    "stateful-stream-no-collation": lambda: DataLoader(StatefulStream(), batch_size=None),
    "stream": lambda: DataLoader(Stream(), batch_size=3),
    "list": lambda: [torch.tensor([float(i)]) for i in range(7)],
}
WORKERS: dict[str, Callable[[], Any]] = {
    "workers": _shuffled(num_workers=2),
    "workers-persistent": _shuffled(num_workers=2, persistent_workers=True),
    "workers-getitems": _shuffled(ManyItems, num_workers=2),
    "stateful-dataloader-workers": _shuffled(cls=StatefulDataLoader, num_workers=2),
    "stateful-dataloader-persistent": _shuffled(cls=StatefulDataLoader, num_workers=2, persistent_workers=True),
    "stream-workers": lambda: DataLoader(Stream(), batch_size=3, num_workers=2),
    "stream-workers-persistent": lambda: DataLoader(Stream(), batch_size=3, num_workers=2, persistent_workers=True),
}
ALL = {**INDEXED, **OTHER}


def _places(name: str, exhaust: bool) -> list[str]:
    # Who counts takes a pass for over when its last batch was trained, and a loader with a state of its own may begin
    # the next pass where another says that this one is over.
    no_end = not exhaust or name.startswith("stateful")
    return [place for place in PLACES if not (place == "at-the-end" and no_end)]


@pytest.mark.parametrize("exhaust", [True, False], ids=["asked-for-more", "counted"])
@pytest.mark.parametrize("name", ALL)
def test_a_resumed_run_sees_exactly_what_is_left(name: str, exhaust: bool) -> None:
    counts = None if exhaust else [len(batches) for batches in Run(ALL[name]()).batches]
    run = Run(ALL[name](), counts)
    assert len({repr(batches) for batches in run.batches}) == (1 if name == "list" else len(run.batches))
    for place in _places(name, exhaust):
        assert run.resumed(ALL[name](), place, exhaust=exhaust) == run.left(place), place


@pytest.mark.parametrize("name", WORKERS)
def test_a_resumed_run_with_workers_sees_exactly_what_is_left(name: str) -> None:
    run = Run(WORKERS[name]())
    assert len({repr(batches) for batches in run.batches}) == len(run.batches)
    for place in ("first", "last", "epoch-over", "second-pass"):
        assert run.resumed(WORKERS[name](), place) == run.left(place), place
