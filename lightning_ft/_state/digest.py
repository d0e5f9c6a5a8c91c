"""A digest of any value's bits, the same in every process: how a batch or a state is told from another."""

from __future__ import annotations

import collections
import logging
import pickle
import sys
from typing import Any

import numpy as np
import torch
import xxhash

_log = logging.getLogger(__name__)

_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.Size}
    | {dict, list, tuple, collections.OrderedDict, collections.defaultdict, collections.deque}
)


def digest(batch: Any) -> str | None:
    """A digest of a batch's bits; None when it holds something that cannot be pickled."""
    try:
        return _digest(batch)
    except Exception as error:  # pickling runs code of the batch's classes, which may raise anything
        _log.debug("no digest of a %s: %s", type(batch).__name__, error)
        return None


def digest_of_data(value: Any) -> str | None:
    """A digest of the plain data in `value`: tensors, arrays, numbers and strings, in dicts, lists and the like.

    Of anything else, and of tensors that are spread over several ranks, only the type counts: nobody knows whether two
    processes pickle such objects to the same bytes. None when there is no telling.
    """
    hasher = xxhash.xxh3_128()
    try:
        _DataPickler(hasher).dump(value)
    except Exception as error:  # a structure that contains itself, or is too deep
        _log.debug("no digest of a %s: %s", type(value).__name__, error)
        return None
    return str(hasher.hexdigest())


def _digest(value: Any) -> str:
    hasher = xxhash.xxh3_128()
    _DigestPickler(hasher).dump(value)
    return str(hasher.hexdigest())


class _DigestPickler(pickle.Pickler):
    """A pickle into a hash, without what differs between processes for equal values."""

    def __init__(self, hasher: Any) -> None:
        super().__init__(_HashSink(hasher), protocol=4)
        self.fast = True  # equal objects and the same object twice give the same pickle

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):  # its pickle would hold the address of its storage
            return _tensor_identity(value.detach())
        if isinstance(value, (set, frozenset)):  # the order of strings in it is another in every process
            return type(value).__name__, sorted(_digest(item) for item in value)
        return None


class _DataPickler(_DigestPickler):
    def persistent_id(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return None
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return _tensor_identity(value.detach())
        if kind is set or kind is frozenset:
            return kind.__name__, sorted(str(digest_of_data(item)) for item in value)
        if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            return str(value.dtype), value.shape, xxhash.xxh3_128_hexdigest(np.ascontiguousarray(value).data)
        return f"{kind.__module__}.{kind.__qualname__}"


class _HashSink:
    def __init__(self, hasher: Any) -> None:
        self._hasher = hasher

    def write(self, data: Any) -> int:
        self._hasher.update(data)
        return len(data)


def _tensor_identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    kind = str(tensor.layout), str(tensor.dtype), tuple(tensor.shape)
    shards = _shards(tensor)
    if shards is not None:
        return *kind, *((where, _tensor_identity(part)) for where, part in shards)
    if tensor.layout == torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        plain = tensor.resolve_conj().resolve_neg().cpu().contiguous()
        # Not `reshape`: a single element is contiguous with any stride, and cannot be viewed as bytes with most.
        bits: Any = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy() if plain.numel() else b""
        return *kind, xxhash.xxh3_128_hexdigest(bits)
    return *kind, *(_tensor_identity(part) for part in parts)


def _shards(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]] | None:
    """What this rank holds of a tensor that is spread over the ranks, and where it lies in it; None if it is not."""
    # Whoever made such a tensor has imported its module, which takes its time.
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        mesh = tensor.device_mesh
        return [(f"{tuple(mesh.shape)} {mesh.get_coordinate()} {tensor.placements}", tensor.to_local())]
    sharded = sys.modules.get("torch.distributed._shard.sharded_tensor")
    if sharded is not None and isinstance(tensor, sharded.ShardedTensor):
        return [(str(shard.metadata.shard_offsets), shard.tensor) for shard in tensor.local_shards()]
    return None
