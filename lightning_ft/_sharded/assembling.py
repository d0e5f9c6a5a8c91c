"""Lightning's ordinary dictionary, as one file holds it, from a directory of shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_ft._names import KEY
from lightning_ft._sharded.positions import by_position
from lightning_ft._sharded.replicated import AS_FILE, as_saved, positions_of
from lightning_ft._sharded.shards import Saved, Shards, leaves, with_values
from lightning_ft._sharded.wrappers import plain_name


def assemble(
    shards: Shards, weights_only: bool | None, progress: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """What ``state_dict_type="full"`` would have saved: whole tensors on the CPU, optimizer states by position.

    Everything is verified before anything is unpickled. Memory: the result and one saved piece of a tensor.

    Args:
        shards: The directory, just opened.
        weights_only: As for `torch.load`, of what is no tensor.
        progress: Called with the number of bytes read since the last call.

    Raises:
        CheckpointError: It is damaged, or not all there.
    """
    shards.check_presence()
    entries = [*shards.weights.values(), *leaves(shards.nested)]
    for tree in shards.optimizers:
        entries += leaves(tree)
    shards.verify(shards.files_of(entries))
    checkpoint = shards.read_rest(weights_only)
    found = shards.read_objects(entries, weights_only, progress)
    weights = {name: found[saved.key] for name, saved in shards.weights.items()}
    weights |= with_values(shards.nested, found)
    states = [with_values(tree, found) for tree in shards.optimizers]
    as_file = (checkpoint.get(KEY) or {}).pop(AS_FILE, None)
    if as_file is not None:
        checkpoint["state_dict"] = as_saved(weights, as_file)
        if as_file["optimizers"]:  # an optimizer without any state stands for none
            checkpoint["optimizer_states"] = [by_position(state, positions_of(state)) for state in states] or [{}]
        return checkpoint
    checkpoint["state_dict"] = weights
    if states:
        order = _order(shards.weights, states, checkpoint)
        checkpoint["optimizer_states"] = [by_position(state, order) for state in states]
    return checkpoint


def _order(weights: dict[str, Saved], states: list[dict[str, Any]], checkpoint: dict[str, Any]) -> list[str]:
    """The names of the parameters in the order of the model."""
    named = {plain_name(name) for state in states for group in state["param_groups"] for name in group["params"]}
    saved = checkpoint.get(KEY) or {}
    order = [plain_name(name) for name in saved.get("requires_grad", {})]
    if not named.issubset(order):  # then the order of the parameters that are optimized is all that is known
        order = [name for name in weights if name in named]
    return order + sorted(named.difference(order))
