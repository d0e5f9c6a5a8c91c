"""Filling a sharded model and its optimizers from any checkpoint: by name, and only after everything is known to fit.

What is read comes from a `Source`: a directory of shards or one whole file. A `Filling` is made of one and of a model:
it knows what goes where and what is left over, and nothing of the model has changed until `Filling.fill`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ft._names import KEY
from lightning_ft._sharded.places import Piece, Place, Places
from lightning_ft._sharded.shards import Saved, Wanted, leaves, with_values
from lightning_ft._sharded.wrappers import plain_name
from lightning_ft.errors import CheckpointError, RestoreError
from lightning_ft.state import restore_state_dtypes

_log = logging.getLogger(__name__)

# Tensors up to this size that every rank needs whole are read by rank 0, which tells the others.
SMALL_BYTES = 1 << 20
_MOST_NAMED = 5


class Source(Protocol):
    """What is in a checkpoint, and a way to read it."""

    path: str
    weights: dict[str, Saved]
    nested: dict[str, Any]
    optimizers: list[dict[str, Any]]

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Everything wanted is where it belongs."""

    def read_objects(self, entries: Iterable[Saved], weights_only: bool | None) -> dict[str, Any]:
        """Whole values, by key."""


class WholeFile:
    """One file, as `torch.load` returns it, to be read like a directory of shards.

    Args:
        path: For messages.
        checkpoint: Lightning's dictionary; the weights and the optimizer states are taken out of it.
        parameters: The names of the parameters of the model that will be filled, in its order.
    """

    def __init__(self, path: str, checkpoint: dict[str, Any], parameters: Sequence[str]) -> None:
        self.path = path
        self._values: dict[str, Any] = {}
        if "state_dict" not in checkpoint:
            raise CheckpointError(f"{path} has no state_dict: it holds no model")
        weights = checkpoint.pop("state_dict")
        self.weights = {plain_name(name): self._leaf(f"state_dict.{name}", value) for name, value in weights.items()}
        self.nested: dict[str, Any] = {}
        layout = (checkpoint.get(KEY) or {}).get("optimizers", [])
        states = checkpoint.pop("optimizer_states", [])
        self.optimizers: list[dict[str, Any]] = []
        for number, state in enumerate(states):
            names = _names_of_positions(state, layout[number] if number < len(layout) else None, parameters)
            self.optimizers.append(
                {
                    "state": {
                        names.get(position, position): self._tree(f"optimizer_{number}.{position}", values)
                        for position, values in state["state"].items()
                    },
                    "param_groups": [
                        {
                            **{k: self._tree(f"optimizer_{number}.group{g}.{k}", v) for k, v in group.items()},
                            "params": [names.get(position, position) for position in group["params"]],
                        }
                        for g, group in enumerate(state["param_groups"])
                    ],
                }
            )

    def _leaf(self, key: str, value: Any) -> Saved:
        self._values[key] = value
        if isinstance(value, Tensor):
            return Saved(key, tuple(value.shape), value.dtype)
        return Saved(key, None, None)

    def _tree(self, key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self._tree(f"{key}.{name}", item) for name, item in value.items()}
        if isinstance(value, list):
            return [self._tree(f"{key}.{i}", item) for i, item in enumerate(value)]
        return self._leaf(key, value)

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Everything wanted is where it belongs."""
        with torch.no_grad():
            for one in wanted:
                tensor = self._values[one.saved.key]
                for piece in one.parts:
                    source = tensor
                    for dimension, (offset, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
                        source = source.narrow(dimension, offset, size)
                    piece.part_of(one.into()).copy_(source)

    def read_objects(self, entries: Iterable[Saved], weights_only: bool | None) -> dict[str, Any]:
        """Whole values, by key."""
        return {saved.key: self._values[saved.key] for saved in entries}


def _names_of_positions(
    state: dict[str, Any], layout: list[dict[str, Any]] | None, of_model: Sequence[str]
) -> dict[Any, str]:
    """The names behind the positions in an optimizer's state, as far as they were saved."""
    positions = [p for group in state["param_groups"] for p in group["params"]]
    if all(isinstance(position, str) for position in positions):
        return {position: plain_name(position) for position in positions}
    names = [name for group in layout or [] for name in group["names"]]
    if layout is None and positions != list(range(len(positions))) and len(set(positions)) == len(positions):
        # Lightning's FSDP and ModelParallel count all parameters of the model, and torch those of the optimizer.
        return {position: of_model[position] for position in positions if position < len(of_model)}
    if len(names) != len(positions) or len(set(names)) != len(names) or any(n.startswith("(unnamed") for n in names):
        return {}
    return {position: plain_name(name) for position, name in zip(positions, names, strict=True)}


