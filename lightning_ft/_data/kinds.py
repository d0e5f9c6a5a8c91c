"""Kinds of loaders, by what is known about them.

``indexed``   a `DataLoader` over a map-style dataset: its order is drawn again and indices are skipped (`dataloading`).
``stateful``  anything with ``state_dict``/``load_state_dict`` (torchdata, litdata, the user's own): its own state.
``dataset``   a `DataLoader` without workers over an iterable dataset that has ``state_dict``/``load_state_dict``.
``replay``    any other iterable, and a `DataLoader` class with an `__iter__` of its own: fetched again from the start
              of the pass and thrown away up to the position, said loudly, and checked: the last batch thrown away must
              equal, by digest, the last one trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset


def kind_of(loader: Any) -> str:
    """``stateful``, ``indexed``, ``dataset`` or ``replay``: see the first lines here."""
    if is_stateful(loader):
        return "stateful"
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return "replay"  # a class that iterates in its own way may yield other batches than its sampler has
    if kind_of_dataset(loader) != "iterable":
        return "indexed"
    return "dataset" if loader.num_workers == 0 and is_stateful(loader.dataset) else "replay"


def kind_of_dataset(loader: DataLoader[Any]) -> str:
    """``iterable``, ``map``, or ``pipe`` for the deprecated datapipes, whose graphs must not be wrapped."""
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset):
        return "iterable"
    pipes = (getattr(torch.utils.data, "MapDataPipe", ()), getattr(torch.utils.data, "IterDataPipe", ()))
    return "pipe" if isinstance(dataset, pipes) else "map"


def length_of(value: Any) -> int | None:
    """Its length; None if it has none."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def leaves_by_itself(state: Any) -> bool:
    """Whether a loader with this state begins a new pass at once: torchdata's knows that its pass is finished."""
    return isinstance(state, dict) and bool(state.get("_iterator_finished"))


def is_stateful(value: Any) -> bool:
    """Whether it has ``state_dict`` and ``load_state_dict``."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
