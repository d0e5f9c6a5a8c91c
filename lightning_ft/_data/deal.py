"""The order of a pass as a value: described when it is drawn, drawn again and dealt out to another number of ranks.

What can be described is what `torch.utils.data` and Lightning make: a `BatchSampler` or none, over a
`DistributedSampler` (the user's or Lightning's, also around a sampler of the user's), or, on one rank, over any sampler
that has a length. Everything else deals samples out by a rule that only its author knows, and is refused on another
number of ranks.

A description is plain data. It holds all that the order depends on; only of a user's own sampler, the sampler itself is
asked again, in the state it had when the pass began.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from lightning_ft._data import elastic
from lightning_ft._data.elastic import Change, DataRank
from lightning_ft._state import random_state


def describe(loader: DataLoader[Any], stream: int, rank: DataRank) -> dict[str, Any]:
    """How the pass that `loader` is about to begin is drawn and dealt out; under ``unknown``, why that is not known.

    Args:
        loader: Not yet asked for its first index.
        stream: Seed of the random stream in which the order is drawn.
        rank: This process.
    """
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return {"unknown": f"its batch sampler {type(batches).__name__} makes batches in a way of its own"}
    order = _order(_sampler(loader), stream, rank)
    if isinstance(order, str):
        return {"unknown": order}
    return {"order": order, "offset": 0, "ranks": rank.size, "batch_size": _batch_size(loader), "dealt_anew": False}


def _sampler(loader: DataLoader[Any]) -> Any:
    # A loader that is given a batch sampler has another, unused, `sampler`.
    batches: Any = loader.batch_sampler
    return loader.sampler if batches is None else batches.sampler


def _batch_size(loader: DataLoader[Any]) -> int:
    batches: Any = loader.batch_sampler
    return 1 if batches is None else int(batches.batch_size)


def _own_sampler(sampler: Any) -> Any:
    """The user's sampler, within the one that Lightning puts around it for several ranks; None if there is none."""
    if _wraps(sampler):
        return sampler.dataset._sampler  # private to Lightning (2.5.5 to 2.6), which has no other way to it
    return None if type(sampler) in (DistributedSampler, RandomSampler, SequentialSampler) else sampler


def _wraps(sampler: Any) -> bool:
    module = type(sampler).__module__.partition(".")[0]
    return type(sampler).__name__ == "DistributedSamplerWrapper" and "lightning" in module


def _order(sampler: Any, stream: int, rank: DataRank) -> dict[str, Any] | str:
    name = type(sampler).__name__
    if isinstance(sampler, DistributedSampler):
        if type(sampler) is not DistributedSampler and not _wraps(sampler):
            return f"its sampler {name} deals samples out in a way of its own"
        if (sampler.rank, sampler.num_replicas) != (rank.rank, rank.size):
            return (
                f"its sampler deals out to {sampler.num_replicas} replicas, of which this is {sampler.rank}, and the "
                f"run has {rank.size} data-parallel ranks, of which this is {rank.rank}"
            )
        permuted = {"shuffle": bool(sampler.shuffle), "seed": int(sampler.seed), "epoch": int(sampler.epoch)}
        length = len(sampler.dataset)  # type: ignore[arg-type]  # it has asked for it, too
        if not _wraps(sampler):
            return {"kind": "distributed", "length": length, **permuted}
        own = type(_own_sampler(sampler)).__name__
        return {"kind": "sampler", "length": length, "sampler": own, "stream": stream, "permuted": permuted}
    if rank.size > 1:
        return f"its sampler {name} is no DistributedSampler: how it deals samples out to ranks is not known"
    try:
        length = len(sampler)
    except (TypeError, NotImplementedError):
        return f"its sampler {name} has no length"
    if type(sampler) is SequentialSampler:
        return {"kind": "sequential", "length": length}
    if type(sampler) is RandomSampler:
        generator = sampler.generator.get_state().cpu() if sampler.generator is not None else None
        of = len(sampler.data_source)
        return {
            "kind": "random", "length": length, "of": of, "replacement": bool(sampler.replacement),
            "generator": generator, "stream": stream,
        }  # fmt: skip
    return {"kind": "sampler", "length": length, "sampler": name, "stream": stream, "permuted": None}


