"""Loggers hear of a checkpoint when it is durable, whichever callback has saved it.

Lightning's `ModelCheckpoint` tells them as soon as its save has returned. With a background writer there is no file
yet, and a logger that uploads it finds nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_ft._fit import loops

_log = logging.getLogger(__name__)


class News:
    """What other callbacks tell the loggers of a trainer is held back until every save submitted is over.

    Of every save, since a logger asks the callback for its newest path when it is told, and that one has to be there.
    With saves as fast as the disk that may be when training ends.

    Thread: main.

    Args:
        trainer: The trainer.
        saves: How many saves were submitted so far, and how many of these are over (they are in order).
    """

    def __init__(self, trainer: pl.Trainer, saves: Callable[[], tuple[int, int]]) -> None:
        self._trainer = trainer
        self._saves = saves
        self._held: list[tuple[Callable[[Any], None], Any]] = []
        self._loggers = [(logger, logger.after_save_checkpoint) for logger in trainer.loggers]

    def install(self) -> Callable[[], None]:
        """News are held back until the returned function is called, which passes on what is left."""
        undo = [
            loops.replaced(logger, "after_save_checkpoint", partial(self._hold, tell)) for logger, tell in self._loggers
        ]

        def remove() -> None:
            for step in undo:
                step()
            held, self._held = self._held, []
            for tell, callback in held:
                try:
                    tell(callback)
                except Exception:  # the run is over: nothing may hide how it ended
                    _log.exception("a logger failed on the news of a checkpoint")

        return remove

    def _hold(self, tell: Callable[[Any], None], callback: Any) -> None:
        self._held.append((tell, callback))

    def pass_on(self) -> None:
        """What was held back is told, if every save submitted is over."""
        submitted, over = self._saves()
        if submitted != over:
            return
        held, self._held = self._held, []
        for tell, callback in held:
            tell(callback)

    def tell(self, callback: Any) -> None:
        """Every logger is told at once: of a checkpoint that is known to be durable."""
        for _, tell in self._loggers:
            tell(callback)

    def mark_restart(self) -> None:
        """Every logger has ``ft/resumed_at_step``: what it was told before of later steps is trained again."""
        self.log_metrics({"resumed_at_step": loops.logged_step(self._trainer)})

    def log_metrics(self, metrics: Mapping[str, float | int]) -> None:
        """Every logger has the figures of a save that is durable, as ``ft/...`` at the step of now."""
        values = {f"ft/{name}": value for name, value in metrics.items()}
        for logger in self._trainer.loggers:
            logger.log_metrics(values, step=loops.logged_step(self._trainer))
