"""What saves cost and how often the run has failed is measured, for ``every_n_train_steps="auto"``."""

from __future__ import annotations

import logging

from lightning_ft import _names, events
from lightning_ft._fit import console
from lightning_ft._fit.watch import Fit, Watch
from lightning_ft._history.pace import Past
from lightning_ft._history.timeline import read
from lightning_ft.errors import ConfigurationError
from lightning_ft.plugin import FaultTolerantCheckpointIO
from lightning_ft.storage import Storage
from lightning_ft.triggers import Trigger

_log = logging.getLogger(__name__)


def require_measurable(trigger: Trigger, plugin: FaultTolerantCheckpointIO | None) -> None:
    """What `trigger` is to be decided from can be known.

    Raises:
        ConfigurationError: Saves go through a plugin that does not say what they cost.
    """
    if trigger.auto and plugin is None:
        raise ConfigurationError(
            'every_n_train_steps="auto": only FaultTolerantCheckpointIO measures what saves cost; give a number, or '
            "leave the other checkpoint plugin out"
        )


class Measuring(Watch):
    """The pace of a fit follows what is measured. Ranks: zero.

    Args:
        fit: The fit.
        plugin: Its plugin, in whose writer thread the event files of earlier starts are read.
        of_now: The event file of this start.
    """

    def __init__(self, fit: Fit, plugin: FaultTolerantCheckpointIO, of_now: str) -> None:
        self._fit = fit
        self._pace = fit.pace
        self._of_now = of_now
        self._storage = Storage(plugin.storage_options)
        self._forget = events.observe(self._note)
        plugin.writer.then(of_now, self._read_past)

    def _is_first(self, path: str) -> bool:
        return _names.split(path)[0] == self._fit.tiers.first

    def _is_final(self, path: str) -> bool:
        return _names.split(path)[0] == self._fit.dirpath

    def _read_past(self) -> None:
        """Thread: writer. Blocks on: the store."""
        try:
            timeline = read(self._fit.dirpath, self._storage)
        except Exception as error:  # stores have errors of their own classes, and none of them may end the training
            _log.warning("how often to save is decided without earlier starts, which cannot be read: %s", error)
            return
        earlier = [start for start in timeline.starts if start.path != self._of_now]
        self._pace.recall(Past.of(earlier, self._is_first, self._is_final))

    def _note(self, event: events.Event) -> None:
        if not isinstance(event, events.Committed) or not self._fit.tiers.has(event.path):
            return
        figures = event.metrics
        self._pace.learn(
            figures.get("blocked_secs") if self._is_first(event.path) else None,
            figures.get("total_secs") if self._is_final(event.path) else None,
        )

    def ballot(self) -> dict[str, int]:
        news = self._pace.news()
        if news is not None:
            console.tell(news)
        return {}

    def close(self) -> None:
        self._forget()
