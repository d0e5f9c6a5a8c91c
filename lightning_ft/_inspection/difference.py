"""How two checkpoints differ: which keys, which tensors, and by how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from lightning_ft._inspection.contents import Contents, read_contents
from lightning_ft._inspection.descriptions import TensorDescription, dotted
from lightning_ft._inspection.tensors import TensorReader
from lightning_ft.storage import Storage

Kind = Literal["only_in_a", "only_in_b", "value", "shape", "dtype", "elements"]

# What names a save and is no state: two saves of the same state differ in it.
IDENTITY = frozenset(f"lightning_ft.{name}" for name in ("generation", "run_id", "start", "parent", "reason"))
# At a time, in float64 besides: the comparison of a large tensor takes little more memory than the two of it.
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Difference:
    """One key in which two checkpoints differ; `a` and `b` are what each has there, None if it has nothing."""

    name: str
    kind: Kind
    a: Any
    b: Any
    differing: int | None = None
    """Number of elements whose bits differ."""
    numel: int | None = None
    max_abs: float | None = None
    """Largest absolute difference of two finite elements; None if there is no such pair."""
    max_rel: float | None = None
    """Largest difference divided by the larger magnitude of the two."""
    not_finite: int = 0
    """Elements that differ and of which at least one is infinite or no number."""


@dataclass(frozen=True)
class Comparison:
    """Two checkpoints and their differences, in the order of the first."""

    a: Contents
    b: Contents
    compared: int
    """Number of keys that both or one of them have, without those left out."""
    left_out: tuple[str, ...]
    differences: tuple[Difference, ...]


def compare(
    storage: Storage,
    path_a: str,
    path_b: str,
    keep: Callable[[str], bool] = lambda name: True,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> Comparison:
    """What differs between the two, to the bit. Memory: one tensor of each.

    Args:
        storage: Where they are.
        path_a: The one.
        path_b: The other.
        keep: Which keys, by their dotted names; those of `IDENTITY` are left out besides.
        progress: Called with the number of bytes compared since the last call.

    Raises:
        CheckpointError: One of them is damaged where it was read.
    """
    a, b = read_contents(storage, path_a), read_contents(storage, path_b)
    leaves_a, leaves_b = dict(a.leaves), dict(b.leaves)
    keys = [*leaves_a, *(key for key in leaves_b if key not in leaves_a)]
    wanted = [key for key in keys if keep(dotted(key)) and dotted(key) not in IDENTITY]
    left_out = tuple(dotted(key) for key in keys if dotted(key) in IDENTITY)
    found = []
    with TensorReader(storage, a) as read_a, TensorReader(storage, b) as read_b:
        for key in wanted:
            name = dotted(key)
            if key not in leaves_b:
                found.append(Difference(name, "only_in_a", leaves_a[key], None))
            elif key not in leaves_a:
                found.append(Difference(name, "only_in_b", None, leaves_b[key]))
            else:
                found += _differences(name, leaves_a[key], leaves_b[key], read_a, read_b)
                progress(sum(leaf.size_bytes for leaf in (leaves_a[key],) if isinstance(leaf, TensorDescription)))
    return Comparison(a, b, len(wanted), left_out, tuple(found))


def _differences(name: str, a: Any, b: Any, read_a: TensorReader, read_b: TensorReader) -> Iterator[Difference]:
    if not (isinstance(a, TensorDescription) and isinstance(b, TensorDescription)):
        if not _same(a, b):
            yield Difference(name, "value", a, b)
    elif a.shape != b.shape:
        yield Difference(name, "shape", a, b)
    elif a.dtype != b.dtype:
        yield Difference(name, "dtype", a, b)
    else:
        difference = _elements(name, read_a.read(a), read_b.read(b))
        if difference is not None:
            yield difference


def _same(a: Any, b: Any) -> bool:
    """Equal and of one type; a value that is no number equals itself."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return type(a) is type(b) and bool(a == b)


def _elements(name: str, a: torch.Tensor, b: torch.Tensor) -> Difference | None:
    a, b = a.reshape(-1), b.reshape(-1)
    differing = not_finite = 0
    largest: list[tuple[float, float]] = []
    for start in range(0, a.numel(), _CHUNK_ELEMENTS):
        piece_a, piece_b = a[start : start + _CHUNK_ELEMENTS], b[start : start + _CHUNK_ELEMENTS]
        apart = (_bits(piece_a) != _bits(piece_b)).any(dim=1)
        if not bool(apart.any()):
            continue
        differing += int(apart.sum())
        wide_a, wide_b = _wide(piece_a[apart]), _wide(piece_b[apart])
        finite = torch.isfinite(wide_a) & torch.isfinite(wide_b)
        not_finite += int((~finite).sum())
        if bool(finite.any()):
            wide_a, wide_b = wide_a[finite], wide_b[finite]
            distance, magnitude = (wide_a - wide_b).abs(), torch.maximum(wide_a.abs(), wide_b.abs())
            relative = torch.where(magnitude > 0, distance / magnitude, 0.0)
            largest.append((float(distance.max()), float(relative.max())))
    if not differing:
        return None
    max_abs = max((pair[0] for pair in largest), default=None)
    max_rel = max((pair[1] for pair in largest), default=None)
    return Difference(name, "elements", a, b, differing, a.numel(), max_abs, max_rel, not_finite)


def _bits(piece: torch.Tensor) -> torch.Tensor:
    # -0.0 and 0.0 are equal numbers, and lead to other ones; one "no number" is as good as another of the same bits.
    return piece.contiguous().view(torch.uint8).reshape(piece.numel(), -1)


def _wide(piece: torch.Tensor) -> torch.Tensor:
    return piece.to(torch.complex128 if piece.is_complex() else torch.float64)


def selector(only: str | None, ignore: list[str]) -> Callable[[str], bool]:
    """Whether a key is under `only` and matches none of the shell patterns `ignore`, nor lies under such a key."""

    def keep(name: str) -> bool:
        under = only is None or name == only or name.startswith(f"{only}.")
        return under and not any(fnmatchcase(name, p) or fnmatchcase(name, f"{p}.*") for p in ignore)

    return keep
