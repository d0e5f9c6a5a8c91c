from __future__ import annotations

import inspect
import pickle
import random
import subprocess
import sys
import threading
from collections import UserDict
from collections.abc import Callable, Iterator
from itertools import combinations
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
    limited,
    plain,
    position_after,
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

from lightning_ft._data.tracked import track
from lightning_ft._state.digest import digest
from lightning_ft.dataloading import Tracker
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


# -- what a resume costs and touches -----------------------------------------------------------------------------


def _resumed_at(loader: Any, position: dict[str, Any]) -> Any:
    twin, tracker = tracked(loader, root_seed=2)
    tracker.resume(position)
    return twin


@pytest.mark.parametrize("name", [n for n in INDEXED if not n.endswith("state")])
def test_no_sample_is_made_for_a_batch_that_was_trained(name: str) -> None:
    whole = INDEXED[name]()
    for _ in tracked(whole)[0]:
        pass
    first = INDEXED[name]()
    position = position_after(first, 2)
    rest = INDEXED[name]()
    for _ in _resumed_at(rest, position):
        pass
    assert first.dataset.asked + rest.dataset.asked == whole.dataset.asked


def test_near_the_end_of_a_million_samples_only_the_rest_is_made() -> None:
    def loader() -> Any:
        return DataLoader(Items(1_000_000), batch_size=1000, shuffle=True)

    position = position_after(DataLoader(Items(3000), batch_size=1000, shuffle=True), 2)
    position["delivered"] = 998
    resumed = loader()
    batches = list(_resumed_at(resumed, position))
    assert len(resumed.dataset.asked) == 2000
    twin = loader()
    run, tracker = tracked(twin, root_seed=position["root_seed"])
    tracker.resume({**position, "delivered": 999})
    assert [plain(b) for b in run] == [plain(batches[1])]


@pytest.mark.parametrize("name", {**ALL, **WORKERS})
def test_the_users_loader_stays_as_it_was_and_usable(name: str) -> None:
    loader = {**ALL, **WORKERS}[name]()
    before = dict(vars(loader)) if hasattr(loader, "__dict__") else {}
    is_object = not isinstance(loader, DataLoader)
    twin, _ = tracked(loader)
    count = len(list(twin))
    if not is_object:
        after = vars(loader)
        assert after.keys() == before.keys()
        assert all(after[k] is before[k] for k in before)
    assert len(list(loader)) == count


def test_a_tracked_loader_looks_like_the_original() -> None:
    class Mine(DataLoader[Any]):
        def __init__(self, dataset: Any, mine: int) -> None:
            super().__init__(dataset, batch_size=3)
            self.mine = mine

        def twice(self) -> int:
            return 2 * self.mine

    loader = Mine(Items(), 4)
    twin, _ = tracked(loader)
    assert isinstance(twin, Mine)
    assert type(twin).__qualname__ == type(loader).__qualname__
    assert (twin.twice(), len(twin), twin.batch_size, twin.dataset) == (8, 4, 3, loader.dataset)
    assert [plain(b)[0] for b in twin] == [plain(b)[0] for b in loader]


def test_a_loader_tracked_twice_is_tracked_once() -> None:
    loader = DataLoader(Items(), batch_size=3)
    again, tracker = tracked(tracked(loader)[0])
    assert again._ft_original is loader
    assert len(list(again)) == 4
    assert tracker.delivered == 4


def test_something_iterable_keeps_its_own_attributes() -> None:
    twin, _ = tracked(EagerStateful(5))
    assert (twin.length, len(twin)) == (5, 5)
    with pytest.raises(AttributeError, match="absent"):
        _ = twin.absent
    unsized, _ = tracked(OnePass())
    with pytest.raises(TypeError):
        len(unsized)


@pytest.mark.parametrize("owner", [LazyStateful, EagerStateful])
@pytest.mark.parametrize("batches", [1, 5])
def test_a_state_within_a_pass_is_loaded_exactly_once(owner: type[LazyStateful], batches: int) -> None:
    position = position_after(owner(), batches)
    again = owner()
    list(_resumed_at(again, position))
    assert again.loads == 1


