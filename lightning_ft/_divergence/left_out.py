"""Batches that are fetched and not trained: what a rollback leaves out, and what a person asks for.

A batch is named by its number in the run, from 1 on. Leaving it out is as if the data had not had it: no forward pass,
no optimizer step, no scheduler, no random number, no hook. What counts batches counts it, so positions, the length of
the epoch and its validations stay what they are. Which batches they are is part of a run's state, so that a restart
leaves out the same.

Private to Lightning (2.5.5 to 2.6): the loop of an epoch, of which `advance` fetches and trains one batch, with its
counters and what asks them. `on_train_batch_start`, the public way, can only end the epoch (by -1).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_ft._data.loaders import TrackedLoaders
from lightning_ft._divergence.criteria import parse_batches, ranges
from lightning_ft._fit import loops
from lightning_ft._ranks.dist import Ranks
from lightning_ft.errors import ConfigurationError, FaultToleranceError

_log = logging.getLogger(__name__)

_SHOWN = 8
"""So many indices of a batch are in a line of the log; exceptions and emergency checkpoints have all."""

VARIABLE = "LIGHTNING_FT_SKIP_BATCHES"
"""Environment variable with the numbers of batches to leave out: ``17,20-22``. That of rank 0 counts."""


class LeftOut:
    """The batches of a run that are not trained.

    Ranks: construct on all ranks at the same point; all leave out the same. Thread: main.

    Raises:
        ConfigurationError: The environment variable holds something else than numbers.
    """

    def __init__(self, trainer: pl.Trainer, ranks: Ranks, loaders: TrackedLoaders) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._loaders = loaders
        self._leaving_out = False
        self._asked = frozenset(ranks.decide(_asked_for))
        self._batches = set(self._asked)
        self._added = set[int]()
        self._from_batch = 0  # batches done where this fit has begun, or gone back to

    def install(self) -> Callable[[], None]:
        """They are left out, until the returned function is called."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        advance, update = epoch_loop.advance, epoch_loop.update_lr_schedulers

        def advance_or_leave_out(data_fetcher: Any) -> None:
            number = epoch_loop.batch_progress.total.ready + 1
            # While the loop restarts it may be about to validate, and not to take a batch.
            self._leaving_out = number in self._batches and not epoch_loop.restarting
            if self._leaving_out:
                self._pass_by(data_fetcher, number)
            else:
                advance(data_fetcher)

        def update_lr_schedulers(interval: str, update_plateau_schedulers: bool) -> None:
            if interval != "step" or not self._leaving_out:
                update(interval, update_plateau_schedulers)

        undo = [
            loops.replaced(epoch_loop, "advance", advance_or_leave_out),
            loops.replaced(epoch_loop, "update_lr_schedulers", update_lr_schedulers),
        ]

        def remove() -> None:
            for step in undo:
                step()

        return remove

    def _pass_by(self, data_fetcher: Any, number: int) -> None:
        """What `_TrainingEpochLoop.advance` does about counters, and nothing of what it does with the batch."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        if loops.takes_iterator(self._trainer):
            raise ConfigurationError(
                f"batch {number} cannot be left out: training_step(dataloader_iter) fetches its batches by itself"
            )
        next(data_fetcher)
        batches = epoch_loop.batch_progress
        batches.is_last_batch = data_fetcher.done
        batches.increment_ready()
        batches.increment_started()
        batches.increment_processed()
        if epoch_loop._num_ready_batches_reached():  # the schedulers of the epoch, which is over all the same
            epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        batches.increment_completed()
        if not epoch_loop._should_accumulate():
            epoch_loop._batches_that_stepped -= 1  # which `on_advance_end` is about to add
        if self._ranks.is_zero:
            _log.warning(
                "%s is left out: %s",
                place(number, self._trainer.current_epoch, epoch_loop.batch_idx), words(self._loaders.batch_indices()),
            )  # fmt: skip

    def add(self, batches: Iterable[int]) -> None:
        """These will not be trained, either, from whichever checkpoint this fit goes on."""
        self._added.update(batches)
        self._batches |= self._added

    def among(self, batches: Iterable[int]) -> bool:
        """Whether all of `batches` are left out."""
        return self._batches.issuperset(batches)

    def state(self) -> list[int]:
        """For a checkpoint: plain data."""
        return sorted(self._batches)

    def to_ask_for(self, batches: Iterable[int], after: int | None = None) -> str:
        """For `VARIABLE`: what a restart has to be given, to leave out `batches` and what this fit has left out.

        Args:
            batches: More of them.
            after: How many batches are done in the checkpoint that it starts from; None: it is one of this fit.
        """
        after = self._from_batch if after is None else after
        return ranges({number for number in self._batches.union(batches) if number > after})

    def restore(self, batches: Iterable[int], done: int, *, other_ranks: bool) -> None:
        """Left out are the batches of the saved run, those that this start was asked for, and what this fit has added.

        Args:
            batches: Of `state`.
            done: How many batches were done by then.
            other_ranks: The number of ranks is another one, so that the coming batches are not those that were meant.
        """
        self._batches = set(batches)
        if other_ranks and (lost := {number for number in self._batches if number > done}):
            self._batches -= lost
            _log.warning(
                "batches %s are not left out: with another number of ranks these numbers mean other samples",
                ranges(lost),
            )
        self._batches |= self._asked | self._added
        self._from_batch = done

    def say_how(self, error: BaseException) -> None:
        """After an error within a batch, the log says which it was, and how a restart can do without it. Local."""
        batches: Any = self._trainer.fit_loop.epoch_loop.batch_progress
        # What this package raises has said so itself, or is about another rank or a save.
        said = isinstance(error, FaultToleranceError) or not isinstance(error, Exception)
        if said or batches.total.ready == batches.total.processed:
            return
        number = batches.total.ready
        _log.error(
            "rank %d: %s in %s. A restart begins at the last checkpoint and trains this batch again; to leave it out, "
            "start with %s=%s; %s",
            self._ranks.rank, type(error).__name__,
            place(number, self._trainer.current_epoch, batches.current.ready - 1),
            VARIABLE, self.to_ask_for([number]), words(self._loaders.batch_indices()),
        )  # fmt: skip


def place(number: int, epoch: int, batch_idx: int) -> str:
    """Which batch it is, for the log: its number in the run, which `VARIABLE` takes; and as Lightning counts."""
    return f"batch {number} (epoch {epoch}, batch_idx {batch_idx})"


def words(indices: Sequence[Any]) -> str:
    """The indices of a batch, for the end of a line: one entry per loader, None where nobody knows them."""
    known = [_shortened(each) for each in indices if each is not None]
    return "indices " + "; ".join(known) if known else "indices unknown"


def _shortened(indices: Any) -> str:
    if isinstance(indices, (list, tuple)) and len(indices) > _SHOWN:
        first = ", ".join(map(str, indices[:_SHOWN]))
        return f"[{first}, and {len(indices) - _SHOWN} more]"
    return str(indices)


def _asked_for() -> list[int]:
    text = os.environ.get(VARIABLE, "")
    try:
        return parse_batches(text)
    except ValueError:
        raise ConfigurationError(f"{VARIABLE}={text!r}: must be numbers of batches, such as 17,20-22") from None
