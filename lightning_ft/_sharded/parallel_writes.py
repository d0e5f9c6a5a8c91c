"""Parallel writes: under DDP, what all ranks have alike is saved as one directory, of which each writes its share."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_ft._fit import loops
from lightning_ft._names import KEY
from lightning_ft._saving.options import SaveOptions
from lightning_ft._sharded.replicated import AS_FILE, Names, Replicated, as_file, by_layout
from lightning_ft.plugin import FaultTolerantCheckpointIO


def install(trainer: pl.Trainer, plugin: FaultTolerantCheckpointIO) -> Callable[[], None]:
    """Saves of our callback are shared out to all ranks, until the returned function is called.

    Everybody else's are made by the strategy as before: some are asked for in the middle of a step, or on one rank
    only, where the ranks cannot agree on anything.
    """
    writes = _ParallelWrites(trainer, plugin)
    return loops.replaced(trainer.strategy, "save_checkpoint", writes.save_checkpoint)


class _ParallelWrites:
    """What takes the place of `Strategy.save_checkpoint`. Thread: main."""

    def __init__(self, trainer: pl.Trainer, plugin: FaultTolerantCheckpointIO) -> None:
        self._trainer = trainer
        self._plugin = plugin
        self._original = trainer.strategy.save_checkpoint
        self._trained: dict[str, bool] | None = None
        self._names: Names | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """`checkpoint` is on its way to `filepath`. Ranks: all."""
        if not isinstance(storage_options, SaveOptions):
            self._original(checkpoint, os.fspath(filepath), storage_options=storage_options)
            return
        weights, states = checkpoint.pop("state_dict"), checkpoint.pop("optimizer_states", [])
        checkpoint[KEY] = {**checkpoint[KEY], AS_FILE: as_file(weights, len(states))}
        trained = checkpoint[KEY]["requires_grad"]
        make = partial(self._state, weights, states, trained)
        # A parameter that was frozen when DDP began is none of those that it keeps alike, once it is trained.
        replicated = Replicated(make, trained, compared=self._trainer.world_size > 1)
        self._plugin.save_sharded(replicated, checkpoint, filepath, storage_options)

    def _state(self, weights: dict[str, Any], states: list[dict[str, Any]], trained: dict[str, bool]) -> dict[str, Any]:
        # The same object for as long as the modules and their parameters are the same: see `ModuleTree.requires_grad`.
        if self._names is None or trained is not self._trained:
            self._names, self._trained = Names(self._trainer.lightning_module), trained
        parameters = [
            [p for group in optimizer.param_groups for p in group["params"]] for optimizer in self._trainer.optimizers
        ]
        return by_layout(weights, states, parameters, self._names, everything=self._trainer.is_global_zero)
