"""Host memory for staged checkpoints, allocated once and used for save after save.

Fresh memory costs a page fault every 4 KiB, which makes a copy into it several times slower than one into memory that
was used before.
"""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch import Tensor

from lightning_ft._copying.layout import Layout

PINNED_BLOCK_BYTES = 512 << 20
"""Pinned memory comes from torch's allocator, which rounds up to a power of two: blocks of this size waste nothing."""


class Buffers:
    """Memory for one copy of a checkpoint; it grows when a layout needs more, and is given back with the object.

    Thread: main lays out; after that any thread may read and write the tensors.

    Args:
        pinned: Allocate page-locked memory, into which an accelerator copies while the host goes on.
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.allocations = 0
        """How often memory was asked for: it stays as it is while the same layout comes again."""
        self._blocks: list[Any] = []
        self._sizes: list[int] = []

    def tensors(self, layout: Layout) -> list[Tensor]:
        """For each extent of `layout` its place, a tensor of uint8 that has a storage of exactly that size.

        What was in the buffers before is undefined afterwards.
        """
        needed = layout.block_bytes
        if len(needed) > len(self._sizes) or any(n > has for n, has in zip(needed, self._sizes, strict=False)):
            # What grows once (a list of metrics, the first optimizer state) may grow again: then with room to spare.
            spare = 1.05 if self.allocations > 1 else 1.0
            self._blocks, self._sizes = [], []  # given back first: never twice the memory
            self._sizes = [self._with_room(size, spare) for size in needed]
            self._blocks = [_allocate(size, self.pinned) for size in self._sizes]
            self.allocations += 1
        return [
            # `frombuffer` makes a storage that begins and ends here; a view would be saved with all of the block.
            torch.frombuffer(self._blocks[e.block], dtype=torch.uint8, count=e.size_bytes, offset=e.offset_bytes)
            if e.size_bytes
            else torch.empty(0, dtype=torch.uint8, device="cpu")
            for e in layout.extents
        ]

    def _with_room(self, size_bytes: int, spare: float) -> int:
        room_bytes = int(size_bytes * spare)
        # What torch rounds up is room enough, and more than a block would be rounded up to twice as much.
        return max(size_bytes, min(room_bytes, PINNED_BLOCK_BYTES)) if self.pinned else room_bytes


def _allocate(size_bytes: int, pinned: bool) -> Any:
    if pinned:
        return torch.empty(max(1, size_bytes), dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
    # Shared (the default of `mmap`): in private memory every page would be copied once more at the first save after
    # each fork, and workers of loaders are forked all the time.
    return mmap.mmap(-1, max(1, size_bytes))
