"""What ``torch.load(weights_only=True)``, Lightning's default, would refuse in a checkpoint, said when it is saved."""

from __future__ import annotations

import io
import logging
import pickle
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_ft.errors import SaveError

if TYPE_CHECKING:
    from lightning_ft._copying.staging import Staged

_log = logging.getLogger(__name__)

PLAIN_LEAVES = frozenset({str, int, float, complex, bool, type(None), torch.Size, torch.dtype, torch.device})
"""What torch's weights-only unpickler accepts without being told; containers are walked, leaves are not."""

PLAIN_INT_BITS = 2000
"""Longer integers have an encoding of their own, which that unpickler does not know."""

_LARGEST_INT = 1 << PLAIN_INT_BITS
_ALWAYS_PLAIN = PLAIN_LEAVES - {int}


def is_plain(value: Any) -> bool:
    """Whether `value` is one that never changes and that the unpickler accepts: a leaf, or a tuple of such."""
    kind = type(value)
    if kind is int:
        return -_LARGEST_INT < value < _LARGEST_INT  # type: ignore[no-any-return]
    return kind in PLAIN_LEAVES or (kind is tuple and all(map(is_plain, value)))


def are_plain(values: Collection[Any]) -> bool:
    """Whether each of `values` is plain; of a million strings or floats a matter of a few milliseconds."""
    return _ALWAYS_PLAIN.issuperset(map(type, values)) or all(map(is_plain, values))


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
    if type(value) is int and value.bit_length() > PLAIN_INT_BITS:
        return [f"{path} is an int of {value.bit_length()} bits"]
    if type(value) in PLAIN_LEAVES or type(value) in (Tensor, torch.nn.Parameter):
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


class WeightsOnlyRule:
    """What is done about a checkpoint that could not be loaded with ``weights_only=True``.

    Args:
        required: Whether it is a failed save; if not, the first one is warned of.
    """

    def __init__(self, required: bool = False) -> None:
        self.required = required
        self._warned = False

    def checked(self, staged: Staged, checkpoint: dict[str, Any], path: str) -> Staged:
        """`staged`, of which `checkpoint`, to be saved to `path`, was looked through if that had to be.

        Raises:
            SaveError: See above; `staged` is released.
        """
        try:
            if staged.odd:
                self.check(checkpoint, path)
        except BaseException:
            staged.release()
            raise
        return staged

    def check(self, checkpoint: dict[str, Any], path: str) -> None:
        """`checkpoint`, to be saved to `path`, was looked through. Raises SaveError: see above."""
        problems = not_weights_only(checkpoint)
        if not problems:
            return
        message = (
            "it could not be loaded with weights_only=True, Lightning's default: " + "; ".join(problems[:5])
            + ". Allow the type with torch.serialization.add_safe_globals, keep it out of the checkpoint, or use "
            "FaultTolerantCheckpoint(strict=False) and fit(weights_only=False)"
        )  # fmt: skip
        if self.required:
            raise SaveError(message, path)
        if not self._warned:
            _log.warning("%s: %s", path, message)
            self._warned = True
