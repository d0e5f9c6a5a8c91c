"""A copy of a checkpoint dictionary that training can no longer change, and a check of what it holds."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

# What torch's weights-only unpickler accepts without being told; containers are walked, leaves are not.
_PLAIN_LEAVES = (str, int, float, complex, bool, type(None), torch.Size, torch.dtype, torch.device)
_PLAIN_INT_BITS = 2000  # longer ones have an encoding of their own, which that unpickler does not know


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
    found = _tensors(checkpoint)  # held until the end: an id is good as long as its object lives
    for tensor in found:
        if id(tensor) not in memo:
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
    if type(value) is int and value.bit_length() > _PLAIN_INT_BITS:
        return [f"{path} is an int of {value.bit_length()} bits"]
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


class _TensorFinder(pickle.Pickler):
    """Finds the tensors that a pickle of a value would hold, in objects of whatever kind; keeps no bytes."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []
        super().__init__(_Discard(), protocol=5, buffer_callback=lambda buffer: None)

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        self.found.append(value)
        return ""


class _Discard:
    def write(self, data: Any) -> int:
        return len(data)


def _tensors(value: Any) -> list[Tensor]:
    finder = _TensorFinder()
    with contextlib.suppress(Exception):  # what cannot be pickled fails when it is written, and is reported then
        finder.dump(value)
    return finder.found


def _copy_tensor(tensor: Tensor, storages: dict[tuple[str, int], torch.UntypedStorage]) -> Tensor:
    source = tensor.detach()
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and source.layout == torch.strided
    if not plain or source.is_quantized or source.is_meta or source.is_conj() or source.is_neg():
        # sparse, quantised and subclassed tensors have no single storage to share, meta tensors no data to move
        copied_tensor = source.clone() if source.is_meta else source.clone().cpu()
        return copied_tensor.requires_grad_(tensor.requires_grad)
    storage = source.untyped_storage()
    key = (str(source.device), storage.data_ptr())
    copied = storages.get(key)
    if copied is None or copied.nbytes() != storage.nbytes():
        copied = _copy_storage(storage)
        if storage.nbytes():  # every empty storage has address 0: nothing to share
            storages[key] = copied
    target = torch.empty(0, dtype=source.dtype, device="cpu")
    target.set_(copied, source.storage_offset(), source.size(), source.stride())
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(target, requires_grad=tensor.requires_grad)
    return target.requires_grad_(tensor.requires_grad)


def _copy_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    copied: torch.UntypedStorage = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
    copied.copy_(storage, False)
    return copied
