"""The state this package adds to a checkpoint, and how a restart gets it back.

When what is restored, in the order Lightning allows::

    on_load_checkpoint     loaders know where to start; Lightning's own loader states are taken out of its hands
    optimizers restored    matched by name instead of by position, every tensor with the dtype it was saved in
    before the epoch       everything is compared; frozen parameters, metrics, reload schedule; random state last
    the epoch runs         loops forget that they restart

What is a rank's own (position of its loaders, random state, metrics, gradients) comes from the saved ranks that the
rank takes over (`_state.takeover`), so that the number of ranks may be another one.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import lightning.pytorch as pl

from lightning_ft import events, state
from lightning_ft._copying.module_tree import ModuleTree
from lightning_ft._data.elastic import DataRank
from lightning_ft._data.loaders import TrackedLoaders
from lightning_ft._fit import console, lightning_callbacks, loops
from lightning_ft._names import KEY
from lightning_ft._ranks.dist import Ranks
from lightning_ft._restart import compare
from lightning_ft._restart.compare import RestoreReport
from lightning_ft._state import merged_metrics, random_state, takeover
from lightning_ft._state import metrics as _metrics
from lightning_ft._vote.before_validation import Before
from lightning_ft.errors import RestoreError

_log = logging.getLogger(__name__)

_FORMAT = 1


def build_state(
    trainer: pl.Trainer,
    tree: ModuleTree,
    ranks: Ranks,
    data_rank: DataRank,
    loaders: TrackedLoaders,
    *,
    boundary: str,
    stopped_early: bool,
    seed: str | None,
    guards: dict[str, Any],
    before: Before | None = None,
) -> dict[str, Any]:
    """What a restart needs beyond Lightning's own dictionary. Complete on rank 0, which writes it.

    Ranks: all. Thread: main. Blocks on: all ranks (one gather).

    Args:
        trainer: The trainer.
        tree: Of its module.
        ranks: The ranks of the run.
        data_rank: This one's place among those that train on different data.
        loaders: Its train dataloaders.
        boundary: ``"step"`` or ``"epoch"`` at our own boundaries, ``"none"`` for saves of other callbacks.
        stopped_early: An `EarlyStopping` has decided that the run is over; not a guard, after which it goes on.
        seed: What the run was first seeded with.
        before: Of the validation within which this is; what is saved is the state before it.
        guards: What the guards of this rank know.
    """
    progress = loops.progress(trainer)
    # At the last batch of an epoch the position within it is of no use any more: what comes next is a new pass.
    epoch_over = before is None and (boundary == "epoch" or progress.epoch_over or progress.last_batch)
    own = before.own if before is not None else {
        "rng": random_state.capture(),
        "loaders": loaders.state(epoch_over=epoch_over, noted=boundary != "none"),
        "metrics": _metrics.capture(trainer, tree),
    }  # fmt: skip
    per_rank = ranks.gather(
        {
            "data_rank": {"rank": data_rank.rank, "size": data_rank.size},
            **own,
            "gradients": state.held_gradients(trainer.lightning_module),
            "guards": guards,
        }
    )
    return {
        "format": _FORMAT,
        "boundary": boundary,
        "step": progress.step,
        "batch": progress.batch,
        "epochs": progress.epochs,
        "within_epoch": not epoch_over,
        "world_size": ranks.world_size,
        "ranks": per_rank,
        "requires_grad": tree.requires_grad(),
        "optimizers": tree.layout(trainer.optimizers),
        "fingerprint": compare.fingerprint(trainer, loaders.describe(), ranks.world_size),
        "planned": compare.planned(trainer),
        "seed": seed,
        "reloads": loops.reloads(trainer) if before is None else before.reloads,
        "validation_due": before is not None,
        "should_stop": stopped_early,
    }


class Restore:
    """One restart: from the loaded checkpoint to the first batch.

    Ranks: all. Construct in `on_load_checkpoint`, before loops and optimizers are restored.

    Raises:
        TopologyError: The checkpoint was written by another number of ranks, and cannot be continued on this one.
        RestoreError: It holds nothing for this rank, or a part of it does not fit.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        checkpoint: dict[str, Any],
        path: str,
        ranks: Ranks,
        data_rank: DataRank,
        loaders: TrackedLoaders,
        strict: bool,
    ) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._loaders = loaders
        self._strict = strict
        self._done = False
        self._undo = [loops.replaced(trainer, "num_sanity_val_steps", 0)]  # they ran before the first step
        self._saved: dict[str, Any] | None = checkpoint.get(KEY)
        self._rank_state: takeover.RankState | None = None
        self.report = RestoreReport(path, restored=["weights", "optimizers", "schedulers", "loops", "callbacks"])
        if self._saved is None:
            self._note_plain(checkpoint)
            return
        self._undo.append(loops.replaced(trainer.strategy, "load_optimizer_state_dict", self._load_optimizer_states))
        of_rank = self._rank_state = takeover.of_this_rank(self._saved, data_rank, ranks.rank, path)
        self._change = of_rank.change
        # Lightning would load rank 0's state into the loaders of every rank, and only under some orders of set-up.
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        # Of loaders that the uninterrupted run makes anew just now, nothing carries over.
        made = self._saved["reloads"]["train"]
        self._remade = not self._saved["within_epoch"] and loops.reload_due(trainer, checkpoint["epoch"], made)
        made_in = {**self._saved["reloads"], **({"train": checkpoint["epoch"]} if self._remade else {})}
        loaders.resume(of_rank.loaders, made_in, remade=self._remade, change=self._change)
        if self._saved["boundary"] == "none":
            self.report.noted.append("saved by another callback, not at a boundary: a restart from it may not be exact")
        self._scores = lightning_callbacks.saved_scores(checkpoint)
        compare.compare_checkpoint(self.report, checkpoint, trainer)
        if self._saved["should_stop"]:
            trainer.should_stop = True  # a finished run stays finished
            if ranks.is_zero:
                _log.warning("the run of %s was ended by EarlyStopping: nothing is left to train", path)

    def _note_plain(self, checkpoint: dict[str, Any]) -> None:
        self.report.noted.append(
            "written without FaultTolerantCheckpoint: random state, partial metrics and the order of the data are not "
            "in it"
        )
        batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        done = batches["current"]["processed"]
        if done and not batches["is_last_batch"] and not self._stateful_states(checkpoint):
            self.report.noted.append(
                f"it was saved after batch {done} of epoch {checkpoint['epoch']}: the loader starts that epoch anew: "
                f"{done} batches are drawn again and as many at its end are not"
            )

    @staticmethod
    def _stateful_states(checkpoint: dict[str, Any]) -> Any:
        return checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader")

    def _load_optimizer_states(self, checkpoint: dict[str, Any]) -> None:
        assert self._saved is not None
        optimizers = self._trainer.strategy.optimizers
        present = state.optimizer_layout(optimizers, self._trainer.lightning_module)
        states, changed = state.match_optimizer_states(
            checkpoint["optimizer_states"], self._saved["optimizers"], present
        )
        self.report.noted.extend(changed)
        then, now = self._saved["fingerprint"]["optimizers"], [type(o).__name__ for o in optimizers]
        if self._strict and then != now:
            # Now, and not with all other differences: most optimizers fail on a state that is not theirs.
            self.report.changed.append(f"optimizers: {then} when saved, {now} now")
            self.report.raise_if_different()
        type(self._trainer.strategy).load_optimizer_state_dict(
            self._trainer.strategy, {**checkpoint, "optimizer_states": states}
        )
        for optimizer, saved in zip(optimizers, states, strict=True):
            state.restore_state_dtypes(optimizer, saved)

    def before_epoch(self) -> None:
        """Everything is restored, the random state last; the report is logged and, with `strict`, enforced.

        Raises:
            RestoreError: The run differs from the one saved (`strict`), or its data does where a position within an
                epoch depends on it.
        """
        if self._done:
            return
        self._done = True
        saved, trainer = self._saved, self._trainer
        if saved is None:
            self._say()
            return
        lightning_callbacks.restore_scores(trainer, self._scores)
        lightning_callbacks.restore_weight_averaging(trainer)
        loops.restore_accumulation(trainer, saved["fingerprint"]["accumulate_grad_batches"])
        present = compare.fingerprint(trainer, self._loaders.describe(), self._ranks.world_size)
        compare.compare(self.report, saved["fingerprint"], present, other_data=self._remade, change=self._change)
        compare.compare_plan(self.report, saved["planned"], compare.planned(trainer))
        if saved["seed"] != os.environ.get("PL_GLOBAL_SEED"):
            now = os.environ.get("PL_GLOBAL_SEED")
            self.report.noted.append(f"the run goes on with seed {saved['seed']}, not with {now or 'no seed'}")
        if saved["within_epoch"] or saved["step"]:
            self.report.noted += loops.inexact_reductions(trainer, self._ranks.world_size)
        moved = [c for c in self.report.changed if c.startswith("train dataloader")]
        if self._change is not None:
            moved = [m for m in moved if " batch size: " not in m]  # what is left of the order is dealt out anew
        if moved and saved["within_epoch"] and not self._strict:
            raise RestoreError(
                f"{self.report.path} was saved within an epoch, and its position there means nothing in other data: "
                + "; ".join(moved)
                + ". Give the path of a checkpoint of an epoch's end as ckpt_path, or start over in another directory"
            )
        module = trainer.lightning_module
        self.report.noted += state.restore_requires_grad(module, saved["requires_grad"])
        of_rank = self._rank_state
        assert of_rank is not None
        self.report.noted += of_rank.noted
        metrics, unmerged = merged_metrics.merge(trainer, of_rank.metrics)
        self.report.noted += unmerged
        self.report.missing += _metrics.restore(
            trainer, metrics, within_epoch=saved["within_epoch"], other_ranks=self._change is not None
        )
        state.restore_gradients(module, of_rank.gradients)
        loops.restore_reloads(trainer, saved["reloads"])
        if saved["boundary"] == "epoch":
            loops.continue_without_restart(trainer)
        begins = all(position["epoch_over"] for position in of_rank.loaders["train"])  # with a validation due, maybe
        if saved["within_epoch"] and not begins and self._change is not None and not self._remade:
            self.report.noted += self._loaders.count_batches()
        self._restore_random_state(of_rank)
        self.report.restored += ["random state", "data position", "metrics"]
        step, batch = saved["step"] + 1, saved["batch"] + 1
        self.report.position = f"training goes on with step {step} (epoch {trainer.current_epoch}, batch {batch})"
        self._say()

    def _restore_random_state(self, of_rank: takeover.RankState) -> None:
        if of_rank.rng is None:
            random_state.begin(of_rank.seed)
            return
        lost = random_state.restore(of_rank.rng)
        # With fewer ranks on a machine, a process may see fewer devices than it did.
        (self.report.missing if self._change is None else self.report.noted).extend(lost)

    def epoch_runs(self) -> bool:
        """The first batch may be asked for: loops and loaders are as they were.

        Returns:
            Whether the validation of the step saved is still to be run, before that.
        """
        validation_due = self._saved is not None and self._saved.get("validation_due", False)
        if self._saved is not None:
            if self._saved["boundary"] == "step":
                loops.continue_without_restart(self._trainer)
            self._loaders.mark_consumed()
        self._loaders.resumed()
        self._saved = self._rank_state = None  # releases what of the checkpoint is still held
        return bool(validation_due)

    def _say(self) -> None:
        path = self.report.path
        if self._strict and self._saved is not None:
            self.report.raise_if_different()
        if self.report.differences or self.report.noted:
            if self._ranks.is_zero:
                _log.warning("%s", self.report.render())
        else:
            console.tell(self.report.render())
        events.emit(events.Resumed(path, self._trainer.global_step))

    def say_if_nothing_ran(self) -> None:
        """One line tells a restart of a finished run from one that trained."""
        if not self._done and self._ranks.is_zero:
            trainer = self._trainer
            _log.warning(
                "nothing was trained: %s stands at step %d, and training ends there (max_steps=%s, max_epochs=%s)",
                self.report.path, trainer.global_step, trainer.max_steps, trainer.max_epochs,
            )  # fmt: skip

    def close(self) -> None:
        """Everything replaced for this restart is as it was."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []
