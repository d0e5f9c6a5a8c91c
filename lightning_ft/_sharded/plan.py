"""Which rank writes what of a sharded state: worked out once by rank 0, and kept by every rank while nothing changes.

A tensor that lies in shards is written by the ranks that have them. What several ranks have alike (replicated tensors,
and shards along a replicated dimension of a mesh) is laid end to end and cut into as many stretches of equal bytes as
there are ranks that have it, at rows of tensors (along their first dimension): each writes one stretch.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor  # private, and what FSDP's state is made of
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from lightning_ft._sharded.replicated import Replicated, require_restorable
from lightning_ft._state.digest import digest_of_data

# What is smaller is not cut: a piece costs half a kilobyte and a call or two.
_CUT_BYTES = 64 << 10


@dataclass(frozen=True)
class Part:
    """What one rank writes of one entry of the state."""

    item: WriteItem
    source: MetadataIndex
    """Where to find it in the state of that rank."""
    rows: tuple[int, int] | None = None
    """Which rows of what is found there, from and to; None: all of it."""


@dataclass(frozen=True)
class LocalPlan:
    """What one rank has, for rank 0 to decide on."""

    plan: SavePlan
    whole: frozenset[MetadataIndex]
    """What cannot be cut where this rank has it."""
    digests: dict[MetadataIndex, str]
    """Of what must be the same on all ranks that have it."""


class LocalState:
    """The state of this rank as DCP sees it: one flat dictionary.

    Ranks: each for itself. Thread: main.

    Args:
        state: Nested dictionaries and lists of tensors (plain, `DTensor`, `ShardedTensor`) and other values.

    Raises:
        Exception: What a `Replicated` raises that makes its state.
    """

    def __init__(self, state: dict[str, Any] | Replicated) -> None:
        self._replicated = state if isinstance(state, Replicated) else None
        self._given: dict[str, Any] = state.make() if isinstance(state, Replicated) else state
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(self._given, None, False)
        self._flat: dict[str, Any] = self._planner.state_dict

    def signature(self) -> list[Any]:
        """Equal to that of another state if, and only if, the plan of that one is right for this one."""
        marks = self._replicated.marks if self._replicated is not None else None
        return [marks, *((name, *_described(value)) for name, value in self._flat.items())]

    def plan(self) -> LocalPlan:
        """What this rank has; empty shards, of tensors that are not empty, are left out.

        Raises:
            SaveError: Of a `Replicated`: it could not be loaded as it is.
        """
        if self._replicated is not None:
            require_restorable(self._given, self._flat, self._planner.mappings)
        plan = self._planner.create_local_plan()
        items = [item for item in plan.items if not _is_nothing(item)]
        whole = frozenset(item.index for item in items if not self._can_be_cut(item))
        compared = self._replicated is not None and self._replicated.compared
        tensors = [item.index for item in items if compared and item.tensor_data is not None]
        digests = {index: str(digest_of_data(self.find(index))) for index in tensors}
        return LocalPlan(dataclasses.replace(plan, items=items), whole, digests)

    def _can_be_cut(self, item: WriteItem) -> bool:
        if item.tensor_data is None:
            return False
        tensor = self.find(item.index)
        return type(tensor.detach()) is Tensor and tensor.layout is torch.strided and tensor.is_contiguous()

    def find(self, index: MetadataIndex) -> Any:
        """The local tensor, or the value, that is meant by `index`."""
        with torch.no_grad():  # a `DTensor` gives its local tensor as it is then
            return find_state_dict_object(self._flat, index)

    def counted(self, index: MetadataIndex) -> Tensor:
        """The tensor whose version counter moves when the one that is meant by `index` is changed."""
        value: Tensor = self._flat[index.fqn]
        return value if isinstance(value, DTensor) else self.find(index)

    def is_of_optimizer(self, index: MetadataIndex) -> bool:
        """Whether `index` is under one of the keys that Lightning gives to states of optimizers."""
        return str(self._planner.mappings[index.fqn][0]).startswith("optimizer_")


def _described(value: Any) -> tuple[Any, ...]:
    if isinstance(value, DTensor):
        return DTensor, value.dtype, value.shape, value.requires_grad, value.device_mesh, value.placements
    if isinstance(value, ShardedTensor):
        shards = tuple((*s.metadata.shard_offsets, -1, *s.metadata.shard_sizes) for s in value.local_shards())
        return ShardedTensor, value.dtype, value.size(), shards
    if isinstance(value, Tensor):
        return Tensor, value.dtype, value.shape, value.requires_grad, value.is_contiguous()
    return (None,)


def _is_nothing(item: WriteItem) -> bool:
    data = item.tensor_data
    return data is not None and data.chunk is not None and 0 in data.chunk.sizes and 0 not in data.size


def share_out(locals_: list[LocalPlan]) -> tuple[list[list[Part]], Metadata]:
    """What each rank writes, and what the checkpoint says about itself but for the places in the files.

    Ranks: zero.

    Raises:
        ValueError: What the ranks have does not make up whole tensors, or is not of one kind on all of them, or
            differs where it must not.
    """
    _require_alike([local.digests for local in locals_])
    owners: dict[MetadataIndex, list[int]] = {}
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, local in enumerate(locals_):
        for item in local.plan.items:
            owners.setdefault(item.index, []).append(rank)
            items.setdefault(item.index, item)
    whole = frozenset().union(*(local.whole for local in locals_))
    parts: list[list[Part]] = [[] for _ in locals_]
    shared: dict[tuple[int, ...], list[WriteItem]] = {}
    for index, item in items.items():
        if len(owners[index]) == 1 or item.tensor_data is None:
            parts[owners[index][0]].append(Part(item, index))
        else:
            shared.setdefault(tuple(owners[index]), []).append(item)
    for ranks, alike in shared.items():
        for number, part in _cut(alike, len(ranks), whole):
            parts[ranks[number]].append(part)
    # DCP's own planner checks that chunks cover tensors, and gives the index of each a hint by which readers find it.
    plans = [
        dataclasses.replace(local.plan, items=[part.item for part in mine])
        for local, mine in zip(locals_, parts, strict=True)
    ]
    final, metadata = DefaultSavePlanner().create_global_plan(plans)
    hinted = [
        [dataclasses.replace(part, item=item) for part, item in zip(mine, plan.items, strict=True)]
        for mine, plan in zip(parts, final, strict=True)
    ]
    return hinted, metadata


def _require_alike(digests: list[dict[MetadataIndex, str]]) -> None:
    """A mixture of what differs would be the state of no rank."""
    expected: dict[MetadataIndex, tuple[int, str]] = {}
    different: dict[int, list[str]] = {}
    for rank, of_rank in enumerate(digests):
        for index, digest in of_rank.items():
            if expected.setdefault(index, (rank, digest))[1] != digest:
                different.setdefault(rank, []).append(index.fqn)
    if different:
        which = "; ".join(f"rank {rank}: {', '.join(names[:5])}" for rank, names in different.items())
        raise ValueError(
            f"not the same on all ranks, so they cannot share it out ({which}): use "
            'FaultTolerantCheckpointIO(layout="file"), which saves what rank 0 has'
        )


def _cut(items: list[WriteItem], count: int, whole: frozenset[MetadataIndex]) -> Iterator[tuple[int, Part]]:
    """`items`, end to end, in `count` stretches: for each part the number of its stretch."""
    sizes = [size_bytes(item) for item in items]
    total = sum(sizes) or 1
    position = 0
    for item, size in zip(items, sizes, strict=True):
        rows = _chunk(item).sizes[0] if len(_chunk(item).sizes) else 1
        if item.index in whole or rows < 2 or size < _CUT_BYTES:
            yield min(count - 1, (2 * position + size) * count // (2 * total)), Part(item, item.index)
        else:
            cuts = [round((number * total / count - position) * rows / size) for number in range(count + 1)]
            cuts = [min(max(cut, 0), rows) for cut in cuts]
            for number, (first, end) in enumerate(itertools.pairwise(cuts)):
                if first < end:
                    yield number, _rows_of(item, first, end)
        position += size


def _rows_of(item: WriteItem, first: int, end: int) -> Part:
    chunk = _chunk(item)
    assert item.tensor_data is not None
    if (first, end) == (0, chunk.sizes[0]):
        return Part(item, item.index)
    offsets = torch.Size((chunk.offsets[0] + first, *chunk.offsets[1:]))
    piece = ChunkStorageMetadata(offsets, torch.Size((end - first, *chunk.sizes[1:])))
    data = TensorWriteData(piece, item.tensor_data.properties, item.tensor_data.size)
    cut = WriteItem(MetadataIndex(item.index.fqn, offsets), WriteItemType.SHARD, tensor_data=data)
    return Part(cut, item.index, (first, end))


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    assert item.tensor_data.chunk is not None
    return item.tensor_data.chunk


def size_bytes(item: WriteItem) -> int:
    """Of the tensor, or the part of one, that `item` stands for."""
    assert item.tensor_data is not None
    return math.prod(_chunk(item).sizes) * item.tensor_data.properties.dtype.itemsize
