"""A replicated state by name: who gives what of it, and what would not come back from a directory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from lightning_ft._sharded.positions import by_position
from lightning_ft._sharded.replicated import Names, as_file, as_saved, by_layout, positions_of, require_restorable
from lightning_ft.errors import SaveError

ONE = torch.ones(1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(reversed(list(model.parameters())), lr=0.1)
    sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    return optimizer


def layout(model: nn.Module, optimizer: Any, *, everything: bool, weights: Any = None) -> dict[str, Any]:
    parameters = [[p for group in optimizer.param_groups for p in group["params"]]]
    weights = model.state_dict() if weights is None else weights
    return by_layout(weights, [optimizer.state_dict()], parameters, Names(model), everything=everything)


def test_rank_0_gives_everything_and_the_others_what_is_alike() -> None:
    model = Model()
    optimizer = stepped(model)
    zero, other = (layout(model, optimizer, everything=everything) for everything in (True, False))
    assert list(zero["state_dict"]) == list(model.state_dict())
    assert list(other["state_dict"]) == [
        name for name in model.state_dict() if "running" not in name and "num" not in name
    ]
    assert (
        zero["optimizer_0"]["state"].keys()
        == other["optimizer_0"]["state"].keys()
        == dict(model.named_parameters()).keys()
    )
    assert zero["optimizer_0"]["param_groups"][0]["params"] == list(dict(model.named_parameters()))[::-1]
    assert "param_groups" not in other["optimizer_0"]
    for name, of_zero in zero["optimizer_0"]["state"].items():
        assert of_zero["exp_avg"] is other["optimizer_0"]["state"][name]["exp_avg"]


def test_what_only_is_called_like_a_parameter_is_rank_0s() -> None:
    model = Model()
    weights = {**model.state_dict(), "first.bias": model.first.bias.detach().clone(), "second.bias": 3}
    other = layout(model, stepped(model), everything=False, weights=weights)
    assert "first.bias" not in other["state_dict"]
    assert "second.bias" not in other["state_dict"]
    assert "first.weight" in other["state_dict"]


def test_positions_are_the_optimizers_own_again() -> None:
    model = Model()
    optimizer = stepped(model)
    named = layout(model, optimizer, everything=True)["optimizer_0"]
    state = by_position(named, positions_of(named))
    assert state["param_groups"] == optimizer.state_dict()["param_groups"]
    for position, values in optimizer.state_dict()["state"].items():
        assert all(state["state"][position][name] is value for name, value in values.items())


def test_names_without_wrappers_that_are_the_same_are_refused() -> None:
    model = Model()
    weights = {"a.weight": ONE, "a._orig_mod.weight": ONE}
    with pytest.raises(SaveError, match=r"two names are 'a\.weight'"):
        layout(model, stepped(model), everything=True, weights=weights)


@pytest.mark.parametrize(("count", "empty"), [(2, 1), (1, 0)])
def test_an_optimizer_without_a_state_is_known_only_alone(count: int, empty: int) -> None:
    model = Model()
    optimizer = stepped(model)
    parameters = [[p for group in optimizer.param_groups for p in group["params"]]] * count
    states = [{} if number == empty else optimizer.state_dict() for number in range(count)]
    names = Names(model)
    assert "optimizer_1" not in by_layout({}, states, parameters, names, everything=False)
    if count == 1:
        assert by_layout({}, states, parameters, names, everything=True) == {"state_dict": {}}
        return
    with pytest.raises(SaveError, match="optimizer 1: its state_dict\\(\\) is empty"):
        by_layout({}, states, parameters, names, everything=True)


def test_states_and_optimizers_that_are_not_as_many() -> None:
    model = Model()
    optimizer = stepped(model)
    states = [optimizer.state_dict()] * 2
    with pytest.raises(SaveError, match="2 optimizer states are to be saved of 1 optimizers"):
        by_layout({}, states, [list(model.parameters())], Names(model), everything=True)
    with pytest.raises(SaveError, match=r"tells of 5 parameters and not of 1"):
        by_layout({}, states[:1], [[model.norm.bias]], Names(model), everything=True)
    with pytest.raises(SaveError, match=r"has norm\.bias twice"):
        by_layout({}, states[:1], [[model.norm.bias] * 2], Names(model), everything=True)


GROUPS = [{"params": ["a"], "lr": 0.1, "betas": (0.9, 0.999), "table": [{"x": ONE}]}]


def checked(weights: Any, state: Any, groups: Any = GROUPS) -> None:
    whole = {"state_dict": weights, "optimizer_0": {"state": {"a": state}, "param_groups": groups}}
    require_restorable(whole, *flatten_state_dict(whole))


@pytest.mark.parametrize(
    ("weights", "state"),
    [
        ({"a": ONE, "a.b": ONE, "a.b.c": ONE}, {"step": 3, "none": None}),
        ({"a": [ONE, [ONE, 3]], "b": {"c": {"d": (1, ONE)}}}, {"list": [ONE, ONE], "plain": [1, (2, {})]}),
        (OrderedDict(a=ONE), OrderedDict(a=ONE)),
        ({}, {}),
        ({"a": ONE}, {0: ONE, 12: {3: ONE}}),
        ({"a": set()}, {"tuple": (1, {})}),
    ],
)
def test_what_comes_back_as_it_is(weights: Any, state: Any) -> None:
    checked(weights, state)


@pytest.mark.parametrize(
    ("weights", "state", "named"),
    [
        ({"a": {}}, {}, r"state_dict\.a would"),
        ({"a": {1: ONE}}, {}, r"state_dict\.a\.1 would"),
        ({"a": [ONE, {}]}, {}, r"state_dict\.a would|state_dict\.a\.1 would"),
        ({}, {"a": {}}, r"optimizer_0\.state\.a would"),
        ({}, {"a": [1, {}], "b": ONE}, r"optimizer_0\.state\.a\.a would"),
        ({}, {"1": ONE}, r"optimizer_0\.state\.a\.1 would"),
        ({}, {(1, 2): ONE}, r"optimizer_0\.state\.a\.\(1, 2\) would"),
        ({}, {True: ONE}, r"optimizer_0\.state\.a\.True would"),
    ],
)
def test_what_would_not_come_back_is_named(weights: Any, state: Any, named: str) -> None:
    with pytest.raises(SaveError, match=named):
        checked(weights, state)


def test_weights_have_their_order_and_the_versions_of_modules() -> None:
    saved = Model().state_dict()
    shuffled = dict(sorted(saved.items()))
    back = as_saved(shuffled, as_file(saved, 1))
    assert list(back) == list(saved)
    assert back._metadata == saved._metadata  # type: ignore[attr-defined]
    plain = as_saved(shuffled, as_file(dict(saved), 1))
    assert type(plain) is dict
