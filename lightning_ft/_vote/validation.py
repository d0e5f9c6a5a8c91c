"""The vote within a validation and the sanity check, and leaving one before its end.

A training step has one ballot. In a validation, which may take hours, there is about one per second: cast after a
batch, and read a second's worth of batches later, when all ranks have long cast theirs. Ranks may have different
numbers of batches: one that is through answers for as long as another one is not, before it goes where it would wait
for that one without an answer, as in the reduction of what was logged.

::

    validation starts       the ballot of the step before it is read
    each batch              now and then: the last ballot is read, the next one cast
    a loader is through     ballots until all ranks are through with a loader
    all of them are         ballots until all ranks say so
    epoch-end hooks         as ever

What was heard is acted upon when the validation is over, which is a step boundary. Unless a watch calls it urgent: then
all ranks leave the validation in the same round, and the state that is saved is the one before it
(`_vote.before_validation`), if all of them still have it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lightning_ft._copying.module_tree import ModuleTree
from lightning_ft._data.loaders import TrackedLoaders
from lightning_ft._fit import loops
from lightning_ft._fit.watch import Watches
from lightning_ft._vote.before_validation import Before
from lightning_ft._vote.voting import VALIDATION_TOPICS, Voting

# Between two ballots: soon enough for any grace period, and nothing beside a second's worth of batches.
_ROUND_US = 1_000_000
# Where batches take no time that can be measured, the next ones may.
_MOST_BATCHES = 256

# Where a rank is, the smaller the further, so that the maximum of all ranks tells where the last one is.
_BETWEEN_BATCHES, _BETWEEN_LOADERS, _THROUGH = 2, 1, 0


class _ValidationLeft(Exception):
    """The validation ends here, on all ranks."""


class Validation:
    """One fit's validations, seen from the vote.

    Thread: main. Ranks: all.

    Args:
        trainer: The trainer.
        voting: The ballots of the fit.
        watches: Whose ballots these are.
        tree: Of the module.
        loaders: The loaders of the fit.
        left: Called when a validation, or the sanity check, was left.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        voting: Voting,
        watches: Watches,
        tree: ModuleTree,
        loaders: TrackedLoaders,
        *,
        left: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._voting = voting
        self._vote = voting.vote
        self._watches = watches
        self._tree = tree
        self._loaders = loaders
        self._left = left
        self.before: Before | None = None
        """What is saved from within the validation that runs; None between validations, and if that is not possible."""
        self._runs = False
        self._stays = False
        self._every = 1
        self._batches = 0
        self._since = 0.0

    def install(self) -> Callable[[], None]:
        """Validations of the trainer are served until the returned function is called."""
        loop = self._trainer.fit_loop.epoch_loop.val_loop
        run = loop.run
        undo = [
            loops.replaced(loop, "run", lambda: self._run(run)),
            loops.around(loop, "_store_dataloader_outputs", before=lambda: self._await(_BETWEEN_LOADERS)),
            loops.around(loop, "on_run_end", before=lambda: self._await(_THROUGH)),
        ]

        def remove() -> None:
            for step in reversed(undo):
                step()

        return remove

    def _run(self, run: Callable[[], list[Any]]) -> list[Any]:
        if not self._watches.anywhere:
            return run()
        self._voting.end_of_batch()
        possible = Before.possible(self._trainer)
        self.before = Before(self._trainer, self._tree, self._loaders) if possible else None
        self._runs, self._stays = True, False
        self._every, self._batches, self._since = 1, 0, time.monotonic()
        hook = self._trainer.lightning_module._current_fx_name
        try:
            outputs = run()
            self._await(_THROUGH)  # if this rank has no batches at all
            return outputs
        except _ValidationLeft:
            self._trainer.lightning_module._current_fx_name = hook
            loops.end_validation(self._trainer)
            self._left()
            return []
        finally:
            self._runs = False

    def batch_over(self) -> None:
        """A batch of validation or of the sanity check is over. Blocks on: a rank that is a second's worth behind."""
        self._batches += 1
        if self._runs and self._batches >= self._every:
            self._read()
            self._cast(_BETWEEN_BATCHES)

    def _await(self, place: int) -> None:
        """All ranks have come to `place`, or to one after it."""
        while self._runs and self._read() > place:
            self._cast(place)
        if place == _THROUGH:
            self._runs = False

    def _cast(self, place: int) -> None:
        spent_us = int(1e6 * (time.monotonic() - self._since))
        batch_us = spent_us // self._batches if place == _BETWEEN_BATCHES else 0
        self._batches, self._since = 0, time.monotonic()
        own = {"validating": place, "validation_batch_us": batch_us}
        self._vote.cast({**own, **self._watches.ballot_between_steps()})

    def _may_be_left(self) -> bool:
        # The sanity check, which nothing depends on, whenever.
        return self._trainer.sanity_checking or (self.before is not None and self.before.holds)

    def _read(self) -> int:
        """Where the last rank was when it cast the last ballot."""
        if not self._vote.cast_open:
            return _BETWEEN_BATCHES
        votes = self._vote.read()
        self._voting.note({topic: vote for topic, vote in votes.items() if vote and topic not in VALIDATION_TOPICS})
        # By the slowest rank, so that all have the same number.
        self._every = max(1, min(_MOST_BATCHES, _ROUND_US // max(1, votes["validation_batch_us"])))
        if not self._stays and self._watches.urgent(votes):
            # All ranks have just heard it, and ask each other at once, and only once.
            self._vote.cast({"validation_needed": int(not self._may_be_left())})
            self._stays = bool(self._vote.read()["validation_needed"])
            if not self._stays:
                raise _ValidationLeft
        return votes["validating"]
