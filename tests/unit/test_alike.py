from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ft._copying import alike as _alike
from lightning_ft._copying.alike import Alike
from lightning_ft._copying.layout import signature

FLAT = torch.arange(24.0)


def alike(tensors: list[Tensor]) -> Alike:
    return Alike(tensors, signature(tensors)[0])


def same() -> list[Tensor]:
    shared = torch.arange(24.0)
    return [shared, shared[3:7], torch.ones(2, 3), torch.zeros((), dtype=torch.int64), torch.empty(0), torch.empty(0)]


def test_tensors_of_the_same_kind_are_alike_and_their_addresses_are_told() -> None:
    first = alike(same())
    for _ in range(3):
        tensors = same()
        assert first.addresses(tensors) == signature(tensors)[1]


def test_it_holds_no_tensor() -> None:
    import gc
    import weakref

    tensors = same()
    first = alike(tensors)
    references = [weakref.ref(tensor) for tensor in tensors]
    tensors = same()
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert first.addresses(tensors) is not None


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "shape": lambda t: torch.ones(3, 2),
    "one dimension more": lambda t: t[None],
    "strides": lambda t: torch.ones(3, 2).t(),
    "dtype": lambda t: t.to(torch.int32),
    "storage of another size": lambda t: torch.ones(7)[:6].view(2, 3),
    "offset": lambda t: torch.ones(7)[1:].view(2, 3),
    "requires gradients": lambda t: t.clone().requires_grad_(),
    "a parameter": lambda t: nn.Parameter(t, requires_grad=False),
    "sparse": lambda t: t.to_sparse(),
    "on no device": lambda t: t.to("meta"),
    "a conjugate": lambda t: t.to(torch.complex64).conj(),
    "negated": lambda t: torch._neg_view(t),
    "in inference mode": lambda t: torch.inference_mode()(torch.ones)(2, 3),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_what_has_another_signature_is_not_alike(name: str, grad: bool) -> None:
    first, tensors = alike(same()), same()
    tensors[2] = CHANGES[name](tensors[2])
    if signature(tensors)[0] == signature(same())[0]:
        assert name == "in inference mode"  # of which a signature knows nothing
        return
    with torch.set_grad_enabled(grad):
        assert first.addresses(tensors) is None


def test_another_sharing_of_storages_is_not_alike() -> None:
    first = alike([FLAT[:12], FLAT[12:]])
    assert first.addresses([FLAT[:12], FLAT[12:]]) is not None
    assert first.addresses([FLAT[:12], FLAT.clone()[12:]]) is None
    assert alike([FLAT[:12], FLAT.clone()[12:]]).addresses([FLAT[:12], FLAT[12:]]) is None


def test_one_more_or_less_is_not_alike() -> None:
    first = alike(same())
    assert first.addresses(same()[:-1]) is None
    assert first.addresses([*same(), torch.ones(1)]) is None


@pytest.mark.parametrize(
    "make",
    [lambda: [], lambda: [FLAT, torch.eye(3).to_sparse()], lambda: [FLAT, torch.ones(2, device="meta")]],
    ids=["none", "a sparse one", "a meta one"],
)
def test_where_addresses_do_not_tell_nothing_is_alike(make: Callable[[], list[Tensor]]) -> None:
    assert alike(make()).addresses(make()) is None


class Strict:
    """Guards that do not know their own tensors again."""

    def __init__(self, *tensors: Tensor, dynamic_dims_sizes: None, dynamic_dims_strides: None) -> None: ...

    def check(self, *tensors: Tensor) -> bool:
        return False


@pytest.mark.parametrize("guards", [None, lambda *tensors: None, lambda *tensors, **dims: None, Strict])
def test_without_torchs_own_guards_as_they_are_here_nothing_is_alike(
    guards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_alike, "_TensorGuards", guards)
    assert alike(same()).addresses(same()) is None
