"""The structure of a part of a checkpoint, kept from save to save: where it is the same again, nothing is made anew.

Thousands of small tensors come with as many dictionaries. To copy those at every save costs the main thread more than
the tensors do, and python's garbage collector, which counts new containers and then looks at every object of the
process, costs the training more than both.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_ft._copying.layout import has_one_storage
from lightning_ft._saving.weights_only import are_plain, is_plain

_TENSOR, _LEAF = "tensor", "leaf"
_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_KEYS = frozenset({str, int, bool, type(None)})
_FEW = 8  # dictionaries: up to so many are quicker asked one by one than together


class Template:
    """A copy of one part of a checkpoint, and what has to be found again for the copy to be of use again.

    Only of dictionaries and lists, of tensors and plain values.

    Thread: one at a time.

    Args:
        value: The part, as it was; no dictionary, list or tensor of it is anywhere else in the checkpoint.
        copy: A copy of its containers; the tensors in it stay where they are.
        first: How many tensors a walk of the checkpoint finds before those of `value`.

    Raises:
        UnfitError: Something else is in it.
    """

    def __init__(self, value: Any, copy: Any, first: int) -> None:
        self._node = _node(value, copy)
        self.copy = copy
        """The copy, as of the last `refill`; without a meaning after one that failed."""
        self.first = first
        """The number of its first tensor: elsewhere, those in `copy` are not the ones that belong there."""

    def refill(self, value: Any) -> tuple[list[Tensor], dict[int, Any]] | None:
        """The copy is one of `value` now, but for its tensors; None: `value` has another structure.

        Returns:
            The tensors, in the order of the walk, and for each container of `value`, by its id, the copy.
        """
        tensors: list[Tensor] = []
        copies: dict[int, Any] = {}
        return (tensors, copies) if self._node.refill(value, tensors, copies) else None


class UnfitError(Exception):
    """A part that cannot be kept; caught where templates are made."""


class _Mapping:
    """A dictionary. Whatever can be asked of all its items in one call is not asked of each."""

    __slots__ = ("_attributes", "_children", "_copy", "_kind", "_names", "_only", "_rows", "_types")

    def __init__(self, value: Any, copy: Any) -> None:
        self._kind = type(value)
        self._copy = copy
        self._names = list(value)
        self._types = list(map(type, self._names))
        if not _KEYS.issuperset(self._types):  # of others, equal is not always the same
            raise UnfitError
        if not are_plain(self._names) or self._names != list(copy):  # another thread may have changed it
            raise UnfitError
        self._children = [_child(item, copy[name]) for name, item in value.items()]
        # `nn.Module.state_dict` leaves the versions of the modules in an attribute of its dictionary.
        attributes = self._kind is OrderedDict and vars(value)
        self._attributes = _Mapping(attributes, vars(copy)) if attributes else None
        kinds = {child if child in (_TENSOR, _LEAF) else "container" for child in self._children}
        self._only = kinds.pop() if len(kinds) == 1 else ""
        self._rows = _Rows(self._children) if self._only == "container" and len(self._children) > _FEW else None

    def refill(self, value: Any, found: list[Tensor], own: dict[int, Any]) -> bool:
        if type(value) is not self._kind or id(value) in own:
            return False
        own[id(value)] = self._copy
        if not _same_names(list(value), self._names, self._types) or not self._refill_items(value, found, own):
            return False
        if self._attributes is not None:  # after the items, as in a walk
            return self._attributes.refill(vars(value), found, own)
        return self._kind is dict or not vars(value)

    def _refill_items(self, value: Any, found: list[Tensor], own: dict[int, Any]) -> bool:
        if self._only == _TENSOR:
            found += value.values()
            return _TENSORS.issuperset(map(type, value.values()))
        if self._rows is not None and (known := self._rows.refill(list(value.values()), found, own)) is not None:
            return known
        return self._refill_each(value, found, own)

    def _refill_each(self, value: Any, found: list[Tensor], own: dict[int, Any]) -> bool:
        copy = self._copy
        for (name, item), child in zip(value.items(), self._children, strict=True):
            if child is _LEAF:
                if copy[name] is not item:
                    if not is_plain(item):
                        return False
                    copy[name] = item
            elif child is _TENSOR:
                if type(item) not in _TENSORS:
                    return False
                found.append(item)
            elif not child.refill(item, found, own):
                return False
        return True


class _Rows:
    """Many dictionaries in one, of tensors only or of plain values only: what optimizers have for each parameter."""

    def __init__(self, rows: list[Any]) -> None:
        plain = all(type(row) is _Mapping and row._kind is dict for row in rows)
        self._only = {row._only for row in rows} if plain else set()
        self._copies = [row._copy for row in rows] if plain else []
        self._names = list(chain.from_iterable(self._copies))
        self._types = list(map(type, self._names))
        self._lengths = list(map(len, self._copies))

    def refill(self, rows: list[Any], found: list[Tensor], own: dict[int, Any]) -> bool | None:
        """As of a mapping; None: to be found out one by one."""
        if self._only not in ({_TENSOR}, {_LEAF}):
            return None
        if set(map(type, rows)) != {dict} or list(map(len, rows)) != self._lengths:
            return False
        if not _same_names(list(chain.from_iterable(rows)), self._names, self._types):
            return False
        items = list(chain.from_iterable(map(dict.values, rows)))
        if self._only == {_TENSOR}:
            if not _TENSORS.issuperset(map(type, items)):
                return False
        elif not all(map(operator.is_, items, chain.from_iterable(map(dict.values, self._copies)))):
            return None
        before = len(own)
        own.update(zip(map(id, rows), self._copies, strict=True))
        if self._only == {_TENSOR}:
            found += items
        return len(own) == before + len(rows)


def _same_names(names: list[Any], expected: list[Any], types: list[type]) -> bool:
    return names == expected and list(map(type, names)) == types


class _Sequence:
    __slots__ = ("_children", "_copy")

    def __init__(self, value: list[Any], copy: list[Any]) -> None:
        self._copy = copy
        if len(value) != len(copy):  # another thread has changed it
            raise UnfitError
        self._children = None if are_plain(value) else list(map(_child, value, copy))

    def refill(self, value: Any, found: list[Tensor], own: dict[int, Any]) -> bool:
        if type(value) is not list or len(value) != len(self._copy) or id(value) in own:
            return False
        own[id(value)] = copy = self._copy
        if self._children is None:
            if not all(map(operator.is_, value, copy)):
                if not are_plain(value):
                    return False
                copy[:] = value
            return True
        for index, (item, child) in enumerate(zip(value, self._children, strict=True)):
            if child is _TENSOR:
                if type(item) not in _TENSORS:
                    return False
                found.append(item)
            elif child is _LEAF:
                if copy[index] is not item:
                    if not is_plain(item):
                        return False
                    copy[index] = item
            elif not child.refill(item, found, own):
                return False
        return True


def _child(item: Any, copy: Any) -> Any:
    if type(item) in _TENSORS:
        if not has_one_storage(item):  # it has no place of its own, but another copy each time
            raise UnfitError
        return _TENSOR
    return _LEAF if is_plain(item) else _node(item, copy)


def _node(value: Any, copy: Any) -> _Mapping | _Sequence:
    if type(value) is list:
        return _Sequence(value, copy)
    if type(value) not in (dict, OrderedDict):
        raise UnfitError
    return _Mapping(value, copy)
