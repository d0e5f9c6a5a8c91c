"""The copying itself: how the bytes of storages get into host memory, by which calls and threads."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, UntypedStorage

PIECE_BYTES = 8 << 20
"""Of one call that copies: what a thread that waits for its turn may have to wait for."""

Piece = tuple[int, int, int]
"""Destination and source address, and a length in bytes."""


def is_streamed(device: torch.device) -> bool:
    """Whether `device` copies into page-locked host memory by itself, on a stream, while the host goes on."""
    if device.type in ("cpu", "meta", "mps") or not torch.accelerator.is_available():
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def copied(tensor: Tensor) -> Tensor:
    """A copy in host memory of a tensor that has no single storage. Blocks on: the copy."""
    source = tensor.detach()
    copy = source.clone() if source.is_meta else source.clone().cpu()
    return copy.requires_grad_(tensor.requires_grad)


def storage_bytes(storage: UntypedStorage) -> Tensor:
    """All of `storage`, as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def digest(data: Tensor) -> str:
    """xxh3-128 of a tensor of uint8, on any device."""
    host = data.detach().cpu()
    size_bytes = host.numel()
    view: Any = (ctypes.c_char * size_bytes).from_address(host.data_ptr()) if size_bytes else b""
    return xxhash.xxh3_128_hexdigest(view)


def copy_grouped(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Many small tensors of host memory are copied, by one call without the GIL."""
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(list(targets), list(sources))


def pieces(target: int, source: int, size_bytes: int) -> Iterable[Piece]:
    """A stretch of host memory, cut."""
    for start in range(0, size_bytes, PIECE_BYTES):
        yield target + start, source + start, min(PIECE_BYTES, size_bytes - start)


def move(queue: deque[Piece]) -> None:
    """The pieces are copied, each by one of the threads that run this with the same queue."""
    while True:
        try:
            target, source, size_bytes = queue.popleft()
        except IndexError:
            return
        ctypes.memmove(target, source, size_bytes)  # called without the GIL


def launch(stream: Any, device: torch.device, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
    """Copies from `device` are launched on `stream`, behind what its current stream has been given so far.

    Blocks on: nothing, if `targets` are page-locked. The sources have to live until the returned event has happened.
    """
    before, current = torch.accelerator.current_stream(), torch.accelerator.current_stream(device)
    stream.wait_stream(current)
    torch.accelerator.set_stream(stream)
    try:
        with torch.no_grad():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
    except BaseException:
        stream.synchronize()  # there is no event for those that were launched, and their targets are about to be free
        raise
    finally:
        torch.accelerator.set_stream(current)
        torch.accelerator.set_stream(before)  # and with it its device, for which torch 2.6 has another function
    return stream.record_event()