def test_the_state_of_a_stream_is_loaded_exactly_once_and_no_item_is_made_again() -> None:
    position = position_after(DataLoader(StatefulStream(), batch_size=3), 2)
    again = DataLoader(StatefulStream(), batch_size=3)
    list(_resumed_at(again, position))
    assert again.dataset.loads == 1
    assert again.dataset.yielded == [6, 7, 8, 9, 10]


def test_nothing_is_fetched_before_the_first_batch_is_asked_for() -> None:
    loader = DataLoader(Items(), batch_size=3)
    twin = _resumed_at(loader, position_after(DataLoader(Items(), batch_size=3), 1))
    iterator = iter(twin)
    assert loader.dataset.asked == []
    next(iterator)
    assert loader.dataset.asked == [3, 4, 5]


def test_an_iterator_asked_for_and_dropped_changes_nothing() -> None:
    run = Run(INDEXED["own-torch"]())
    twin, tracker = tracked(INDEXED["own-torch"](), root_seed=2)
    iter(twin)
    tracker.resume(run.positions[1, 2])
    iter(twin)
    assert [plain(b) for b in twin] == run.batches[1][2:]


def test_draws_from_the_sampler_before_the_first_batch_change_nothing() -> None:
    run = Run(INDEXED["own-torch"]())
    loader = INDEXED["own-torch"]()
    twin = _resumed_at(loader, run.positions[1, 2])
    list(loader.sampler)
    assert [plain(b) for b in twin] == run.batches[1][2:]


@pytest.mark.parametrize("name", ["shuffle", "own-numpy", "stateful-stream", "stateful-object-lazy", "stream"])
@pytest.mark.parametrize("place", [p for p in PLACES if p != "at-the-end"])
def test_a_resumed_run_saved_before_its_first_batch_holds_the_position_it_came_from(name: str, place: str) -> None:
    run = Run(ALL[name]())
    twin, tracker = tracked(ALL[name](), root_seed=2)
    tracker.resume(run.positions[run.where(place)])
    run.positions[run.where(place)] = through_a_file(tracker.position(epoch_over=False))
    assert run.resumed(ALL[name](), place) == run.left(place)
    assert len(list(twin)) > 0


def test_the_position_does_not_depend_on_draws_of_the_training() -> None:
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        twin, _ = tracked(INDEXED["global-python"]())
        found.append([plain(b) for b in twin])
    assert found[0] == found[1]


def test_the_training_does_not_see_the_draws_of_the_data() -> None:
    disturb_global_state(3)
    expected = torch.rand(1), np.random.rand(), random.random()
    disturb_global_state(3)
    list(tracked(INDEXED["global-python"]())[0])
    list(tracked(OTHER["stream"]())[0])
    assert (torch.rand(1), np.random.rand(), random.random()) == expected


@pytest.mark.parametrize(
    ("other", "same_order", "same_noise"),
    [
        ({}, True, True),
        ({"root_seed": 2}, False, False),
        ({"index": 1}, False, False),
        ({"rank": 1}, True, False),
    ],
    ids=["same", "root-seed", "index", "rank"],
)
def test_what_order_and_augmentation_depend_on(other: dict[str, int], same_order: bool, same_noise: bool) -> None:
    def batches(**kwargs: int) -> tuple[list[Any], list[Any]]:
        found = [plain(b) for b in tracked(INDEXED["shuffle"](), **kwargs)[0]]
        return [b[0] for b in found], sorted(x for b in found for x in b[1])

    order, noise = batches()
    other_order, other_noise = batches(**other)
    assert ((order == other_order), (noise == other_noise)) == (same_order, same_noise)


def test_with_workers_the_batches_are_those_without() -> None:
    alone, other = Run(_shuffled()()), Run(_shuffled(num_workers=2, prefetch_factor=3)())
    assert alone.batches == other.batches
    position = alone.positions
    alone.positions = other.positions
    assert alone.resumed(_shuffled()(), "middle") == alone.left("middle")
    alone.positions = position
    assert alone.resumed(_shuffled(num_workers=1)(), "middle") == alone.left("middle")


