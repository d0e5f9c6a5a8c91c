"""Names of parameters as they are without the modules that only wrap others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
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


def named_like(state: Mapping[str, _T], names: Iterable[str], modules: Iterable[str]) -> Mapping[str, _T]:
    """`state` under the names that a model has for the same things, which may be wrapped in it otherwise.

    What the model has not keeps its name. The same object, if all names are the model's.

    Args:
        state: As it was saved.
        names: Of the state of the model.
        modules: The names of its modules.
    """
    present = {plain_name(name): name for name in names}
    if all(present.get(plain_name(name), name) == name for name in state):
        return state
    renamed = OrderedDict((present.get(plain_name(name), name), value) for name, value in state.items())
    # Where torch keeps the versions of modules.
    versions = {plain_name(name): value for name, value in getattr(state, "_metadata", {}).items()}
    kept = {name: versions[plain_name(name)] for name in modules if plain_name(name) in versions}
    renamed._metadata = kept  # type: ignore[attr-defined]
    return renamed


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
