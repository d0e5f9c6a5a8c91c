from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from _loaders import (
    LENGTH,
    PLACES,
    Draws,
    Items,
    ManyItems,
    Run,
    plain,
    position_after,
    through_a_file,
    tracked,
)
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from lightning_ft._data.order import IndexSource, SamplerState, Seeded, SeededDataset
from lightning_ft._state import random_state
from lightning_ft.errors import RestoreError

# -- indices -----------------------------------------------------------------------------------------------------


class Lazy(Sampler[int]):
    """Draws from all three global generators, an index at a time."""

    def __init__(self, length: int = 6) -> None:
        self.length = length
        self.iterators = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.iterators += 1
        for _ in range(self.length):
            yield int(torch.randint(1000, ()).item()) + 1000 * int(np.random.randint(9)) + random.randrange(99)


def source(base: Any, skip: int = 0, seed: int = 5, seed_of: Callable[[int], int] | None = None) -> IndexSource:
    return IndexSource(base, lambda: random_state.Stream(seed), seed_of, lambda: skip)


@pytest.mark.parametrize("skip", range(7))
@pytest.mark.parametrize(
    "make",
    [Lazy, lambda: RandomSampler(range(6)), lambda: BatchSampler(Lazy(12), 2, False)],
    ids=["lazy", "random", "batches"],
)
def test_skipped_indices_are_drawn_and_dropped(make: Callable[[], Any], skip: int) -> None:
    assert list(source(make(), skip)) == list(source(make()))[skip:]


def test_the_order_depends_on_its_stream_alone() -> None:
    orders = []
    for seed in (1, 2):
        random_state.seed_cpu(seed)
        indices = iter(source(Lazy()))
        first = next(indices)
        random_state.seed_cpu(seed)
        orders.append([first, *indices])
    assert orders[0] == orders[1]


def test_drawing_the_order_leaves_the_global_sequences_alone() -> None:
    random_state.seed_cpu(1)
    expected = [(random.random(), torch.rand(1), np.random.rand()) for _ in range(6)]
    random_state.seed_cpu(1)
    assert [(random.random(), torch.rand(1), np.random.rand()) for _ in source(Lazy())] == expected


def test_nothing_is_drawn_before_the_first_index_is_asked_for() -> None:
    base = Lazy()
    indices = iter(source(base))
    assert base.iterators == 0
    next(indices)
    assert base.iterators == 1


def test_indices_carry_the_seed_of_their_place_in_the_pass() -> None:
    items = list(source(SequentialSampler(range(4)), 2, seed_of=lambda ordinal: 10 * ordinal))
    assert [(item.value, item.seed) for item in items] == [(2, 20), (3, 30)]


def test_it_is_as_long_as_what_it_stands_for() -> None:
    assert len(source(Lazy(6))) == 6
    with pytest.raises(TypeError):
        len(source(iter([1])))


@pytest.mark.parametrize(("length", "skip"), [(6, 7), (0, 1), (3, 1000)])
def test_fewer_indices_than_were_trained_are_refused(length: int, skip: int) -> None:
    with pytest.raises(RestoreError, match=f"Lazy yielded {length} batches, and {skip} of this epoch had been"):
        next(iter(source(Lazy(length), skip)))


def test_a_sampler_that_raises_leaves_the_global_state_alone() -> None:
    class Broken(Lazy):
        def __iter__(self) -> Iterator[int]:
            random.random()
            raise KeyError("broken")
            yield

    random_state.seed_cpu(3)
    expected = random.random()
    random_state.seed_cpu(3)
    with pytest.raises(KeyError, match="broken"):
        next(iter(source(Broken())))
    assert random.random() == expected


def test_a_seeded_index_can_be_sent_to_a_worker() -> None:
    sent = pickle.loads(pickle.dumps(Seeded([1, 2], 7)))
    assert (sent.value, sent.seed) == ([1, 2], 7)


