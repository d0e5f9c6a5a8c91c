"""Where a tensor of the whole model is on this rank: which part of it, and in which memory.

A part is a list of boxes, whatever cut it: a `DTensor` is one box, a plain tensor is one that is everything, and what
FSDP leaves on a rank of a flattened parameter, a range of its elements, is a few. So whatever wrote a checkpoint, each
rank reads what it needs of it straight to where it belongs, without asking any other.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from lightning_ft._sharded.wrappers import plain_name
from lightning_ft.errors import RestoreError


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor; `start` is its first element in a flat local tensor, None if it is all of the local."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int | None = None

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Piece:
        """All of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def chunk(self) -> ChunkStorageMetadata:
        """The same in the words of `torch.distributed.checkpoint`."""
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))

    def part_of(self, local: Tensor) -> Tensor:
        """The view of `local`, the memory of this rank, which is this box."""
        if self.start is None:
            return local
        return local[self.start : self.start + self.numel].view(self.sizes)


def boxes(shape: tuple[int, ...], start: int, stop: int, at: int = 0) -> Iterator[Piece]:
    """The elements `start` to `stop` of a contiguous tensor, flattened, as boxes; `at` is the place of the first.

    At most one box less than twice the number of dimensions.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Piece((start,) if shape else (), (stop - start,) if shape else (), at)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows that are in it whole
    if first > last:  # within one row
        yield from _in_row(last, shape, start - last * row, stop - last * row, at)
        return
    yield from _in_row(first - 1, shape, start - (first - 1) * row, row, at)
    at += first * row - start
    if last > first:
        zeros = (0,) * (len(shape) - 1)
        yield Piece((first, *zeros), (last - first, *shape[1:]), at)
        at += (last - first) * row
    yield from _in_row(last, shape, 0, stop - last * row, at)


def _in_row(row: int, shape: tuple[int, ...], start: int, stop: int, at: int) -> Iterator[Piece]:
    for piece in boxes(shape[1:], start, stop, at):
        yield Piece((row, *piece.offsets), (1, *piece.sizes), piece.start)


@dataclass(frozen=True)
class Place:
    """One parameter or buffer of the whole model, as far as it is on this rank."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    """What of it is here; nothing, if all of it is on other ranks."""
    local: Callable[[], Tensor]
    """The memory here."""
    empty: Callable[[torch.dtype], tuple[Tensor, Tensor]]
    """New memory cut the same way, in two forms: what an optimizer holds, and the local tensor in that."""
    sharded: bool
    """Whether other ranks have other parts of it."""
    span: tuple[int, int] | None = None
    """First element and number of elements in the flattened parameter that it is a part of."""


# The wrapper that a strategy has put around a module, which does not know of it.
_ROOTS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def note_wrapper(module: nn.Module, wrapper: nn.Module) -> None:
    """`wrapper` is around `module`: parameters of `module` may be flattened there."""
    _ROOTS[module] = weakref.ref(wrapper)


def _root(module: nn.Module) -> nn.Module:
    wrapper = _ROOTS.get(module)
    return (wrapper() if wrapper is not None else None) or module


def described(module: nn.Module) -> dict[int, list[tuple[str, list[int]]]]:
    """Behind each parameter object of `module`, by id, the plain names and whole shapes of what is in it."""
    if module not in _ROOTS:
        named = module.named_parameters(remove_duplicate=False)
        return {id(p): [(plain_name(name), list(p.shape))] for name, p in named}
    places = Places(module)
    return {
        identity: [(name, list(places.by_name[name].shape)) for name in names]
        for identity, names in places.names_of.items()
    }


def local_part(tensor: Tensor) -> Tensor:
    """What of `tensor` is in the memory of this rank, detached."""
    from torch.distributed.tensor import DTensor

    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like_parameter(local: Tensor, parameter: Tensor) -> Tensor:
    """`local`, the part of this rank, as a tensor that is cut like `parameter`."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip


