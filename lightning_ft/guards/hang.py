"""A run that makes no progress is ended, so that its launcher can start it again."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta

from lightning_ft.errors import ConfigurationError


@dataclass(frozen=True)
class HangGuard:
    """Ends all ranks, with exit code 78 and the stacks of all threads, when one of them no longer gets on.

    A small process beside each rank looks at how far its rank is; it notices what no thread of the rank could, C code
    that keeps the interpreter to itself or a stopped process, and it ends with the rank. What counts is what was
    completed: a step, a batch of validation, a piece of a file read or written, a batch fetched again to reach the
    position of a restart. Time during which the watching process does not run either (a suspended job, a laptop asleep)
    does not count, nor does that in which a debugger holds the rank. A rank that waits for another one does not hang as
    long as that one goes on.

    A limit that is None is learned in each process: ten times the slowest of its kind so far, at least 5 minutes, and
    at most an hour, or twice the slowest if that is more. Until the first is completed `startup_timeout` stands for it.

    Nothing is saved. A save that is being written is waited for, a minute at most.

    Args:
        step_timeout: Between the ends of two batches.
        startup_timeout: Without progress before the first step is complete: set-up of the process group, choosing and
            loading a checkpoint, reaching the position in the data, the sanity check, the first step with whatever it
            compiles.
        validation_timeout: Between two batches of a validation; also for what hooks do at the end of a validation, of
            an epoch or of training.
        save_timeout: Without progress of a save, in the background too, and for the part that training waits for.

    Raises:
        ConfigurationError: A limit is no positive `timedelta`.
    """

    step_timeout: timedelta | None = None
    startup_timeout: timedelta = timedelta(minutes=30)
    validation_timeout: timedelta | None = None
    save_timeout: timedelta | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name != "startup_timeout":
                continue
            if not isinstance(value, timedelta) or value <= timedelta(0):
                raise ConfigurationError(f"HangGuard: {field.name}={value!r}: a positive timedelta is needed")
