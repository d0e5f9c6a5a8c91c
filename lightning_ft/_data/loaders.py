"""The train dataloaders of a run, tracked: where Lightning makes them, where they stand, where they start again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from lightning_ft._data.elastic import Change, DataRank
from lightning_ft._data.kinds import kind_of
from lightning_ft._data.tracked import track
from lightning_ft._fit import loops
from lightning_ft._state import random_state
from lightning_ft.dataloading import Tracker
from lightning_ft.errors import RestoreError, TopologyError

_VALIDATION = 1_000_000  # seeds of validation loaders are told from those of any train dataloader by their index


class TrackedLoaders:
    """Every train dataloader Lightning makes for this run is tracked, whatever hook or argument it came from.

    Validation loaders are tracked too: their samplers, generators and states go on where they were.

    Args:
        trainer: The trainer.
        root_seed: Seed of the data order and augmentation of this rank.
        rank: This rank's place among those with data of their own.
        seed_batches: ``FaultTolerantCheckpoint(seed_workers=...)``.
    """

    def __init__(self, trainer: pl.Trainer, root_seed: int, rank: DataRank, seed_batches: bool) -> None:
        self._trainer = trainer
        self.root_seed = root_seed
        self._rank = rank
        self._seed_batches = seed_batches
        self._trackers: list[Tracker] = []
        self._being_made: list[Tracker] = []
        self._to_resume: list[dict[str, Any]] | None = None
        self._remade = False
        self._change: Change | None = None
        self._validation: list[Tracker] = []
        self._validation_being_made: list[Tracker] = []
        self._validation_to_resume: list[dict[str, Any]] = []
        self._made_in: dict[str, int] = {}
        self._trained: list[dict[str, Any]] = []
        self._fetched: list[dict[str, Any]] = []

    def install(self) -> Callable[[], None]:
        """Loaders made from now on are tracked, until the returned function is called."""
        strategy = self._trainer.strategy
        original = strategy.process_dataloader
        undo = loops.replaced(strategy, "process_dataloader", lambda loader: self._process(original(loader)))
        validation = self._trainer.fit_loop.epoch_loop.val_loop
        undo_validation = loops.around(
            validation, "setup_data", before=self._before_validation_setup, inside=lambda: self.making("val")
        )

        def remove() -> None:
            undo_validation()
            undo()

        return remove

    def _before_validation_setup(self) -> None:
        self._validation_being_made = []

    def making(self, stage: str) -> AbstractContextManager[None]:
        """Inside, the user's code makes loaders: what it draws (a random subset) is drawn again in a restart."""
        epoch = self._made_in.pop(stage, self._trainer.current_epoch)
        return random_state.Stream(random_state.mix(self.root_seed, "make", stage, epoch)).active()

    def _process(self, loader: Any) -> Any:
        if self._trainer.training:
            tracker = self._new_tracker(len(self._being_made))
            tracked = track(loader, tracker)
            if self._to_resume is not None:
                self._resume(tracker, len(self._being_made))
            self._being_made.append(tracker)
            return tracked
        evaluating = self._trainer.validating or self._trainer.sanity_checking
        if not evaluating or not (isinstance(loader, DataLoader) or kind_of(loader) == "stateful"):
            return loader
        number = len(self._validation_being_made)
        tracker = Tracker(
            _VALIDATION + number, self.root_seed, self._rank.rank, self._seed_batches, self._batch, "validation",
            self._rank.size,
        )  # fmt: skip
        tracked = track(loader, tracker)
        if number < len(self._validation_to_resume):
            tracker.resume(self._validation_to_resume[number], self._change)
        self._validation_being_made.append(tracker)
        self._validation = self._validation_being_made
        return tracked

    def _batch(self) -> int:
        # A restart runs no sanity check, so the number of a validation must not depend on how many there were.
        return loops.progress(self._trainer).batch

    def _new_tracker(self, index: int) -> Tracker:
        return Tracker(index, self.root_seed, self._rank.rank, self._seed_batches, ranks=self._rank.size)

    def _resume(self, tracker: Tracker, index: int) -> None:
        states = self._to_resume or []
        if self._remade:
            # The uninterrupted run makes new loaders here, too: they take over the count of passes, nothing else.
            tracker.passes = states[index]["passes"] if index < len(states) else 0
        elif index >= len(states):
            raise RestoreError(f"the checkpoint holds positions of {len(states)} train dataloaders, this run has more")
        else:
            tracker.resume(states[index], self._change)

    def before_setup_data(self) -> None:
        """Loaders made from here on are a new set."""
        self._being_made = []

    def after_setup_data(self) -> None:
        """If a new set was made, it is the one that counts."""
        if not self._being_made:
            return
        if self._to_resume is not None and not self._remade and len(self._to_resume) != len(self._being_made):
            raise RestoreError(
                f"the checkpoint holds positions of {len(self._to_resume)} train dataloaders, this run has "
                f"{len(self._being_made)}"
            )
        for made, before in zip(self._being_made, self._trackers, strict=False):
            made.passes = max(made.passes, before.passes)  # made anew: its passes are counted on, not from zero
        self._trackers, self._being_made = self._being_made, []

    def state(self, *, epoch_over: bool, noted: bool) -> dict[str, Any]:
        """Everything a restart needs of the loaders of this rank, as plain data (for the arguments see `positions`)."""
        return {
            "root_seed": self.root_seed,
            "train": self.positions(epoch_over=epoch_over, noted=noted),
            # At our boundaries no validation runs: the next one is a pass of its own.
            "val": [t.position(epoch_over=True) for t in self._validation],
        }

    def resume(
        self, state: dict[str, Any], made_in: dict[str, int | None], *, remade: bool, change: Change | None = None
    ) -> None:
        """The loaders, made already or not, start at `state`.

        Args:
            state: Of `state`.
            made_in: The epochs in which the run that was saved had made its loaders (train and val).
            remade: The uninterrupted run makes new train dataloaders for the epoch that comes now.
            change: `state` is that of another number of ranks.
        """
        self._to_resume = state["train"]
        self._validation_to_resume = state["val"]
        self._made_in = {stage: epoch for stage, epoch in made_in.items() if epoch is not None}
        self._remade = remade
        self._change = change
        self.root_seed = state["root_seed"]
        for index, tracker in enumerate(self._trackers):
            self._resume(tracker, index)

    def resumed(self) -> None:
        """The epoch of the checkpoint runs: loaders made later begin as usual."""
        self._to_resume = None
        self._validation_to_resume = []
        self._remade = False
        self._change = None
        self._made_in = {}

    def count_batches(self) -> list[str]:
        """Lightning's counters say how much of the epoch is done, in batches of this number of ranks.

        Returns:
            What differs from an epoch that began on them, in words.

        Raises:
            TopologyError: Nothing of the epoch is left for so many ranks, or they would train more than it has.
        """
        counts = [t.batches_left() for t in self._trackers]
        known = [count for count in counts if count is not None]
        if self._change is None or len(known) < len(counts):
            return []
        done = loops.batches_done(self._trainer, known, [t.has_cycled for t in self._trackers])
        whole = self._trainer.num_training_batches
        if done >= whole:
            raise TopologyError(
                f"{self._change.path}: on {self._change.present} ranks (saved by {self._change.saved}) nothing is left "
                f"of its epoch: {done} of {whole:g} batches are done (batch size, drop_last or limit_train_batches of "
                "this run). Continue on another number of ranks, or from a checkpoint of an epoch's end",
                self._change.saved,
                self._change.present,
            )
        loops.set_batches_done(self._trainer, done)
        window = self._trainer.accumulate_grad_batches
        if done % window == 0:
            return []
        return [f"the first step accumulates {window - done % window} batches and not {window}: {done} are done"]

    def begin_epoch(self) -> None:
        """An epoch begins from its first batch."""
        for tracker in self._trackers:
            tracker.begin_epoch()

    def mark_consumed(self) -> None:
        """Lightning's combined loader knows which of its members were cycled within this epoch before."""
        loops.mark_consumed(self._trainer, [t.cycles > 0 for t in self._trackers])

    def note(self) -> None:
        """To be called once before the first step of an epoch in this process and once after each step.

        Where Lightning fetches one batch ahead, the position that belongs to the batch trained last is the one that
        was noted a step earlier.
        """
        if loops.batches_ahead(self._trainer):
            self._trained, self._fetched = self._fetched, self._now(epoch_over=False)

    def batch_indices(self) -> list[Any]:
        """Per loader, what its dataset was asked for to make the batch at hand; None where nobody knows."""
        ahead = loops.batches_ahead(self._trainer)
        return [tracker.indices(ahead) for tracker in self._trackers]

    def positions(self, *, epoch_over: bool, noted: bool) -> list[dict[str, Any]]:
        """Where each loader stands after the batch trained last.

        Args:
            epoch_over: The next batch begins a new epoch.
            noted: Whether `note` has been called since that batch.
        """
        if epoch_over or not loops.batches_ahead(self._trainer):
            return self._now(epoch_over=epoch_over)
        return self._trained if noted else self._fetched

    def _now(self, *, epoch_over: bool) -> list[dict[str, Any]]:
        return [t.position(epoch_over=epoch_over) for t in self._trackers]

    def keep_only_own_states(self, fit_loop_state: dict[str, Any]) -> None:
        """Of the loader states that Lightning saves, those stay that plain Lightning could load into the loaders."""
        states = fit_loop_state.get("combined_loader")
        if states is None:
            return
        own = [s for s, t in zip(states, self._trackers, strict=True) if t.kind == "stateful"]
        if own:
            fit_loop_state["combined_loader"] = own
        else:
            del fit_loop_state["combined_loader"]

    def describe(self) -> dict[str, Any]:
        """Facts of the loaders that a position depends on, for comparison at resume."""
        return {f"train dataloader {i} {k}": v for i, t in enumerate(self._trackers) for k, v in t.describe().items()}