def test_a_pass_in_persistent_workers_is_augmented_anew() -> None:
    run = Run(WORKERS["workers-persistent"](), passes=2)
    noise = [sorted(x for batch in batches for x in batch[1]) for batches in run.batches]
    assert not set(noise[0]) & set(noise[1])


def test_without_seeds_the_order_is_still_exact() -> None:
    def ids(batches: Any) -> list[Any]:
        return [plain(b)[0] for b in batches]

    whole, _ = tracked(INDEXED["shuffle"](), seed_batches=False)
    expected = ids(whole)
    twin, tracker = tracked(INDEXED["shuffle"](), seed_batches=False)
    for _ in limited(twin, 2):
        pass
    again, resumed = tracked(INDEXED["shuffle"](), seed_batches=False, root_seed=2)
    resumed.resume(through_a_file(tracker.position(epoch_over=False)))
    assert ids(again) == expected[2:]


# -- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_fewer_batches_than_were_trained_are_refused(workers: int) -> None:
    position = position_after(DataLoader(Items(), batch_size=3), 3)
    twin = _resumed_at(DataLoader(Items(5), batch_size=3, num_workers=workers), position)
    with pytest.raises(RestoreError, match=r"BatchSampler yielded 2 batches, and 3 of this epoch had been trained"):
        next(iter(twin))


@pytest.mark.parametrize("saved", ["shuffle", "stateful-object-lazy", "stateful-stream", "stream"])
@pytest.mark.parametrize("present", ["shuffle", "stateful-object-lazy", "stateful-stream", "stream"])
def test_a_position_is_for_loaders_of_its_kind(saved: str, present: str) -> None:
    _, tracker = tracked(ALL[present]())
    position = position_after(ALL[saved](), 1)
    if saved == present:
        tracker.resume(position)
        return
    with pytest.raises(RestoreError, match=rf"position of a '{position['kind']}' loader, this run has a '.*Use the"):
        tracker.resume(position)


def test_other_samplers_are_refused() -> None:
    position = position_after(INDEXED["shuffle"](), 1)
    _, tracker = tracked(INDEXED["sequential"]())
    with pytest.raises(RestoreError, match=r"samplers \['BatchSampler', 'RandomSampler'\], this run has .*Sequential"):
        tracker.resume(position)


def test_a_stream_that_does_not_repeat_itself_is_refused() -> None:
    position = position_after(OnePass(), 4)
    twin = _resumed_at(OnePass(first=1), position)
    with pytest.raises(RestoreError, match="batch 4 of its epoch, fetched again, is not the one that was trained"):
        next(iter(twin))


def test_a_stream_that_ends_too_early_is_refused() -> None:
    position = position_after(OnePass(), 4)
    twin = _resumed_at(OnePass(length=2), position)
    with pytest.raises(
        RestoreError, match=r"ended after 2 batches of its epoch, fetched again, and 4\s+had been trained"
    ):
        next(iter(twin))


def test_a_stream_that_repeats_itself_is_continued_and_says_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    twin = _resumed_at(OnePass(), position_after(OnePass(), 4))
    assert list(twin) == list(range(4, LENGTH))
    assert "fetching 4 batches again" in caplog.text


def test_a_stream_whose_batches_cannot_be_compared_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def stream() -> list[Any]:
        return [lambda: 1, lambda: 2, lambda: 3]

    twin = _resumed_at(stream(), position_after(stream(), 2))
    assert [f() for f in twin] == [3]
    assert "nothing checks that it repeats itself" in caplog.text


# -- digest ------------------------------------------------------------------------------------------------------

