"""The order of a pass: indices drawn in a private random stream, seeds that travel with them, sampler state."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_ft._state import random_state
from lightning_ft._state.digest import digest
from lightning_ft.errors import RestoreError

_SCALARS = (bool, int, float, str)
_COLLECTIONS = (list, dict, tuple, set, deque, torch.Tensor, np.ndarray)
# Samplers of these libraries carry little that changes. The rest (batch size, length, number of ranks) is how the
# script made them, and is not to be overwritten where the script was changed on purpose.
_LIBRARIES = ("torch", "torchdata", "lightning", "pytorch_lightning", "lightning_fabric")
_LIBRARY_FIELDS = ("epoch", "seed")


class Seeded:
    """What a sampler yielded, together with the seed for making it into a batch."""

    __slots__ = ("seed", "value")

    def __init__(self, value: Any, seed: int) -> None:
        self.value = value
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        return Seeded, (self.value, self.seed)


class IndexSource:
    """Stands for a sampler or batch sampler for one loader iterator (several passes where workers persist).

    Args:
        base: The sampler it stands for.
        new_stream: Makes the random stream in which the order of a pass is drawn: nothing else draws from it.
        seed_of: Seed of the n-th item of the pass, or None to hand out bare indices.
        skip: How many items of the pass were trained already; their indices are drawn and dropped.
        instead: What a pass is drawn from; default: `base`.
        drawn: Called with the number of each item, from 0 on in the pass, and the item.
    """

    def __init__(
        self,
        base: Any,
        new_stream: Callable[[], random_state.Stream],
        seed_of: Callable[[int], int] | None,
        skip: Callable[[], int],
        instead: Callable[[], Any] | None = None,
        drawn: Callable[[int, Any], None] | None = None,
    ) -> None:
        self._base = base
        self._instead = instead
        self._drawn = drawn
        self._new_stream = new_stream
        self._seed_of = seed_of
        self._skip = skip

    def __len__(self) -> int:
        return len(self._base)

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that nothing is drawn before the first item is asked for: a loader with workers asks for an
        # iterator twice and uses the second, and a sampler with a generator of its own would be drawn from twice.
        stream, ordinal = self._new_stream(), self._skip()
        base = self._base if self._instead is None else self._instead()
        with stream.active():
            items = iter(base)
            self._drop(items, ordinal)
        once = _draws_only_at_start(base)
        while True:
            with contextlib.nullcontext() if once and ordinal else stream.active():
                try:
                    item = next(items)
                except StopIteration:
                    return
            if self._drawn is not None:
                self._drawn(ordinal, item)
            yield item if self._seed_of is None else Seeded(item, self._seed_of(ordinal))
            ordinal += 1

    def _drop(self, items: Iterator[Any], count: int) -> None:
        for dropped in range(count):
            try:
                next(items)
            except StopIteration:
                raise RestoreError(
                    f"{type(self._base).__name__} yielded {dropped} batches, and {count} of this epoch had been "
                    "trained when the checkpoint was saved: the data or the batch size changed"
                ) from None


def _draws_only_at_start(sampler: Any) -> bool:
    """Whether a sampler is known to draw from the global generators for its first item only."""
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    known = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
    return type(sampler) in known


class RepeatedOrder(Sampler[Any]):
    """Stands for the sampler of a loader that keeps its own state.

    However often it is asked to begin within one pass, it begins with the same order. To restore a position,
    torchdata's loader asks twice and uses the second answer; others draw the order again and skip batches.

    Args:
        base: The sampler it stands for.
        samplers: State of that sampler, and of those within it.
        new_stream: As for `IndexSource`.
        number_of_pass: Which pass it is now.
    """

    def __init__(
        self,
        base: Any,
        samplers: SamplerState,
        new_stream: Callable[[], random_state.Stream],
        number_of_pass: Callable[[], int],
    ) -> None:
        self._base = base
        self._samplers = samplers
        self._new_stream = new_stream
        self._number_of_pass = number_of_pass
        self._begun: tuple[int, dict[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self._base)

    def __iter__(self) -> Iterator[Any]:
        if self._begun is None or self._begun[0] != self._number_of_pass():
            self._begun = self._number_of_pass(), self._samplers.capture()
        else:
            self._samplers.restore(self._begun[1])
        stream = self._new_stream()
        with stream.active():
            items = iter(self._base)
        # An iterator with a state of its own is known to the loader, and has to be.
        return items if callable(getattr(items, "state_dict", None)) else self._drawn(items, stream)

    @staticmethod
    def _drawn(items: Iterator[Any], stream: random_state.Stream) -> Iterator[Any]:
        while True:
            with stream.active():
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item


class SeededDataset(Dataset[Any]):
    """The dataset it stands before, with the random state of this process set by each batch's seed.

    Runs in the worker, or in the main process inside the loader's private stream. Indices that carry no seed (the
    loader has a sampler of its own) get one from the pass and the indices themselves.
    """

    def __init__(self, dataset: Any, pass_seed: int) -> None:
        vars(self).update(_ft_dataset=dataset, _ft_pass_seed=_shared(pass_seed))

    def reseed(self, pass_seed: int) -> None:
        """Workers that persist over passes see the seed of the new one (shared memory)."""
        vars(self)["_ft_pass_seed"].fill_(pass_seed)

    def __getitem__(self, index: Any) -> Any:
        return vars(self)["_ft_dataset"][self._seed(index)]

    def __getitems__(self, indices: Any) -> Any:
        indices = self._seed(indices)
        dataset = vars(self)["_ft_dataset"]
        fetch_many = getattr(dataset, "__getitems__", None)
        return fetch_many(indices) if fetch_many else [dataset[i] for i in indices]

    def __len__(self) -> int:
        return len(vars(self)["_ft_dataset"])

    def _seed(self, index: Any) -> Any:
        if isinstance(index, Seeded):
            random_state.seed_cpu(index.seed)
            return index.value
        random_state.seed_cpu(random_state.mix(int(vars(self)["_ft_pass_seed"]), repr(index)))
        return index

    # Worker init functions and users reach for attributes of their dataset, to read and to set them.
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_ft_dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(vars(self)["_ft_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_ft_dataset"], name, value)


def _shared(value: int) -> torch.Tensor:
    tensor = torch.tensor(value, dtype=torch.int64, device="cpu")  # whatever the default device is
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor


class SamplerState:
    """What decides the next order of a `DataLoader`'s samplers, captured and restored.

    A sampler with ``state_dict``/``load_state_dict`` is asked for its own. Of others, everything plain they carry is
    kept (`DistributedSampler.epoch` and `.seed`, counters of custom samplers), every random generator, and those
    collections, tensors and arrays that have changed since the loader was made; also within lists, tuples and
    dictionaries, and of samplers within samplers. State in objects of other classes is not seen: such a sampler needs
    ``state_dict``/``load_state_dict``.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._samplers: list[Any] = []
        waiting = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
        while waiting:
            sampler = waiting.pop(0)
            if sampler is not None and not any(sampler is s for s in self._samplers):
                self._samplers.append(sampler)
                waiting += _inner_samplers(sampler)
        self._as_made = [{k: digest(v) for k, v in _collections(s).items()} for s in self._samplers]

    def capture(self) -> dict[str, Any]:
        """Plain data, one entry per sampler, in the order they are found."""
        entries = []
        for sampler, as_made in zip(self._samplers, self._as_made, strict=True):
            entry = _capture_sampler(sampler)
            if "state" not in entry:
                changed = {k: v for k, v in _collections(sampler).items() if digest(v) != as_made.get(k)}
                entry["collections"] = {k: _plain(copy.deepcopy(v)) for k, v in changed.items()}
            entries.append(entry)
        return {"samplers": entries}

    def restore(self, state: dict[str, Any], *, common: bool = False) -> None:
        """The samplers stand as they did at `capture`.

        Args:
            state: Of `capture`.
            common: Only samplers of which both have one: on another number of ranks Lightning puts its own in place of,
                or around, the user's.

        Raises:
            RestoreError: The loader has other samplers than the one that was saved.
        """
        saved = state["samplers"]
        present = [type(s).__name__ for s in self._samplers]
        if common:
            entries = {s["type"]: s for s in saved}
            for sampler, name in zip(self._samplers, present, strict=True):
                if name in entries and present.count(name) == sum(s["type"] == name for s in saved) == 1:
                    _restore_sampler(sampler, entries[name])
            return
        if [s["type"] for s in saved] != present:
            raise RestoreError(f"the checkpoint holds samplers {[s['type'] for s in saved]}, this run has {present}")
        for sampler, entry in zip(self._samplers, saved, strict=True):
            _restore_sampler(sampler, entry)


