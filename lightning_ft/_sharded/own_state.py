"""State that each rank of a sharded strategy has for itself, and of which a checkpoint holds that of rank 0 alone.

Lightning saves it so, and a restart gives rank 0's to all. Where the ranks have the same that is right. Where not, the
restart is not exact, and a callback that keeps shards has those of rank 0 on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_ft._sharded.wrappers import plain_name
from lightning_ft._state.digest import digest


def own_state(module: nn.Module, callbacks: Mapping[str, Any]) -> dict[str, str | None]:
    """A digest of each persistent buffer and of the tensors of each callback, by what a person calls them.

    Args:
        module: The model; what is spread over the ranks does not count.
        callbacks: Their states, by their keys. Only tensors count: clocks of two ranks never agree.
    """
    found: dict[str, str | None] = {}
    for prefix, owner in module.named_modules():
        for short, buffer in owner._buffers.items():
            if buffer is not None and short not in owner._non_persistent_buffers_set and _is_whole(buffer):
                name = plain_name(f"{prefix}.{short}" if prefix else short)
                found[f"buffer {name}"] = digest(buffer)
    for key, state in callbacks.items():
        if tensors := list(_tensors(state)):
            found[f"state of callback {key}"] = digest(tensors)
    return found


def differing(of_ranks: Sequence[Mapping[str, str | None]]) -> list[str]:
    """What some rank has otherwise than rank 0."""
    names = dict.fromkeys(name for own in of_ranks for name in own)
    return [name for name in names if len({own.get(name) for own in of_ranks}) > 1]


def _is_whole(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return not isinstance(tensor, DTensor)


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor) and _is_whole(tree):
        yield tree
    children = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, (list, tuple)) else ()
    for child in children:
        yield from _tensors(child)
