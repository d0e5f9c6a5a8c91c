from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ft._copying.module_tree import ModuleTree
from lightning_ft.state import optimizer_layout


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.lookup = nn.Embedding(5, 2)
        self.tied = self.first
        self.one, self.second = nn.Module(), nn.Module()
        self.one.own = nn.Parameter(torch.ones(1))


def requires_grad(model: nn.Module) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in model.named_parameters()}


CHANGES: dict[str, Callable[[Model], Any]] = {
    "a parameter is replaced": lambda m: setattr(m.first, "weight", nn.Parameter(torch.ones(3, 2))),
    "a parameter is removed": lambda m: setattr(m.first, "bias", None),
    "a parameter is added": lambda m: m.register_parameter("own", nn.Parameter(torch.ones(1), requires_grad=False)),
    "a module is replaced": lambda m: setattr(m, "norm", nn.LayerNorm(3)),
    "a module is added": lambda m: m.add_module("more", nn.Linear(1, 1)),
    "a module is removed": lambda m: delattr(m, "norm"),
    "a module has another name": lambda m: (delattr(m, "norm"), m.add_module("renamed", nn.BatchNorm1d(3))),
    "parameters move to the next module": lambda m: (
        m.second.register_parameter("own", m.one.own),
        m.one.__delattr__("own"),
    ),
    "another table of parameters": lambda m: setattr(m.lookup, "_parameters", {"other": m.lookup.weight}),
    "deep inside": lambda m: setattr(m.tied, "weight", nn.Parameter(torch.ones(3, 2))),
    "a parameter is frozen": lambda m: m.first.weight.requires_grad_(False),
    "two change places": lambda m: m.first.requires_grad_(False) and m.lookup.requires_grad_(True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_seen(name: str) -> None:
    model = Model()
    model.lookup.requires_grad_(False)
    tree = ModuleTree(model)
    assert tree.requires_grad() == requires_grad(model)
    optimizers = [torch.optim.SGD(model.parameters())]
    assert tree.layout(optimizers) == optimizer_layout(optimizers, model)
    CHANGES[name](model)
    assert tree.requires_grad() == requires_grad(model)
    assert tree.layout(optimizers) == optimizer_layout(optimizers, model)
    assert [n for n, _ in tree.modules] == [n for n, _ in model.named_modules()]


OPTIMIZERS: dict[str, Callable[[Model, list[Any]], Any]] = {
    "a group more": lambda m, o: o[0].add_param_group({"params": list(m.lookup.parameters())}),
    "an optimizer more": lambda m, o: o.append(torch.optim.SGD(m.lookup.parameters())),
    "another order": lambda m, o: o[0].param_groups[0]["params"].reverse(),
    "a parameter moves to another group": lambda m, o: (
        o[0].param_groups[1]["params"].append(o[0].param_groups[0]["params"].pop())
    ),
    "a parameter of another shape": lambda m, o: setattr(m.first.weight, "data", torch.ones(6)),
    "a parameter of another dtype": lambda m, o: setattr(m.first.weight, "data", torch.ones(3, 2, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_has_changed_in_the_optimizers_is_seen(name: str) -> None:
    model = Model()
    groups = [{"params": list(model.first.parameters())}, {"params": list(model.norm.parameters())}]
    optimizers: list[Any] = [torch.optim.SGD(groups)]
    tree = ModuleTree(model)
    before = tree.layout(optimizers)
    OPTIMIZERS[name](model, optimizers)
    assert tree.layout(optimizers) == optimizer_layout(optimizers, model) != before


def test_while_nothing_changes_nothing_is_looked_through_again() -> None:
    model = Model()
    optimizers = [torch.optim.Adam(model.parameters())]
    tree = ModuleTree(model)
    trained, layout = tree.requires_grad(), tree.layout(optimizers)
    for _ in range(3):
        model.first.weight.data.add_(1)
        assert tree.requires_grad() is trained
        assert tree.layout(optimizers) is layout
        assert len(tree.changed_in_forward()) == 3
    assert tree.walks == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_module_may_be_anywhere() -> None:
    model = Model()
    model.norm = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    tree = ModuleTree(model)
    for _ in range(2):
        assert tree.requires_grad() == requires_grad(model)
        assert len(tree.changed_in_forward()) == 3
        next(model.norm.parameters()).requires_grad_(False)


def test_buffers_are_those_of_now() -> None:
    model = Model()
    tree = ModuleTree(model)
    assert len(tree.changed_in_forward()) == 3
    model.norm.running_mean = torch.zeros(3)
    model.register_buffer("own", torch.ones(1))
    model.register_buffer("none", None)
    model.lookup.max_norm = 1.0
    found = {id(t) for t in tree.changed_in_forward()}
    assert {id(model.norm.running_mean), id(model.own), id(model.lookup.weight)} <= found
    assert len(found) == 5
