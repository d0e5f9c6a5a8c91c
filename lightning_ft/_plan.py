"""What does not change about a copy of a checkpoint from save to save: buffers, targets, and what may be late."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ft._buffers import PINNED_BLOCK_BYTES, Buffers
from lightning_ft._layout import Signature, lay_out

# Smaller storages are copied at once: step counters and scalars, which cost less to copy than to watch.
_LATE_BYTES = 4 << 10
# Storages of less are copied together by one call of torch, larger ones piece by piece.
_GROUPED_BYTES = 1 << 20


@dataclass(frozen=True)
class Late:
    """Which storages may be copied after `stage` has returned, by their addresses."""

    addresses: frozenset[int]
    """Of parameters that an optimizer trains."""
    never: frozenset[int]
    """Of what a forward pass may change: buffers, and embeddings that renormalise themselves."""
    optimizer_steps: int
    """Steps taken when the copy was asked for."""

    @classmethod
    def of(cls, module: nn.Module, optimizers: Iterable[Optimizer], optimizer_steps: int) -> Late:
        """What an optimizer step changes, and nothing else does.

        A parameter that no optimizer has (a frozen one, a momentum encoder) is not among them: whatever changes it
        does so in the forward pass.
        """
        trained = [p for o in optimizers for g in o.param_groups for p in g["params"] if p.requires_grad]
        # With `max_norm`, torch renormalises the rows that a forward pass looks up, in place.
        lookups = [m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
        changing = [m.weight for m in lookups if m.max_norm is not None]
        return cls(_addresses(trained), _addresses([*module.buffers(), *changing]), optimizer_steps)


def _addresses(tensors: Iterable[Tensor]) -> frozenset[int]:
    # Subclasses and sparse tensors may have no storage of their own; they are never late.
    own = (t for t in tensors if type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided)
    return frozenset(t.untyped_storage().data_ptr() for t in own)


@dataclass
class Work:
    """Extents to be copied: of host memory in groups and in pieces, of device memory on a stream."""

    grouped: list[int] = field(default_factory=list)
    raw: list[int] = field(default_factory=list)
    device: dict[torch.device, list[int]] = field(default_factory=dict)

    @property
    def extents(self) -> list[int]:
        """All of them."""
        return [*self.grouped, *self.raw, *(index for indices in self.device.values() for index in indices)]


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
        self.entries = entries
        self.layout = lay_out(entries, PINNED_BLOCK_BYTES if self.buffers.pinned else None)
        self.places = self.buffers.tensors(self.layout)
        self.targets = [self._target(number) for number in range(len(entries))]
        self._large = [i for i, extent in enumerate(self.layout.extents) if extent.size_bytes >= _LATE_BYTES]
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
            extents = self.layout.extents
            for index in self._large:
                number = extents[index].tensor
                address = addresses[number]
                if (address in late.addresses or number in of_optimizers) and address not in late.never:
                    found.append(index)
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
            elif extent.whole and extent.size_bytes < _GROUPED_BYTES:
                work.grouped.append(index)
            else:
                work.raw.append(index)
        return now, late
