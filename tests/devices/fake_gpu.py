"""Tensors that say they are on ``cuda:0``, by a subclass: for code that asks a tensor where it is.

The data are in an inner tensor of the CPU. Operations run at once, except that a copy to the host asked for with
``non_blocking=True`` is only queued: the host tensor holds garbage, for nothing here ever synchronises. There is no
backward pass and no pinned memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

queued: list[tuple[Tensor, Tensor]] = []
"""Target and source of each copy that was asked for with ``non_blocking=True``, and never made."""


def _garbage(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if tensor.dtype is torch.bool else 0x55)


def inner_of(value: Any) -> Any:
    """The data of a tensor that says it is elsewhere; anything else as it is."""
    return value.inner if isinstance(value, FakeGPUTensor) else value


def _outer(value: Any) -> Any:
    return FakeGPUTensor(value) if isinstance(value, Tensor) and not isinstance(value, FakeGPUTensor) else value


class FakeGPUTensor(Tensor):
    """Says ``cuda:0``; `inner` has the data."""

    inner: Tensor

    @staticmethod
    def __new__(cls: type, inner: Tensor) -> FakeGPUTensor:
        made: FakeGPUTensor = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device="cuda:0", requires_grad=inner.requires_grad,
        )  # fmt: skip
        made.inner = inner.detach()
        return made

    def __repr__(self) -> str:
        return f"FakeGPUTensor({self.inner!r}, device='cuda:0')"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        if name == "aten::_to_copy" and to_host and kwargs.get("non_blocking"):
            target = _garbage(torch.empty_like(args[0].inner, dtype=kwargs.get("dtype")))
            queued.append((target, args[0].inner))
            return target
        if name == "aten::copy_":
            target, source = args[:2]
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            if non_blocking and isinstance(source, cls) and not isinstance(target, cls):
                queued.append((_garbage(target), source.inner))
            else:
                inner_of(target).copy_(inner_of(source))
            return target
        for argument in ("non_blocking", "pin_memory"):
            kwargs.pop(argument, None)
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        result = func(*tree_map(inner_of, args), **tree_map(inner_of, kwargs))
        if func._schema.is_mutable and args and isinstance(args[0], cls):
            return args[0]
        return result if to_host else tree_map(_outer, result)


def moved(module: nn.Module) -> nn.Module:
    """`module` with every parameter and buffer on the device that is none."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(FakeGPUTensor(parameter.detach().clone()), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = FakeGPUTensor(buffer.detach().clone())
    return module


@contextmanager
def cuda_is_here() -> Iterator[None]:
    """Torch says that it has CUDA; whoever asks for a stream, an event or pinned memory of it gets an error."""
    queued.clear()
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("cuda")),
    ):
        yield
    queued.clear()