def objects_of(source: Source, optimizers: bool) -> list[Saved]:
    """What is no large tensor and has to be known first: options of parameter groups, step counters, pickled things."""
    found = [saved for saved in source.weights.values() if not saved.is_tensor] + leaves(source.nested)
    for tree in source.optimizers if optimizers else []:
        found += leaves(tree["param_groups"])
        found += [leaf for leaf in leaves(tree["state"]) if not leaf.is_tensor or _is_single(leaf)]
    return found


def _is_single(saved: Saved) -> bool:
    return saved.shape is not None and all(size == 1 for size in saved.shape)


class Filling:
    """What of `source` goes where in a model and its optimizers, on this rank.

    Args:
        source: The checkpoint.
        objects: `objects_of` it, read.
        module: The model, set up by its strategy.
        optimizers: Its optimizers; None: only weights are loaded.
        strict: Whether every weight must be there and every saved one find its place.

    Raises:
        RestoreError: Something does not fit: names, shapes, the number of optimizers or of their groups.
    """

    def __init__(
        self,
        source: Source,
        objects: dict[str, Any],
        module: nn.Module,
        optimizers: Sequence[Optimizer] | None,
        *,
        strict: bool,
    ) -> None:
        self._source = source
        self._objects = objects
        self._places = Places(module)
        self._kept: list[tuple[nn.Module, str, Any]] = []
        self._small_weights: list[tuple[Place, Saved]] = []
        self.wanted: list[Wanted] = []
        """What this rank reads."""
        self._plan_weights(strict)
        self._optimizers = list(optimizers or [])
        self._states: list[dict[str, Any]] = []
        if optimizers is not None:
            self._plan_optimizers()

    @property
    def small(self) -> list[Saved]:
        """What every rank needs whole, and one may read for all; the same on all ranks."""
        return [saved for _, saved in self._small_weights]

    def fill(self, small: dict[str, Any]) -> None:
        """Weights and optimizers are what was saved, bit for bit, with the dtypes that were saved for the optimizers.

        Args:
            small: What `small` names, read.
        """
        with torch.no_grad():
            for place, saved in self._small_weights:
                place.local().copy_(small[saved.key])
        self._source.read(self.wanted)
        for module, name, value in self._kept:
            if name == "_extra_state":
                module.set_extra_state(value)
            else:
                setattr(module, name, value.to(getattr(module, name).device))
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            optimizer.load_state_dict(state)
            restore_state_dtypes(optimizer, state)

    # -- weights -------------------------------------------------------------------------------------------------

    def _plan_weights(self, strict: bool) -> None:
        found: dict[str, Saved] = {}
        unexpected = []
        for name, saved in self._source.weights.items():
            canonical = self._places.canonical(name)
            if canonical in self._places.by_name and saved.is_tensor:
                if canonical == name or canonical not in found:
                    found[canonical] = saved
            elif (keeper := self._places.keeper(name)) is not None:
                self._kept.append((*keeper, self._whole(saved)))
            else:
                unexpected.append(name)
        for name, tree in self._source.nested.items():
            if (keeper := self._places.keeper(name)) is not None:
                self._kept.append((*keeper, with_values(tree, self._objects)))
            else:
                unexpected.append(name)
        missing = [name for name in self._places.by_name if name not in found]
        if strict and (missing or unexpected):
            raise RestoreError(
                f"{self._source.path} and the model differ: "
                + "; ".join(
                    f"{len(names)} {what} ({_some(names)})"
                    for names, what in ((missing, "not in the checkpoint"), (unexpected, "not in the model"))
                    if names
                )
                + ". A state_dict() of the user's own, which leaves out or renames parameters, does that, too. Set "
                "strict_loading = False in the LightningModule to load what fits"
            )
        if missing or unexpected:
            _log.warning(
                "%s: strict_loading is off: %d parameters or buffers keep what they have (%s), %d saved ones are not "
                "used (%s)", self._source.path, len(missing), _some(missing), len(unexpected), _some(unexpected),
            )  # fmt: skip
        for name, saved in found.items():
            place = self._places.by_name[name]
            if saved.shape != place.shape:
                raise RestoreError(f"{self._source.path}: {name} has shape {saved.shape}, the model's {place.shape}")
            if not place.sharded and _size_bytes(saved) <= SMALL_BYTES:
                self._small_weights.append((place, saved))
            else:
                self.wanted.append(Wanted(saved, place.pieces, place.local))

    def _whole(self, saved: Saved) -> Any:
        """A value of which this rank needs all; a tensor is empty yet."""
        if not saved.is_tensor or saved.key in self._objects:
            return self._objects.get(saved.key)
        whole = torch.empty(saved.shape or (), dtype=saved.dtype)
        self.wanted.append(Wanted(saved, (Piece.whole(saved.shape or ()),), lambda: whole))
        return whole

    # -- optimizers ----------------------------------------------------------------------------------------------

    def _plan_optimizers(self) -> None:
        path = self._source.path
        if not self._source.optimizers and self._optimizers:
            raise RestoreError(
                f"{path} holds weights alone and no optimizer: it was saved with weights_only=True, and nothing can "
                "be trained on from it"
            )
        if len(self._source.optimizers) != len(self._optimizers):
            raise RestoreError(
                f"{path} holds {len(self._source.optimizers)} optimizers, this run has {len(self._optimizers)}"
            )
        for number, (optimizer, tree) in enumerate(zip(self._optimizers, self._source.optimizers, strict=True)):
            self._states.append(self._state_of(f"{path}: optimizer {number}", optimizer, tree))

    def _state_of(self, where: str, optimizer: Optimizer, tree: dict[str, Any]) -> dict[str, Any]:
        groups = [with_values(group, self._objects) for group in tree["param_groups"]]
        if len(groups) != len(optimizer.param_groups):
            raise RestoreError(
                f"{where}: {len(groups)} parameter groups were saved, this run has {len(optimizer.param_groups)}"
            )
        positions: list[list[int]] = []
        saved_names: dict[Any, str] = {}
        count = 0
        for number, (then, now) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
            names = [name for p in now["params"] for name in self._names(where, p)]
            saved_names |= self._match(f"{where}, group {number}", then["params"], names)
            positions.append(list(range(count, count + len(now["params"]))))
            count += len(now["params"])
        by_name: dict[str, Any] = {}
        known = set(saved_names.values())
        for key, values in tree["state"].items():
            name = saved_names.get(key, self._places.canonical(key) if isinstance(key, str) else key)
            if name not in known:
                raise RestoreError(f"{where}: its state of {key} finds no place: no optimizer of this run has it")
            by_name[name] = values
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state = {}
        for position, parameter in enumerate(parameters):
            made = self._state_of_parameter(where, parameter, by_name)
            if made is not None:
                state[position] = made
        options = [
            {**{k: v for k, v in group.items() if k not in ("params", "param_names")}, "params": places}
            for group, places in zip(groups, positions, strict=True)
        ]
        return {"state": state, "param_groups": options}

    def _names(self, where: str, parameter: Tensor) -> list[str]:
        names = self._places.names_of.get(id(parameter))
        if names is None:
            raise RestoreError(f"{where}: it has a parameter of shape {tuple(parameter.shape)} that is not the model's")
        return names

    def _match(self, where: str, saved: list[Any], present: list[str]) -> dict[Any, str]:
        """Each saved name, or position, with the present one."""
        if any(not isinstance(name, str) for name in saved):
            if len(saved) != len(present):
                raise RestoreError(f"{where}: {len(saved)} parameters were saved, this run has {len(present)}")
            return dict(zip(saved, present, strict=True))
        matched = {name: self._places.canonical(name) for name in saved}
        then, now = set(matched.values()), set(present)
        gone = [name for name in matched.values() if name not in now]
        new = [name for name in present if name not in then]
        if gone or new:
            raise RestoreError(f"{where}: parameters differ from the saved ones: missing {gone}, new {new}")
        return matched

    def _state_of_parameter(self, where: str, parameter: Tensor, by_name: dict[str, Any]) -> dict[str, Any] | None:
        names = self._names(where, parameter)
        if id(parameter) in self._places.flat:
            return self._state_of_flat(where, parameter, {name: by_name[name] for name in names if name in by_name})
        (name,) = names
        place = self._places.by_name[name]
        if name not in by_name or (place.span is not None and not place.pieces):
            return None  # FSDP keeps no optimizer state of what is on other ranks altogether

        def value(key: str | int, tree: Any) -> Any:
            if isinstance(tree, dict):
                return {inner: value(inner, child) for inner, child in tree.items()}
            if isinstance(tree, list):
                return [value(key, child) for child in tree]
            if _is_cut(key, tree, place):
                made, local = place.empty(tree.dtype)
                self.wanted.append(Wanted(tree, place.pieces, lambda: local))
                return made
            if not tree.is_tensor or tree.key in self._objects:
                return _own(self._objects[tree.key])
            return self._unlike(where, name, tree, parameter)

        made: dict[str, Any] = {key: value(key, tree) for key, tree in by_name[name].items()}
        return made

    def _unlike(self, where: str, name: str, saved: Saved, parameter: Tensor) -> Tensor:
        """State that has not the shape of its parameter: whole on every rank."""
        from torch.distributed.tensor import DTensor, Replicate

        place = self._places.by_name[name]
        if place.span is not None:
            raise RestoreError(
                f"{where}: the state of {name} has shape {saved.shape} and the parameter "
                f"{place.shape}: FSDP cannot cut it; load it with ModelParallelStrategy"
            )
        whole = torch.empty(saved.shape or (), dtype=saved.dtype, device=parameter.device)
        self.wanted.append(Wanted(saved, (Piece.whole(saved.shape or ()),), lambda: whole))
        if not isinstance(parameter, DTensor):
            return whole
        mesh = parameter.device_mesh
        return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)

    def _state_of_flat(self, where: str, parameter: Tensor, by_name: dict[str, Any]) -> dict[str, Any] | None:
        """Of several parameters that FSDP has made one, ``use_orig_params=False``."""
        if not by_name:
            return None
        made: dict[str, Any] = {}
        for name, values in by_name.items():
            place = self._places.by_name[name]
            assert place.span is not None
            for key, saved in values.items():
                if isinstance(saved, Saved) and _is_cut(key, saved, place):
                    if key not in made:
                        made[key] = torch.zeros(parameter.numel(), dtype=saved.dtype, device=parameter.device)
                    self.wanted.append(Wanted(saved, place.pieces, _slice_of(made[key], *place.span)))
                elif key not in made:
                    made[key] = _own(with_values(saved, self._objects))
        return made


def _is_cut(key: str | int, saved: Saved, place: Place) -> bool:
    """Whether this state of a parameter has one value for each of its elements, and is where they are."""
    return saved.shape == place.shape and key != "step"  # which torch's optimizers keep whole, and plain


def _slice_of(tensor: Tensor, start: int, length: int) -> Callable[[], Tensor]:
    return lambda: tensor[start : start + length]


def _own(value: Any) -> Any:
    """A step counter must not be shared by the parameters whose it was, nor with the checkpoint."""
    return value.clone() if isinstance(value, Tensor) else value


def _size_bytes(saved: Saved) -> int:
    count = saved.dtype.itemsize if saved.dtype is not None else 0
    for size in saved.shape or ():
        count *= size
    return count


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
