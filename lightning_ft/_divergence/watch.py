"""`DivergenceGuard` at work: from the losses of a fit to what all ranks do about a bad one.

::

                         losses on the CPU                            losses on an accelerator
    before each backward the loss is judged                           its copy is launched
    the vote             the worst loss of the batch                  the worst of those that have arrived since
    before the step      all act; weights are as before the step      --
    the boundary         what had no step: all act                    all act; some steps have been taken since
    before a save        what was heard is enough                     all losses are waited for
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lightning_ft._copying.copies import is_streamed
from lightning_ft._divergence import emergency as _emergency
from lightning_ft._divergence import last_finite, left_out, rollback
from lightning_ft._divergence.criteria import (
    Badness,
    Course,
    Judge,
    Move,
    batches_in_words,
    is_worth_a_line,
    step_of_batch,
)
from lightning_ft._divergence.late_losses import LateLosses, Seen
from lightning_ft._fit import loops
from lightning_ft._fit.watch import Fit, Request, Watch
from lightning_ft._ranks.dist import everywhere
from lightning_ft.errors import ConfigurationError, DivergenceError
from lightning_ft.exit_codes import DIVERGED
from lightning_ft.guards.divergence import DivergenceGuard
from lightning_ft.state import Progress

_log = logging.getLogger(__name__)

_TOPIC = "loss"
_UNKNOWN = 0
"""The vote of a rank that has nothing to say of a loss; else one more than the `Badness`."""
_MOST_REPORTED = 20


class DivergenceWatch(Watch):
    """See `DivergenceGuard`.

    Args:
        guard: What the user asked for.
        fit: What it is asked for.

    Raises:
        ConfigurationError: The guard is to go back, and this fit has nothing it could go back to.
    """

    key = "divergence"
    topics = (_TOPIC,)

    def __init__(self, guard: DivergenceGuard, fit: Fit) -> None:
        self._guard = guard
        self._fit = fit
        self._judge = Judge(guard)
        self._course = Course()
        self.wants_loss = not is_streamed(fit.trainer.strategy.root_device)
        self._late: dict[torch.device, LateLosses] = {}
        self._own: list[tuple[Seen, str]] = []  # this rank's bad losses since the last good step
        self._vote = _UNKNOWN
        self._kinds = self._steps_of_batch = 0
        self._heard = _UNKNOWN  # the worst of the step at hand, by all ranks
        self._move = Move.GO_ON  # of the step at hand
        self._bad_steps = 0
        self._poisoned = False  # by a step that was taken although its loss was not finite
        self._trained_up_to = self._batch_at_start = 0
        self._never_finite: frozenset[str] = frozenset()
        self._step_at_hand = self._last_step = range(0)
        self._sound_buffers: frozenset[str] | None = None
        if guard.action == "rollback" and fit.plugin is None:
            other = type(fit.trainer.strategy.checkpoint_io).__name__
            raise ConfigurationError(
                'DivergenceGuard(action="rollback"): it goes back to verified checkpoints, which '
                f"FaultTolerantCheckpointIO writes, and this trainer has {other}"
            )
        self._undo = [rollback.install(fit, self._went_back)]
        fit.tiers.keep_predecessors()

    def open(self) -> None:
        if (
            self._guard.action == "rollback"
            and self._guard.offending == "skip"
            and loops.takes_iterator(self._fit.trainer)
        ):
            raise ConfigurationError(
                'DivergenceGuard(action="rollback", offending="skip"): training_step(dataloader_iter) fetches its '
                'batches by itself, so none can be left out; use offending="retry" or action="stop"'
            )
        self._trained_up_to = self._batch_at_start = loops.progress(self._fit.trainer).batch
        self._never_finite = last_finite.weights_not_finite(self._fit.trainer.lightning_module)
        if self._guard.patience:
            self._sound_buffers = self._buffers_that(finite=True)

    def close(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    # -- what is known of losses ---------------------------------------------------------------------------------

    def loss_known(self, loss: Tensor) -> None:
        loss = loss.detach()
        loss = getattr(loss, "_local_tensor", loss)
        if loss.numel() != 1:
            loss = loss.float().mean()
        trainer = self._fit.trainer
        seen = self._place(self._kinds)
        self._kinds += 1
        self._step_at_hand = seen.step
        # Lightning has divided it by the number of batches that are accumulated.
        factor = float(trainer.accumulate_grad_batches if trainer.lightning_module.automatic_optimization else 1)
        if is_streamed(loss.device):
            if loss.device not in self._late:
                self._late[loss.device] = LateLosses(loss.device)
            self._late[loss.device].add(loss, seen, factor)
        else:
            self._judged(replace(seen, value=float(loss) * factor))

    def _place(self, kind: int) -> Seen:
        trainer = self._fit.trainer
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress
        number, in_epoch = batches.total.ready, batches.current.ready
        automatic = trainer.lightning_module.automatic_optimization
        window = trainer.accumulate_grad_batches if automatic else 1
        step = step_of_batch(number, in_epoch, window, trainer.num_training_batches)
        indices = tuple(self._fit.loaders.batch_indices())
        return Seen(number, in_epoch, step, kind, indices, epoch=trainer.current_epoch)

    def _judged(self, seen: Seen) -> Badness:
        found = self._judge.judge(seen.value, seen.kind)
        badness = Badness.GOOD if found is None else found.badness
        if found is not None:
            self._own = [*self._own[-_MOST_REPORTED:], (seen, found.words)]
        self._vote = max(self._vote, badness + 1)
        return badness

    def _read_arrived(self) -> None:
        for late in self._late.values():
            for seen in late.arrived():
                if self._judged(seen) == Badness.NOT_FINITE:
                    late.forget()

    def ballot(self) -> dict[str, int]:
        self._read_arrived()
        vote = self._vote
        if not self.wants_loss:
            self._vote = _UNKNOWN  # told once; while the losses of a batch are voted on, with each of them
        return {_TOPIC: vote}

    # -- what follows --------------------------------------------------------------------------------------------

    def before_step(self, votes: Mapping[str, int]) -> None:
        # An optimizer that computes the loss several times in its step (LBFGS) has moved the weights after the first.
        automatic = self._fit.trainer.lightning_module.automatic_optimization
        self._heed(votes.get(_TOPIC, _UNKNOWN), undone=not (automatic and self._steps_of_batch))
        if self._move == Move.LEAVE_OUT:
            self._drop_gradients()
        else:
            self._steps_of_batch += 1

    def _drop_gradients(self) -> None:
        trainer = self._fit.trainer
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        left_out_by_scaler = _unscale_in_their_steps(trainer.optimizers, scaler)
        for parameter in trainer.lightning_module.parameters():
            if left_out_by_scaler and parameter.grad is not None:
                parameter.grad.fill_(math.nan)
            else:
                parameter.grad = None

    def decide(self, votes: Mapping[str, int], progress: Progress) -> Request | None:
        accumulating = loops.accumulating(self._fit.trainer) and not progress.last_batch
        # Of an accelerator, that was some steps ago; on the CPU, a step was taken before this loss was known.
        self._heed(votes.get(_TOPIC, _UNKNOWN), undone=accumulating and self.wants_loss)
        self._kinds = self._steps_of_batch = 0
        if self.wants_loss:
            self._vote = _UNKNOWN
        if not accumulating and self._heard != _UNKNOWN:
            self._step_is_over(progress)
        return None

    def _step_is_over(self, progress: Progress) -> None:
        if self._move == Move.GO_ON:
            self._course, _ = self._course.after(Badness.GOOD, self._guard, undone=False)
            self._own = []
        if self._move != Move.LEAVE_OUT:
            self._trained_up_to, self._last_step = progress.batch, self._step_at_hand
        self._poisoned = self._move == Move.WARN and self._heard == Badness.NOT_FINITE + 1
        self._move, self._heard = Move.GO_ON, _UNKNOWN

    def _heed(self, heard: int, *, undone: bool) -> None:
        """What all ranks have heard of the losses of a step is acted upon, once."""
        self._heard = max(self._heard, heard)
        if heard <= Badness.GOOD + 1 or self._move != Move.GO_ON:
            return
        self._course, move = self._course.after(Badness(heard - 1), self._guard, undone=undone)
        if move == Move.LEAVE_OUT and self._buffers_were_hit():
            self._course, move = self._course.without_tolerance(self._guard)
        self._move = move
        if move in (Move.STOP, Move.ROLL_BACK):
            self._act(move, undone=undone)
        self._bad_steps += 1
        if is_worth_a_line(self._bad_steps):
            self._say(move)

    def _say(self, move: Move) -> None:
        reports = self._reports()
        if self._fit.ranks.is_zero:
            what = {
                Move.WARN: "training goes on", Move.LEAVE_OUT: "the step is left out",
                Move.TOLERATE: "the step was taken",
            }[move]  # fmt: skip
            limit = "" if move == Move.WARN else f"{self._course.in_a_row} in a row, patience={self._guard.patience}, "
            _log.warning(
                "%s: %s (%sbad step number %d of this start); %s",
                _in_words(reports), what, limit, self._bad_steps, _indices_in_words(reports),
            )  # fmt: skip

    def _reports(self) -> list[list[tuple[Seen, str]]]:
        """Every rank's bad losses since the last good step. Ranks: all."""
        return self._fit.ranks.all_gather(self._own)

    def _act(self, move: Move, *, undone: bool) -> None:
        """Never returns.

        Raises:
            DivergenceError: The run ends.
            GoBack: It goes back.
        """
        fit = self._fit
        reports = self._reports()
        bad = [seen for report in reports for seen, _ in report]
        first = min(seen.batch for seen in bad)
        words = _in_words(reports)
        culprits = sorted({number for seen in bad for number in seen.step})
        # No finite loss came of the checkpoint right before, so that its weights may be what is wrong.
        suspect_from: int | None = first - 1
        if undone and not self._steps_of_batch:
            # The weights of now are those of the last step, and of every checkpoint since.
            finite = all(fit.ranks.all_gather(not last_finite.weights_not_finite(fit.trainer.lightning_module)))
            suspect_from = None if finite else self._trained_up_to
            if not finite:
                culprits = list(self._last_step)
                words += "; its weights were not finite to begin with"
                words += f", since the step of {batches_in_words(culprits)}" if culprits else ""
        self._leave(move, words, reports, first, first, culprits, suspect_from)

    def _leave(
        self,
        move: Move,
        words: str,
        reports: Sequence[Sequence[tuple[Seen, str]]],
        first: int,
        before: int,
        culprits: Sequence[int],
        suspect_from: int | None,
    ) -> None:
        """Never returns. What it raises, see `_act`; of `before` and `suspect_from`, see `last_finite.find`."""
        fit = self._fit
        found = last_finite.find(fit, before, suspect_from)
        if move == Move.ROLL_BACK and found.path:
            leave_out = culprits if self._guard.offending == "skip" else []
            if fit.ranks.is_zero:
                last_finite.remove(fit, found.poisoned)
                _log.error(
                    "%s: training goes back to %s (rollback %d of %d)%s; %s",
                    words, found.path, self._course.rollbacks, self._guard.max_rollbacks,
                    f", without {batches_in_words(leave_out)}" if leave_out else ", and trains the same batches again",
                    _indices_in_words(reports),
                )  # fmt: skip
            raise rollback.GoBack(found.path, leave_out)
        if move == Move.ROLL_BACK:
            words += "; there is no finite checkpoint to go back to"
        elif self._guard.action == "rollback":
            words += f"; it went back {self._course.rollbacks} times already (max_rollbacks)"
        raise self._error(words, reports, first, culprits, found)

    def training_over(self) -> None:
        """No loss will show what the last step has made of the weights, so they are looked at."""
        fit = self._fit
        batch = loops.progress(fit.trainer).batch
        if batch == self._batch_at_start or fit.stop() is not None:
            return  # nothing was trained; or a restart will show it, and this job may have little time
        self._hear_the_rest()  # a loss that was bad says more, and who had it
        broken = last_finite.weights_not_finite(fit.trainer.lightning_module) - self._never_finite
        if not any(fit.ranks.all_gather(bool(broken))):
            return
        culprits = list(self._step_at_hand)
        words = f"weights are not finite after the last step of the run ({batches_in_words(culprits)})"
        if self._guard.action == "warn":
            self._poisoned = True
            if fit.ranks.is_zero:
                _log.warning("%s: they are not saved", words)
            return
        self._course, move = self._course.without_tolerance(self._guard)
        # The checkpoint after the last batch is one of those that are looked into.
        self._leave(move, words, self._reports(), min(culprits, default=batch), batch + 1, culprits, batch)

    def _error(
        self,
        words: str,
        reports: Sequence[Sequence[tuple[Seen, str]]],
        first: int,
        culprits: Sequence[int],
        found: last_finite.Found,
    ) -> DivergenceError:
        """The run ends: its state is in an emergency checkpoint, and the error says all there is to know."""
        fit = self._fit
        step = loops.progress(fit.trainer).step
        losses = [[seen.value for seen, _ in report] for report in reports]
        indices = [list(report[-1][0].indices) if report else [] for report in reports]
        about = {
            "cause": words, "batch": first, "losses": losses, "indices": indices, "restart_from": found.path,
            "steps_of_batch": self._steps_of_batch,
        }  # fmt: skip
        emergency = _emergency.save(fit, step, about)
        if emergency and fit.ranks.is_zero:
            last_finite.remove(fit, found.poisoned)
        fit.ranks.all_gather(None)  # nobody leaves before rank 0 has written and removed: launchers kill what is left
        leave_out = fit.left_out.to_ask_for(culprits, found.batch)
        message = (
            f"{words}. The run ends at step {step}, on all ranks, with exit code {DIVERGED}. "
            + (f"Restart from {found.path}" if found.path else "There is no finite checkpoint to restart from")
            + f". If nothing is changed it diverges again; {left_out.VARIABLE}={leave_out} leaves that out"
            + (f". To look into: the state as it is now, {emergency}" if emergency else "")
            + f"; {_indices_in_words(reports)}"
        )
        if fit.ranks.is_zero:
            _log.error("%s", message)
        error = DivergenceError(
            message, step=step, batch=first, losses=losses, indices=indices,
            emergency=emergency, restart_from=found.path,
        )  # fmt: skip
        everywhere(error)
        return error

    def _went_back(self) -> None:
        for late in self._late.values():
            late.wait()
        self._late = {}
        self._own = []
        self._vote = self._heard = _UNKNOWN
        self._kinds = self._steps_of_batch = 0
        self._move, self._poisoned = Move.GO_ON, False
        self._trained_up_to, self._last_step = loops.progress(self._fit.trainer).batch, range(0)

    # -- buffers -------------------------------------------------------------------------------------------------

    def _buffers_that(self, *, finite: bool) -> frozenset[str]:
        return frozenset(
            name
            for name, buffer in self._fit.trainer.lightning_module.named_buffers()
            if buffer.is_floating_point() and last_finite.is_all_numbers(buffer) is finite
        )

    def _buffers_were_hit(self) -> bool:
        """Whether the forward pass has left something in a buffer that is not finite, on any rank. Ranks: all."""
        sound = self._sound_buffers or frozenset()
        return any(self._fit.ranks.all_gather(bool(sound & self._buffers_that(finite=False))))

    # -- saves ---------------------------------------------------------------------------------------------------

    def refuses_save(self) -> str | None:
        self._hear_the_rest()
        return "the last loss was not finite" if self._poisoned else None

    def _hear_the_rest(self) -> None:
        """All losses so far are known to all, and acted upon. Ranks: all. Blocks on: the device, if they are on one.

        Raises:
            FaultToleranceError: See `_act`.
        """
        if self.wants_loss:
            return
        for late in self._late.values():
            late.wait()
        self._read_arrived()
        heard, self._vote = max(self._fit.ranks.all_gather(self._vote)), _UNKNOWN
        self._heed(heard, undone=False)
        if self._move == Move.WARN and heard == Badness.NOT_FINITE + 1:
            self._poisoned = True

    def state(self) -> dict[str, Any]:
        return {
            "in_a_row": self._course.in_a_row,
            "rollbacks": self._course.rollbacks,
            "losses": self._judge.state(),
        }

    def restore(self, state: dict[str, Any], *, other_ranks: bool) -> None:
        # Of a run that goes back, how often it went back is not undone with the rest.
        rollbacks = max(state["rollbacks"], self._course.rollbacks)
        self._course = Course(state["in_a_row"], rollbacks)
        if not other_ranks:
            self._judge.restore(state["losses"])


