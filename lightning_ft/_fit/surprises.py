"""What about a run may surprise its user, said before its first step: sooner than when it costs something."""

from __future__ import annotations

import logging
import re

import lightning.pytorch as pl

from lightning_ft import _names, _words
from lightning_ft._fit import console, loops
from lightning_ft._fit.local_tier import LocalTier
from lightning_ft._fit.settings import Settings
from lightning_ft._history import interval as _interval
from lightning_ft._saving.weights_only import not_weights_only
from lightning_ft.errors import ConfigurationError
from lightning_ft.state import Progress
from lightning_ft.triggers import Trigger

_log = logging.getLogger(__name__)


def check_hyper_parameters(trainer: pl.Trainer) -> None:
    """The hyperparameters, which are in every checkpoint, can be loaded with ``weights_only=True``. Ranks: all.

    Raises:
        ConfigurationError: They cannot.
    """
    owners = [trainer.lightning_module, loops.datamodule(trainer)]
    problems = [p for o in owners if o is not None for p in not_weights_only(dict(o.hparams), "hparams")]
    if problems:
        raise ConfigurationError(
            f"{'; '.join(problems)}: a checkpoint with it cannot be loaded with weights_only=True, Lightning's "
            "default. Save plain values, allow the type with torch.serialization.add_safe_globals, or use "
            "FaultTolerantCheckpoint(strict=False)"
        )


def is_of_lightnings_requeue(path: str) -> bool:
    """Whether Lightning saved `path` before it queued a SLURM job again: what it takes there without a `ckpt_path`."""
    return re.fullmatch(r"hpc_ckpt_[0-9]+\.ckpt", _names.split(path)[1]) is not None


def refuse_older(path: str, dirpath: str, checkpoints: int) -> None:
    """Lightning's own checkpoint `path` was taken where there is none of ours.

    Raises:
        ConfigurationError: There are some, which go on from it, or from something else.
    """
    if checkpoints:
        raise ConfigurationError(
            f"{path} was taken, as Lightning does under SLURM without a ckpt_path, but {dirpath} holds {checkpoints} "
            'checkpoint(s) of this callback: give ckpt_path="last" to go on from them; or, to return to it, give '
            "that file another name and its path as ckpt_path"
        )


def warn_of_other_run(dirpath: str) -> None:
    """The user knows that `dirpath` has checkpoints of a run that this one does not continue. Ranks: zero."""
    _log.warning(
        'a new run starts in %s, which holds checkpoints of another: those are kept, and ckpt_path="last" will no '
        "longer choose them once this run has saved. If they were to be continued: stop this run, remove what it has "
        'saved (lightning-ft list %s), and start with trainer.fit(..., ckpt_path="last")',
        dirpath,
        dirpath,
    )


def say(trainer: pl.Trainer, dirpath: str, settings: Settings, *, earlier: bool) -> None:
    """The user knows when the first save is due, and what of this run may not be as expected. Ranks: zero.

    Args:
        trainer: The trainer.
        dirpath: The directory of the run.
        settings: What the user asked for.
        earlier: Whether there were earlier starts, whose figures decide when to save with ``"auto"``.
    """
    announce_first_save(dirpath, settings.trigger, settings.local, loops.progress(trainer), earlier=earlier)
    warn_of_iterator(trainer)
    local = settings.local
    often = settings.trigger if local is None or local.trigger == Trigger() else local.trigger
    warn_of_rare_saves(trainer, often, save_on_train_end=settings.save_on_train_end)


def warn_of_iterator(trainer: pl.Trainer) -> None:
    """The user knows what a `training_step` has to do that takes batches by itself, if there is one. Ranks: zero."""
    if loops.takes_iterator(trainer):
        _log.warning(
            "training_step takes batches from `dataloader_iter`: a restart continues after the last one taken, so "
            "it is exact only if each step trains what it takes"
        )


def warn_of_rare_saves(trainer: pl.Trainer, trigger: Trigger, *, save_on_train_end: bool) -> None:
    """The user knows if `trigger` will not be due in the whole run. Ranks: zero."""
    if trigger.train_time_interval is not None or trigger.auto:
        return  # how long the run takes, nobody knows
    rules = [
        (f"{name}={every}", every, planned, unit)
        for name, every, planned, unit in (
            ("every_n_train_steps", trigger.every_n_train_steps, loops.planned_steps(trainer), "steps"),
            ("every_n_epochs", trigger.every_n_epochs, loops.planned_epochs(trainer), "epochs"),
        )
        if every is not None
    ]
    if all(planned is not None and every > planned for _, every, planned, _ in rules):
        _log.warning(
            "%s, but the run has %s: it is %s, and a crash before loses all of it",
            " and ".join(rule for rule, *_ in rules),
            " and ".join(f"{planned} {unit}" for *_, planned, unit in rules),
            "saved only when training ends" if save_on_train_end else "never saved",
        )


def announce_first_save(
    dirpath: str, trigger: Trigger, local: LocalTier | None, progress: Progress, *, earlier: bool
) -> None:
    """The user sees where checkpoints will be and when to look for the first of this start. Ranks: zero."""
    first = _first_due(trigger, progress, earlier=earlier)
    if local is None:
        where = f"{dirpath}: the first one {first}"
    elif local.trigger == Trigger():
        where = f"{local.dirpath}, and from there to {dirpath}: the first one {first}"
    else:
        where = f"{local.dirpath}: the first one {_first_due(local.trigger, progress, earlier=earlier)} or {first}"
        where += f"; and from there to {dirpath}: the first one {first}"
    console.tell(f"checkpoints are saved to {where}")


def _first_due(trigger: Trigger, progress: Progress, *, earlier: bool) -> str:
    due = []
    if (steps := trigger.every_n_train_steps) is not None:
        due.append(f"after step {(progress.step // steps + 1) * steps}")
    if (epochs := trigger.every_n_epochs) is not None:
        number = (progress.epochs // epochs + 1) * epochs
        due.append(f"after {number} epoch{'s' if number > 1 else ''}")
    interval = trigger.train_time_interval
    if trigger.auto:
        secs = _interval.LEAST_SECS if interval is None else min(_interval.LEAST_SECS, interval.total_seconds())
        costs = ", or later if that is best by what saves have cost in earlier starts" if earlier else ""
        due.append(f"{_words.duration(secs)} from now{costs}")
    elif interval is not None:
        due.append(f"{_words.duration(interval.total_seconds())} from now")
    return " or ".join(due)
