"""`PreemptionGuard` at work: signals go into the vote, and all ranks act on them after the same step."""

from __future__ import annotations

import atexit
import logging
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

import lightning.pytorch as pl

from lightning_ft import _names, _words, events
from lightning_ft._fit import loops
from lightning_ft._fit.watch import Fit, Request, Watch
from lightning_ft._preemption import grace, loader_workers, own_signals, signals, slurm
from lightning_ft._preemption.save_now import SaveNow
from lightning_ft._ranks.peers import agent_shares_its_store
from lightning_ft.errors import CheckpointError
from lightning_ft.exit_codes import INTERRUPTED, PREEMPTED, PREEMPTED_UNSAVED
from lightning_ft.guards.preemption import PreemptionGuard
from lightning_ft.state import Progress
from lightning_ft.storage import Storage

_log = logging.getLogger(__name__)

_AT_ONCE_SECS = 3.0  # for a write in flight, after a second Ctrl-C: whoever types that does not want to wait
_NOTABLE_SECS = 1.0
_RANK_BITS = 24
_LAST_RANK = (1 << _RANK_BITS) - 1


class Preemption(Watch):
    """Signals of any rank, and requests for a save, in one fit. Ranks: construct on all.

    Args:
        guard: The guard.
        fit: The fit. Lightning's own handlers stay out of it from here on.

    Raises:
        ConfigurationError: The environment of any rank holds a grace period that is none.
    """

    topics = ("preempt", "preempt_age_ms", "save_now")
    anywhere = True
    replaces_lightnings_signals = True

    def __init__(self, guard: PreemptionGuard, fit: Fit) -> None:
        self._guard = guard
        self._fit = fit
        # Every node has an environment of its own.
        self._grace_secs, self._grace_from = fit.ranks.together(lambda: grace.grace_secs(guard.grace_secs))
        self._durations = grace.Durations()
        self._save_now = SaveNow([fit.dirpath, *([fit.local_dirpath] if fit.local_dirpath else [])])
        self._saving_step: int | None = None
        self._still_asked = False
        self._voted_at = time.monotonic()
        self._request: Request | None = None
        self._by_signal = False
        self._leaves = False
        self._failed = False
        self._batch_at_start: int | None = None
        self._over = False
        requeue_signal = own_signals.requeue_signal(fit.trainer)
        numbers = guard.numbers | ({requeue_signal} if requeue_signal is not None else set())
        self._stopping = numbers - {guard.save_signal}
        self._noting = signals.Noting(numbers, guard)
        self._undo: list[Callable[[], None]] = [
            own_signals.keep_lightning_out(fit.trainer, self._noting.numbers),
            loader_workers.shield(numbers),
            events.observe(self._note),
        ]
        if fit.ranks.is_zero:
            _warn_of_shared_store()

    def _note(self, event: events.Event) -> None:
        """Thread: the one that emits."""
        if not isinstance(event, (events.Committed, events.SaveFailed)) or not self._is_of_this_run(event.path):
            return
        if isinstance(event, events.Committed):
            self._durations.note(_names.split(event.path)[0], event.metrics)
            self._save_now.saved(event.step)
            if self._saving_step is not None and event.step >= self._saving_step:
                self._saving_step = None
        else:
            self._save_now.failed()

    def _is_of_this_run(self, path: str) -> bool:
        """Not of another callback, whose saves, on a disk of their own maybe, tell nothing of ours."""
        return self._fit.tiers.has(path) and _names.parse_checkpoint_name(_names.split(path)[1]) is not None

    def open(self) -> None:
        """Handlers are over whatever was installed since; Ctrl-C is noted, where it is Python's own business."""
        self._noting.retake()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._noting.add(signal.SIGINT)
            self._stopping |= {signal.SIGINT}
        self._batch_at_start = loops.progress(self._fit.trainer).batch
        resumed_from = self._fit.trainer.ckpt_path
        if self._grace_secs is not None and self._fit.ranks.is_zero and resumed_from:
            self._durations.resumed_from(self._figures_of(str(resumed_from)))

    def _figures_of(self, path: str) -> Mapping[str, float | int]:
        options = None if self._fit.plugin is None else self._fit.plugin.storage_options
        try:
            manifest, _ = Storage(options).read_manifest(path)
        except (CheckpointError, OSError) as error:
            _log.warning("how long a save takes is not known from %s: %s", path, error)
            return {}
        return {} if manifest is None else manifest.metrics

    def ballot(self) -> dict[str, int]:
        self._voted_at = now = time.monotonic()
        arrivals = self._noting.arrivals()
        stops = {n: arrival for n, arrival in arrivals.items() if n in self._stopping}
        by_file = self._fit.ranks.is_zero and self._save_now.look()
        asked = by_file or self._still_asked or self._guard.save_signal in arrivals
        return {
            "preempt": max((_code(n, self._fit.ranks.rank) for n in stops), default=0),
            "preempt_age_ms": max((int(1e3 * (now - a.first_at)) + 1 for a in stops.values()), default=0),
            "save_now": int(asked and not self._over),
        }

    def urgent(self, votes: Mapping[str, int]) -> bool:
        """A validation is not waited for: the restart begins it anew."""
        return bool(votes.get("preempt"))

    def decide(self, votes: Mapping[str, int], progress: Progress) -> Request | None:
        if self._request is not None and self._fit.stop() is not None:
            return None  # else the fit has gone back to an older checkpoint, and forgotten it
        if votes.get("preempt"):
            number, rank = _decoded(votes["preempt"])
            self._by_signal = number != signal.SIGINT
            self._request = self._stop(number, rank, votes["preempt_age_ms"] / 1e3, progress)
            self._leaves = self._request.exit_code is not None
            return self._request
        if votes.get("save_now"):
            if isinstance(self._guard.save_signal, int):
                self._noting.forget(self._guard.save_signal)
            self._save_now.asked(progress.step)
            self._saving_step, self._still_asked = progress.step, False
            if self._fit.ranks.is_zero:
                _log.warning("a save was asked for: the state after step %d is saved, training goes on", progress.step)
            return Request("asked for", stop=False, save="on_demand")
        return None

    def _stop(self, number: int, rank: int, age_secs: float, progress: Progress) -> Request:
        """Ranks: all. Blocks on: rank 0, if it may have a grace period."""
        what = "Ctrl-C" if number == signal.SIGINT else f"{signals.name_of(number)} on rank {rank}"
        code: int | None = PREEMPTED
        if number == signal.SIGINT:
            # In a notebook, or at a prompt, the session goes on; a program does not.
            code = None if hasattr(sys, "ps1") else INTERRUPTED
        step = progress.step
        if self._over or self._batch_at_start in (None, progress.batch):
            when = f"training is over at step {step}" if self._over else f"stopping before any batch, at step {step}"
            if self._over and not self._fit.saves.has(progress):
                self._say(f"{what}: {when}, and that state is not saved; the last checkpoint is kept")
                return Request(what, save=None, exit_code=None if code is None else PREEMPTED_UNSAVED)
            self._say(f"{what}: {when}; nothing is left to be saved")
            return Request(what, save=None, exit_code=code)
        save = Request(what, exit_code=code, unsaved_code=None if code is None else PREEMPTED_UNSAVED)
        if number == signal.SIGINT:
            self._say(f"{what}: saving and stopping after step {step}")
            return save
        elapsed_secs = age_secs + time.monotonic() - self._voted_at
        # One clock and one memory of earlier saves decide for all.
        budget = self._fit.ranks.decide(lambda: self._budget(elapsed_secs))
        if elapsed_secs >= _NOTABLE_SECS:
            what = f"{what}, {_words.age(elapsed_secs)} ago"
        if budget.allows_save:
            self._say(f"{what}: saving and stopping after step {step} ({budget})")
            return save
        self._say(
            f"{what}: stopping after step {step} without a new save, which would not be over "
            f"in time ({budget}, says {self._grace_from}); the last checkpoint is kept"
        )
        return Request(what, save=None, exit_code=PREEMPTED_UNSAVED)

    def _budget(self, elapsed_secs: float) -> grace.Budget:
        """Ranks: zero."""
        busy = self._fit.plugin is not None and self._fit.plugin.writer.busy
        return grace.Budget(self._grace_secs, elapsed_secs, self._durations.expected_secs(busy=busy))

    def _say(self, text: str) -> None:
        if self._noting.deferred_exits:
            text += "; another handler wanted to exit at once, and has to wait"
        if self._fit.ranks.is_zero:
            _log.warning("%s", text)

    def phase(self, name: str) -> None:
        self._over = name == "end"
        if name == "load":
            self._batch_at_start = -1  # gone back, maybe to before the start: all that follows is still to be saved
            # Rank 0 alone hears of commits; it votes for all.
            self._still_asked = self._fit.ranks.is_zero and (self._still_asked or self._saving_step is not None)
            self._saving_step = None
            self._save_now.went_back()

    def failed(self, error: BaseException) -> None:
        self._leaves = False
        self._failed = True  # the process ends anyway, and is to say why
        if isinstance(error, KeyboardInterrupt) and self._fit.plugin is not None:
            self._fit.plugin.writers.hurry(_AT_ONCE_SECS)

    def close(self) -> None:
        undo, self._undo = self._undo, []
        for step in reversed(undo):
            step()
        if not self._leaves:
            self._noting.close(dealt_with=self._failed or self._request is not None)

    def leave(self, exit_code: int) -> None:
        """SLURM queues the job again, where that was asked for; signals do nothing until the process has ended."""
        if self._leaves:
            self._leaves = False
            if exit_code == INTERRUPTED:
                atexit.unregister(_interrupt_ends_at_once)
                atexit.register(_interrupt_ends_at_once)
            failed = exit_code == PREEMPTED_UNSAVED and self._request is not None and self._request.save is not None
            job = self._job_to_requeue()
            if job is not None and failed:
                self._say(f"SLURM is not asked to queue job {job} again, as its state could not be saved: see to that")
            elif job is not None and self._fit.ranks.is_zero:
                # Also how `scancel` ends a job; the early signal is none of that.
                sigterm_alone = set(self._noting.arrivals()) <= {signal.SIGTERM}
                slurm.last_words.leave(partial(slurm.requeue, job, unless_cancelled=sigterm_alone))
            # A scheduler repeats itself, and what the script still does may take long.
            self._noting.linger()

    def stays(self) -> None:
        """Signals mean what they meant before."""
        if self._noting.lingers:
            self._noting.close(dealt_with=True)

    def _job_to_requeue(self) -> str | None:
        wanted = self._guard.requeue
        if wanted is None:
            wanted = own_signals.auto_requeue(self._fit.trainer) is not False
        return slurm.job_id() if wanted and self._by_signal else None


