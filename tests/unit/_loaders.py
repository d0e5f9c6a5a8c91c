"""Datasets, samplers and streams for the tests of positions. Item i is `i`, and noise of all three generators."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from lightning_ft._data.tracked import track
from lightning_ft.dataloading import Tracker

LENGTH = 11
Item = tuple[int, float]


def item(i: int) -> Item:
    return int(i), torch.rand(()).item() + float(np.random.rand()) + random.random()


class Items(Dataset[Item]):
    """A map-style dataset that keeps a list of what it was asked for (in this process)."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Item:
        self.asked.append(int(i))
        return item(i)


class ManyItems(Items):
    """With a method that fetches a whole batch."""

    def __getitems__(self, indices: list[int]) -> list[Item]:
        noise = item(0)[1]  # one draw per batch
        self.asked += indices
        return [(i, noise + random.random()) for i in indices]


class Draws(Sampler[int]):
    """Draws an index at a time, when it is asked for; counts in a plain attribute how often it was iterated."""

    def __init__(self, draw: Callable[[], float], generator: Any = None, length: int = LENGTH) -> None:
        self.draw = draw
        self.generator = generator
        self.length = length
        self.iterated = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.iterated += 1
        for _ in range(self.length):
            yield (int(self.draw() * self.length) + self.iterated) % self.length


class Batches(Sampler[Any]):
    """A batch sampler of batches of unequal sizes, drawn lazily; `make` decides of what type a batch is."""

    def __init__(self, make: Callable[[list[int]], Any], length: int = LENGTH) -> None:
        self.make = make
        self.length = length

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        for _ in range(4):
            size = 1 + int(torch.randint(3, ()).item())
            yield self.make([random.randrange(self.length) for _ in range(size)])


class Stream(IterableDataset[Item]):
    """A stream without state, sharded over workers; its noise is of the global generators."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Item]:
        info = get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(first, self.length, stride):
            yield item(i)


class StatefulStream(IterableDataset[Item]):
    """A stream with a state: its position and the number of the pass."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.at = 0
        self.passes = 0
        self.loads = 0
        self.yielded: list[int] = []

    def __iter__(self) -> Iterator[Item]:
        if self.at == 0:
            self.passes += 1
        while self.at < self.length:
            self.at += 1
            self.yielded.append(self.at - 1)
            yield item(self.at - 1 + 100 * self.passes)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1
        self.at, self.passes = state["at"], state["passes"]


