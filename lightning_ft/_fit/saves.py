"""The saves of one fit: made at its boundaries, their failures heard by all ranks, their commits told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lightning_ft._copying.copy_plan import Late
from lightning_ft._copying.module_tree import ModuleTree
from lightning_ft._fit.directories import Tiers
from lightning_ft._fit.logger_news import News
from lightning_ft._ranks.dist import Ranks
from lightning_ft._saving.failure import GIVE_UP_AFTER, agreed_failure
from lightning_ft._saving.options import SaveOptions
from lightning_ft._sharded.written_by import saves_sharded
from lightning_ft.plugin import FaultTolerantCheckpointIO
from lightning_ft.state import Progress

_log = logging.getLogger(__name__)


class Saves:
    """What of a fit is saved, and how more of it is.

    Ranks: all, at the same points. Thread: main.

    Args:
        trainer: The trainer.
        tree: Its module.
        plugin: Our plugin; None if the user gave another one.
        ranks: The ranks of the run.
        tiers: Where checkpoints go.
        news: What loggers and other callbacks hear.
        told: Called on all ranks with the path of a checkpoint that has become durable (rank 0 alone knows of one).
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        tree: ModuleTree,
        plugin: FaultTolerantCheckpointIO | None,
        ranks: Ranks,
        tiers: Tiers,
        news: News,
        told: Callable[[str], None],
    ) -> None:
        self._trainer = trainer
        self._tree = tree
        self._plugin = plugin
        self._ranks = ranks
        self._tiers = tiers
        self._news = news
        self._tell = told
        self._saved_batch = self._uploaded_batch = -1
        self._saved_path = self._durable_path = ""
        self._saved_at = time.monotonic()
        self.at_hand: tuple[str, str] | None = None
        """Reason and boundary of the save that is being made; None if that is somebody else's."""
        self.emergency: dict[str, Any] | None = None
        """What is known about the emergency that is being saved."""

    @property
    def secs_since_last(self) -> float:
        """How long ago the last save was made that `train_time_interval` counts from."""
        return time.monotonic() - self._saved_at

    def has(self, progress: Progress) -> bool:
        """Whether a save of this state was made, and has not failed as far as the ranks have heard."""
        return progress.batch == self._saved_batch

    def newest(self, progress: Progress) -> str:
        """The checkpoint with this state, or else the newest that is known to be durable; empty if there is none.

        Ranks: zero knows it.
        """
        return self._saved_path if self.has(progress) else self._durable_path

    def start_from(self, path: str) -> None:
        """The fit goes on from the checkpoint `path`."""
        self._durable_path = path

    def start_clock(self) -> None:
        """Training begins, as far as `train_time_interval` is concerned."""
        self._saved_at = time.monotonic()

    def votes(self) -> dict[str, int]:
        """What this rank knows of its saves, for the vote."""
        plugin = self._plugin
        return {
            "save_failed": int(plugin is not None and plugin.failed),
            "writer_busy": int(plugin is not None and plugin.writer.busy),
            "repeat": int(self.must_repeat()),
        }

    TOPICS = ("save_failed", "writer_busy", "repeat")

    def must_repeat(self) -> bool:
        """Ranks: those that take copies know, the others say no."""
        return self._plugin is not None and self._plugin.take_repeat()

    def make(
        self, reason: str, boundary: str, progress: Progress, run_id: str, *, ends: bool = False, upload: bool = True
    ) -> None:
        """The state is copied and on its way to disk, unless it is saved already.

        Args:
            reason: Why, for the manifest.
            boundary: ``"step"`` or ``"epoch"``: where this is.
            progress: The counters here.
            run_id: Id of the run.
            ends: Whether training ends here, within an epoch: callbacks may change parameters before a step does.
            upload: If there are two directories, also to that of the run, and not to the local one alone.
        """
        if progress.batch == self._saved_batch:
            if upload and self._tiers.two and progress.batch != self._uploaded_batch:
                self._uploaded_batch = progress.batch
                if self._ranks.is_zero:
                    self._tiers.upload(self._saved_path, run_id)
            return
        path = self._tiers.new_path(progress.step)
        options = None
        if self._plugin is not None:
            last = reason in ("stop", "train_end")
            options = SaveOptions(
                self._tiers.on_commit(path, run_id, upload=upload),
                # After the last batch of an epoch, or of training, callbacks may change parameters before a step does.
                late=self._late() if boundary == "step" and not ends else None,
                replaceable=not last and not (upload and self._tiers.two),
            )
        self.at_hand = reason, boundary
        try:
            self._trainer.save_checkpoint(path, weights_only=False, storage_options=options)
        finally:
            self.at_hand = None
        self._saved_batch, self._saved_path = progress.batch, path
        if upload:
            self._uploaded_batch = progress.batch
            self._saved_at = time.monotonic()

    def make_emergency(self, path: str, about: dict[str, Any], options: SaveOptions) -> bool:
        """The state as it is, within a step perhaps, is durable under `path`, not to be resumed from; or that failed.

        Ranks: all, wherever they are, as long as it is the same place. Blocks on: the write.

        Args:
            path: The same on all ranks.
            about: What is to be known of it: plain data, the same on all ranks.
            options: For the plugin.
        """
        self.at_hand, self.emergency = ("emergency", "none"), about
        try:
            self._trainer.save_checkpoint(path, False, options if self._plugin is not None else None)
        finally:
            self.at_hand = self.emergency = None
        return self.drained()

    def drained(self) -> bool:
        """What was submitted is over; whether it is durable, too. Failures are logged. Blocks on: all ranks, writes."""
        if self._plugin is None:
            return True
        self._plugin.drain()
        durable = True
        while any(self._ranks.all_gather(self._plugin.failed)):
            failure = agreed_failure(self._ranks, self._plugin)
            durable = False
            if failure is not None and self._ranks.is_zero:
                _log.error("%s", failure.error)
        return durable

    def go_back(self, path: str) -> None:
        """Training goes on from the checkpoint `path`, as if nothing had been saved since, once that is loaded."""
        self._saved_batch = self._uploaded_batch = -1
        self._tiers.pin(path)

    def _late(self) -> Late | None:
        # Who takes no copy, and a plugin that copies at once, need not look through the parameters.
        copies = self._ranks.is_zero or saves_sharded(self._trainer.strategy, self._plugin)
        if self._plugin is None or not copies or not self._plugin.overlaps:
            return None
        return Late.of(self._tree, self._trainer.optimizers, self._trainer.global_step)

    def settle(self, after: str) -> None:
        """What was submitted is durable, or every rank knows that it is not.

        Raises:
            SaveError: See `report_failure`.
        """
        plugin = self._plugin
        if plugin is None:
            return
        plugin.drain()
        while any(self._ranks.all_gather(plugin.failed)):
            self.report_failure(after)

    def report_failure(self, after: str) -> None:
        """The failed save of a rank is known on all ranks: raised, or logged and lived with.

        Raises:
            SaveError: The save that failed, on all ranks, unless ``on_error="warn"``.
        """
        assert self._plugin is not None
        failure = agreed_failure(self._ranks, self._plugin)
        if failure is None:
            return
        if failure.newest_save:
            self._saved_batch = -1  # the state is still to be saved, should training end here
        if failure.newest_upload:
            self._uploaded_batch = -1  # or to be uploaded
        if failure.ends_the_run:
            raise failure.error
        if self._ranks.is_zero:
            _log.warning(
                "%s (%s; %d in a row, the run stops at %d)", failure.error, after, failure.in_a_row, GIVE_UP_AFTER
            )

    def tell_of_commits(self) -> None:
        """Loggers hear of a checkpoint after it is durable, never before."""
        durable = self._tiers.take_durable()
        for committed in durable:
            self._news.log_metrics(self._tiers.figures(committed))
        if durable:  # of several the newest: the others may have been rotated away
            self._durable_path = max(reversed(durable), key=lambda committed: committed.step).path
            self._tell(self._durable_path)
        self._news.pass_on()