def draw(order: dict[str, Any], own: Any = None) -> list[Any]:
    """The whole order of a description.

    Args:
        order: Of `describe`.
        own: The user's sampler, in the state it had when the pass began, where the description names one.
    """
    if order["kind"] == "sequential":
        return list(range(order["length"]))
    if order["kind"] == "distributed":
        return _permuted(order, order["length"])
    with random_state.Stream(order["stream"]).active():
        if order["kind"] == "random":
            generator = None
            if order["generator"] is not None:
                generator = torch.Generator()
                generator.set_state(order["generator"])
            return list(RandomSampler(range(order["of"]), order["replacement"], order["length"], generator))
        items = list(islice(iter(own), order["length"]))
    return items if order["permuted"] is None else [items[i] for i in _permuted(order["permuted"], len(items))]


def _permuted(facts: dict[str, Any], length: int) -> list[int]:
    whole: DistributedSampler[int] = DistributedSampler(range(length), 1, 0, facts["shuffle"], facts["seed"])  # type: ignore[arg-type]
    whole.set_epoch(facts["epoch"])
    return list(whole)


class Rest(Sampler[Any]):
    """The share of this rank in what is left of an order, from the offset where this number of ranks took over."""

    def __init__(self, loader: DataLoader[Any], deal: dict[str, Any], rank: DataRank) -> None:
        self._order, self._offset, self._rank = deal["order"], deal["offset"], rank
        sampler = _sampler(loader)
        self._own = _own_sampler(sampler)
        self._drop_last = bool(getattr(sampler, "drop_last", False)) and rank.size > 1

    def __iter__(self) -> Iterator[Any]:
        order = draw(self._order, self._own)
        return iter(elastic.share(order, self._offset, self._rank.rank, self._rank.size, self._drop_last))

    def __len__(self) -> int:
        return elastic.share_length(self._order["length"] - self._offset, self._rank.size, self._drop_last)


def rest(loader: DataLoader[Any], deal: dict[str, Any], rank: DataRank) -> Any:
    """What stands for the batch sampler of `loader`, or its sampler if it has no other, until the pass ends."""
    samples, batches = Rest(loader, deal, rank), loader.batch_sampler
    if batches is None:
        return samples
    return BatchSampler(samples, _batch_size(loader), bool(batches.drop_last))  # type: ignore[attr-defined]


def dealt_anew(
    state: dict[str, Any], loader: Any, rank: DataRank, change: Change, name: str, facts: dict[str, Any], *, anew: bool
) -> dict[str, Any]:
    """The position `state` of a loader on `change.saved` ranks, as a position on this number of ranks.

    Args:
        state: Of `Tracker.position`, the same on all saved ranks but for what is a rank's own.
        loader: The loader of this run.
        rank: This process.
        change: For messages.
        name: Of the loader.
        facts: Of the loader.
        anew: A loader with a state of its own begins a pass rightly without it.

    Raises:
        TopologyError: It cannot be.
    """
    kind = state["kind"]
    if state["epoch_over"]:
        if "state" in state and not anew:
            why = f"it keeps a state of its own ({kind!r}), which is that of one rank"
            raise change.refusal(name, facts, why, within_epoch=False)
        return {k: v for k, v in state.items() if k not in ("state", "fetching")}
    if kind != "indexed":
        why = "keeps a state of its own, which is that of one rank" if "state" in state else "is no map-style loader"
        raise change.refusal(name, facts, f"it {why}, and its epoch is not over")
    deal = state.get("deal", {"unknown": "the version that saved it did not note the order of the samples"})
    present = describe(loader, 0, rank)
    for unknown in (deal, present):
        if "unknown" in unknown:
            raise change.refusal(name, facts, str(unknown["unknown"]))
    order, now = deal["order"], present["order"]
    if order.get("sampler") != now.get("sampler"):
        then, own = order.get("sampler", "none of the user's"), now.get("sampler", "none of the user's")
        raise change.refusal(name, facts, f"its order was drawn by another sampler ({then}; now {own})")
    if order["length"] != now["length"]:
        raise change.refusal(name, facts, f"its order had {order['length']} samples, and now has {now['length']}")
    offset = elastic.trained(order["length"], deal["offset"], deal["ranks"], deal["batch_size"], state["delivered"])
    dealt = {**present, "order": order, "offset": offset, "dealt_anew": True}
    return {**state, "delivered": 0, "exhausted": False, "digest": None, "deal": dealt}
