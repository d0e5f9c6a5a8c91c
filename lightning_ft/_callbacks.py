"""State of Lightning's own callbacks that it saves and does not load again."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging

from lightning_ft import _loops


def saved_scores(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The last value of every monitored metric, by the key of the `ModelCheckpoint` that monitors it."""
    states = checkpoint.get("callbacks", {}).items()
    return {key: s["current_score"] for key, s in states if isinstance(s, dict) and "current_score" in s}


def restore_scores(trainer: pl.Trainer, scores: dict[str, Any]) -> None:
    """Every `ModelCheckpoint` knows the last value of its metric, of which `load_state_dict` restores only the best."""
    for callback in _loops.callbacks(trainer):
        if isinstance(callback, ModelCheckpoint) and callback.state_key in scores:
            callback.current_score = scores[callback.state_key]


def restore_weight_averaging(trainer: pl.Trainer) -> None:
    """A `StochasticWeightAveraging` that had begun has its scheduler again.

    It makes one where an epoch begins, so not in a run that goes on within an epoch. What is not restored is its last
    epoch, which updates batch norm statistics: that is found as a difference in the schedulers.
    """
    for callback in _loops.callbacks(trainer):
        if not isinstance(callback, StochasticWeightAveraging) or callback._scheduler_state is None:
            continue
        if callback.swa_start <= trainer.current_epoch <= callback.swa_end:
            # Making a scheduler sets learning rates, which are those of the checkpoint already.
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            kept = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            for group, values in zip(groups, kept, strict=True):
                group.update(values)
