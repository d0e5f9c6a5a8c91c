from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ft.errors import RestoreError
from lightning_ft.state import (
    match_optimizer_states,
    optimizer_layout,
    restore_requires_grad,
    restore_state_dtypes,
)


class Model(nn.Module):
    """Parameters of the given names; each has one shape, unless told otherwise."""

    def __init__(self, names: str, dtype: torch.dtype = torch.float32, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(shapes.get(name, (2,)), dtype=dtype)))

    def groups(self, *groups: str) -> list[dict[str, Any]]:
        return [{"params": [getattr(self, name) for name in group]} for group in groups]


def optimizer(model: Model, *groups: str, cls: Any = torch.optim.Adam, **kwargs: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = cls(model.groups(*groups), **kwargs)
    return made


def train(optimizer: torch.optim.Optimizer) -> None:
    """Every parameter gets a state of its own: its moments tell which it is."""
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.full_like(parameter, number + 1)
    optimizer.step()


def moments(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    return {
        name: optimizer.state[p]["exp_avg"].flatten()[0].item()
        for name, p in model.named_parameters()
        if p in optimizer.state
    }


def transfer(saved: tuple[str, ...], present: tuple[str, ...]) -> tuple[dict[str, float], dict[str, float], list[str]]:
    """Moments by name before and after a restart with other groups, and what is said of it."""
    names = "".join(saved)
    old = Model(names)
    first = optimizer(old, *saved)
    train(first)
    new = Model(names)
    second = optimizer(new, *present)
    states, changed = match_optimizer_states(
        [first.state_dict()], optimizer_layout([first], old), optimizer_layout([second], new)
    )
    second.load_state_dict(states[0])
    return moments(old, first), moments(new, second), changed


@pytest.mark.parametrize(
    ("saved", "present", "said"),
    [
        (("abc",), ("abc",), 0),
        (("abc",), ("cab",), 1),
        (("abc",), ("bca",), 1),
        (("ab", "cd"), ("ab", "cd"), 0),
        (("ab", "cd"), ("ba", "cd"), 1),
        (("ab", "cd"), ("ba", "dc"), 1),
        (("a", "bcd"), ("a", "dbc"), 1),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, tuple) else str(v),
)
def test_every_parameter_keeps_its_own_state(saved: tuple[str, ...], present: tuple[str, ...], said: int) -> None:
    before, after, changed = transfer(saved, present)
    assert len(set(before.values())) == len(before)
    assert after == before
    assert len(changed) == said


def test_what_was_saved_is_not_changed_by_matching() -> None:
    old, new = Model("abc"), Model("abc")
    first, second = optimizer(old, "abc"), optimizer(new, "cba")
    train(first)
    state = first.state_dict()
    before = copy.deepcopy(state)
    match_optimizer_states([state], optimizer_layout([first], old), optimizer_layout([second], new))
    assert state["param_groups"] == before["param_groups"]


def test_options_of_groups_stay_with_their_groups() -> None:
    old, new = Model("abcd"), Model("abcd")
    first = torch.optim.Adam([{**g, "lr": lr} for g, lr in zip(old.groups("ab", "cd"), (0.1, 0.2), strict=True)])
    second = optimizer(new, "ba", "dc")
    train(first)
    (state,), _ = match_optimizer_states(
        [first.state_dict()], optimizer_layout([first], old), optimizer_layout([second], new)
    )
    second.load_state_dict(state)
    assert [g["lr"] for g in second.param_groups] == [0.1, 0.2]


def test_names_that_the_optimizer_knows_itself_follow_their_parameters() -> None:
    old, new = Model("abc"), Model("abc")
    first = torch.optim.Adam(list(old.named_parameters()))
    second = torch.optim.Adam([(n, getattr(new, n)) for n in "cab"])
    train(first)
    (state,), _ = match_optimizer_states(
        [first.state_dict()], optimizer_layout([first], old), optimizer_layout([second], new)
    )
    second.load_state_dict(state)
    assert second.param_groups[0]["param_names"] == ["c", "a", "b"]
    assert moments(new, second) == moments(old, first)


def test_parameters_without_a_state_yet_are_matched_too() -> None:
    old, new = Model("ab"), Model("ab")
    first, second = optimizer(old, "ab"), optimizer(new, "ba")
    old.b.grad = torch.ones(2)
    first.step()
    (state,), _ = match_optimizer_states(
        [first.state_dict()], optimizer_layout([first], old), optimizer_layout([second], new)
    )
    second.load_state_dict(state)
    assert moments(new, second) == moments(old, first)


def test_parameters_without_a_name_are_matched_by_position() -> None:
    named, extra = Model("a"), [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    first = torch.optim.Adam([named.a, *extra])
    layout = optimizer_layout([first], named)
    assert layout[0][0]["names"] == ["a", "(unnamed 1)", "(unnamed 2)"]
    assert match_optimizer_states([first.state_dict()], layout, layout) == ([first.state_dict()], [])


def test_a_parameter_with_two_names_is_matched() -> None:
    def made() -> tuple[Model, torch.optim.Optimizer]:
        model = Model("ab")
        model.register_parameter("tied", model.a)
        return model, torch.optim.Adam(model.parameters())

    (old, first), (new, second) = made(), made()
    train(first)
    states, changed = match_optimizer_states(
        [first.state_dict()], optimizer_layout([first], old), optimizer_layout([second], new)
    )
    assert changed == []
    second.load_state_dict(states[0])
    assert moments(new, second) == moments(old, first)


def layout(*groups: str, shape: tuple[int, ...] = (2,)) -> list[dict[str, Any]]:
    return [{"names": list(g), "shapes": [list(shape)] * len(g), "dtypes": ["torch.float32"] * len(g)} for g in groups]


@pytest.mark.parametrize(
    ("saved", "present", "message"),
    [
        ([layout("a")], [layout("a"), layout("b")], "holds 1 optimizers, this run has 2"),
        ([layout("a"), layout("b")], [layout("a")], "holds 2 optimizers, this run has 1"),
        ([layout("ab")], [layout("a", "b")], "optimizer 0: 1 parameter groups were saved, this run has 2"),
        ([layout("abc")], [layout("ab")], r"optimizer 0, group 0: .*missing \['c'\], new \[\]"),
        ([layout("ab")], [layout("abc")], r"optimizer 0, group 0: .*missing \[\], new \['c'\]"),
        ([layout("ab")], [layout("ac")], r"missing \['b'\], new \['c'\]"),
        ([layout("ab", "cd")], [layout("ac", "bd")], r"group 0: .*missing \['b'\], new \['c'\]"),
        ([layout("a"), layout("b")], [layout("b"), layout("a")], r"optimizer 0, group 0: .*missing \['a'\]"),
        (
            [layout("ab")],
            [layout("ab", shape=(3,))],
            r"group 0: a has shape \[3\], its saved state belongs to \[2\]",
        ),
    ],
    ids=["more", "fewer", "groups", "missing", "new", "renamed", "moved", "swapped", "shape"],
)
def test_another_set_of_parameters_is_refused(saved: Any, present: Any, message: str) -> None:
    states = [{"state": {}, "param_groups": [{"params": list(range(9))} for _ in optimizer]} for optimizer in saved]
    with pytest.raises(RestoreError, match=message):
        match_optimizer_states(states, saved, present)


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("parameter", [torch.bfloat16, torch.float32])
def test_state_keeps_the_dtype_and_the_bits_it_was_saved_with(
    parameter: torch.dtype, saved: torch.dtype, order: str
) -> None:
    old, new = Model("ab", parameter), Model("ab", parameter)
    first, second = optimizer(old, "ab"), optimizer(new, order)
    train(first)
    for number, p in enumerate((old.a, old.b)):
        first.state[p]["exp_avg"] = torch.tensor([1.00390625, 3.14159274 + number]).to(saved)
    (state,), _ = match_optimizer_states(
        [first.state_dict()], optimizer_layout([first], old), optimizer_layout([second], new)
    )
    second.load_state_dict(state)
    restore_state_dtypes(second, state)
    for name in "ab":
        then, now = first.state[getattr(old, name)], second.state[getattr(new, name)]
        assert {k: (v.dtype, v.tolist()) for k, v in now.items()} == {k: (v.dtype, v.tolist()) for k, v in then.items()}


def test_restored_state_is_not_the_saved_tensor() -> None:
    model = Model("a", torch.bfloat16)
    made = optimizer(model, "a")
    train(made)
    made.state[model.a]["exp_avg"] = torch.tensor([1.5, 2.5])
    state = copy.deepcopy(made.state_dict())
    made.load_state_dict(state)
    restore_state_dtypes(made, state)
    made.state[model.a]["exp_avg"].zero_()
    assert state["state"][0]["exp_avg"].tolist() == [1.5, 2.5]


def test_state_that_is_no_tensor_is_left_alone() -> None:
    model = Model("a")
    made = optimizer(model, "a", cls=torch.optim.SGD, lr=0.1, momentum=0.9)
    train(made)
    made.state[model.a]["note"] = {"n": 1}
    state = copy.deepcopy(made.state_dict())
    made.load_state_dict(state)
    restore_state_dtypes(made, state)
    assert made.state[model.a]["note"] == {"n": 1}


@pytest.mark.parametrize(
    ("saved", "present", "said"),
    [
        ({"a": True, "b": True}, {"a": True, "b": True}, []),
        ({"a": False, "b": True}, {"a": True, "b": True}, ["1 parameters was set back to what was saved (a)"]),
        ({"a": True, "b": False}, {"a": False, "b": True}, ["2 parameters was set back to what was saved (a, b)"]),
        ({"a": False, "gone": True}, {"a": False, "b": False}, []),
    ],
    ids=["same", "frozen", "both", "others-stay"],
)
def test_parameters_are_frozen_as_they_were(saved: dict[str, bool], present: dict[str, bool], said: list[str]) -> None:
    model = Model("ab")
    for name, value in present.items():
        getattr(model, name).requires_grad_(value)
    lines = restore_requires_grad(model, saved)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == {
        **present,
        **{k: v for k, v in saved.items() if k in present},
    }
    assert len(lines) == len(said)
    assert all(s in line for s, line in zip(said, lines, strict=True))


def test_of_many_parameters_the_first_five_are_named() -> None:
    model = Model("abcdefg")
    (line,) = restore_requires_grad(model, dict.fromkeys("abcdefg", False))
    assert line.endswith("(a, b, c, d, e, ...)")
    assert "of 7 parameters" in line
