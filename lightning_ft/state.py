"""State that Lightning's checkpoint leaves out or stores by position: optimizers by name, frozen parameters.

Pure functions on modules and optimizers; per-rank random state is in `_state.random_state`, positions of
loaders in `dataloading`.
"""

from __future__ import annotations

import copy
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ft._sharded.places import described, like_parameter, local_part
from lightning_ft._sharded.wrappers import plain_name
from lightning_ft.errors import RestoreError


@dataclass(frozen=True)
class Progress:
    """The counters of a run, as they stand at some moment."""

    step: int
    """Optimizer steps; in manual optimization batches, since there each optimizer counts."""
    batch: int
    """Batches trained since the run began: grows by one per batch, so it tells which state is newer."""
    epochs: int
    """Epochs finished since the run began."""
    last_batch: bool
    """The batch trained last is the last one of its epoch."""
    epoch_over: bool
    """The epoch is over and the next one has not begun."""


def optimizer_layout(optimizers: Sequence[Optimizer], module: nn.Module) -> list[list[dict[str, Any]]]:
    """Names, shapes and dtypes of the parameters behind each optimizer's positions: one entry per parameter group.

    torch stores optimizer state by position only; without the names a changed order of two equal shapes swaps their
    moments in silence.
    """
    known = described(module)
    return [[_layout_of(group["params"], known) for group in optimizer.param_groups] for optimizer in optimizers]


def _layout_of(parameters: Sequence[Tensor], known: dict[int, list[tuple[str, list[int]]]]) -> dict[str, Any]:
    inside = [
        (name, shape, str(p.dtype))
        for i, p in enumerate(parameters)
        for name, shape in known.get(id(p), [(f"(unnamed {i})", list(p.shape))])
    ]
    return {
        "names": [name for name, _, _ in inside],
        "shapes": [shape for _, shape, _ in inside],
        "dtypes": [dtype for _, _, dtype in inside],
    }


def match_optimizer_states(
    states: Sequence[dict[str, Any]], saved: list[list[dict[str, Any]]], present: list[list[dict[str, Any]]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The saved states with their positions put in the order of the present optimizers.

    Args:
        states: One ``Optimizer.state_dict()`` per optimizer, as saved.
        saved: `optimizer_layout` at the save.
        present: `optimizer_layout` now.

    Returns:
        The states (copied where they were changed) and a line for each group whose order had changed.

    Raises:
        RestoreError: Another number of optimizers or groups, other names, or another shape under a name.
    """
    if len(saved) != len(present):
        raise RestoreError(f"the checkpoint holds {len(saved)} optimizers, this run has {len(present)}")
    matched, changed = [], []
    for number, (state, then, now) in enumerate(zip(states, saved, present, strict=True)):
        if len(then) != len(now):
            raise RestoreError(f"optimizer {number}: {len(then)} parameter groups were saved, this run has {len(now)}")
        orders = [
            _order(f"optimizer {number}, group {g}", a, b) for g, (a, b) in enumerate(zip(then, now, strict=True))
        ]
        if any(order != sorted(order) for order in orders):
            state = copy.copy(state)
            state["param_groups"] = [
                {**group, **{key: [group[key][i] for i in order] for key in ("params", "param_names") if key in group}}
                for group, order in zip(state["param_groups"], orders, strict=True)
            ]
            changed.append(f"optimizer {number}: parameters are in another order than when saved; matched by name")
        matched.append(state)
    return matched, changed


def _order(where: str, then: dict[str, Any], now: dict[str, Any]) -> list[int]:
    """For each present parameter its position among the saved ones."""
    then = {**then, "names": [plain_name(name) for name in then["names"]]}
    position = {name: i for i, name in enumerate(then["names"])}
    if set(position) != set(now["names"]) or len(position) != len(then["names"]):
        gone = [n for n in then["names"] if n not in now["names"]]
        new = [n for n in now["names"] if n not in position]
        if gone or new:
            raise RestoreError(f"{where}: parameters differ from the saved ones: missing {gone}, new {new}")
        return list(range(len(then["names"])))  # duplicate names: position is all there is
    order = [position[name] for name in now["names"]]
    for name, i, shape in zip(now["names"], order, now["shapes"], strict=True):
        if then["shapes"][i] != shape:
            raise RestoreError(f"{where}: {name} has shape {shape}, its saved state belongs to {then['shapes'][i]}")
    return order


def restore_state_dtypes(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Every tensor of the optimizer's state has the dtype and the bits it was saved with.

    ``Optimizer.load_state_dict`` casts floating state to its parameter's dtype: 32-bit moments of a bfloat16
    parameter lose half their bits there.
    """
    positions = [i for group in state["param_groups"] for i in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for position, parameter in zip(positions, parameters, strict=True):
        # `ZeroRedundancyOptimizer` leaves nothing in it of what other ranks have.
        for key, value in (state["state"].get(position) or {}).items():
            loaded = optimizer.state[parameter].get(key)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(loaded.device, copy=True)


def restore_requires_grad(module: nn.Module, saved: dict[str, bool]) -> list[str]:
    """Every parameter is frozen or trained as it was when saved; returns a line for those that were not."""
    saved = {plain_name(name): trained for name, trained in saved.items()}
    named = [(plain_name(name), p) for name, p in module.named_parameters()]
    wrong = [(name, p) for name, p in named if name in saved and p.requires_grad != saved[name]]
    for name, parameter in wrong:
        parameter.requires_grad_(saved[name])
    if not wrong:
        return []
    shown = ", ".join(name for name, _ in wrong[:5]) + (", ..." if len(wrong) > 5 else "")
    return [f"requires_grad of {len(wrong)} parameters was set back to what was saved ({shown})"]


def held_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Gradients that the next step may add to, by parameter name, on the CPU.

    In automatic optimization there are none at a step boundary: Lightning clears them before the next backward. In
    manual optimization only the user's code knows, so all are kept that are there; `zero_grad` after an optimizer's
    step keeps them out of the checkpoint.
    """
    if getattr(module, "automatic_optimization", True):
        return {}
    return {plain_name(n): local_part(p.grad).cpu() for n, p in module.named_parameters() if p.grad is not None}


def restore_gradients(module: nn.Module, saved: dict[str, Tensor]) -> None:
    """The parameters hold the gradients they held when saved; of a sharded one, the part of this rank.

    Raises:
        RestoreError: A parameter is cut into other parts than when saved.
    """
    saved = {plain_name(name): gradient for name, gradient in saved.items()}
    for wrapped_name, parameter in module.named_parameters():
        name = plain_name(wrapped_name)
        if name not in saved:
            continue
        present = local_part(parameter)
        if saved[name].shape != present.shape:
            raise RestoreError(
                f"the gradient of {name} was kept in parts of shape {tuple(saved[name].shape)}, and this run has "
                f"{tuple(present.shape)}: gradients are not dealt out anew. Save after optimizer.zero_grad()"
            )
        parameter.grad = like_parameter(saved[name].to(present.device, copy=True), parameter)


def versions() -> dict[str, str]:
    """The library versions a checkpoint was written by; informative."""
    return {"torch": str(torch.__version__), "python": platform.python_version()}
