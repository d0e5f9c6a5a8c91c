"""The user sees, while a fit runs, what of it is durable: in the progress bar, and in a warning when nothing is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from lightning_ft import _names, events
from lightning_ft._fit import loops
from lightning_ft._fit.newest_durable import Durable
from lightning_ft._fit.watch import Fit, Watch
from lightning_ft.errors import ConfigurationError

_log = logging.getLogger(__name__)

IN_BAR = "durable"
"""What the value in the progress bar is called."""


def check(after: timedelta | None) -> timedelta | None:
    """`after`, as the argument of that name may be.

    Raises:
        ConfigurationError: It is no positive duration, and not None.
    """
    if after is not None and (not isinstance(after, timedelta) or after <= timedelta(0)):
        raise ConfigurationError(
            f"warn_if_not_durable_after={after!r}: a positive timedelta is needed; None: no warning"
        )
    return after


class Durability(Watch):
    """What of one fit is durable is shown from `open` to `close`. Ranks: zero.

    Args:
        fit: The fit.
        after: After how long without a new durable checkpoint that is said, on top of the time that is meant to pass
            between two saves; None: never.
    """

    def __init__(self, fit: Fit, after: timedelta | None) -> None:
        self._fit = fit
        self._after_secs = None if after is None else after.total_seconds()
        self._durable = Durable(fit.dirpath)
        self._undo = [events.observe(self._note)]

    def _note(self, event: events.Event) -> None:
        ours = self._fit.tiers.has(event.path) and _names.parse_checkpoint_name(_names.split(event.path)[1])
        if ours or isinstance(event, events.Resumed):  # which may be of any directory
            self._durable.note(event)

    def open(self) -> None:
        self._undo.append(_show(self._fit.trainer, self._durable))

    def ballot(self) -> dict[str, int]:
        self._warn()
        return {}

    def batch_over(self) -> None:
        self._warn()  # within a validation, which may take long, there are no ballots

    def _warn(self) -> None:
        if self._after_secs is None:
            return
        warning = self._durable.warning(self._after_secs + self._fit.pace.planned_secs)
        if warning is not None:
            _log.warning("%s", warning)

    def close(self) -> None:
        undo, self._undo = self._undo, []
        for step in undo:
            step()


def _show(trainer: pl.Trainer, durable: Durable) -> Callable[[], None]:
    """The progress bar, if there is one, shows what is durable, until the returned function is called.

    What is logged, and what loggers and callbacks see of it, stays as it is: the bar alone is asked for its figures.
    Lightning's own bars end after that: with the last save, which is durable after the last batch only.
    """
    bar = trainer.progress_bar_callback
    if bar is None:
        return lambda: None
    get_metrics = bar.get_metrics
    words = partial(durable.words, in_one=isinstance(bar, RichProgressBar))  # which wraps lines between words

    def with_words(*args: Any, **kwargs: Any) -> dict[str, Any]:
        metrics: dict[str, Any] = get_metrics(*args, **kwargs)
        return {**metrics, IN_BAR: metrics.get(IN_BAR, words())}

    undo = [loops.replaced(bar, "get_metrics", with_words)]
    ends: list[Callable[[], None]] = []
    for kind, hook in ((TQDMProgressBar, "on_train_end"), (RichProgressBar, "teardown")):
        if isinstance(bar, kind):
            undo.append(loops.replaced(bar, hook, _later(getattr(bar, hook), ends)))

    def end() -> None:
        if ends:  # by itself, and not by an error
            # Draws the metrics once more. Not that of a subclass, which may do there what is to be done once an epoch.
            if isinstance(bar, TQDMProgressBar):
                TQDMProgressBar.on_train_epoch_end(bar, trainer, trainer.lightning_module)
            elif isinstance(bar, RichProgressBar):
                RichProgressBar.on_train_epoch_end(bar, trainer, trainer.lightning_module)
        for step in (*undo, *ends):
            step()

    return end


def _later(hook: Callable[..., None], calls: list[Callable[[], None]]) -> Callable[..., None]:
    """In place of `hook`: its calls are in `calls`, to be made later."""
    return lambda *args, **kwargs: calls.append(partial(hook, *args, **kwargs))
