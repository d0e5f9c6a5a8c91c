"""`DivergenceGuard`: what a run does about a loss that is not finite, too high, or far above the ones before it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_ft.errors import ConfigurationError

Action = Literal["stop", "rollback", "warn"]
Offending = Literal["skip", "retry"]


@dataclass(frozen=True)
class DivergenceGuard:
    """All ranks act together on a bad loss, before the optimizer step that it would lead to.

    A loss is bad if it is not finite, if it is above `max_loss`, or if it is a spike (`spike_sigmas`); on one rank is
    enough. Every loss that is differentiated is looked at, unscaled, also in manual optimization: gradients that
    overflow under a `GradScaler`, whose step it leaves out by itself, and metrics that are logged, are not losses.

    The state after a bad step is never saved, and the last checkpoint from which a finite loss has been computed stays
    until there is another.

    On an accelerator, reading a loss would make training wait. There it is copied while training goes on, and read one
    step late or later: the action follows that many steps after the bad one, and no step can be left out. A save waits
    for the losses up to it.

    Args:
        action: ``"stop"``: the run ends with `DivergenceError` on all ranks (exit code 77), and an emergency checkpoint
            of the state as it is then is left beside the others, to be looked into and not to be resumed from.
            ``"rollback"``: the run goes back, in the same process, to the last finite checkpoint, and on from there.
            ``"warn"``: it goes on, with a line in the log; what is not finite is not saved.
        max_loss: Losses above this are bad.
        patience: So many bad steps in a row are left out, without the action: their gradients are dropped and weights
            and optimizer state stay, as a `GradScaler` does it; schedulers and counters move on. Not if the forward
            pass has left something in a buffer that is not finite.
        max_rollbacks: The run stops at the bad step after so many rollbacks, counted over all its starts.
        offending: What a rollback does with the batches that had the bad loss: ``"skip"`` leaves them out: they are
            fetched and not trained, and no scheduler or step counter moves, as if they were not in the data. Of a step
            that accumulates several batches, all. They stay left out, in later rollbacks and in restarts from
            checkpoints saved since; killed before the next one is saved, the run finds them bad once more, and goes
            back again. ``"retry"`` trains them again.
        spike_sigmas: A loss is bad that is more than so many standard deviations above the mean of the last
            `spike_window` losses of its rank, once half as many are known. 6, over 128 losses, is what OLMo-core's
            ``SkipStepOptimizer`` (``sigma_factor``, ``rolling_interval_length``) leaves steps out by. Going back to a
            checkpoint before a spike and leaving out its batches is what PaLM did by hand (Chowdhery et al. 2022,
            section 5.1). None: no such check.
        spike_window: See `spike_sigmas`.

    Raises:
        ConfigurationError: An argument has a value it cannot have.
    """

    action: Action = "stop"
    max_loss: float | None = None
    patience: int = 0
    max_rollbacks: int = 3
    offending: Offending = "skip"
    spike_sigmas: float | None = None
    spike_window: int = 128

    def __post_init__(self) -> None:
        for name, allowed in (("action", get_args(Action)), ("offending", get_args(Offending))):
            if getattr(self, name) not in allowed:
                choices = ", ".join(repr(a) for a in allowed)
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: must be one of {choices}")
        _require_number("max_loss", self.max_loss, positive=False)
        _require_number("spike_sigmas", self.spike_sigmas, positive=True)
        for name, least in (("patience", 0), ("max_rollbacks", 1), ("spike_window", 4)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"{name}={value!r}: must be an integer of at least {least}")


def _require_number(name: str, value: object, *, positive: bool) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigurationError(f"{name}={value!r}: must be a finite number, or None")
    if positive and value <= 0:
        raise ConfigurationError(f"{name}={value!r}: must be above 0, or None")