_T = torch.tensor([1.0, 2.0])
DIFFERENT: list[Any] = [
    _T,
    _T.double(),
    _T.bfloat16(),
    torch.tensor([1.0, 3.0]),
    _T.reshape(2, 1),
    _T.reshape(1, 2),
    [_T],
    (_T,),
    [[_T]],
    [_T, _T],
    {"a": _T},
    {"b": _T},
    {"a": [_T]},
    {"a": {"b": _T}},
    {"a": {}, "b": _T},
    {"a": _T, "b": {}},
    {1: _T},
    {"1": _T},
    torch.tensor([0.0]),
    torch.tensor([-0.0]),
    torch.tensor([float("nan")]),
    torch.tensor([1, 0], dtype=torch.uint8),
    torch.tensor([True, False]),
    torch.tensor(1),
    torch.empty(0),
    torch.empty(0, 2),
    torch.zeros(2, dtype=torch.complex64),
    torch.eye(2).to_sparse(),
    torch.eye(2).to_sparse_csr(),
    torch.eye(2),
    np.array([1.0, 2.0]),
    np.array([1.0, 2.0], dtype=np.float32),
    np.array([[1.0, 2.0]]),
    "1",
    1,
    1.0,
    b"1",
    None,
    {"1"},
    frozenset({"1"}),
    UserDict(a=_T),
    UserDict(a=_T + 1),
    [1, [2]],
    [[1], 2],
    [[1, 2]],
    [],
    (),
    {},
]


def _copied(value: Any) -> Any:
    """Equal, of other objects and other storages."""
    return pickle.loads(pickle.dumps(value))


def test_the_digest_tells_batches_apart() -> None:
    digests = [digest(value) for value in DIFFERENT]
    assert None not in digests
    same = [(DIFFERENT[i], DIFFERENT[j]) for i, j in combinations(range(len(digests)), 2) if digests[i] == digests[j]]
    assert same == []


@pytest.mark.parametrize("value", DIFFERENT, ids=range(len(DIFFERENT)))
def test_equal_batches_have_equal_digests(value: Any) -> None:
    assert digest(_copied(value)) == digest(value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (_T[:1], torch.tensor([1.0])),
        (torch.arange(6).reshape(2, 3).T, torch.tensor([[0, 3], [1, 4], [2, 5]])),
        (torch.zeros(2, dtype=torch.complex64).conj(), torch.complex(torch.zeros(2), -torch.zeros(2))),
        (torch.arange(4.0)[::2][:1], torch.tensor([0.0])),
        (UserDict(a=_T, b=_T), UserDict(a=_T, b=_T.clone())),
        (torch.ones(2, requires_grad=True), torch.ones(2)),
    ],
    ids=["view", "strides", "conjugate", "one-element", "same-object-twice", "requires-grad"],
)
def test_how_a_batch_lies_in_memory_does_not_matter(one: Any, other: Any) -> None:
    assert digest(one) == digest(other)


def test_the_digest_is_the_same_in_another_process() -> None:
    code = (
        "import torch; from collections import UserDict; from lightning_ft._state.digest import digest;"
        "print(digest(UserDict(a=torch.arange(4.0), names={'x', 'y', 'zz', 'w'})))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    expected = digest(UserDict(a=torch.arange(4.0), names={"x", "y", "zz", "w"}))
    assert found == {f"{expected}\n"}


@pytest.mark.parametrize("value", [lambda: 0, torch.empty(2, device="meta"), threading.Lock()])
def test_what_cannot_be_compared_has_no_digest(value: Any) -> None:
    assert digest([value]) is None


def test_a_batch_within_itself_has_no_digest() -> None:
    batch: list[Any] = []
    batch.append(batch)
    assert digest(batch) is None


def test_a_stateful_loader_is_seen_as_one_without_asking_getattr() -> None:
    """From Python 3.12 on, `isinstance` against a protocol looks attributes up statically."""

    class Own:
        def __iter__(self) -> Iterator[int]:
            return iter([1])

        def state_dict(self) -> dict[str, int]:
            return {"at": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.state = state

    original = Own()
    tracked = track(original, Tracker(0, 1, 0, True))
    inspect.getattr_static(tracked, "state_dict")
    inspect.getattr_static(tracked, "load_state_dict")
    assert tracked.state_dict() == {"at": 1}
    tracked.load_state_dict({"at": 2})
    assert original.state == {"at": 2}
