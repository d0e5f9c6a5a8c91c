"""A copy of a checkpoint dictionary that training can no longer change, and a check of what it holds."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# What torch's weights-only unpickler accepts without being told; containers are walked, leaves are not.
_PLAIN_LEAVES = (str, bytes, int, float, complex, bool, type(None), torch.Size, torch.dtype, torch.device)


def snapshot(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Afterwards nothing the caller does to `checkpoint`, its tensors or its objects shows in the result.

    Tensors are copied to CPU memory; tensors that share a storage in `checkpoint` share one in the copy (tied
    weights stay tied, also in the size of the file). Everything else is deep-copied.

    Thread: main, at a step boundary. Blocks on: the copy (device copies are synchronous).
    """
    # deepcopy looks an object up in the memo before it copies it, so tensors placed there are taken as they are,
    # wherever they hide in containers or objects that we do not walk ourselves.
    memo: dict[int, Any] = {}
    storages: dict[tuple[str, int], torch.UntypedStorage] = {}
    for tensor in _tensors(checkpoint):
        memo[id(tensor)] = _copy_tensor(tensor, storages)
    return copy.deepcopy(checkpoint, memo)


def not_weights_only(value: Any, path: str = "checkpoint") -> list[str]:
    """Key paths in `value` that ``torch.load(weights_only=True)`` would refuse, with their types.

    What the user allowed with ``torch.serialization.add_safe_globals`` counts as safe.
    """
    if type(value) in (dict, OrderedDict):
        problems = [p for k in value for p in _leaf_problem(k, f"{path} (key {k!r})")]
        return problems + [p for k, v in value.items() for p in not_weights_only(v, f"{path}[{k!r}]")]
    if type(value) in (list, tuple):
        return [p for i, v in enumerate(value) for p in not_weights_only(v, f"{path}[{i}]")]
    return _leaf_problem(value, path)


def _leaf_problem(value: Any, path: str) -> list[str]:
    if type(value) in _PLAIN_LEAVES or type(value) in (Tensor, torch.nn.Parameter):
        return []
    if type(value) is tuple:
        return not_weights_only(value, path)
    # Rare types are judged by the loader itself and not by a list of ours that would age.
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError, RuntimeError):
        kind = type(value)
        return [f"{path} is a {kind.__module__}.{kind.__qualname__}"]
    return []


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for v in value.values():
            yield from _tensors(v)
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)


def _copy_tensor(tensor: Tensor, storages: dict[tuple[str, int], torch.UntypedStorage]) -> Tensor:
    source = tensor.detach()
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and source.layout == torch.strided
    if not plain or source.is_quantized or source.is_meta or source.is_conj() or source.is_neg():
        # sparse, quantised and subclassed tensors have no single storage to share
        return source.clone().cpu()
    storage = source.untyped_storage()
    key = (str(source.device), storage.data_ptr())
    copied = storages.get(key)
    if copied is None or copied.nbytes() != storage.nbytes():
        copied = _copy_storage(storage)
        if storage.nbytes():  # every empty storage has address 0: nothing to share
            storages[key] = copied
    target = torch.empty(0, dtype=source.dtype)
    target.set_(copied, source.storage_offset(), source.size(), source.stride())
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(target, requires_grad=tensor.requires_grad)
    return target


def _copy_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    copied: torch.UntypedStorage = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
    copied.copy_(storage, False)
    return copied
