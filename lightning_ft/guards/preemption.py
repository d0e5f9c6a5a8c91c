"""Preemption: a signal to any rank, and all of them save after the same step and leave."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lightning_ft._preemption import signals as _signals
from lightning_ft._preemption import slurm
from lightning_ft.errors import ConfigurationError

_log = logging.getLogger(__name__)

# Windows has neither.
_STOP = tuple(name for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
_SAVE = "SIGUSR2" if hasattr(signal, "SIGUSR2") else None


@dataclass(frozen=True)
class PreemptionGuard:
    """Signals are noted from now on; in a fit, one of them on any rank makes all ranks save and stop at the same step.

    The first thing a script does should be to make it, and to keep it: it needs neither torch nor Lightning, whose
    imports take seconds, and process 1 of a container ignores SIGTERM until somebody handles it. Signals are noted
    until the fit is over; then they mean again what they meant before. The process ends with an exit code of
    `lightning_ft.exit_codes`.

    Ctrl-C is noted from the start of training: the first saves and stops, the second stops at once. So is the signal of
    a `SLURMEnvironment` with ``auto_requeue``.

    Thread: main; elsewhere Python allows no handlers, which is said, and only the file ``SAVE_NOW`` is looked at.

    Args:
        signals: Numbers or names of the signals that save and stop. SLURM sends one of one's choice some time before it
            ends a job (``#SBATCH --signal=SIGUSR1@180``), and SIGTERM then.
        save_signal: A signal that saves after the step and does not stop; None for none. A file named ``SAVE_NOW`` does
            the same, in a local `dirpath` or in `local_dirpath`; it is removed when the checkpoint is durable.
        grace: How long the process has from the first signal until it is killed (seconds, or a `timedelta`). A save
            that would take longer, as earlier ones have shown, is not begun. Default: the environment's
            ``LIGHTNING_FT_GRACE_SECS``; of a worker of torchrun the 30 s that torchrun waits; else unknown, and a save
            is begun whatever it takes.
        requeue: Whether a SLURM job is queued again (``scontrol requeue``) when a signal has stopped it. Default: yes,
            unless the trainer has a `SLURMEnvironment` without ``auto_requeue``.

    Raises:
        ConfigurationError: An argument has a value it cannot have.
    """

    signals: Sequence[int | str] = _STOP
    save_signal: int | str | None = _SAVE
    grace: timedelta | float | None = None
    requeue: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.signals, str) or not isinstance(self.signals, Sequence):
            raise ConfigurationError(f"signals={self.signals!r}: must be a list or tuple of signals")
        numbers = tuple(_number("signals", name) for name in self.signals)
        saving = None if self.save_signal is None else _number("save_signal", self.save_signal)
        if saving in numbers:
            if self.save_signal != _SAVE:
                raise ConfigurationError(f"save_signal={self.save_signal!r}: is one of signals, which stop")
            saving = None  # the default gives way
        object.__setattr__(self, "signals", numbers)
        object.__setattr__(self, "save_signal", saving)
        grace = self.grace
        secs = grace.total_seconds() if isinstance(grace, timedelta) else grace
        if secs is not None and (isinstance(secs, bool) or not isinstance(secs, (int, float)) or not 0 < secs < 1e9):
            raise ConfigurationError(f"grace={grace!r}: must be a positive number of seconds, a timedelta, or None")
        if self.requeue is not None and not isinstance(self.requeue, bool):
            raise ConfigurationError(f"requeue={self.requeue!r}: must be True, False or None")
        if not _signals.note(self.numbers, self):
            _log.warning(
                "PreemptionGuard was made in thread %s: only the main thread can handle signals, so none of them saves "
                "this run; make it in the main thread",
                threading.current_thread().name,
            )
        if self.requeue is not False and slurm.job_id() is not None:
            slurm.last_words.prepare()

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of all signals that are noted."""
        return frozenset(n for n in (*self.signals, self.save_signal) if isinstance(n, int))

    @property
    def grace_secs(self) -> float | None:
        """The grace period that was given."""
        return self.grace.total_seconds() if isinstance(self.grace, timedelta) else self.grace

    def __reduce__(self) -> tuple[Any, ...]:
        # A process that is spawned notes signals from where it has unpickled this.
        return type(self), (self.signals, self.save_signal, self.grace, self.requeue)


def _number(field: str, name: object) -> int:
    try:
        number = _signals.number_of(name)
    except ValueError as error:
        raise ConfigurationError(f"{field}: {error}") from None
    if number == signal.SIGINT:
        raise ConfigurationError(f"{field}: SIGINT is Ctrl-C, which saves and stops without being named")
    return number