def stand_aside(guards: Collection[object], trainer: pl.Trainer) -> Callable[[], None]:
    """While `trainer` validates, tests or predicts, signals mean what they mean without us.

    Nothing is there to be saved, so none of them is noted; those that have come arrive again. Lightning's handlers, of
    which one waits for the other ranks, stay out here, too.

    Returns:
        A function that ends this.
    """
    numbers = {n for guard in guards if isinstance(guard, PreemptionGuard) for n in guard.numbers}
    if not numbers:
        return lambda: None
    undo = [signals.suspend(), own_signals.keep_lightning_out(trainer, numbers)]

    def end() -> None:
        while undo:
            undo.pop()()

    return end


def _code(number: int, rank: int) -> int:
    """One number for the vote, of which the greatest counts: signals before Ctrl-C, and of ranks the first."""
    return (int(number != signal.SIGINT) << 40) | (number << _RANK_BITS) | (_LAST_RANK - min(rank, _LAST_RANK))


def _decoded(code: int) -> tuple[int, int]:
    return (code >> _RANK_BITS) & 0xFFFF, _LAST_RANK - (code & _LAST_RANK)


def _interrupt_ends_at_once() -> None:
    """At the exit of a process whose state is saved: Ctrl-C once more is no exception in whatever Python tidies up."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _warn_of_shared_store() -> None:
    """With torch 2.13 the workers of a restart find the addresses of the dead ones in the agent's store, and hang."""
    if agent_shares_its_store():
        _log.warning(
            "torchrun shares its store with its workers (TORCHELASTIC_USE_AGENT_STORE=True). Only if a worker is lost, "
            "the restarted ones may hang in init_process_group with gloo; to rule that out, start torchrun with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --standalone or --rdzv-backend=c10d"
        )
