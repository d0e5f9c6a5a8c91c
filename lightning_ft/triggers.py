"""When to save: values and pure functions, no clock, no trainer.

The callback turns what it sees into `Facts`, once per step boundary and once per epoch boundary, and passes
them with the state of the time before to `advance`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Literal

from lightning_ft.errors import ConfigurationError


@dataclass(frozen=True)
class Trigger:
    """The rules under which a save is due; any of them is enough, and there is one save for all.

    Raises:
        ConfigurationError: A rule is no positive whole number, or no positive duration.
    """

    every_n_train_steps: int | None = None
    every_n_epochs: int | None = None
    train_time_interval: timedelta | None = None
    auto: bool = False
    """Whether a save is due as often as costs and failures say (`_history.pace`)."""

    def __post_init__(self) -> None:
        for name in ("every_n_train_steps", "every_n_epochs"):
            value = getattr(self, name)
            if value is None:
                continue
            # `True` is an int, and would mean a save at every step to the one and a switch to the other.
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigurationError(f"{name}={value!r}: a whole number is needed, not {type(value).__name__}")
            if value < 1:
                raise ConfigurationError(f"{name}={value!r}: at least 1 is needed; leave it out to switch it off")
        interval = self.train_time_interval
        if interval is None:
            return
        if not isinstance(interval, timedelta):
            raise ConfigurationError(
                f"train_time_interval={interval!r}: a timedelta is needed, not {type(interval).__name__}"
            )
        if interval <= timedelta(0):
            raise ConfigurationError(f"train_time_interval={interval!r}: a positive duration is needed")

    @classmethod
    def of(
        cls,
        every_n_train_steps: int | Literal["auto"] | None,
        every_n_epochs: int | None,
        train_time_interval: timedelta | None,
    ) -> Trigger:
        """What these arguments of `FaultTolerantCheckpoint` ask for; without any, the default.

        Raises:
            ConfigurationError: One of them has a value it cannot have.
        """
        if isinstance(every_n_train_steps, str):
            if every_n_train_steps != "auto":
                raise ConfigurationError(f'every_n_train_steps={every_n_train_steps!r}: a whole number, or "auto"')
            return cls(None, every_n_epochs, train_time_interval, auto=True)
        return resolve(cls(every_n_train_steps, every_n_epochs, train_time_interval))

    @classmethod
    def default(cls) -> Trigger:
        """The end of every epoch."""
        return cls(every_n_epochs=1)


def resolve(trigger: Trigger) -> Trigger:
    """`trigger`, or the default if it has no rule."""
    return Trigger.default() if trigger == Trigger() else trigger


@dataclass(frozen=True)
class Facts:
    """What a decision may depend on, at one step or epoch boundary; equal on all ranks."""

    step: int
    """Optimizer steps taken."""
    epoch_finished: bool
    """Whether this is the boundary at the end of an epoch."""
    epochs: int
    """Epochs finished so far."""
    accumulating: bool = False
    """Whether gradients of an unfinished accumulation are held, which no checkpoint contains."""
    time_due: bool = False
    """Whether enough time has passed since the last save, by the clock of rank 0, broadcast."""


@dataclass(frozen=True)
class LastSave:
    """The counters at the decision before, whether or not it led to a save."""

    step_seen: int = 0
    epochs_seen: int = 0


@dataclass(frozen=True)
class Pending:
    """The state between two decisions."""

    last: LastSave = field(default_factory=LastSave)
    postponed: str | None = None
    """The reason of a save that is due and was not to be made yet: within a gradient accumulation, while another one
    was being written, or in place of one whose copy was withdrawn."""


def due(trigger: Trigger, facts: Facts, last: LastSave) -> str | None:
    """Why a save is due at these facts ("epoch_end", "periodic", "time"), None if it is not.

    A rule of n fires when a multiple of n was passed since `last`: a counter that jumps over one cannot miss
    it, and one that stands still does not fire twice.
    """
    if facts.epoch_finished and _passed(trigger.every_n_epochs, last.epochs_seen, facts.epochs):
        return "epoch_end"
    if _passed(trigger.every_n_train_steps, last.step_seen, facts.step):
        return "periodic"
    if facts.time_due and (trigger.auto or trigger.train_time_interval is not None):
        return "time"
    return None


def _passed(n: int | None, before: int, now: int) -> bool:
    return n is not None and now // n > before // n


def advance(trigger: Trigger, state: Pending, facts: Facts) -> tuple[Pending, str | None]:
    """The state after this boundary, and why to save now, None if not.

    A save that becomes due within a gradient accumulation is postponed to its end, never lost.
    """
    reason = due(trigger, facts, state.last) or state.postponed
    # The epoch rule looks at epoch boundaries only, so only those may use up a multiple.
    epochs_seen = facts.epochs if facts.epoch_finished else state.last.epochs_seen
    last = LastSave(step_seen=facts.step, epochs_seen=epochs_seen)
    if facts.accumulating:
        return Pending(last, postponed=reason), None
    return replace(state, last=last, postponed=None), reason