class LazyStateful:
    """Something with a state that is no `DataLoader`; `__iter__` is a generator, which begins at the first `next`."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.at = 0
        self.passes = 0
        self.loads = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Item]:
        if self.at >= self.length:
            self.at = 0
            self.passes += 1
        while self.at < self.length:
            self.at += 1
            yield item(self.at - 1 + 100 * self.passes)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1
        self.at, self.passes = state["at"], state["passes"]


class EagerStateful(LazyStateful):
    """The same, with an `__iter__` that begins at once."""

    def __iter__(self) -> Iterator[Item]:
        if self.at >= self.length:
            self.at = 0
            self.passes += 1
        return self._items()

    def _items(self) -> Iterator[Item]:
        while self.at < self.length:
            self.at += 1
            yield item(self.at - 1 + 100 * self.passes)


class OnePass:
    """A stream that does not repeat itself: every iterator goes on where the last one was."""

    def __init__(self, length: int = LENGTH, first: int = 0) -> None:
        self.rest = iter(range(first, first + length))

    def __iter__(self) -> Iterator[int]:
        return self.rest


def plain(batch: Any) -> Any:
    """A batch as nested lists of numbers, compared exactly."""
    if isinstance(batch, (torch.Tensor, np.ndarray)):
        return batch.tolist()
    if isinstance(batch, (list, tuple)):
        return [plain(b) for b in batch]
    return batch


def tracked(loader: Any, *, root_seed: int = 1, index: int = 0, rank: int = 0, seed_batches: bool = True) -> Any:
    """A tracked loader and its tracker."""
    tracker = Tracker(index, root_seed, rank, seed_batches)
    return track(loader, tracker), tracker


def set_epoch(loader: Any, epoch: int) -> None:
    """What Lightning does before every pass."""
    for sampler in (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if callable(getattr(sampler, "set_epoch", None)):
            sampler.set_epoch(epoch)


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def disturb_global_state(seed: int) -> None:
    """What training draws between two batches, of which the data must know nothing."""
    torch.default_generator.manual_seed(seed)  # without torch.manual_seed's care for accelerators
    np.random.seed(seed)
    random.seed(seed)


class Run:
    """Passes over a tracked loader, as a run makes them, with the position after every batch.

    Args:
        loader: What the script made.
        counts: Batches of each pass, where a loop knows them and does not ask for one more; else it asks.
        passes: How many, where nobody knows how long they are.
    """

    def __init__(self, loader: Any, counts: list[int] | None = None, passes: int = 3) -> None:
        self.batches: list[list[Any]] = []
        self.positions: dict[tuple[int, int], dict[str, Any]] = {}
        twin, tracker = tracked(loader)
        self.positions[0, 0] = through_a_file(tracker.position(epoch_over=False))
        for number in range(passes):
            set_epoch(twin, number)
            tracker.begin_epoch()
            self.batches.append([])
            for batch in limited(twin, counts[number] if counts else None):
                self.batches[-1].append(plain(batch))
                disturb_global_state(5)
                self.positions[number, len(self.batches[-1])] = through_a_file(tracker.position(epoch_over=False))
            self.positions[number + 1, 0] = through_a_file(tracker.position(epoch_over=True))

    def where(self, place: str) -> tuple[int, int]:
        first, second = len(self.batches[0]), len(self.batches[1])
        return {
            "start": (0, 0),
            "first": (0, 1),
            "middle": (0, first // 2),
            "last": (0, first - 1),
            "at-the-end": (0, first),
            "epoch-over": (1, 0),
            "second-pass": (1, max(1, second // 2)),
            "second-epoch-over": (2, 0),
        }[place]

    def left(self, place: str) -> list[list[Any]]:
        """What a run that starts at the place has yet to see."""
        number, count = self.where(place)
        rest = [list(batches) for batches in self.batches[number:]]
        if count:
            rest[0] = rest[0][count:]
        return rest

    def resumed(self, loader: Any, place: str, *, exhaust: bool = True) -> list[list[Any]]:
        """What another process sees that starts at the place, with the `loader` that its script made."""
        disturb_global_state(99)
        twin, tracker = tracked(loader, root_seed=2)  # the root seed is the saved one
        tracker.resume(self.positions[self.where(place)])
        left = self.left(place)
        found: list[list[Any]] = []
        for number, batches in enumerate(left, start=len(self.batches) - len(left)):
            set_epoch(twin, number)
            if found:
                tracker.begin_epoch()
            found.append([])
            for batch in limited(twin, None if exhaust else len(batches)):
                found[-1].append(plain(batch))
                disturb_global_state(98)
        return found


def limited(loader: Any, count: int | None) -> Iterator[Any]:
    """All batches, or `count` of them without asking whether there are more."""
    iterator = iter(loader)
    return iterator if count is None else (next(iterator) for _ in range(count))


PLACES = ("start", "first", "middle", "last", "at-the-end", "epoch-over", "second-pass", "second-epoch-over")


def position_after(loader: Any, batches: int, *, epoch_over: bool = False) -> dict[str, Any]:
    """Where a tracked twin of `loader` stands after so many batches."""
    twin, tracker = tracked(loader)
    for _ in limited(twin, batches):
        pass
    position: dict[str, Any] = through_a_file(tracker.position(epoch_over=epoch_over))
    return position
