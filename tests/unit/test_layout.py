from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_ft._copying.layout import ALIGNMENT_BYTES, has_one_storage, lay_out, signature

FLAT = torch.arange(24.0)

ONE_STORAGE: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "tensor": (lambda: torch.ones(2), True),
    "parameter": (lambda: nn.Parameter(torch.ones(2)), True),
    "view": (lambda: torch.ones(4)[1:], True),
    "empty": (lambda: torch.empty(0), True),
    "sparse": (lambda: torch.eye(2).to_sparse(), False),
    "sparse-csr": (lambda: torch.eye(2).to_sparse_csr(), False),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), False),
    "meta": (lambda: torch.empty(2, device="meta"), False),
    "conjugate": (lambda: torch.ones(2, dtype=torch.complex64).conj(), False),
    "negated": (lambda: torch.ones(2, dtype=torch.complex64).conj().imag, False),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), False),
    "subclass": (lambda: torch.ones(2).as_subclass(Strange), False),
}


class Strange(Tensor):
    pass


@pytest.mark.parametrize("name", ONE_STORAGE)
def test_which_tensors_have_one_storage(name: str) -> None:
    make, expected = ONE_STORAGE[name]
    tensor = make()
    assert has_one_storage(tensor) is expected
    (entry,), (address,) = signature([tensor])
    assert bool(entry) is expected
    assert address == (tensor.untyped_storage().data_ptr() if expected else 0)


# Each is one change of `FLAT`; only the first is none.
VARIANTS: dict[str, Callable[[], Tensor]] = {
    "an alias": lambda: FLAT.detach(),
    "other memory": lambda: FLAT.clone(),
    "another shape": lambda: FLAT.view(4, 6),
    "another stride": lambda: FLAT.view(4, 6).t(),
    "another offset": lambda: FLAT[1:],
    "another dtype": lambda: FLAT.view(torch.int32),
    "a parameter": lambda: nn.Parameter(FLAT),
    "with gradient": lambda: FLAT.detach().requires_grad_(),
    "sparse": lambda: FLAT.to_sparse(),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_signatures_are_equal_if_nothing_about_the_tensor_differs(name: str) -> None:
    assert (signature([VARIANTS[name]()])[0] == signature([FLAT])[0]) is (name in ("an alias", "other memory"))


def test_what_shares_a_storage_is_part_of_a_signature() -> None:
    """A plan for tied tensors is none for tensors of the same shapes that are not."""
    assert signature([FLAT, FLAT.detach()])[0] != signature([FLAT, FLAT.clone()])[0]
    assert signature([FLAT, FLAT.clone()])[0] == signature([FLAT.clone(), FLAT.clone()])[0]


def test_values_are_no_part_of_a_signature() -> None:
    tensor = torch.zeros(3)
    before = signature([tensor])
    tensor.add_(1)
    assert signature([tensor]) == before


def test_one_more_tensor_and_another_order_are_other_signatures() -> None:
    a, b = torch.ones(2), torch.ones(3)
    assert signature([a, b]) != signature([a])
    assert signature([a, b]) != signature([b, a])


TABLE: dict[str, tuple[Callable[[], list[Tensor]], list[int | None], list[tuple[int, int]]]] = {
    # tensors -> extent of each, then (tensor, size_bytes) of each extent
    "nothing": (lambda: [], [], []),
    "two": (lambda: [torch.ones(2), torch.ones(3)], [0, 1], [(0, 8), (1, 12)]),
    "tied": (lambda: [FLAT, FLAT.detach(), nn.Parameter(FLAT)], [0, 0, 0], [(0, 96)]),
    "a view and then all": (lambda: [FLAT[2:4], FLAT], [0, 0], [(0, 96)]),
    "all and then a view": (lambda: [FLAT, FLAT[2:4]], [0, 0], [(0, 96)]),
    "overlapping views": (lambda: [FLAT[:10], FLAT[5:]], [0, 0], [(0, 96)]),
    "transposed": (lambda: [FLAT.view(4, 6).t()], [0], [(0, 96)]),
    "reshaped": (lambda: [FLAT.view(2, 3, 4)], [0], [(0, 96)]),
    "with an axis of one": (lambda: [FLAT.view(1, 24, 1).as_strided((1, 24, 1), (7, 1, 9))], [0], [(0, 96)]),
    "channels-last": (lambda: [torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)], [0], [(0, 480)]),
    "expanded": (lambda: [torch.ones(1).expand(5)], [0], [(0, 4)]),
    "all of one of another dtype": (lambda: [FLAT.view(torch.uint8)], [0], [(0, 96)]),
    "all but the last": (lambda: [FLAT[:-1]], [0], [(0, 96)]),
    "a scalar": (lambda: [torch.tensor(1.0)], [0], [(0, 4)]),
    "empty ones": (lambda: [torch.empty(0), torch.empty(0, 3)], [0, 1], [(0, 0), (1, 0)]),
    "one without storage": (lambda: [torch.ones(2), torch.eye(2).to_sparse()], [0, None], [(0, 8)]),
}


@pytest.mark.parametrize("name", TABLE)
def test_extents(name: str) -> None:
    make, extent_of, expected = TABLE[name]
    tensors = make()
    layout = lay_out(signature(tensors)[0])
    assert layout.extent_of == tuple(extent_of)
    assert [(e.tensor, e.size_bytes) for e in layout.extents] == expected
    assert layout.size_bytes == sum(size for _, size in expected)


@pytest.mark.parametrize(
    ("sizes", "largest", "blocks"),
    [
        ([], None, ()),
        ([10], None, (64,)),
        ([64, 65, 1], None, (64 + 128 + 64,)),
        ([100, 100, 100], 256, (256, 128)),
        ([100, 1000, 100], 256, (128, 1024, 128)),
        ([1000], 256, (1024,)),
        ([256, 256], 256, (256, 256)),
    ],
    ids=str,
)
def test_blocks(sizes: list[int], largest: int | None, blocks: tuple[int, ...]) -> None:
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    layout = lay_out(signature(tensors)[0], largest)
    assert layout.block_bytes == blocks
    taken: dict[int, int] = {}
    for extent in layout.extents:
        assert extent.offset_bytes % ALIGNMENT_BYTES == 0
        assert extent.offset_bytes >= taken.get(extent.block, 0), "two storages overlap in the buffer"
        taken[extent.block] = extent.offset_bytes + extent.size_bytes
        assert taken[extent.block] <= layout.block_bytes[extent.block]
