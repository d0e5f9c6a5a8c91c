"""What happens at the boundaries of a fit: what is due is saved, and what asks for its end ends it.

All ranks decide alike, from what they have heard in the vote.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import lightning.pytorch as pl

from lightning_ft import events
from lightning_ft._fit import loops
from lightning_ft._fit.directories import Tiers
from lightning_ft._fit.due import Due
from lightning_ft._fit.ending import Ending, last_words
from lightning_ft._fit.saves import Saves
from lightning_ft._fit.settings import Settings
from lightning_ft._fit.watch import Request, Watches
from lightning_ft._history.pace import Pace
from lightning_ft._ranks.dist import Ranks
from lightning_ft._vote.voting import Voting
from lightning_ft.errors import SaveError
from lightning_ft.plugin import FaultTolerantCheckpointIO
from lightning_ft.state import Progress
from lightning_ft.triggers import Facts

_log = logging.getLogger(__name__)


class Boundaries:
    """Decides at step and epoch boundaries, and where training starts and ends.

    Ranks: all, at the same points. Thread: main.

    Args:
        trainer: The trainer.
        settings: What the user asked for.
        plugin: Our plugin; None if the user gave another one.
        ranks: The ranks of the run.
        tiers: Where checkpoints go.
        saves: What makes the saves.
        pace: When time says that one is due.
        ending: What ends the fit.
        watches: The watches of the guards.
        run_id: Id of the run.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        settings: Settings,
        plugin: FaultTolerantCheckpointIO | None,
        ranks: Ranks,
        tiers: Tiers,
        saves: Saves,
        pace: Pace,
        ending: Ending,
        watches: Watches,
        run_id: Callable[[], str],
    ) -> None:
        self._trainer = trainer
        self._settings = settings
        self._plugin = plugin
        self._ranks = ranks
        self._tiers = tiers
        self._saves = saves
        self._pace = pace
        self._ending = ending
        self._watches = watches
        self._run_id = run_id
        progress = loops.progress(trainer)  # not zero if the trainer has been fitted before
        local = settings.local.trigger if settings.local is not None else None
        self.due = Due(settings.trigger, local, progress.step, progress.epochs)
        self.voting = Voting(trainer, ranks, watches, (*Saves.TOPICS, "time_due"), self.own_votes)
        self.stopped_within_epoch = False
        """Whether training ends, or has ended, at the last step boundary, within an epoch."""
        self.is_last = False
        """Whether no restart will train what is left of the epoch at the last boundary."""
        self.stopped_early = False
        """Whether an `EarlyStopping` had decided, before the fit was asked to end, that the run is over."""
        self._refused = 0  # saves, in a row
        self._undo: list[Callable[[], None]] = []

    def close(self) -> None:
        """The trainer is as it was, and nothing is left of the vote. Local: asks nothing of other ranks."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        self.voting.close()

    def stop_now(self) -> None:
        """No further batch is trained in this fit."""
        self._undo.append(loops.stop_now(self._trainer))

    def forget(self) -> None:
        """The fit goes on from an older checkpoint of its own. Blocks on: all ranks, if a ballot was cast."""
        self.voting.forget()
        self._ending.forget()
        self.stopped_within_epoch = False

    def own_votes(self) -> dict[str, int]:
        """What this rank knows, beside its watches, for the vote."""
        due = self._ranks.is_zero and self._pace.is_over(self._saves.secs_since_last)
        return {"time_due": int(due), **self._saves.votes()}

    def decide(self, progress: Progress, *, epoch_finished: bool, ends_here: bool = False) -> None:
        """What is due here is saved; what asks for the end of the fit ends it.

        Args:
            progress: The counters.
            epoch_finished: Whether this is the boundary at the end of an epoch.
            ends_here: Whether no further batch will be trained, for a reason that is not the end of the epoch.

        Raises:
            SaveError: An earlier save has failed (on all ranks, unless ``on_error="warn"``).
        """
        self.is_last = loops.run_is_over(self._trainer)
        self.stopped_early = loops.stopped_early(self._trainer)
        votes = self.voting.take(afresh=epoch_finished)
        if votes.get("save_failed"):
            self._saves.report_failure("training goes on")
        if votes.get("repeat"):
            self.due.postpone("repeated")
        self._saves.tell_of_commits()
        for request in self._watches.decide_all(votes, progress):
            self._heed(request)
        facts = Facts(
            step=progress.step,
            epoch_finished=epoch_finished,
            epochs=progress.epochs,
            # A save at the last batch waits for the end of the epoch, which follows at once.
            accumulating=not epoch_finished and (progress.last_batch or loops.accumulating(self._trainer)),
            time_due=bool(votes.get("time_due")),
        )
        reason, only_local = self.due.at(facts)
        stop = self._ending.request
        if stop is not None and not facts.accumulating:
            self.stop_now()
            self.stopped_within_epoch = not epoch_finished
            # Whatever `save_on_train_end` says: the run is to be continued.
            reason = (reason or stop.save) if stop.save is not None else None
            only_local = only_local if stop.save is not None else None
        elif ends_here and self._settings.save_on_train_end:
            reason = reason or "train_end"
        elif (reason or only_local) and votes.get("writer_busy") and self._skips_when_busy:
            events.emit(events.SaveSkipped(self._tiers.first, progress.step, "another save is being written"))
            self.due.put_off(reason, only_local)
            reason = only_local = None
        if reason or only_local:
            boundary = "epoch" if epoch_finished else "step"
            self._save(reason or only_local or "", boundary, progress, upload=reason is not None)

    def _heed(self, request: Request) -> None:
        """The fit ends or a save is made: at this boundary, or where the accumulation ends."""
        if request.stop:
            self._ending.heed(request)
        elif request.save is not None:
            self.due.postpone(request.save)

    @property
    def _skips_when_busy(self) -> bool:
        return self._plugin is not None and self._plugin.when_busy == "skip"

    def _save(self, reason: str, boundary: str, progress: Progress, *, upload: bool = True) -> None:
        refusal = self._watches.refuses_save()
        if refusal is not None:
            events.emit(events.SaveSkipped(self._tiers.first, progress.step, refusal))
            self.due.postpone(reason)
            self._refused += 1
            if self._ranks.is_zero and _is_worth_a_line(self._refused):
                _log.warning(
                    "no checkpoint is saved after step %d, since %s: it is tried again after each step; what was "
                    "saved before stays (refused %d times in a row)",
                    progress.step, refusal, self._refused,
                )  # fmt: skip
            return
        self._refused = 0
        self._saves.make(reason, boundary, progress, self._run_id(), ends=self.stopped_within_epoch, upload=upload)

    def leave_validation(self) -> None:
        """The state before the validation is saved, and the fit ends. Ranks: all."""
        if self._trainer.sanity_checking:
            return  # what was heard is decided upon at the first boundary
        progress = loops.progress(self._trainer)
        votes = self.voting.take(afresh=False)
        for request in self._watches.decide_all(votes, progress):
            self._heed(request)
        stop = self._ending.request
        assert stop is not None, "a watch that calls something urgent asks for the end of the fit"
        self._undo.append(loops.update_no_more_schedulers(self._trainer))
        self.stopped_early = loops.stopped_early(self._trainer)
        self.stop_now()
        self.stopped_within_epoch = True
        if stop.save is not None:
            self._save(stop.save, "step", progress)

    def train_ends(self) -> None:
        """Training is over, its last state is durable, and every rank knows if it is not.

        Raises:
            SaveError: The last save failed (on all ranks, unless ``on_error="warn"``).
        """
        progress = loops.progress(self._trainer)
        try:
            self._finish_saves(progress)
        except SaveError as error:
            if not self._ending.leaves:
                raise
            _log.error("%s; the run ends without it", error)
        if self._plugin is not None:
            # From here on only other callbacks ask for saves, and nobody else reports their failure.
            self._plugin.reports_failures = True
        self._watches.phase("end")
        self.ask_now(progress)
        saved, newest = self._saves.has(progress), self._saves.newest(progress)

        def last(code: int | None) -> None:
            if code is not None:
                self._watches.leave(code)
            if self._ranks.is_zero:
                _log.warning("%s", last_words(code, newest, saved=saved))

        self._ending.leave(saved=saved, last=last, stays=self._watches.stays)

    def ask_now(self, progress: Progress) -> bool:
        """Whether the fit ends here, where nothing is left to be saved. Blocks on: all ranks."""
        if self._watches.anywhere:
            votes = self.voting.take(afresh=True)
            for request in self._watches.decide_all(votes, progress):
                self._heed(replace(request, save=None) if request.stop else request)
        return self._ending.request is not None

    def _finish_saves(self, progress: Progress) -> None:
        self._saves.settle("training goes on to its last save")
        last = self._settings.save_on_train_end or any(self._ranks.all_gather(self._saves.must_repeat()))
        if last and not self.stopped_within_epoch and self._ending.saves:
            self._save("train_end", "epoch", progress)
            self._saves.settle("training ends without it")
        self._saves.tell_of_commits()


def _is_worth_a_line(count: int) -> bool:
    """The first of many refusals in a row, and seldom more."""
    return count == 1 or (count >= 64 and count & (count - 1) == 0)