def _inner_samplers(sampler: Any) -> list[Any]:
    fields = _fields(sampler)
    inner = [getattr(sampler, "sampler", None)]
    for value in fields.values():
        inner += [v for v in _members(value).values() if isinstance(v, Sampler)]
    if type(fields.get("dataset")).__name__ == "_DatasetSamplerWrapper":  # Lightning's, around a user's sampler in DDP
        inner.append(fields["dataset"]._sampler)
    return inner


def _fields(sampler: Any) -> dict[str, Any]:
    return vars(sampler) if hasattr(sampler, "__dict__") else {}


def _of_library(sampler: Any) -> bool:
    return type(sampler).__module__.partition(".")[0] in _LIBRARIES


def _collections(sampler: Any) -> dict[str, Any]:
    """What a custom sampler may rearrange, and the weights that a user may change."""
    found = {k: v for k, v in _fields(sampler).items() if type(v) in _COLLECTIONS and _is_plain(v)}
    return {k: v for k, v in found.items() if k == "weights"} if _of_library(sampler) else found


def _is_plain(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray)) or value is None or type(value) in _SCALARS:
        return True
    if type(value) is dict:
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    return type(value) in _COLLECTIONS and all(map(_is_plain, value))


def _members(value: Any) -> dict[str, Any]:
    """The value itself, under an empty name, or the members of a list, tuple or dictionary."""
    if type(value) in (list, tuple):
        return {f"[{i}]": v for i, v in enumerate(value) if not isinstance(v, _SCALARS)}
    if type(value) is dict:
        return {f"[{k!r}]": v for k, v in value.items() if not isinstance(v, _SCALARS)}
    return {"": value}


