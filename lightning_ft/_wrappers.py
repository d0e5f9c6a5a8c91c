"""Names of parameters as they are without the modules that only wrap others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")

# `torch.compile`, activation checkpointing and FSDP put a module around another one, under these names.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def plain_name(name: str) -> str:
    """`name` without the wrappers in it: the same parameter has the same name, compiled, sharded or neither."""
    if not any(wrapper in name for wrapper in WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def plain_names(state: Mapping[str, _T]) -> dict[str, _T]:
    """`state` under `plain_name` of its names, in the same order."""
    return {plain_name(name): value for name, value in state.items()}


def plain_optimizer_state(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer, in which names stand for parameters, under their plain names."""
    if not state:
        return state
    groups = [
        {**group, "params": [plain_name(p) if isinstance(p, str) else p for p in group["params"]]}
        for group in state["param_groups"]
    ]
    of_parameters = {plain_name(p) if isinstance(p, str) else p: values for p, values in state["state"].items()}
    return {**state, "state": of_parameters, "param_groups": groups}
