"""A state that every rank has alike, as one directory that all of them write: by name, and such that it comes back.

Parameters are alike, and what optimizers keep for them; that is shared out. Running statistics, what a module saves
besides, and options of optimizers may differ; rank 0 writes its own, which one file would hold, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_ft._sharded.positions import by_name, with_numbers
from lightning_ft._sharded.shards import put
from lightning_ft._sharded.wrappers import plain_name, plain_names
from lightning_ft.errors import SaveError

AS_FILE = "as_file"
"""Under our key in a directory that was written like this: what one file would hold and shards do not."""

_INSTEAD = 'or use FaultTolerantCheckpointIO(layout="file")'


@dataclass(frozen=True)
class Replicated:
    """A state for `FaultTolerantCheckpointIO.save_sharded`: whatever several ranks give of it is the same on them."""

    make: Callable[[], dict[str, Any]]
    """The state of this rank. What it raises fails the save, on all ranks."""
    marks: Any
    """Where these are others than in the last save, what all ranks have is compared once more."""
    compared: bool
    """Whether there are others to compare with."""


class Names:
    """The parameters of a model, by plain name and by identity.

    Args:
        module: The model, as it is now.
    """

    def __init__(self, module: nn.Module) -> None:
        named = [(plain_name(name), p) for name, p in module.named_parameters(remove_duplicate=False)]
        self.parameters = dict(named)
        self._names: dict[int, str] = {}
        for name, parameter in named:
            self._names.setdefault(id(parameter), name)

    def are_weights(self, name: str, value: Any) -> bool:
        """Whether `value`, saved as `name`, is that parameter itself, and no copy of it or anything else."""
        parameter = self.parameters.get(name)
        return (
            parameter is not None
            and type(value) in (Tensor, nn.Parameter)
            and (value.shape, value.dtype, value.device) == (parameter.shape, parameter.dtype, parameter.device)
            and value.data_ptr() == parameter.data_ptr()
        )

    def of(self, where: str, parameters: Iterable[Tensor]) -> list[str]:
        """The first name of each.

        Raises:
            SaveError: One is no parameter of the model, or is there twice.
        """
        parameters = list(parameters)
        names = [self._names.get(id(parameter), "") for parameter in parameters]
        for number, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
            if not name:
                raise SaveError(
                    f"{where}: parameter {number}, of shape {tuple(parameter.shape)}, is none of the LightningModule, "
                    f"and a directory knows parameters by name: make it one, {_INSTEAD}"
                )
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise SaveError(f"{where}: has {', '.join(twice[:5])} twice: take it out once, {_INSTEAD}")
        return names


def by_layout(
    weights: Mapping[str, Any],
    states: Sequence[dict[str, Any]],
    parameters: Sequence[Sequence[Tensor]],
    names: Names,
    *,
    everything: bool,
) -> dict[str, Any]:
    """What this rank gives of a state, in the layout of Lightning's ModelParallel strategy.

    Args:
        weights: ``LightningModule.state_dict()``.
        states: What each optimizer's ``state_dict()`` is; empty, if another rank has all of it.
        parameters: Of each optimizer, of all groups, one after the other.
        names: Of the model.
        everything: Whether this is rank 0, which gives also what is its own.

    Raises:
        SaveError: A part of it could not be loaded from a directory.
    """
    named = plain_names(weights)
    if len(named) < len(weights):
        raise SaveError(f"state_dict(): two names are {_doubled(weights)!r} without wrappers; rename one, {_INSTEAD}")
    if not everything:
        named = {name: value for name, value in named.items() if names.are_weights(name, value)}
    state: dict[str, Any] = {"state_dict": named}
    if states and len(states) != len(parameters):
        raise SaveError(f"{len(states)} optimizer states are to be saved of {len(parameters)} optimizers; {_INSTEAD}")
    for number, (saved, mine) in enumerate(zip(states, parameters, strict=False)):
        where = f"optimizer {number}"
        if not saved:
            if everything and len(states) > 1:
                raise SaveError(f"{where}: its state_dict() is empty, and a directory cannot tell; {_INSTEAD}")
            continue
        found = _named_state(where, saved, names.of(where, mine))
        state[f"optimizer_{number}"] = found if everything else {"state": found["state"]}
    return state


def _named_state(where: str, saved: dict[str, Any], names: list[str]) -> dict[str, Any]:
    others = sorted(str(key) for key in saved.keys() - {"state", "param_groups"})
    if others:
        raise SaveError(f"{where}: state_dict() has {others[:5]}, for which a directory has no place; {_INSTEAD}")
    count = sum(len(group["params"]) for group in saved["param_groups"])
    if count != len(names):
        raise SaveError(f"{where}: state_dict() tells of {count} parameters and not of {len(names)}; {_INSTEAD}")
    found = by_name(saved, names)
    unknown = [key for key in found["state"] if key not in set(names)]
    if unknown:
        raise SaveError(f"{where}: keeps a state under {unknown[0]!r}, which is no parameter; {_INSTEAD}")
    return found


def _doubled(names: Iterable[str]) -> str:
    seen = set()
    for name in map(plain_name, names):
        if name in seen:
            return name
        seen.add(name)
    return ""


def require_restorable(state: dict[str, Any], flat: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]]) -> None:
    """What is read from the directory will be what `state` is: of its containers nothing is lost or another.

    Args:
        state: What was given.
        flat: What is written, by its names there.
        paths: What the directory says about where each of these belongs.

    Raises:
        SaveError: Something would be; names it.
    """
    rebuilt: dict[str, Any] = {}
    for name, value in flat.items():
        put(rebuilt, paths[name], value)
    for key, part in state.items():
        found = rebuilt.get(key, {})
        if key != "state_dict":
            found["state"] = {name: with_numbers(values) for name, values in found.get("state", {}).items()}
            # What an optimizer has not begun to keep is not there, or is empty: that is the same.
            part = {**part, "state": {name: values for name, values in part["state"].items() if not _is_empty(values)}}
        lost = _lost(part, found, key)
        if lost is not None:
            raise SaveError(
                f"{lost} would not come back from a directory as it is: an empty dictionary, or one with other keys "
                f"than text, or with text that is a number. Keep it in on_save_checkpoint, {_INSTEAD}"
            )


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def _lost(value: Any, rebuilt: Any, path: str) -> str | None:
    if isinstance(value, Mapping):
        if not isinstance(rebuilt, dict):
            return path
        for key in value.keys() ^ rebuilt.keys():
            return f"{path}.{key}"
        pairs: Iterable[tuple[Any, Any]] = value.items()
    elif type(value) is list and type(rebuilt) is list and value is not rebuilt:
        if len(value) != len(rebuilt):
            return path
        pairs = enumerate(value)
    else:
        return None if value is rebuilt else path
    return next((lost for key, item in pairs if (lost := _lost(item, rebuilt[key], f"{path}.{key}"))), None)


def as_file(weights: Mapping[str, Any], optimizers: int) -> dict[str, Any]:
    """What `as_saved` needs, to be kept beside the shards: plain values."""
    versions = getattr(weights, "_metadata", None)
    return {
        "weights": [plain_name(name) for name in weights],
        "versions": None if versions is None else {plain_name(name): dict(of) for name, of in versions.items()},
        "optimizers": optimizers,
    }


def as_saved(weights: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """`weights`, read from shards, in the order and with the versions of modules with which they were saved."""
    order = [name for name in kept["weights"] if name in weights]
    ordered = OrderedDict((name, weights[name]) for name in [*order, *(weights.keys() - set(order))])
    if kept["versions"] is None:
        return dict(ordered)
    ordered._metadata = OrderedDict(kept["versions"])  # type: ignore[attr-defined]  # where torch keeps them
    return ordered


def positions_of(state: dict[str, Any]) -> list[str]:
    """The names of the parameters of an optimizer, in the order in which torch counts them."""
    return [name for group in state["param_groups"] for name in group["params"]]