# -- the dataset in between --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _keep_global_state() -> Iterator[None]:
    state = random_state.capture()
    yield
    random_state.restore(state)


@pytest.mark.parametrize("dataset", [Items, ManyItems])
def test_a_batch_is_made_from_its_seed_alone(dataset: Callable[[], Any]) -> None:
    def batch(seed: int, indices: list[int], before: int) -> Any:
        random_state.seed_cpu(before)
        return SeededDataset(dataset(), 1).__getitems__(Seeded(indices, seed))

    assert batch(7, [3, 1], 0) == batch(7, [3, 1], 1)
    assert batch(7, [3, 1], 0) != batch(8, [3, 1], 0)
    assert [i for i, _ in batch(7, [3, 1], 0)] == [3, 1]


def test_without_a_seed_of_its_own_an_index_gets_one_from_the_pass() -> None:
    dataset = SeededDataset(Items(), 1)
    first = dataset[3]
    assert dataset[3] == first
    assert dataset[4][1] != first[1]
    batch = dataset.__getitems__([3, 4])
    dataset.reseed(2)
    assert dataset[3] != first
    assert dataset.__getitems__([3, 4]) != batch
    dataset.reseed(1)
    assert dataset[3] == first


def test_attributes_are_those_of_the_users_dataset() -> None:
    mine = Items(5)
    dataset = SeededDataset(mine, 1)
    assert (len(dataset), dataset.length, dataset.asked) == (5, 5, [])
    dataset.length = 9
    dataset.new = "new"
    assert (mine.length, mine.new, len(dataset)) == (9, "new", 9)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="absent"):
        _ = dataset.absent


@pytest.mark.parametrize("how", [copy.deepcopy, copy.copy, lambda d: pickle.loads(pickle.dumps(d))])
def test_it_can_be_copied_and_sent_to_a_worker(how: Callable[[Any], Any]) -> None:
    dataset = SeededDataset(Items(5), 1)
    other = how(dataset)
    assert (type(other), other.length, other[2]) == (SeededDataset, 5, dataset[2])


def test_the_seed_of_the_pass_is_made_whatever_the_default_device() -> None:
    with torch.device("meta"):
        dataset = SeededDataset([1, 2], 3)
    assert dataset[1] == 2