def _capture_sampler(sampler: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": type(sampler).__name__}
    if callable(getattr(sampler, "state_dict", None)) and callable(getattr(sampler, "load_state_dict", None)):
        entry["state"] = copy.deepcopy(sampler.state_dict())
        return entry
    fields = _fields(sampler)
    of_library = _of_library(sampler)
    entry["fields"] = {
        k: v for k, v in fields.items() if type(v) in _SCALARS and (not of_library or k in _LIBRARY_FIELDS)
    }
    entry["generators"] = {k: s for k, v in _generators(sampler).items() if (s := _capture_generator(v)) is not None}
    return entry


def _restore_sampler(sampler: Any, entry: dict[str, Any]) -> None:
    if "state" in entry:
        sampler.load_state_dict(entry["state"])
        return
    for name, value in entry["fields"].items():
        setattr(sampler, name, value)
    for name, value in entry["collections"].items():
        setattr(sampler, name, copy.deepcopy(_unplain(value)))
    for name, state in entry["generators"].items():
        _restore_generator(_generators(sampler).get(name), state)


def _generators(sampler: Any) -> dict[str, Any]:
    """Fields of the sampler and members of its collections that may be random generators."""
    return {f"{k}{m}": v for k, value in _fields(sampler).items() for m, v in _members(value).items()}


def _capture_generator(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state().cpu()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return _plain(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return _plain(value.get_state(legacy=False))
    return None


def _restore_generator(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate((state[0], tuple(state[1]), state[2]))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _unplain(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_unplain(state))
    else:
        raise RestoreError(f"the checkpoint holds a random generator where this run has {type(generator).__name__}")


def _plain(value: Any) -> Any:
    """Numpy arrays as tagged lists: their own pickles are refused by ``weights_only=True``."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return {"__array__": value.tolist(), "dtype": str(value.dtype)}
    if type(value) in (deque, set):  # nor are these accepted by ``weights_only=True``
        bound = value.maxlen if isinstance(value, deque) else None
        return {"__collection__": type(value).__name__, "items": [_plain(v) for v in value], "maxlen": bound}
    if type(value) in (list, tuple):
        return type(value)(_plain(v) for v in value)
    return value.item() if isinstance(value, np.generic) else value


def _unplain(value: Any) -> Any:
    if isinstance(value, dict) and "__array__" in value:
        return np.array(value["__array__"], dtype=value["dtype"])
    if isinstance(value, dict) and "__collection__" in value:
        items = [_unplain(v) for v in value["items"]]
        return deque(items, value["maxlen"]) if value["__collection__"] == "deque" else set(items)
    if type(value) in (list, tuple):
        return type(value)(_unplain(v) for v in value)
    return {k: _unplain(v) for k, v in value.items()} if isinstance(value, dict) else value
