"""Where an epoch stands when the number of ranks changes: arithmetic on values, without loaders and without torch.

A position within an epoch is an *offset* in the one order of the epoch's samples, the same for all ranks:

1. Of W ranks with batches of B, rank r has the samples ``order[r::W]``. After d batches on every rank, exactly the
   first W*B*d samples of the order are trained: the offset.
2. On W' ranks, ``order[offset:]`` is dealt out in the same way, rank r has ``order[offset + r::W']``, and each cuts its
   share into batches of B'. Saved d' batches later, the offset is ``offset + W'*B'*d'``, so that any number of changes
   within one epoch follow one another.
3. At the end of the epoch shares are made equal as `torch.utils.data.DistributedSampler` does it: filled up with the
   first samples of the order, or (``drop_last``) cut. Only there can a sample come twice, or not at all; where W'*B'
   divides what is left, every sample comes exactly once.

*Ranks* are data-parallel ranks here: those of a tensor-parallel group share their data and count as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_ft.errors import TopologyError

_T = TypeVar("_T")


@dataclass(frozen=True)
class DataRank:
    """The place of a process among those that train on different data."""

    rank: int = 0
    size: int = 1
    member: int = 0
    """Which one it is of those that have this `rank` (tensor-parallel ranks train on the same data)."""

    @classmethod
    def among(cls, ranks: Sequence[tuple[int, int]], own: int) -> DataRank:
        """That of process number `own`, where `ranks` are (rank, size) of all processes."""
        rank, size = ranks[own]
        return cls(rank, size, sum(r == rank for r, _ in ranks[:own]))


def sources(saved: Sequence[int], present: DataRank) -> list[int]:
    """Which of the saved processes this one takes over, by number: its own first; none, if it is new.

    Saved rank q goes to present rank ``q % size``.

    Args:
        saved: The data-parallel rank of every saved process.
        present: This process.
    """
    groups: dict[int, list[int]] = {}
    for number, rank in enumerate(saved):
        groups.setdefault(rank, []).append(number)
    return [
        group[present.member] if present.member < len(group) else group[0]
        for rank, group in sorted(groups.items())
        if rank % present.size == present.rank
    ]


def trained(length: int, offset: int, ranks: int, batch_size: int, delivered: int) -> int:
    """The offset after `delivered` more batches on each rank."""
    return min(length, offset + ranks * batch_size * delivered)


def share_length(left: int, ranks: int, drop_last: bool) -> int:
    """How many of `left` samples each rank gets."""
    return left // ranks if drop_last else math.ceil(left / ranks)


def share(order: Sequence[_T], offset: int, rank: int, ranks: int, drop_last: bool) -> list[_T]:
    """What `rank` gets of ``order[offset:]``."""
    left = list(order[offset:])
    total = share_length(len(left), ranks, drop_last) * ranks
    missing = total - len(left)
    if missing > 0:
        left += (list(order) * math.ceil(missing / len(order)))[:missing]
    return left[rank:total:ranks]


def batches(samples: int, batch_size: int, drop_last: bool) -> int:
    """How many batches a share of so many samples makes."""
    return samples // batch_size if drop_last else math.ceil(samples / batch_size)


def epoch_batches(mode: str, counts: Sequence[int], cycled: Sequence[bool]) -> int:
    """How many batches an epoch has, or has left, if its loaders have `counts` of them.

    Args:
        mode: How a `CombinedLoader` combines them; any, if there is one loader.
        counts: Per loader.
        cycled: Per loader, whether it has begun again in this epoch, so that it no longer decides.
    """
    if mode == "min_size":
        return min(counts)
    return max(
        (n for n, again in zip(counts, cycled, strict=True) if not (again and mode == "max_size_cycle")), default=0
    )


@dataclass(frozen=True)
class GlobalBatch:
    """What one optimizer step is made of."""

    ranks: int
    batch_size: int
    accumulated: int

    @property
    def samples(self) -> int:
        """How many there are in a step."""
        return self.ranks * self.batch_size * self.accumulated

    def __str__(self) -> str:
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return (
            f"{self.samples} samples per step ({ranks} x batch size {self.batch_size} x {self.accumulated} accumulated)"
        )

    def keeping(self, saved: GlobalBatch) -> str:
        """What to set to have as many samples in a step as `saved`, in words."""
        per_batch, per_sample = self.ranks * self.batch_size, self.ranks * self.accumulated
        if saved.samples % per_batch == 0:
            return f"accumulate_grad_batches={saved.samples // per_batch} keeps it"
        if saved.samples % per_sample == 0:
            return f"a batch size of {saved.samples // per_sample} keeps it"
        return "nothing keeps it on this number of ranks"


@dataclass(frozen=True)
class Change:
    """A checkpoint of one number of ranks is continued on another.

    Args:
        saved: Ranks that wrote it.
        present: Ranks now.
        path: The checkpoint.
        facts: Its fingerprint.
    """

    saved: int
    present: int
    path: str
    facts: Mapping[str, Any]

    def refusal(
        self, name: str, present: Mapping[str, Any], reason: str, *, within_epoch: bool = True
    ) -> TopologyError:
        """The error that says why loader `name` cannot go on; `present` are its facts in this run."""
        instead = ", or continue from a checkpoint of an epoch's end (its path as ckpt_path)" if within_epoch else ""
        then = {k.removeprefix(f"{name} "): v for k, v in self.facts.items() if k.startswith(f"{name} ")}
        return TopologyError(
            f"{self.path}: {name} cannot go on there on another number of ranks: {reason}. "
            f"Saved: {_topology(self.saved, then)}; now: {_topology(self.present, present)}. "
            f"Start {self.saved} rank{'s' * (self.saved != 1)}{instead}",
            self.saved,
            self.present,
        )


def _topology(ranks: int, facts: Mapping[str, Any]) -> str:
    named = [f"{k} {facts[k]}" for k in ("type", "batch size", "sampler") if facts.get(k) is not None]
    return ", ".join([f"{ranks} rank{'s' * (ranks != 1)}", *named])
