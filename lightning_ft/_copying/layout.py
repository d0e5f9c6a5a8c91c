"""Where each storage of a checkpoint lies in the staging buffers, worked out once and kept while its shape stays.

A layout is a value that knows no addresses: tensors of the same shapes, some of which share a storage in the same way,
give an equal signature, and then the plan of an earlier save, with its target tensors, is used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNMENT_BYTES = 64
"""Of each storage in a buffer: a cache line, and the alignment that `torch.save` gives it in the file."""

Signature = list[tuple[Any, ...]]
"""Per tensor what a plan depends on: the first tensor that has its storage, the size of that in bytes, device, dtype,
shape, stride, offset, whether it requires gradients, and its class; empty if it has no storage of its own."""


def has_one_storage(tensor: Tensor) -> bool:
    """Whether the bits of `tensor` are a stretch of one storage with an address.

    Sparse, quantised, nested and subclassed tensors have no single storage to share, meta tensors no data to move.
    """
    kind = type(tensor)
    return (
        (kind is Tensor or kind is torch.nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_meta or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
    )


def signature(tensors: Sequence[Tensor]) -> tuple[Signature, list[int]]:
    """What a plan depends on, and the address of each tensor's storage (0 if it has none).

    Two lists of tensors with equal signatures can share one plan. Storages are told apart by device, address and size.
    """
    entries: Signature = []
    addresses: list[int] = []
    first: dict[tuple[Any, ...], int] = {}
    for number, tensor in enumerate(tensors):
        if not has_one_storage(tensor):
            entries.append(())
            addresses.append(0)
            continue
        storage = tensor.untyped_storage()
        address, size_bytes, device = storage.data_ptr(), storage.nbytes(), tensor.device
        # Every empty storage has address 0: nothing to share.
        same = first.setdefault((address, size_bytes, device), number) if size_bytes else number
        addresses.append(address)
        entries.append((
            same, size_bytes, device, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(),
            tensor.requires_grad, type(tensor),
        ))  # fmt: skip
    return entries, addresses


@dataclass(frozen=True)
class Extent:
    """One storage, and its place in the buffers."""

    tensor: int
    """Index of the first tensor that lies in it."""
    device: torch.device
    size_bytes: int
    block: int
    offset_bytes: int


@dataclass(frozen=True)
class Layout:
    """The places of all storages.

    Tensors that share a storage share its place too: tied weights stay tied, also in the size of the file.
    """

    extents: tuple[Extent, ...]
    extent_of: tuple[int | None, ...]
    """For each tensor the index of its extent, None if it has no storage of its own to place."""
    block_bytes: tuple[int, ...]
    """Sizes of the buffers, in bytes."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all storages."""
        return sum(extent.size_bytes for extent in self.extents)


def lay_out(entries: Signature, largest_block_bytes: int | None = None) -> Layout:
    """The storages in the order in which they occur, one after the other.

    Args:
        entries: A signature.
        largest_block_bytes: Size in bytes at which a further buffer is begun; a storage that is larger has one for
            itself. None: everything in one buffer.
    """
    index_of: dict[int, int] = {}
    extent_of: list[int | None] = []
    for entry in entries:
        extent_of.append(index_of.setdefault(entry[0], len(index_of)) if entry else None)
    chosen = list(index_of)
    places, block_bytes = _places([entries[number][1] for number in chosen], largest_block_bytes)
    extents = (
        Extent(number, entries[number][2], entries[number][1], block, offset)
        for number, (block, offset) in zip(chosen, places, strict=True)
    )
    return Layout(tuple(extents), tuple(extent_of), block_bytes)


def _places(sizes: Sequence[int], largest_block_bytes: int | None) -> tuple[list[tuple[int, int]], tuple[int, ...]]:
    places: list[tuple[int, int]] = []
    blocks: list[int] = []
    for size_bytes in sizes:
        if not blocks or (largest_block_bytes is not None and blocks[-1] + size_bytes > largest_block_bytes > 0):
            blocks.append(0)
        places.append((len(blocks) - 1, blocks[-1]))
        blocks[-1] += -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return places, tuple(blocks)