def _set_in_worker(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    info.dataset.length += 100
    info.dataset.asked.append(worker)
    info.dataset.fresh = "new"


class _Reports(Items):
    def __getitem__(self, i: int) -> Any:
        return self.length, self.asked[0], self.fresh == "new"  # type: ignore[attr-defined]


def test_worker_init_functions_reach_the_users_dataset() -> None:
    loader = DataLoader(_Reports(), batch_size=2, num_workers=2, worker_init_fn=_set_in_worker)
    twin, _ = tracked(loader)
    found = [plain(b) for b in twin]
    assert found[0] == [[LENGTH + 100] * 2, [0, 0], [True, True]]
    assert found[1] == [[LENGTH + 100] * 2, [1, 1], [True, True]]


# -- the state of samplers ---------------------------------------------------------------------------------------


def _own_torch() -> tuple[Callable[[], float], Any]:
    generator = torch.Generator().manual_seed(3)
    return lambda: torch.rand((), generator=generator).item(), generator


def _own(kind: str) -> Draws:
    if kind == "torch":
        return Draws(*_own_torch())
    if kind == "python":
        own = random.Random(3)
        return Draws(own.random, own)
    if kind == "numpy-legacy":
        legacy = np.random.RandomState(3)
        return Draws(legacy.random_sample, legacy)
    generator = np.random.Generator(getattr(np.random, kind)(3))
    return Draws(generator.random, generator)


GENERATORS = ["torch", "python", "numpy-legacy", "PCG64", "MT19937", "Philox", "SFC64"]


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_of_a_sampler_continues_where_it_was(kind: str) -> None:
    first = _own(kind)
    list(first)
    state = through_a_file(SamplerState(DataLoader(Items(), sampler=first)).capture())
    expected = list(first)
    second = _own(kind)
    SamplerState(DataLoader(Items(), sampler=second)).restore(state)
    assert second.iterated == 1
    assert list(second) == expected


def test_a_captured_state_does_not_change_any_more() -> None:
    class Counts(RandomSampler):
        def __init__(self) -> None:
            super().__init__(range(3))
            self.history: list[int] = []

        def state_dict(self) -> dict[str, Any]:
            return {"history": self.history}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.history = state["history"]

    sampler = Counts()
    state = SamplerState(DataLoader(Items(), sampler=sampler)).capture()
    sampler.history.append(1)
    assert [s["state"] for s in state["samplers"] if "state" in s] == [{"history": []}]


def test_the_epoch_of_a_distributed_sampler_is_kept_and_its_ranks_are_the_scripts() -> None:
    def state(replicas: int, epoch: int = 0) -> tuple[DistributedSampler[Any], SamplerState]:
        sampler = DistributedSampler(Items(), num_replicas=replicas, rank=0, seed=5 + epoch)
        sampler.set_epoch(epoch)
        return sampler, SamplerState(DataLoader(Items(), sampler=sampler))

    sampler, restored = state(3)
    restored.restore(through_a_file(state(2, epoch=4)[1].capture()))
    assert (sampler.epoch, sampler.seed, sampler.num_replicas, sampler.num_samples) == (4, 9, 3, 4)


def test_a_sampler_without_a_dictionary_has_no_state() -> None:
    class Slotted:
        __slots__ = ()

        def __iter__(self) -> Iterator[int]:
            return iter([1])

    state = SamplerState(DataLoader(Items(), sampler=Slotted()))
    state.restore(through_a_file(state.capture()))


@pytest.mark.parametrize(
    ("saved", "present", "message"),
    [
        (lambda: SequentialSampler(range(3)), lambda: RandomSampler(range(3)), "holds samplers .*Sequential.*Random"),
        (
            lambda: RandomSampler(range(3), generator=torch.Generator()),
            lambda: RandomSampler(range(3)),
            "a random generator where this run has NoneType",
        ),
    ],
)
def test_other_samplers_are_refused(saved: Callable[[], Any], present: Callable[[], Any], message: str) -> None:
    state = SamplerState(DataLoader(Items(), sampler=saved())).capture()
    with pytest.raises(RestoreError, match=message):
        SamplerState(DataLoader(Items(), sampler=present())).restore(state)


def _resumed_at(loader: Any, position: dict[str, Any]) -> Any:
    twin, tracker = tracked(loader, root_seed=2)
    tracker.resume(position)
    return twin


def test_a_sampler_within_lightnings_distributed_wrapper_keeps_its_generator() -> None:
    def loader() -> Any:
        dataset = Items()
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(3))
        return DataLoader(dataset, batch_size=2, sampler=DistributedSamplerWrapper(sampler, num_replicas=2, rank=1))

    run = Run(loader())
    for place in PLACES:
        assert run.resumed(loader(), place) == run.left(place), place


def test_a_sampler_within_a_sampler_keeps_its_generator() -> None:
    class Outer(Draws):
        def __init__(self) -> None:
            super().__init__(random.random)
            self.hidden = Draws(*_own_torch())

        def __iter__(self) -> Any:
            return iter([*self.hidden][::-1])

    run = Run(DataLoader(Items(), batch_size=2, sampler=Outer()))
    for place in PLACES:
        assert run.resumed(DataLoader(Items(), batch_size=2, sampler=Outer()), place) == run.left(place), place


def test_at_the_end_of_an_epoch_another_batch_size_is_the_new_one() -> None:
    position = position_after(DataLoader(Items(), batch_size=3, shuffle=True), 4, epoch_over=True)
    twin = _resumed_at(DataLoader(Items(20), batch_size=5, shuffle=True), position)
    assert [len(plain(b)[0]) for b in twin] == [5, 5, 5, 5]
