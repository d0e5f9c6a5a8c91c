"""Lightning's signal handlers stay out of a fit in which ours are at work.

Its handler for SIGTERM runs a collective, between any two bytecodes of each rank (two ranks that are signalled in the
same step hang), and the one for SLURM's signal saves there, in the middle of a step.

Private to Lightning (2.5.5 to 2.6): `Trainer._signal_connector`, with what registers a handler and the handlers that
it found before. Only the one for SLURM can be turned off, and with it the requeueing. The cluster environment that a
trainer has chosen is known to its `_accelerator_connector` alone, where the strategy has none.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

from lightning_ft._fit import loops
from lightning_ft._preemption import signals


def keep_lightning_out(trainer: pl.Trainer, numbers: Collection[int]) -> Callable[[], None]:
    """Lightning neither takes nor gives back the signals in `numbers`, until the returned function is called."""
    connector = trainer._signal_connector
    register = connector._register_signal

    def register_others(number: Any, handlers: Any) -> None:
        if int(number) not in numbers:
            register(number, handlers)

    let_in = loops.replaced(connector, "_register_signal", register_others)

    def undo() -> None:
        let_in()
        # It remembers handlers of the time before training, to give them back: ours among them, which are gone then.
        # But that of SIGINT after a Ctrl-C, which it ignores by then, and would for ever.
        originals = connector._original_handlers
        for number in numbers:
            if any(map(signals.is_ours, (signal.getsignal(number), originals.get(number)))):
                originals.pop(number, None)

    return undo


def auto_requeue(trainer: pl.Trainer) -> bool | None:
    """Whether Lightning's environment would queue a SLURM job again; None without such an environment."""
    environment = _environment(trainer)
    return None if environment is None else environment.auto_requeue


def requeue_signal(trainer: pl.Trainer) -> int | None:
    """The signal on which Lightning would save and queue the job again."""
    environment = _environment(trainer)
    if environment is None or not environment.auto_requeue or environment.requeue_signal is None:
        return None
    return int(environment.requeue_signal)


def _environment(trainer: pl.Trainer) -> SLURMEnvironment | None:
    environment = trainer._accelerator_connector.cluster_environment
    return environment if isinstance(environment, SLURMEnvironment) else None
