"""A checkpoint dictionary without its bytes: containers and plain values copied, tensors found and still to be placed.

One walk does what every save needs of the structure, because with thousands of small tensors each further walk would
cost as much as the copying.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_ft._copying.template import Template, UnfitError
from lightning_ft._saving.weights_only import PLAIN_INT_BITS, PLAIN_LEAVES, is_plain

_UNCHANGING = PLAIN_LEAVES | {bytes}
_LARGEST_INT = 1 << PLAIN_INT_BITS


class Skeleton:
    """A copy of `checkpoint` that lacks only the bytes of its tensors; what happens to `checkpoint` shows no more.

    Shared objects stay shared. Values of other kinds than dictionaries, lists, tuples and plain values are deep-copied.

    Thread: any that alone uses `checkpoint` and `templates`. Blocks on: nothing; copies no tensor.

    Args:
        checkpoint: What Lightning made for a save.
        templates: Of earlier copies, by the part of the checkpoint. Where one fits, its copy is used again.
    """

    def __init__(self, checkpoint: dict[str, Any], templates: Mapping[str, Template] | None = None) -> None:
        self.tensors: list[Tensor] = []
        """Every tensor, each object once, in the order of the walk; the walk of equal structures is equal."""
        self.of_optimizers = range(0)
        """Those under Lightning's key for optimizer states, and nowhere before."""
        self.odd = False
        """Whether something is there that ``weights_only=True`` may refuse (see `not_weights_only`)."""
        self._indices: dict[int, int] = {}
        self._slots: list[tuple[Any, Any, int]] = []
        self._objects: list[tuple[Any, Any, Any]] = []
        self._memo: dict[int, Any] = {}
        self._root: dict[str, Any] = {}
        self._memo[id(checkpoint)] = self._root
        self._walked: list[tuple[str, Any, int]] = []
        self._met_again = False  # something of the part that is walked: it gets no template then (see there)
        self._refilled_ids: list[set[int]] = []
        self._unindexed: list[tuple[int, list[Tensor]]] = []
        for key, value in checkpoint.items():
            first = len(self.tensors)
            template = templates.get(key) if templates else None
            if template is not None and self._refilled(template, value):
                self._root[key] = template.copy
            elif is_plain(value):
                self._root[key] = value
            else:
                self._index_refilled()
                self._met_again = False
                self._root[key] = self._copied(value, self._root, key)
                if not self._met_again:
                    self._walked.append((key, value, first))
            if key == "optimizer_states":
                self.of_optimizers = range(first, len(self.tensors))
            self.odd = self.odd or type(key) is not str

    def filled(self, targets: list[Tensor]) -> dict[str, Any]:
        """The whole copy, with `targets` in the places of `tensors`. To be called once."""
        for container, key, index in self._slots:
            container[key] = targets[index]
        if self._objects:
            # deepcopy looks an object up in the memo before it copies it, so these are taken as they are, wherever they
            # hide in objects that were not walked.
            memo = self._memo
            memo.update((id(tensor), target) for tensor, target in zip(self.tensors, targets, strict=True))
            for container, key, value in self._objects:
                container[key] = copy.deepcopy(value, memo)
        return self._root

    def templates(self) -> dict[str, Template]:
        """For later copies in the same place: of the parts that were walked, those that can be kept.

        To be made when the copy is filled.
        """
        made: dict[str, Template] = {}
        for key, value, first in self._walked:
            # A structure may be so deep that only the walk has room on the stack.
            with contextlib.suppress(UnfitError, RecursionError):
                made[key] = Template(value, self._root[key], first)
        return made

    def _refilled(self, template: Template, value: Any) -> bool:
        """Whether the copy of `template` can be used; sharing nothing with what was copied before."""
        refilled = template.refill(value) if template.first == len(self.tensors) else None
        if refilled is None:
            return False
        tensors, copies = refilled
        ids = set(map(id, tensors))
        if len(ids) < len(tensors) or not self._indices.keys().isdisjoint(ids):
            return False
        if not (copies.keys().isdisjoint(self._memo) and all(map(ids.isdisjoint, self._refilled_ids))):
            return False
        self._refilled_ids.append(ids)
        self._unindexed.append((len(self.tensors), tensors))
        self.tensors += tensors
        self._memo.update(copies)
        return True

    def _index_refilled(self) -> None:
        """A walk would find what it shares with the parts before it."""
        for first, tensors in self._unindexed:
            self._indices.update(zip(map(id, tensors), range(first, first + len(tensors)), strict=True))
        self._unindexed.clear()

    # The walk runs in the main thread at every save: types are compared by identity, most frequent first.

    def _copied(self, value: Any, container: Any, key: Any) -> Any:
        kind = type(value)
        if kind is Tensor or kind is torch.nn.Parameter:
            self._slots.append((container, key, self._index(value)))
            return None
        if kind is int:
            self.odd = self.odd or not -_LARGEST_INT < value < _LARGEST_INT
            return value
        if kind in _UNCHANGING:
            self.odd = self.odd or kind is bytes
            return value
        if kind is dict or kind is OrderedDict:
            return self._copied_dict(value, container, key)
        if kind is list:
            return self._copied_list(value)
        if kind is tuple and self._is_unchanging(value):
            return value
        return self._later(value, container, key)

    def _copied_dict(self, source: Any, container: Any, key: Any) -> Any:
        known = self._memo.get(id(source))
        if known is not None:
            self._met_again = True
            return known
        if not all(type(name) in _UNCHANGING for name in source):
            return self._later(source, container, key)
        copied: Any = type(source)()
        self._memo[id(source)] = copied
        for name, value in source.items():
            kind = type(name)
            if kind is not str and (kind is bytes or (kind is int and not -_LARGEST_INT < name < _LARGEST_INT)):
                self.odd = True
            kind = type(value)
            if kind is Tensor:
                copied[name] = None
                self._slots.append((copied, name, self._index(value)))
            else:
                copied[name] = self._copied(value, copied, name)
        if type(source) is OrderedDict and vars(source):  # `nn.Module.state_dict` leaves its versions there
            attributes = vars(copied)
            for name, value in vars(source).items():
                attributes[name] = self._copied(value, attributes, name)
        return copied

    def _copied_list(self, source: list[Any]) -> Any:
        known = self._memo.get(id(source))
        if known is not None:
            self._met_again = True
            return known
        copied: list[Any] = source.copy()
        self._memo[id(source)] = copied
        for index, value in enumerate(source):
            kind = type(value)
            if kind is not str and kind is not float:
                copied[index] = self._copied(value, copied, index)
        return copied

    def _is_unchanging(self, value: tuple[Any, ...]) -> bool:
        for item in value:
            kind = type(item)
            if kind is tuple:
                if not self._is_unchanging(item):
                    return False
            elif kind not in _UNCHANGING:
                return False
            elif kind is bytes or (kind is int and not -_LARGEST_INT < item < _LARGEST_INT):
                self.odd = True
        return True

    def _later(self, value: Any, container: Any, key: Any) -> Any:
        """An object of some other kind, or that holds one: its tensors are found, and it is copied when they are."""
        self.odd = True
        for tensor in _tensors(value):
            self._index(tensor)
        self._objects.append((container, key, value))
        return None

    def _index(self, tensor: Tensor) -> int:
        index = self._indices.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
        else:
            self._met_again = True
        return index


def name_of(checkpoint: dict[str, Any], tensor: Tensor) -> str:
    """The key path of `tensor` in `checkpoint`, for messages; empty if it is within an object of another kind."""
    found: list[str] = []

    def search(value: Any, path: str) -> None:
        if value is tensor:
            found.append(path)
        elif isinstance(value, dict):
            for key, item in value.items():
                search(item, f"{path}[{key!r}]" if path else str(key))
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                search(item, f"{path}[{index}]")

    search(checkpoint, "")
    return found[0] if found else ""


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
