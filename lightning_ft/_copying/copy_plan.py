"""What does not change about a copy of a checkpoint from save to save: buffers, targets, and what may be late."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_ft._copying.alike import Alike
from lightning_ft._copying.buffers import PINNED_BLOCK_BYTES, Buffers
from lightning_ft._copying.layout import Extent, Signature, lay_out
from lightning_ft._copying.module_tree import ModuleTree
from lightning_ft._copying.template import Template
from lightning_ft._saving.serialise import Reductions

# Of a parameter; its state in an optimizer is nobody's to change, however small.
_LATE_BYTES = 4 << 10
# Storages of less are copied together by one call of torch, larger ones piece by piece.
_GROUPED_BYTES = 1 << 20


@dataclass(frozen=True)
class Late:
    """Which storages may be copied after `stage` has returned, by their addresses."""

    addresses: frozenset[int]
    """Of parameters that an optimizer trains."""
    never: frozenset[int]
    """Of what may change before: buffers, embeddings that renormalise themselves, and settings of optimizers."""
    optimizer_steps: int
    """Steps taken when the copy was asked for."""

    @classmethod
    def of(cls, tree: ModuleTree, optimizers: Iterable[Optimizer], optimizer_steps: int) -> Late:
        """What an optimizer step changes, and nothing else does.

        A parameter that no optimizer has (a frozen one, a momentum encoder) is not among them: whatever changes it
        does so in the forward pass. Nor is a small one: a temperature or a scale is often kept within bounds there, and
        through `.data`, which leaves no trace; copying it at once costs little.
        """
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        trained = [p for group in groups for p in group["params"] if p.requires_grad and p.nbytes >= _LATE_BYTES]
        # Whoever schedules a learning rate that is a tensor writes into it when a batch starts, or just before a step.
        settings = [t for g in groups for name, value in g.items() if name != "params" for t in _tensors(value)]
        return cls(_addresses(trained), _addresses(tree.changed_in_forward() + settings), optimizer_steps)


def _tensors(setting: Any) -> list[Tensor]:
    items = setting if isinstance(setting, (tuple, list)) else (setting,)
    return [item for item in items if isinstance(item, Tensor)]


def _addresses(tensors: Iterable[Tensor]) -> frozenset[int]:
    # Subclasses and sparse tensors may have no storage of their own; they are never late.
    own = [t for t in map(_held_here, tensors) if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided]
    return frozenset(map(UntypedStorage.data_ptr, map(Tensor.untyped_storage, own)))


def _held_here(tensor: Tensor) -> Tensor:
    """What this rank has of `tensor`, if that is in shards."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # the tensor itself then, and no function of it
        return tensor.to_local()


@dataclass
class Work:
    """Extents to be copied: of host memory in groups and in pieces, of device memory on a stream."""

    grouped: list[int] = field(default_factory=list)
    raw: list[int] = field(default_factory=list)
    device: dict[torch.device, list[int]] = field(default_factory=dict)
    _addresses: list[int] = field(default_factory=list)
    _sources: list[Tensor] = field(default_factory=list)

    @property
    def extents(self) -> list[int]:
        """All of them."""
        return [*self.grouped, *self.raw, *(index for indices in self.device.values() for index in indices)]

    def sources(self, extents: Sequence[Extent], addresses: Sequence[int]) -> list[Tensor]:
        """The bytes at `addresses` of what is copied in groups; the same tensors again while they lie there.

        The memory is not theirs: they are good for as long as the training, or somebody else, holds it.

        Args:
            extents: Of the whole layout.
            addresses: Of each tensor's storage, now.
        """
        wanted = [addresses[extents[index].tensor] for index in self.grouped]
        if wanted != self._addresses:
            sizes = (extents[index].size_bytes for index in self.grouped)
            self._sources = [_bytes_at(address, size) for address, size in zip(wanted, sizes, strict=True)]
            self._addresses = wanted
        return self._sources


def _bytes_at(address: int, size_bytes: int) -> Tensor:
    return torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=torch.uint8)


class Plan:
    """Buffers, laid out for one signature.

    Args:
        entries: The signature.
        buffers: Where the copy is to be; they belong to the plan.
    """

    places: list[Tensor]
    """For each extent its bytes in the buffers."""
    targets: list[Tensor]
    """For each tensor its copy; an empty one if it has no storage of its own."""

    def __init__(self, entries: Signature, buffers: Buffers) -> None:
        self.buffers = buffers
        self.arrange(entries)

    def arrange(self, entries: Signature) -> None:
        """The buffers are laid out for `entries`; what was in them is lost."""
        # Tensors hold on to the memory they lie in: with the old ones there, growing would need both at once.
        self.places = self.targets = []
        self.reductions: Reductions = {}
        self.entries = entries
        self.alike: Alike | None = None
        """Tells whether tensors have the signature; None if nobody can, or nobody has made it yet."""
        self.templates: dict[str, Template] = {}
        """Copies of parts of a checkpoint, with `targets` in them."""
        self.layout = lay_out(entries, PINNED_BLOCK_BYTES if self.buffers.pinned else None)
        self.places = self.buffers.tensors(self.layout)
        self.targets = [self._target(number) for number in range(len(entries))]
        self.reductions = dict.fromkeys(map(id, self.targets))
        self.unplaced = [number for number, extent in enumerate(self.layout.extent_of) if extent is None]
        """Tensors without a storage of their own: their targets are empty."""
        self._filled = [(index, extent.tensor) for index, extent in enumerate(self.layout.extents) if extent.size_bytes]
        self._late: list[int] | None = None
        self._split = Work(), Work()

    def split(self, late: Late | None, of_optimizers: range, addresses: Sequence[int]) -> tuple[Work, Work]:
        """What is copied at once, and what may be copied late.

        Args:
            late: What may be late besides optimizer state; None: nothing may, not even that.
            of_optimizers: Which tensors are optimizer state.
            addresses: Of each tensor's storage, now.
        """
        found = []
        if late is not None:
            found = [
                index
                for index, number in self._filled
                if (number in of_optimizers or addresses[number] in late.addresses)
                and addresses[number] not in late.never
            ]
        if found != self._late:
            self._split, self._late = self._sorted(frozenset(found)), found
        return self._split

    def _target(self, number: int) -> Tensor:
        extent = self.layout.extent_of[number]
        if extent is None:
            return torch.empty(0, device="cpu")
        dtype, shape, stride, offset, requires_grad, kind = self.entries[number][3:]
        target = torch.empty(0, dtype=dtype, device="cpu")
        target.set_(self.places[extent].untyped_storage(), offset, shape, stride)
        return nn.Parameter(target, requires_grad) if kind is nn.Parameter else target.requires_grad_(requires_grad)

    def _sorted(self, late_extents: frozenset[int]) -> tuple[Work, Work]:
        now, late = Work(), Work()
        for index, extent in enumerate(self.layout.extents):
            if not extent.size_bytes:
                continue
            work = late if index in late_extents else now
            if extent.device.type != "cpu":
                work.device.setdefault(extent.device, []).append(index)
            elif extent.size_bytes < _GROUPED_BYTES:
                work.grouped.append(index)
            else:
                work.raw.append(index)
        return now, late
