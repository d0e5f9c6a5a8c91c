"""The one callback: Lightning's hooks, passed on to the session of the fit they belong to."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal
from weakref import proxy

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ft import _names
from lightning_ft._fit import console, durability_watch, guarding, lightning_callbacks, loops
from lightning_ft._fit.local_tier import LocalTier
from lightning_ft._fit.requirements import is_tried_out, require_local_tier, require_strategy
from lightning_ft._fit.session import Session
from lightning_ft._fit.settings import Settings
from lightning_ft._hang import watch
from lightning_ft._history.measuring import require_measurable
from lightning_ft._preemption import leaving
from lightning_ft._preemption.watch import stand_aside
from lightning_ft._proof import drilled
from lightning_ft._ranks.before_session import Early
from lightning_ft._ranks.dist import Ranks, raised_everywhere
from lightning_ft._restart import choose
from lightning_ft._restart.fetched import Fetched
from lightning_ft._restart.shared_verification import SharedVerification
from lightning_ft._vote.ballot import WITHIN
from lightning_ft.discovery import Depth
from lightning_ft.errors import CheckpointError, ConfigurationError
from lightning_ft.guards import AnyGuard, DivergenceGuard, Guard, HangGuard, PreemptionGuard
from lightning_ft.manifest import CheckpointInfo
from lightning_ft.plugin import FaultTolerantCheckpointIO
from lightning_ft.retention import Retention
from lightning_ft.triggers import Trigger

_log = logging.getLogger(__name__)


class FaultTolerantCheckpoint(ModelCheckpoint):
    """Kill the run anywhere, start the same command again, and every later number is bit for bit the same.

    Saves everything a restart needs, at the boundaries between steps and epochs, in the background, and resumes from
    the newest good checkpoint with ``trainer.fit(..., ckpt_path="last")``: on the first start, after a crash and
    after the end it is the same command. It is not for the *best* model: keep a `ModelCheckpoint(monitor=...)`
    beside it.

    A save that is due at the last batch of an epoch is made when the epoch is over; one that is due within a gradient
    accumulation, at its end. In manual optimization the gradients that are there are saved too.

    Args:
        dirpath: Directory or URL for the checkpoints. Default: ``default_root_dir/checkpoints``, which, unlike
            `ModelCheckpoint`'s default, is the same at every start of the same command.
        every_n_train_steps: Save when `trainer.global_step` passes a multiple of this. In manual optimization, where
            that counts every optimizer, batches are counted. ``"auto"``: as often as what saves cost here and the
            failures of this run so far make best, every minute to every hour, and no faster than saves are written; by
            the clock of rank 0.
        every_n_epochs: Save at the end of every n-th epoch. The default, with 1, if no trigger is given.
        train_time_interval: Save when so much time has passed since the last save, by the clock of rank 0.
        keep_last: How many checkpoints of this run are kept, at least 1; -1 keeps all. A `DivergenceGuard` keeps two
            at least: of the newest nobody knows yet whether its loss will be finite.
        keep_every_n_train_steps: The first checkpoint at or after each multiple of this is kept for good.
        local_dirpath: A directory on a fast local disk, in front of a `dirpath` that is slow. Every save is written
            there, and what is due in `dirpath` is copied from there in the background, byte for byte; a copy that still
            waits when the next one is due is left out, so training never waits for it. A restart takes the newest good
            checkpoint of both, and the local copy of one that is in both. With several machines a local checkpoint that
            not every rank sees is passed over. Must belong to this `dirpath` alone; may be empty at any start.
        local_every_n_train_steps: Save locally, and only there, when `trainer.global_step` passes a multiple of this.
            Without it, nothing is saved that is not due in `dirpath`.
        local_keep_last: How many checkpoints of this run are kept in `local_dirpath`, beside what is still to be
            copied.
        save_on_train_end: Save when training ends, unless that state is saved already.
        guards: What may end the run, or take it back, on all ranks at the same step; () for nothing. Default: a
            `PreemptionGuard` and a `DivergenceGuard`, each with its own defaults, made when a fit is set up. One that
            is given notes signals from its own beginning.
        max_restarts_without_progress: When ``ckpt_path="last"`` was started so often from a checkpoint, and each time
            the run ended in a crash before a newer one was saved, the one before is taken, and that is said. Kills
            count as crashes; an end that was asked for (a preemption, Ctrl-C) does not, nor does a refused restart.
            None: the newest is taken however often. A path given as `ckpt_path` always is.
        warn_if_not_durable_after: A warning is logged when for so long nothing new has become durable in `dirpath`, on
            top of `train_time_interval`. None: never.
        seed_workers: Give every batch a seed, so that random augmentation is the same after a restart, with any
            number of workers. If False, draws in worker processes are not repeated.
        strict: A restart that differs from the run that was saved is an error before the first step, and so is a
            checkpoint that could not be loaded with ``weights_only=True``. If False, both are warnings.

    Raises:
        ConfigurationError: An argument has a value it cannot have.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        every_n_train_steps: int | Literal["auto"] | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | None = None,
        keep_last: int = 3,
        keep_every_n_train_steps: int | None = None,
        local_dirpath: str | os.PathLike[str] | None = None,
        local_every_n_train_steps: int | None = None,
        local_keep_last: int = 2,
        save_on_train_end: bool = True,
        guards: Sequence[AnyGuard] | None = None,
        max_restarts_without_progress: int | None = 3,
        warn_if_not_durable_after: timedelta | None = timedelta(minutes=30),
        seed_workers: bool = True,
        strict: bool = True,
    ) -> None:
        if dirpath is not None and (not isinstance(dirpath, (str, os.PathLike)) or not os.fspath(dirpath)):
            raise ConfigurationError(f"dirpath={dirpath!r}: must be a path or URL, or None")
        shown = "" if dirpath is None else _names.without_password(os.fspath(dirpath))
        if dirpath is not None and shown != os.fspath(dirpath):
            raise ConfigurationError(
                f"dirpath={shown!r}: a password in it would be in logs, manifests and event files; give it in the "
                "storage_options of FaultTolerantCheckpointIO, or in the environment"
            )
        flags = {"save_on_train_end": save_on_train_end, "seed_workers": seed_workers, "strict": strict}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise ConfigurationError(f"{name}={value!r}: must be True or False")
        self._guarded_by_default = guards is None
        guards = () if guards is None else guards
        if isinstance(guards, str) or not isinstance(guards, Sequence):
            raise ConfigurationError(f"guards={guards!r}: must be a list or tuple of guards")
        for guard in guards:
            if not isinstance(guard, (Guard, PreemptionGuard, DivergenceGuard, HangGuard)):
                raise ConfigurationError(f"guards: {guard!r} has no poll(step) method")
        for kind in (PreemptionGuard, DivergenceGuard, HangGuard):
            if sum(isinstance(guard, kind) for guard in guards) > 1:
                raise ConfigurationError(f"guards={guards!r}: one {kind.__name__}, with all that it is to do")
        patience = max_restarts_without_progress
        if patience is not None and (isinstance(patience, bool) or not isinstance(patience, int) or patience < 1):
            raise ConfigurationError(
                f"max_restarts_without_progress={patience!r}: a whole number, at least 1, is needed; None: no limit"
            )
        drilled.begin()
        console.install()
        # The base class serves Lightning's `isinstance` checks ("last", logger events); none of its hooks runs.
        super().__init__(save_top_k=0)
        self.settings = Settings(
            trigger=Trigger.of(every_n_train_steps, every_n_epochs, train_time_interval),
            retention=Retention(keep_last, keep_every_n_train_steps),
            local=self._local_tier(local_dirpath, local_every_n_train_steps, local_keep_last, dirpath),
            guards=tuple(guards),
            max_restarts_without_progress=patience,
            warn_if_not_durable_after=durability_watch.check(warn_if_not_durable_after),
            **flags,
        )
        self._given_dirpath = None if dirpath is None else _names.normalise(dirpath)
        self.dirpath = self._given_dirpath
        self._others: list[ModelCheckpoint] = []
        self._session: Session | None = None
        self._ranks: Ranks | None = None
        self._early = Early()
        self._run_id = ""
        self._chosen = ""
        self._damaged: tuple[CheckpointInfo, ...] = ()
        self._forget_choice: Callable[[], None] | None = None
        self._forget_names: Callable[[], None] | None = None
        self._stands_aside: Callable[[], None] | None = None

    @staticmethod
    def _local_tier(
        local_dirpath: str | os.PathLike[str] | None,
        every_n_train_steps: int | None,
        keep_last: int,
        dirpath: str | os.PathLike[str] | None,
    ) -> LocalTier | None:
        if local_dirpath is not None:
            remote = None if dirpath is None else _names.normalise(dirpath)
            return LocalTier.of(local_dirpath, every_n_train_steps, keep_last, remote)
        if every_n_train_steps is not None:
            raise ConfigurationError(
                f"local_every_n_train_steps={every_n_train_steps!r}: needs local_dirpath, a directory to save into"
            )
        return None

    def _redirect(self, elsewhere: Callable[[str], str]) -> None:
        """Checkpoints go to other directories than the given ones: for a drill, before `setup`."""
        if self._given_dirpath is not None:
            self._given_dirpath = self.dirpath = elsewhere(self._given_dirpath)
        local = self.settings.local
        if local is not None:
            self.settings = replace(self.settings, local=replace(local, dirpath=elsewhere(local.dirpath)))

    def _save_also_every(self, n_train_steps: int) -> None:
        """A save is due after so many steps too: for a drill, before `setup`."""
        trigger = replace(self.settings.trigger, every_n_train_steps=n_train_steps)
        self.settings = replace(self.settings, trigger=trigger)

    # -- set-up and tear-down ------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        console.install()  # a spawned process has unpickled this callback
        self._others = self._other_checkpoints(trainer)
        plugin = self._install_plugin(trainer)
        self._forget_names = lightning_callbacks.find_wrapped_weights(trainer)
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._stands_aside = stand_aside(self.settings.guards, trainer)
            return
        with raised_everywhere():
            if sum(isinstance(c, FaultTolerantCheckpoint) for c in loops.callbacks(trainer)) > 1:
                raise ConfigurationError("a Trainer has one FaultTolerantCheckpoint; give one instance all triggers")
            require_strategy(trainer.strategy, plugin)
            require_measurable(self.settings.trigger, plugin)
            if is_tried_out(trainer):
                return
        # From here on one rank alone may fail: links, environments and what can be started are those of its node.
        self.dirpath = self._directory(trainer)
        if self.settings.local is not None:
            require_local_tier(self.settings.local, self.dirpath, trainer.strategy, plugin)
        if self._guarded_by_default:
            # Not before: a signal that arrives where there is no fit has nothing to save, and is to end the process.
            self.settings = replace(self.settings, guards=(PreemptionGuard(), DivergenceGuard()))
        guarding.arm(self.settings.guards)
        self._early.meet(loops.collective_timeout(trainer) or WITHIN)
        self._ranks = self._ranks or Ranks()
        fitted_before = trainer.fit_loop.epoch_loop.batch_progress.total.ready > 0
        with raised_everywhere():
            self._session = Session(
                trainer, self.dirpath, self.settings, plugin, self._ranks, self._durable, self._chosen,
                self._run_id if fitted_before else "", self._damaged,
            )  # fmt: skip
        self._early.close()
        leaving.leave_spawned(trainer, partial(self.on_exception, trainer, pl_module))

    def _install_plugin(self, trainer: pl.Trainer) -> FaultTolerantCheckpointIO | None:
        present = trainer.strategy._checkpoint_io
        if isinstance(present, FaultTolerantCheckpointIO):
            return present
        if present is None or type(present) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = plugin = FaultTolerantCheckpointIO()
            return plugin
        _log.warning(
            "checkpoints go through %s, not through FaultTolerantCheckpointIO: they have no manifest, so they are not "
            'verified, not found by ckpt_path="last", not rotated, and atomic only if that plugin makes them so',
            type(present).__name__,
        )
        return None

    @staticmethod
    def _is_fit(trainer: pl.Trainer) -> bool:
        return trainer.state.fn == TrainerFn.FITTING and not trainer.fast_dev_run  # type: ignore[attr-defined]

    def _other_checkpoints(self, trainer: pl.Trainer) -> list[ModelCheckpoint]:
        return [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c is not self]

    def _directory(self, trainer: pl.Trainer) -> str:
        default = _names.join(_names.normalise(trainer.default_root_dir), "checkpoints")
        return self._given_dirpath or default

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._session is not None:
            self._session.finish()
        self._close()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        leaving.leave_with_spawned(trainer, exception)
        raised = exception
        if self._session is not None:
            raised = self._session.failed(exception)
        elif self._is_fit(trainer):
            raised = self._early.failed(exception)
        self._close()
        if raised is not exception:
            leaving.end_with(trainer, raised)

    def _close(self) -> None:
        """Nothing of the fit is left to the next one, also if a part of this fails, or Ctrl-C ends its waiting."""
        with ExitStack() as in_reverse:
            in_reverse.callback(self._forget)  # last: until then a write that is waited for may be told of
            in_reverse.callback(self._early.close)
            in_reverse.callback(guarding.disarm)
            for forget in (self._stands_aside, self._forget_names, self._forget_choice):
                if forget is not None:
                    in_reverse.callback(forget)
            if self._session is not None:
                self._run_id = self._session.run_id
                in_reverse.callback(self._session.close)
            elif self._ranks is not None:
                in_reverse.callback(self._ranks.close)

    def _forget(self) -> None:
        self._early = Early()
        self._session = self._ranks = self._forget_choice = self._forget_names = self._stands_aside = None
        self._chosen, self._damaged = "", ()

    # -- ckpt_path="last" ----------------------------------------------------------------------------------------

    @override
    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        """Called by Lightning for ``ckpt_path="last"``, before `setup`. Ranks: all; rank 0 decides."""
        if self._is_fit(trainer):
            guarding.arm(self.settings.guards)
        if trainer.world_size > 1:
            with watch.awaited(trainer):
                trainer.strategy.setup_environment()  # idempotent; without it there is nobody to tell
        if self._is_fit(trainer):
            self._early.meet(loops.collective_timeout(trainer) or WITHIN)
        ranks = self._ranks = self._ranks or Ranks()
        plugin = self._install_plugin(trainer)
        dirpath = self._directory(trainer)
        depth: Depth = "full" if plugin is None or plugin.verify == "full" else "size"
        options = plugin.storage_options if plugin is not None else None
        fetched, sharing = Fetched(), SharedVerification(ranks.rank, ranks.world_size, options)
        try:
            path, ours = choose.choose_for_all(
                ranks, dirpath, depth, options, self.settings.local, fetched, sharing,
                self.settings.max_restarts_without_progress,
            )  # fmt: skip
            verified_here = ranks.is_zero or path in sharing.took_part_in
            self._damaged = tuple(fetched.damaged)
            if plugin is not None and path is not None and ours and depth == "full" and verified_here:
                plugin.mark_verified(path, fetched.take(path))
        finally:
            fetched.close()
        if path is None:
            ranks.decide(lambda: self._begin_anew(trainer, dirpath, options))
            return set()
        self._chosen = path
        self._forget_choice = choose.insist(trainer, path)
        return {path}

    def _begin_anew(self, trainer: pl.Trainer, dirpath: str, options: dict[str, Any] | None) -> None:
        # Else Lightning takes the ``last.ckpt`` of another `ModelCheckpoint`.
        if any(c._find_last_checkpoints(trainer) for c in self._other_checkpoints(trainer)):
            return
        if trainer.state.fn != TrainerFn.FITTING:
            raise CheckpointError(
                f'no checkpoint in {dirpath} for ckpt_path="last": without one, untrained weights would be used'
            )
        choose.begin_anew(dirpath, options)

    # -- one call each -------------------------------------------------------------------------------------------

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._session is not None:  # else validate, test or predict: only weights are loaded
            self._session.load(checkpoint, str(trainer._checkpoint_connector._ckpt_path))

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # After an exception other ranks may not be here, and within a step (a signal handler) they are elsewhere: no
        # collective then, and nothing to restart from exactly.
        if self._session is None:
            return
        if self._session.saves or not (trainer.interrupted or loops.half_done(trainer)):
            self._session.add_state(checkpoint)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._session is not None:
            self._session.train_starts()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._session is not None:
            self._session.batch_starts()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        # Steps are watched where optimizers make them (see `_fit.session`); this is for one that is not torch's own.
        if self._session is not None:
            self._session.before_optimizer_step()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._session is not None:
            self._session.train_ends()

    # -- what Lightning asks of a ModelCheckpoint ----------------------------------------------------------------

    def _durable(self, path: str) -> None:
        assert self._session is not None
        self.last_model_path = path
        self._session.news.tell(proxy(self))

    @property
    def best_model_path(self) -> str:
        """The best model of the first other `ModelCheckpoint`.

        For ``ckpt_path="best"`` Lightning asks whichever checkpoint callback comes first, and that may be this one.
        """
        return self._others[0].best_model_path if self._others else ""

    @best_model_path.setter
    def best_model_path(self, path: str) -> None:
        pass  # the base class sets it; this callback knows no best model

    @property
    @override
    def state_key(self) -> str:
        return "FaultTolerantCheckpoint"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}  # all state is under this package's own key, so that plain Lightning misses no callback

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass  # see state_dict

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        pass  # a step is not over here: see `_fit.loops`

    @override
    def on_train_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        pass  # nor is an epoch

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._session is not None:
            self._session.watches.phase("sanity" if trainer.sanity_checking else "validate")

    @override
    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._session is not None:
            self._session.watches.batch_over()
            self._session.validation.batch_over()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Nothing of the base class: the step that was validated is not over here.
        if self._session is not None:
            self._session.watches.phase("train")
