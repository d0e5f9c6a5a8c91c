"""What the user's own objects keep in plain attributes, which no checkpoint holds unless they see to it."""

from __future__ import annotations

import functools
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn

from lightning_ft._fit import loops
from lightning_ft._state.digest import digest

# Larger ones are data, and take too long to look at after every batch.
_MOST_ELEMENTS = 4096
_MOST_ITEMS = 64
# Of a value that is written out; of what is longer a digest.
_MOST_CHARACTERS = 40
# From a module, callback or loader to what it holds, and to what that holds: a data module, its data, its generator.
_MOST_DEPTH = 2
# Their attributes are not the user's to restore.
_LIBRARIES = sys.stdlib_module_names | {
    "lightning",
    "lightning_ft",
    "numpy",
    "pytorch_lightning",
    "torch",
    "torchmetrics",
}


def attributes(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, str]:
    """Numbers, texts, small tensors and containers, and generators, by name: ``"Net.average": "0.37"``.

    They are those of the module, its submodules, the callbacks, the data module and the training loaders with their
    data sets, where these are of classes of the user's own; and buffers that are not saved. Two processes with equal
    values have equal texts.
    """
    found: dict[str, str] = {}
    for name, submodule in pl_module.named_modules():
        prefix = f"{type(pl_module).__name__}.{name}".rstrip(".")
        for buffer in sorted(submodule._non_persistent_buffers_set):
            _add(found, f"{prefix}.{buffer}", submodule._buffers[buffer])
        if _is_own(submodule):
            _add_all(found, prefix, submodule, _MOST_DEPTH - 1)
    for thing in _roots(trainer):
        if _is_own(thing):
            _add_all(found, type(thing).__name__, thing, _MOST_DEPTH)
    return found


def _roots(trainer: pl.Trainer) -> Iterator[Any]:
    yield from loops.callbacks(trainer)
    yield loops.datamodule(trainer)
    combined = trainer.fit_loop._combined_loader
    for loader in [] if combined is None else combined.flattened:
        yield loader
        yield from (getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler", "collate_fn"))


def _add_all(found: dict[str, str], prefix: str, thing: Any, depth: int) -> None:
    for name, value in _variables(thing):
        if _is_own(value) and depth > 0 and not isinstance(value, (nn.Module, pl.Trainer)):
            _add_all(found, f"{prefix}.{name}", value, depth - 1)
        else:
            _add(found, f"{prefix}.{name}", value)


def _add(found: dict[str, str], name: str, value: Any) -> None:
    text = _text(value)
    if text is not None:
        found.setdefault(name, text)


def _variables(thing: Any) -> Iterable[tuple[str, Any]]:
    """Those of the object, and of its own classes, from which it takes a value as long as it has none."""
    values: dict[str, Any] = {}
    for kind in reversed(type(thing).__mro__):
        if kind.__module__.partition(".")[0] not in _LIBRARIES:
            values.update(vars(kind))
    values.update(getattr(thing, "__dict__", {}))
    of_libraries = _of_base(next((base for base in _bases() if isinstance(thing, base)), object))
    return [(name, value) for name, value in values.items() if not name.startswith("__") and name not in of_libraries]


@functools.cache
def _bases() -> tuple[type, ...]:
    return pl.LightningModule, nn.Module, pl.LightningDataModule


@functools.cache
def _of_base(base: type) -> frozenset[str]:
    """Names of the attributes that an object of a library's class has."""
    return frozenset(vars(base())) if base is not object else frozenset()


def _is_own(thing: Any) -> bool:
    """Whether it is an object, and no function or class, of a class that no library has defined."""
    return hasattr(thing, "__dict__") and type(thing).__module__.partition(".")[0] not in _LIBRARIES


def _text(value: Any) -> str | None:
    """`value` in words, the same for equal values in every process; None for what is not plain, or large."""
    if isinstance(value, Tensor):
        if value.numel() > _MOST_ELEMENTS or value.is_meta or type(value) not in (Tensor, nn.Parameter):
            return None
        return _shown(value.item()) if value.numel() == 1 else digest(value)
    if isinstance(value, np.generic):
        return _shown(value.item())
    if isinstance(value, np.ndarray):
        return digest(value) if value.size <= _MOST_ELEMENTS and not value.dtype.hasobject else None
    if isinstance(value, random.Random):
        return f"a generator in state {digest(value.getstate())}"
    if isinstance(value, np.random.Generator):
        return f"a generator in state {digest(value.bit_generator.state)}"
    if isinstance(value, torch.Generator):
        return f"a generator in state {digest(value.get_state())}"
    return _shown(value) if _is_plain(value) else None


def _shown(value: Any) -> str | None:
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS and not isinstance(value, (set, frozenset)) else digest(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) <= _MOST_ITEMS and all(_is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return len(value) <= _MOST_ITEMS and all(_is_plain(item) for item in value)
    if isinstance(value, Tensor):
        return type(value) is Tensor and not value.is_meta and value.numel() <= _MOST_ELEMENTS
    if isinstance(value, np.ndarray):
        return value.size <= _MOST_ELEMENTS and not value.dtype.hasobject
    return value is None or isinstance(value, (bool, int, float, complex, str, np.generic))
