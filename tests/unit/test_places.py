"""Which boxes a range of a flattened tensor is, whole names, and where the parameters of a plain model are."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict

import pytest
import torch
from torch import nn

from lightning_ft._sharded.places import Places, boxes, described
from lightning_ft._sharded.positions import by_position
from lightning_ft._sharded.wrappers import named_like, plain_name, plain_names


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 4), (4, 1, 3), (2, 3, 2, 2), (1, 1, 5)])
def test_every_range_is_covered_once_by_few_boxes(shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    flat = whole.flatten()
    for start, stop in itertools.combinations(range(len(flat) + 1), 2):
        pieces = list(boxes(shape, start, stop))
        assert len(pieces) <= max(1, 2 * len(shape) - 1)
        local = torch.full((stop - start,), -1)
        for piece in pieces:
            box = whole
            for dimension, (offset, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
                box = box.narrow(dimension, offset, size)
            assert (piece.part_of(local) == -1).all(), "two boxes overlap"
            piece.part_of(local).copy_(box)
        assert torch.equal(local, flat[start:stop])


def test_an_empty_range_is_no_box() -> None:
    assert list(boxes((3, 4), 5, 5)) == []


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)
        self.last = nn.Linear(2, 2, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


def test_a_plain_model_has_each_tensor_once() -> None:
    model = Tied()
    places = Places(model)
    assert set(places.by_name) == set(model.state_dict()) - {"last.weight"}
    assert places.canonical("last._orig_mod.weight") == "first.weight"
    assert places.unplaced(["last.weight", "norm.running_mean", "scratch", "other.weight"]) == [
        "scratch",
        "other.weight",
    ]
    assert places.parameter_names() == [name for name, _ in model.named_parameters()]
    place = places.by_name["norm.weight"]
    place.local().fill_(3.0)
    assert torch.equal(model.norm.weight, torch.full((2,), 3.0))
    made, local = place.empty(torch.float16)
    assert made is local
    assert (made.dtype, made.shape) == (torch.float16, place.shape)


def test_names_without_wrappers() -> None:
    wrapped = "a._fsdp_wrapped_module.b._orig_mod._checkpoint_wrapped_module.weight"
    assert plain_name(wrapped) == "a.b.weight"
    assert plain_name("a_orig_mod.weight") == "a_orig_mod.weight"
    assert plain_names({"_orig_mod.x": 1, "y": 2}) == {"x": 1, "y": 2}
    compiled = torch.compile(nn.Linear(2, 2), backend="eager")
    model = nn.ModuleDict({"net": compiled})
    assert [names for names in described(model).values()] == [[("net.weight", [2, 2])], [("net.bias", [2])]]


def test_saved_names_become_those_of_the_model() -> None:
    state = OrderedDict({"net.weight": 1, "net.bias": 2, "gone": 3})
    state._metadata = {"": {"version": 1}, "net": {"version": 7}}  # type: ignore[attr-defined]
    found = named_like(state, ["net._orig_mod.weight", "net._orig_mod.bias"], ["", "net", "net._orig_mod"])
    assert dict(found) == {"net._orig_mod.weight": 1, "net._orig_mod.bias": 2, "gone": 3}
    assert found._metadata["net._orig_mod"] == {"version": 7}  # type: ignore[attr-defined]
    assert named_like(state, ["net.weight", "net.bias"], []) is state


def test_positions_are_those_of_the_model_and_the_order_of_a_group_stays() -> None:
    state = {
        "state": {"b": {"step": 1, "nested": {"0": 5}}, "_orig_mod.a": {"step": 2}},
        "param_groups": [{"lr": 0.1, "params": ["b", "_orig_mod.a"]}],
    }
    assert by_position(state, ["frozen", "a", "b"]) == {
        "state": {1: {"step": 2}, 2: {"step": 1, "nested": {0: 5}}},
        "param_groups": [{"lr": 0.1, "params": [2, 1]}],
    }
