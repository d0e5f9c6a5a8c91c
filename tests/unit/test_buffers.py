from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_ft._copying.buffers import Buffers
from lightning_ft._copying.layout import Layout, lay_out, signature


def layout(*sizes: int, largest: int | None = None) -> Layout:
    return lay_out(signature([torch.zeros(size, dtype=torch.uint8) for size in sizes])[0], largest)


def addresses(tensors: list[Tensor]) -> list[int]:
    return [t.data_ptr() for t in tensors]


def test_each_storage_has_a_place_of_exactly_its_size() -> None:
    tensors = Buffers(pinned=False).tensors(layout(10, 0, 100, 1))
    assert [t.numel() for t in tensors] == [10, 0, 100, 1]
    assert [t.untyped_storage().nbytes() for t in tensors] == [10, 0, 100, 1]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    assert [set(t.tolist()) for t in tensors] == [{1}, set(), {3}, {4}]
    assert all(t.data_ptr() % 64 == 0 for t in tensors)


def test_memory_is_asked_for_once() -> None:
    buffers = Buffers(pinned=False)
    places = [addresses(buffers.tensors(layout(1000, 50))) for _ in range(5)]
    assert buffers.allocations == 1
    assert all(p == places[0] for p in places)


@pytest.mark.parametrize("sizes", [(50, 1000), (1000,), (10, 10, 10), (), (0,)])
def test_what_fits_needs_no_more_memory(sizes: tuple[int, ...]) -> None:
    buffers = Buffers(pinned=False)
    buffers.tensors(layout(1000, 50))
    size_bytes = sum(buffers._sizes)
    assert [t.numel() for t in buffers.tensors(layout(*sizes))] == list(sizes)
    assert (buffers.allocations, sum(buffers._sizes)) == (1, size_bytes)
    buffers.tensors(layout(1000, 50))
    assert buffers.allocations == 1


def test_it_grows_and_from_the_second_time_on_with_room_to_spare() -> None:
    buffers = Buffers(pinned=False)
    sizes = []
    for size in (64_000, 128_000, 192_000, 195_200):
        buffers.tensors(layout(size))
        sizes.append(sum(buffers._sizes))
    assert sizes == [64_000, 128_000, 201_600, 201_600]
    assert buffers.allocations == 3


def test_a_further_block_is_more_memory() -> None:
    buffers = Buffers(pinned=False)
    buffers.tensors(layout(100, largest=128))
    tensors = buffers.tensors(layout(100, 100, largest=128))
    assert buffers.allocations == 2
    assert [t.fill_(7).sum().item() for t in tensors] == [700, 700]


def test_the_memory_of_a_tensor_outlives_the_buffers() -> None:
    """A writer may still be at it when the stager is closed."""
    (tensor,) = Buffers(pinned=False).tensors(layout(1 << 20))
    tensor.fill_(5)
    assert int(tensor.sum()) == 5 << 20
