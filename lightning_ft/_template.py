"""The structure of a part of a checkpoint, kept from save to save: where it is the same again, nothing is made anew.

Thousands of small tensors come with as many dictionaries. To copy those at every save costs the main thread more than
the tensors do, and python's garbage collector, which counts new containers and then looks at every object of the
process, costs the training more than both.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from lightning_ft._layout import has_one_storage
from lightning_ft._weights_only import is_plain

_TENSOR, _LEAF = "tensor", "leaf"


class Template:
    """A copy of one part of a checkpoint, and what has to be found again for the copy to be of use again.

    Only dictionaries and lists, of tensors and plain values; none of them twice, nor within itself.

    Thread: one at a time.

    Args:
        value: The part, as it was.
        copy: A copy of its containers; the tensors in it stay where they are.

    Raises:
        UnfitError: Something else is in it.
    """

    def __init__(self, value: Any, copy: Any) -> None:
        self._node = _node(value, copy, {})
        self.copy = copy
        """The copy, as of the last `refill`; without a meaning after one that failed."""

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
    __slots__ = ("_attributes", "_children", "_copy", "_kind", "_names")

    def __init__(self, value: Any, copy: Any, seen: dict[int, Any]) -> None:
        self._kind = type(value)
        self._copy = copy
        self._names = list(value)
        self._children = [_child(item, copy.get(name), seen) for name, item in value.items()]
        # `nn.Module.state_dict` leaves the versions of the modules in an attribute of its dictionary.
        attributes = self._kind is OrderedDict and vars(value)
        self._attributes = _Mapping(attributes, vars(copy), seen) if attributes else None

    def refill(self, value: Any, found: list[Tensor], own: dict[int, Any]) -> bool:
        if type(value) is not self._kind or len(value) != len(self._names) or id(value) in own:
            return False
        own[id(value)] = copy = self._copy
        for (name, item), expected, child in zip(value.items(), self._names, self._children, strict=True):
            if name is not expected and (type(name) is not type(expected) or name != expected):
                return False
            if child is _TENSOR:
                kind = type(item)
                if kind is not Tensor and kind is not torch.nn.Parameter:
                    return False
                found.append(item)
            elif child is _LEAF:
                if copy[name] is not item:
                    if not is_plain(item):
                        return False
                    copy[name] = item
            elif not child.refill(item, found, own):
                return False
        if self._attributes is not None:
            return self._attributes.refill(vars(value), found, own)
        return self._kind is dict or not vars(value)


class _Sequence:
    __slots__ = ("_children", "_copy")

    def __init__(self, value: list[Any], copy: list[Any], seen: dict[int, Any]) -> None:
        self._copy = copy
        self._children = [_child(item, place, seen) for item, place in zip(value, copy, strict=True)]

    def refill(self, value: Any, found: list[Tensor], own: dict[int, Any]) -> bool:
        if type(value) is not list or len(value) != len(self._children) or id(value) in own:
            return False
        own[id(value)] = copy = self._copy
        if all(map(operator.is_, value, copy)):  # leaves, and all the same: whatever else there is was copied
            return True
        for index, (item, child) in enumerate(zip(value, self._children, strict=True)):
            if child is _TENSOR:
                kind = type(item)
                if kind is not Tensor and kind is not torch.nn.Parameter:
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


def _child(item: Any, copy: Any, seen: dict[int, Any]) -> Any:
    kind = type(item)
    if kind is Tensor or kind is torch.nn.Parameter:
        if not has_one_storage(item):  # it has no place of its own, but another copy each time
            raise UnfitError
        _see(item, seen)
        return _TENSOR
    return _LEAF if is_plain(item) else _node(item, copy, seen)


def _node(value: Any, copy: Any, seen: dict[int, Any]) -> _Mapping | _Sequence:
    _see(value, seen)
    if type(value) is list:
        return _Sequence(value, copy, seen)
    if type(value) not in (dict, OrderedDict) or not all(map(is_plain, value)):
        raise UnfitError
    return _Mapping(value, copy, seen)


def _see(item: Any, seen: dict[int, Any]) -> None:
    if id(item) in seen:
        raise UnfitError
    seen[id(item)] = item  # kept, so that no other object can have its id meanwhile