def _unscale_in_their_steps(optimizers: Sequence[Optimizer], scaler: Any) -> bool:
    """Whether `scaler` looks at the gradients of all of them when they step, as it does of those that are fused.

    It does not go on without gradients, and leaves out the step if they are not finite. Private to torch (2.13).
    """
    return (
        scaler is not None
        and scaler.is_enabled()
        and all(
            getattr(optimizer, "_step_supports_amp_scaling", False)
            and scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
            for optimizer in optimizers
        )
    )


def _in_words(reports: Sequence[Sequence[tuple[Seen, str]]]) -> str:
    """One line: which ranks had which losses, on what."""
    parts = []
    for rank, report in enumerate(reports):
        if not report:
            continue
        seen, words = report[-1]
        more = f", and {len(report) - 1} before it" if len(report) > 1 else ""
        parts.append(f"rank {rank}: {words} in {left_out.place(seen.batch, seen.epoch, seen.in_epoch - 1)}{more}")
    return "; ".join(parts) or "a loss was bad"


def _indices_in_words(reports: Sequence[Sequence[tuple[Seen, str]]]) -> str:
    """For the end of a line: on what each rank had its last bad loss."""
    last = {rank: report[-1][0] for rank, report in enumerate(reports) if report}
    named = len(reports) > 1
    return "; ".join((f"rank {rank}: " if named else "") + left_out.words(seen.indices) for rank, seen in last.items())
