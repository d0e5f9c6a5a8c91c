"""Optimizer state by position, as files hold it, and by name, as directories do: each from the other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lightning_ft._sharded.wrappers import plain_name


def by_position(state: dict[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """`state` with the place of each parameter in `order` instead of its name, as Lightning counts them for one file.

    Args:
        state: ``{"state": {name: ...}, "param_groups": [{"params": [name, ...], ...}, ...]}``.
        order: The names of all parameters, in the order of the model. Any order does for torch's optimizers, which
            count anew; Lightning's FSDP needs that of the model.
    """
    positions = {name: position for position, name in enumerate(order)}
    groups = [
        {**group, "params": [positions[plain_name(name)] for name in group["params"]]}
        for group in state["param_groups"]
    ]
    values = {positions[plain_name(name)]: with_numbers(of_name) for name, of_name in state["state"].items()}
    return {"state": dict(sorted(values.items())), "param_groups": groups}


def by_name(state: dict[str, Any], names: Sequence[Any]) -> dict[str, Any]:
    """`state`, as an optimizer gives it, with `names` instead of positions; what belongs to no parameter stays.

    Args:
        state: ``Optimizer.state_dict()``.
        names: Of the parameters of all groups, one after the other.
    """
    positions = [position for group in state["param_groups"] for position in group["params"]]
    named = dict(zip(positions, names, strict=True))
    return {
        **state,
        "state": {named.get(position, position): values for position, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [named[position] for position in group["params"]]} for group in state["param_groups"]
        ],
    }


def with_numbers(tree: Any) -> Any:
    """Keys of nested state that were numbers are numbers again: in a directory all keys are text."""
    if not isinstance(tree, dict):
        return tree
    numbered: dict[Any, Any] = {}
    for key, value in tree.items():
        name: Any = key
        with suppress(ValueError):
            name = int(key)
        numbered[name] = with_numbers(value)
    return numbered