class Places:
    """Every parameter and persistent buffer of a model, by plain name. The model must not be changed meanwhile.

    Args:
        module: The model; what a strategy wrapped around it is found.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.by_name: dict[str, Place] = {}
        """Each tensor once, under its first name."""
        self.names_of: dict[int, list[str]] = {}
        """The names behind each parameter object by its id: several, for one that FSDP made of several."""
        self.alias_of: dict[str, str] = {}
        """Further names of a tensor that has several, with its first one."""
        self.flat: dict[int, nn.Parameter] = {}
        """Parameters that FSDP made of several, by id."""
        self._owners = {plain_name(name): owner for name, owner in module.named_modules()}
        self._add_flattened(_root(module))
        self._add_others(module)

    def canonical(self, name: str) -> str:
        """The first name of what has this plain name."""
        name = plain_name(name)
        return self.alias_of.get(name, name)

    def _add_flattened(self, root: nn.Module) -> None:
        """The parameters that FSDP has flattened. Handles and what they note are private to torch, here as of 2.13.

        Nothing public says which elements of a parameter are on which rank.
        """
        from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

        for prefix, module in root.named_modules():
            handle = module._handle if isinstance(module, Fsdp) else None
            if handle is None:
                continue
            flat: Any = handle.flat_param
            if handle.uses_sharded_strategy and not handle.is_sharded(flat):
                handle.reshard(True)
            names = [plain_name(f"{prefix}.{name}" if prefix else name) for name in flat._fqns]
            if not handle._use_orig_params:
                self.names_of[id(flat)], self.flat[id(flat)] = names, flat
            elif not handle.uses_sharded_strategy:
                continue  # parameters have their shape: they are found like all others
            for index, name in enumerate(names):
                shape, info = tuple(flat._shapes[index]), flat._shard_param_infos[index]
                if not flat._contiguities[index]:
                    raise RestoreError(
                        f"{name} is not contiguous, so nobody can say what of it FSDP keeps on which rank"
                    )
                place = _flattened(name, shape, flat, info, handle.uses_sharded_strategy)
                self.by_name[name] = place
                if handle._use_orig_params:
                    self.names_of[id(flat._params[index])] = [name]
            for param, module_, module_name, first, _, first_module in flat._shared_param_infos:
                del module_
                parts = [(f"{m}.{p}" if m else p) for m, p in ((module_name, param), (first_module, first))]
                other, canonical = (plain_name(f"{prefix}.{part}" if prefix else part) for part in parts)
                self.alias_of[other] = canonical

    def _add_others(self, module: nn.Module) -> None:
        seen: dict[int, str] = {identity: names[0] for identity, names in self.names_of.items() if len(names) == 1}
        for prefix, owner in module.named_modules(remove_duplicate=False):
            tensors = {**owner._parameters, **owner._buffers}
            for short, tensor in tensors.items():
                if tensor is None or short in owner._non_persistent_buffers_set or id(tensor) in self.flat:
                    continue
                name = plain_name(f"{prefix}.{short}" if prefix else short)
                if name in self.by_name or name in self.alias_of:
                    continue
                if (first := seen.get(id(tensor))) is not None:
                    self.alias_of[name] = first
                    continue
                seen[id(tensor)] = name
                self.by_name[name] = _place_of(name, tensor)
                if isinstance(tensor, nn.Parameter):
                    self.names_of[id(tensor)] = [name]

    def unplaced(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that nothing can be loaded into: no parameter or buffer, nor what a module saves besides."""
        return [n for n in names if self.canonical(n) not in self.by_name and self.keeper(n) is None]

    def keeper(self, name: str) -> tuple[nn.Module, str] | None:
        """The module that saves something of its own as `name`, and what it is called there.

        That is "_extra_state", of any module that has it, or the persistent state of a metric.
        """
        owner, _, short = plain_name(name).rpartition(".")
        module = self._owners.get(owner)
        if module is None:
            return None
        extra = short == "_extra_state" and type(module).set_extra_state is not nn.Module.set_extra_state
        kept: Any = getattr(module, "_persistent", None)  # of torchmetrics, which need not be there
        metric = isinstance(kept, dict) and kept.get(short) and isinstance(getattr(module, short, None), Tensor)
        return (module, short) if extra or metric else None

    def parameter_names(self) -> list[str]:
        """Of the parameters, in the order of the model."""
        order: dict[str, None] = {}
        for parameter in self._module.parameters():
            for name in self.names_of.get(id(parameter), []):
                order[name] = None
        for names in self.names_of.values():
            for name in names:
                order.setdefault(name, None)
        return list(order)


def _flattened(name: str, shape: tuple[int, ...], flat: Any, info: Any, cut: bool) -> Place:
    if not info.in_shard:
        pieces: tuple[Piece, ...] = ()
        offset = length = 0
    else:
        offset, length = info.offset_in_shard, info.numel_in_shard
        pieces = tuple(boxes(shape, info.intra_param_start_idx, info.intra_param_end_idx + 1))

    def local() -> Tensor:
        whole: Tensor = flat.data
        return whole[offset : offset + length]

    def empty(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        made = torch.empty(length, dtype=dtype, device=flat.device)
        return made, made

    return Place(name, shape, pieces, local, empty, cut, (offset, length))


def _place_of(name: str, tensor: Tensor) -> Place:
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):

        def empty(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            made = torch.empty_like(tensor, dtype=dtype, requires_grad=False)
            return made, made

        return Place(
            name, tuple(tensor.shape), (Piece.whole(tuple(tensor.shape)),), lambda: tensor.detach(), empty, False
        )

    def empty_dtensor(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        made = torch.empty_like(tensor.detach(), dtype=dtype)
        assert isinstance(made, DTensor)
        return made, made.to_local()

    here = tensor.device_mesh.get_coordinate() is not None
    chunks: list[ChunkStorageMetadata] = tensor.__create_chunk_list__() if here else []  # type: ignore[no-untyped-call]
    pieces = tuple(Piece(tuple(c.offsets), tuple(c.sizes)) for c in chunks if math.prod(c.sizes))
    if len(pieces) > 1:
        raise RestoreError(f"{name} is in {len(pieces)} parts on this rank, and it is not known how they are stored")
    return Place(
        name, tuple(tensor.shape), pieces, lambda: cast(DTensor, tensor.detach()).to_local(), empty_dtensor, True
    )
