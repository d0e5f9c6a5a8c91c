"""Whether the tensors of a save are those that a plan was made for, asked of all of them in a few calls."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lightning_ft._copying.layout import Signature

_log = logging.getLogger(__name__)

# What a compiled function asks about its inputs: class, layout, device, dtype, shape, strides, requires_grad. Private:
# where it is not there, every save looks at each tensor anew.
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_TensorGuards: Any = getattr(_guards, "TensorGuards", None)


class Alike:
    """What tensors have to have in common with those of a signature for it to be theirs; holds none of them.

    Thread: the one that made it, or one with the same settings of torch: another one gets None.

    Args:
        tensors: Of a checkpoint.
        entries: Their signature.
    """

    def __init__(self, tensors: Sequence[Tensor], entries: Signature) -> None:
        self._guards: Any = None
        if _TensorGuards is None or not tensors or not all(entries):
            return
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._sharing = _sharing(storages)
        sizes = [entry[1] for entry in entries]
        # Storages of different size or device at one address: nothing that could be told by addresses alone.
        if any(entry[0] != first for entry, first in zip(entries, self._sharing, strict=True) if entry[1]):
            return
        self._sizes = sizes
        self._offsets = [tensor.storage_offset() for tensor in tensors]
        try:
            with torch.enable_grad():  # without, it takes no notice of `requires_grad`
                guards = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
                self._guards = guards if guards.check(*tensors) is True else None
        except (TypeError, ValueError, RuntimeError, AttributeError) as error:  # of a torch that has other ones
            _log.debug("every save looks at each tensor anew: %s", error)

    @property
    def can_tell(self) -> bool:
        """Whether `addresses` is ever of use for such tensors."""
        return self._guards is not None

    def addresses(self, tensors: Sequence[Tensor]) -> list[int] | None:
        """Of the storages of `tensors`, if these have the signature; None: they have another one, or nobody knows."""
        if self._guards is None or len(tensors) != len(self._sizes):
            return None
        with torch.enable_grad():
            if not self._guards.check(*tensors):
                return None
        storages = list(map(Tensor.untyped_storage, tensors))
        same = (
            list(map(UntypedStorage.nbytes, storages)) == self._sizes
            and list(map(Tensor.storage_offset, tensors)) == self._offsets
            and _sharing(storages) == self._sharing
        )
        return list(map(UntypedStorage.data_ptr, storages)) if same else None


def _sharing(storages: Sequence[UntypedStorage]) -> list[int]:
    """For each storage the first one at its address."""
    first: dict[int, int] = {}
    return list(map(first.setdefault, map(UntypedStorage.data_ptr, storages), range(len(storages))))
