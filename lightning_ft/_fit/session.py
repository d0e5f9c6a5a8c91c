"""One fit: what is due at its step and epoch boundaries, and the saves that follow.

The callback makes a session when a fit is set up and drops it when the fit ends, however it ends, so nothing of one
fit can reach into the next. Everything here runs in the main thread, on all ranks, in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import datetime, timezone
from typing import Any

import lightning.pytorch as pl

from lightning_ft import _names, events
from lightning_ft._copying.module_tree import ModuleTree
from lightning_ft._copying.optimizer_steps import before_steps
from lightning_ft._data.elastic import DataRank
from lightning_ft._data.loaders import TrackedLoaders
from lightning_ft._divergence import emergency
from lightning_ft._divergence.left_out import LeftOut
from lightning_ft._fit import guarding, lightning_callbacks, loops, surprises
from lightning_ft._fit.boundaries import Boundaries
from lightning_ft._fit.directories import Tiers
from lightning_ft._fit.ending import Ending
from lightning_ft._fit.lineage import Line, is_superseded
from lightning_ft._fit.logger_news import News
from lightning_ft._fit.saves import Saves
from lightning_ft._fit.settings import Settings
from lightning_ft._fit.watch import Fit
from lightning_ft._history.pace import Pace
from lightning_ft._inspection.survey import age_secs
from lightning_ft._names import KEY
from lightning_ft._ranks.dist import Ranks
from lightning_ft._ranks.exceptions import Exceptions
from lightning_ft._restart import resumption
from lightning_ft._restart.consistent import compare_next_load
from lightning_ft._restart.restore import Restore, build_state
from lightning_ft._sharded import parallel_writes
from lightning_ft._sharded.written_by import saves_replicated, saves_sharded
from lightning_ft._state import random_state
from lightning_ft._vote.validation import Validation
from lightning_ft.manifest import CheckpointInfo
from lightning_ft.plugin import FaultTolerantCheckpointIO
from lightning_ft.storage import Storage


class Session:
    """One fit into one directory.

    Ranks: all, at the same points. On disk after construction: the directory, empty of what a crash left, and ours
    alone until `close`.

    Args:
        trainer: The trainer, its process group running.
        dirpath: Directory or URL for the checkpoints.
        settings: What the user asked for.
        plugin: Our plugin; None if the user gave another one.
        ranks: The ranks of the run; closed with the session.
        told: Called on all ranks with the path of a checkpoint that has become durable (rank 0 alone knows of one).
        chosen: What ``ckpt_path="last"`` chose, if it was asked.
        continues: Id of the run that an earlier fit of this trainer has left in memory; empty if there was none.
        damaged: What was found damaged on the way to `chosen`; known on rank 0.

    Raises:
        ConfigurationError: The directory cannot be written.
        DirectoryInUseError: Another live run writes into it.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        dirpath: str,
        settings: Settings,
        plugin: FaultTolerantCheckpointIO | None,
        ranks: Ranks,
        told: Callable[[str], None],
        chosen: str,
        continues: str,
        damaged: Sequence[CheckpointInfo] = (),
    ) -> None:
        self._trainer = trainer
        self._tree = ModuleTree(trainer.lightning_module)
        self._dirpath = dirpath
        self._settings = settings
        self._plugin = plugin
        self._ranks = ranks
        self._chosen = chosen
        self._tiers = Tiers(dirpath, settings.retention, settings.local, plugin, settings.max_restarts_without_progress)
        self._restore: Restore | None = None
        self._undo: list[Callable[[], None]] = []
        start, self._new_run_id = self._tiers.open(ranks)
        with ExitStack() as unless_made:  # nobody closes a session that was never made
            unless_made.callback(self._tiers.close)
            if ranks.is_zero:
                self._tiers.note_damaged(damaged)
            self._continues = continues
            self._line = Line(continues or self._new_run_id, start)
            self._seed = os.environ.get("PL_GLOBAL_SEED")
            self._ending = Ending(trainer)
            self._epoch_begun = False
            # One order for all ranks, whatever they were seeded with.
            root_seeds, places = zip(
                *ranks.all_gather((random_state.draw_seed(), loops.data_rank(trainer))), strict=True
            )
            self._data_rank = DataRank.among(places, ranks.rank)
            self._loaders = TrackedLoaders(trainer, root_seeds[0], self._data_rank, settings.seed_workers)
            self.news = News(trainer, self._submitted)
            self._saves = Saves(trainer, self._tree, plugin, ranks, self._tiers, self.news, told)
            pace = Pace(settings.trigger)
            self._line.from_batch = loops.progress(trainer).batch
            self._left_out = LeftOut(trainer, ranks, self._loaders)
            fit = Fit(
                trainer, ranks, dirpath, plugin, run_id=lambda: self.run_id, stop=lambda: self._ending.request,
                strict=settings.strict, saves=self._saves, tiers=self._tiers, loaders=self._loaders,
                left_out=self._left_out, line=self._line, pace=pace, go_back=self.go_back,
                local_dirpath=None if settings.local is None else settings.local.dirpath,
                warn_after=settings.warn_if_not_durable_after,
            )  # fmt: skip
            self.watches = guarding.watches(settings.guards, fit, start)
            unless_made.callback(self.watches.close)
            self._boundaries = Boundaries(
                trainer, settings, plugin, ranks, self._tiers, self._saves, pace, self._ending, self.watches,
                lambda: self.run_id,
            )  # fmt: skip
            unless_made.callback(self._boundaries.close)
            self.voting = self._boundaries.voting
            self.validation = Validation(
                trainer, self.voting, self.watches, self._tree, self._loaders, left=self._boundaries.leave_validation
            )
            unless_made.callback(self._undo_all)
            self._undo.append(self.news.install())
            self._undo.append(self._loaders.install())
            self._undo.append(loops.install(trainer, self))
            self._undo.append(self.validation.install())
            self._undo.append(events.observe(self._tiers.note))
            self._undo.append(lightning_callbacks.see_queued_files(trainer, self._wait_for))
            self._undo.append(compare_next_load(trainer, ranks))
            self._undo.append(self._left_out.install())
            self._undo.append(loops.before_backward(trainer, self.voting.loss_known))
            if self.watches.replaces_lightnings_signals:
                self._undo.append(loops.leave_out_signal_broadcast(trainer))
            if plugin is not None:
                sharded = saves_sharded(trainer.strategy, plugin)
                unless_made.callback(plugin.close_sharding)
                plugin.fit_begins(require_weights_only=settings.strict, sharded_over=ranks if sharded else None)
                if saves_replicated(trainer.strategy, plugin):
                    self._undo.append(parallel_writes.install(trainer, plugin))
                self._undo.append(before_steps(plugin.before_optimizer_step))
            self._exceptions = Exceptions(trainer, plugin, ranks, self._new_run_id, self.voting.close)
            unless_made.callback(self._exceptions.close, leaves=False)
            if chosen and ranks.is_zero:
                self._tiers.start_from(chosen)  # last of all: what failed before is not the checkpoint's fault
            unless_made.pop_all()

    def _submitted(self) -> tuple[int, int]:
        return self._plugin.writer.saves if self._plugin is not None and self._ranks.is_zero else (0, 0)

    def _wait_for(self, path: str) -> None:
        if self._plugin is not None and self._ranks.is_zero:
            self._plugin.wait_for(path)

    def failed(self, error: BaseException) -> BaseException:
        """The fit ends with `error`, or what is returned. No collective from here on: others may not have failed."""
        raised = self._exceptions.deal_with(error)
        self._left_out.say_how(error)
        self.watches.failed(error)
        self._ending.error = error
        return raised

    def finish(self) -> None:
        """The fit has ended by itself: what a restart of a finished run would otherwise leave open is said."""
        self._ending.finished = True
        if self._restore is not None and self._ending.request is None:
            self._restore.say_if_nothing_ran()

    def close(self) -> None:
        """The directory is given up, and the trainer is as it was. Local: asks nothing of other ranks.

        Blocks on: the write in flight; after `failed`, for a bounded time.
        """
        try:
            if self._plugin is not None:
                self._plugin.drain()
        finally:
            self._give_up()

    def _give_up(self) -> None:
        with ExitStack() as in_reverse:  # each of them, also if another one raises
            in_reverse.callback(self._tiers.close)
            if self._ending.is_no_fault:
                in_reverse.callback(self._tiers.starts.take_back)
            in_reverse.callback(self._ranks.close)
            in_reverse.callback(self._exceptions.close, leaves=self._ending.leaves)
            in_reverse.callback(self._boundaries.close)
            if self._restore is not None:
                in_reverse.callback(self._restore.close)
            in_reverse.callback(self._undo_all)
            in_reverse.callback(self.watches.close)
            if self._plugin is not None:
                self._plugin.reports_failures = True
                in_reverse.callback(self._plugin.close_sharding)

    def _undo_all(self) -> None:
        undo, self._undo = self._undo, []
        for step in reversed(undo):
            step()

    # -- resuming ------------------------------------------------------------------------------------------------

    def load(self, checkpoint: dict[str, Any], path: str) -> None:
        """The fit starts from `checkpoint`, loaded from `path`; Lightning restores its own part of it after this."""
        if surprises.is_of_lightnings_requeue(path):
            self._ranks.decide(lambda: surprises.refuse_older(path, self._dirpath, len(self._tiers.infos())))
        self._restore = Restore(
            self._trainer, checkpoint, path, self._ranks, self._data_rank, self._loaders, self._settings.strict
        )
        path, saved = _names.normalise(path), checkpoint.get(KEY)
        goes_back = self._line.going_back
        continues = self._line.begin(saved, path, self._new_run_id, lambda: self._is_newest(saved or {}, path))
        if saved is not None and self._ranks.is_zero and not goes_back:
            self._tell_start(saved, path, continues=continues)
        self._saves.start_from(path)
        if saved is None:
            return
        emergency.require_not_one(saved, path, strict=self._settings.strict)
        other_ranks = saved["world_size"] != self._ranks.world_size
        self._left_out.restore(saved.get("left_out", []), saved["batch"], other_ranks=other_ranks)
        of_rank = saved["ranks"][0 if other_ranks else self._ranks.rank]
        self.watches.restore(of_rank.get("guards", {}), other_ranks=other_ranks)
        self._seed = saved["seed"]
        self._boundaries.due.start_at(saved["step"], saved["epochs"])
        if continues and self._ranks.is_zero and self._tiers.is_local(path):
            # Its upload was cut off, or was not due: a machine that is lost later must not take it along.
            self._tiers.upload(path, self.run_id)

    def _tell_start(self, saved: dict[str, Any], path: str, *, continues: bool) -> None:
        """The report of the restart begins with what this start is. Ranks: zero. Blocks on: reading small files."""
        assert self._restore is not None
        storage = Storage(self._plugin.storage_options if self._plugin is not None else None)
        report = self._restore.report
        age = age_secs(self._tiers.begun_from, datetime.now(timezone.utc))
        report.start = resumption.of_start(self._line.start, self.run_id, path, age)
        if continues:
            report.again = resumption.of_steps(saved["step"], resumption.last_step(self._dirpath, storage))

    def _is_newest(self, saved: dict[str, Any], path: str) -> bool:
        """Whether `path` is of this directory, and the newest good one (what "last" passed over was not good)."""
        chosen = path == self._chosen
        return self._tiers.has(path) and self._ranks.decide(
            lambda: chosen or not is_superseded(saved, self._tiers.infos())
        )

    @property
    def run_id(self) -> str:
        """Id of the run that is trained."""
        return self._line.run_id

    def go_back(self) -> None:
        """The fit is about to load an older checkpoint of its own. Ranks: all."""
        self.watches.phase("load")
        self._boundaries.forget()
        self._line.go_back()
        self._epoch_begun = False

    # -- the loops: see the table in `_fit.loops` --------------------------------------------------------------------

    def before_setup_data(self) -> None:
        """Loaders may be made now."""
        self._loaders.before_setup_data()

    def making_loaders(self) -> AbstractContextManager[None]:
        """The user's code that makes train dataloaders runs."""
        return self._loaders.making("train")

    def after_setup_data(self) -> None:
        """Loaders were made, if they had to be."""
        self._loaders.after_setup_data()

    def before_epoch(self) -> None:
        """Nothing of the epoch has run yet."""
        if self._restore is not None:
            self._restore.before_epoch()
        if self._epoch_begun:
            self._loaders.begin_epoch()
        self._epoch_begun = True

    def epoch_runs(self) -> None:
        """The first batch is about to be asked for."""
        if self._restore is not None:
            validation_due = self._restore.epoch_runs()
            self.news.mark_restart()
            self._restore.close()
            self._restore = None
            if validation_due:
                loops.finish_step(self._trainer)
                return
        loops.count_epoch(self._trainer)
        self._loaders.note()

    def after_batch(self) -> None:
        """Hooks of other callbacks, which may change parameters, come next."""
        if self._plugin is not None:
            self._plugin.step_is_over(self._trainer.global_step)
        self.watches.batch_over()

    def after_step(self) -> None:
        """A step boundary: what is due is saved, unless the end of the epoch follows at once."""
        self._loaders.note()
        self.validation.before = None
        boundaries = self._boundaries
        if self._ending.request is not None and boundaries.stopped_within_epoch:
            return  # it was decided within the validation
        self._exceptions.check()
        progress = loops.progress(self._trainer)
        ends_here = boundaries.stopped_within_epoch = loops.stops_here(self._trainer) and not progress.last_batch
        boundaries.decide(progress, epoch_finished=False, ends_here=ends_here)

    def leaves_epoch(self) -> bool:
        """Whether the process is about to end within the epoch: the rest of it, and its end, are the restart's."""
        boundaries = self._boundaries
        return boundaries.stopped_within_epoch and self._ending.leaves and not boundaries.is_last

    def after_epoch(self) -> None:
        """An epoch boundary, unless training was stopped within the epoch: then its last step was one."""
        if not self._boundaries.stopped_within_epoch:
            self._exceptions.check()
            self._boundaries.decide(loops.progress(self._trainer), epoch_finished=True)

    def training_over(self) -> None:
        """The last step is done, and what it has made of the weights is known to be sound.

        Raises:
            FaultToleranceError: It is not, on all ranks.
        """
        self._exceptions.check()
        self.watches.training_over()

    # -- hooks of the callback -----------------------------------------------------------------------------------

    def train_starts(self) -> None:
        """Training begins: the clock of `train_time_interval` starts, and what may surprise is said.

        Raises:
            ConfigurationError: No save of this run could be loaded as `strict` asks for.
        """
        self.watches.open()
        if self._boundaries.ask_now(loops.progress(self._trainer)):
            self._boundaries.stop_now()
        self._saves.start_clock()
        if self._settings.strict:
            surprises.check_hyper_parameters(self._trainer)
        if not self._ranks.is_zero:
            return
        options = self._plugin.storage_options if self._plugin is not None else None
        lightning_callbacks.clear_directories_of_others(self._trainer, self._dirpath, options)
        if self._line.start > 1 and self._restore is None and not self._continues:
            surprises.warn_of_other_run(self._dirpath)
        surprises.say(self._trainer, self._dirpath, self._settings, earlier=self._line.start > 1)

    def batch_starts(self) -> None:
        """The batch is about to be trained. This rank's vote is cast, unless a watch waits for the loss.

        Raises:
            PeerLostError: Another rank has failed.
        """
        self._exceptions.check()
        self.voting.batch_starts()

    def before_optimizer_step(self) -> None:
        """Parameters may change. Blocks on: copies of them under way; with a watch that waits for the loss, all ranks.

        Raises:
            FaultToleranceError: What a watch raises, on all ranks.
        """
        self.voting.before_optimizer_step()
        if self._plugin is not None:
            self._plugin.before_optimizer_step()

    def train_ends(self) -> None:
        """Training is over, its last state is durable, and every rank knows if it is not.

        Raises:
            SaveError: The last save failed (on all ranks, unless ``on_error="warn"``).
        """
        self._boundaries.train_ends()

    def add_state(self, checkpoint: dict[str, Any]) -> None:
        """`checkpoint` holds everything a restart needs, whoever asked for it. Ranks: all (one gather)."""
        reason, boundary = self._saves.at_hand or ("user", "none")
        before = self.validation.before if self._saves.at_hand else None
        saved = build_state(
            self._trainer, self._tree, self._ranks, self._data_rank, self._loaders,
            boundary=boundary, stopped_early=self._stopped_early, seed=self._seed, guards=self.watches.state(),
            before=before,
        )  # fmt: skip
        if before is not None:
            before.put_into(checkpoint)
        fit_loop = checkpoint["loops"]["fit_loop"]
        self._loaders.keep_only_own_states(fit_loop["state_dict"])
        if boundary == "epoch":
            loops.begin_next_epoch(fit_loop)
        checkpoint[KEY] = {
            **saved,
            **self._line.stamp(reason),
            "left_out": self._left_out.state(),
        }
        if self._saves.emergency is not None:
            checkpoint[KEY]["emergency"] = self._saves.emergency

    @property
    def _stopped_early(self) -> bool:
        # Who asks for the end of the fit sets the same flag as an `EarlyStopping`, and those remember old decisions.
        return (
            self._boundaries.stopped_early if self._ending.request is not None else loops.stopped_early(self._trainer)
        )

    @property
    def saves(self) -> bool:
        """Whether it is this session that saves, so that all ranks are at the same place."""
        return self._saves.at_hand is not None
