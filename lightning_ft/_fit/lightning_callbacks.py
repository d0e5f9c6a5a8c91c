"""What Lightning's own callbacks need beside us: state that it saves and does not load, files not yet written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging

from lightning_ft import _names
from lightning_ft._fit import loops
from lightning_ft._sharded.wrappers import named_like
from lightning_ft.storage import Storage


def see_queued_files(trainer: pl.Trainer, wait_for: Callable[[str], None]) -> Callable[[], None]:
    """Every `ModelCheckpoint` finds a name taken by a save that is still queued, until the returned function is called.

    It looks for a free name on the disk, where a queued save is not yet, and would be given the same name again.

    Args:
        trainer: The trainer.
        wait_for: Returns when no save to the path it is given is queued or being written.
    """
    callbacks = [c for c in loops.callbacks(trainer) if isinstance(c, ModelCheckpoint)]
    undo = [loops.replaced(c, "file_exists", partial(_file_exists, c.file_exists, wait_for)) for c in callbacks]

    def remove() -> None:
        for step in undo:
            step()

    return remove


def find_wrapped_weights(trainer: pl.Trainer) -> Callable[[], None]:
    """Weights find their parameters whatever wraps those, then and now, until the returned function is called.

    Under `torch.compile` and activation checkpointing torch puts a prefix into the names, and Lightning asks for the
    very same ones. Names are changed only if they would not be found.
    """
    strategy = trainer.strategy
    load = strategy.load_model_state_dict

    def load_model_state_dict(checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = strategy.lightning_module
        state = checkpoint.get("state_dict")  # which a sharded strategy has already loaded
        if module is not None and state is not None:
            modules = [name for name, _ in module.named_modules()]
            checkpoint = {**checkpoint, "state_dict": named_like(state, module.state_dict(), modules)}
        load(checkpoint, strict=strict)

    return loops.replaced(strategy, "load_model_state_dict", load_model_state_dict)


def clear_directories_of_others(trainer: pl.Trainer, dirpath: str, storage_options: dict[str, Any] | None) -> None:
    """What killed saves of a `ModelCheckpoint` beside ours left is gone. `dirpath` is ours, and cleared already.

    Ranks: zero.
    """
    storage = Storage(storage_options)
    given = [c.dirpath for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.dirpath]
    for other in {_names.normalise(path) for path in given} - {dirpath}:
        storage.remove_abandoned(other)


def _file_exists(original: Callable[..., bool], wait_for: Callable[[str], None], filepath: str, *args: Any) -> bool:
    wait_for(filepath)
    return original(filepath, *args)


def saved_scores(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The last value of every monitored metric, by the key of the `ModelCheckpoint` that monitors it."""
    states = checkpoint.get("callbacks", {}).items()
    return {key: s["current_score"] for key, s in states if isinstance(s, dict) and "current_score" in s}


def restore_scores(trainer: pl.Trainer, scores: dict[str, Any]) -> None:
    """Every `ModelCheckpoint` knows the last value of its metric, of which `load_state_dict` restores only the best."""
    for callback in loops.callbacks(trainer):
        if isinstance(callback, ModelCheckpoint) and callback.state_key in scores:
            callback.current_score = scores[callback.state_key]


def restore_weight_averaging(trainer: pl.Trainer) -> None:
    """A `StochasticWeightAveraging` that had begun has its scheduler again.

    It makes one where an epoch begins, so not in a run that goes on within an epoch. What is not restored is its last
    epoch, which updates batch norm statistics: that is found as a difference in the schedulers.
    """
    for callback in loops.callbacks(trainer):
        if not isinstance(callback, StochasticWeightAveraging) or callback._scheduler_state is None:
            continue
        if callback.swa_start <= trainer.current_epoch <= callback.swa_end:
            # Making a scheduler sets learning rates, which are those of the checkpoint already.
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            kept = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            for group, values in zip(groups, kept, strict=True):
                group.update(values)


def add_to_checkpoints(trainer: pl.Trainer) -> bool:
    """Whether something is put into checkpoints of which only its author knows when it changes."""
    data = loops.datamodule(trainer)
    if data is not None and type(data).state_dict is not pl.LightningDataModule.state_dict:
        return True
    owners: list[Any] = [trainer.lightning_module, *loops.callbacks(trainer)]
    hooks = [type(owner).on_save_checkpoint for owner in owners]
    known = (pl.LightningModule.on_save_checkpoint, pl.Callback.on_save_checkpoint)
    return any(hook not in known and not hook.__module__.startswith("lightning_ft.") for hook in hooks)
