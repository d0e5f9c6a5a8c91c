"""What of a run a crash would leave: the newest step that is durable, and how long ago training was there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from lightning_ft import _names, _words, events


@dataclass(frozen=True)
class _Safe:
    step: int | None
    """None: nothing of this run."""
    at_secs: float
    """When training was there, by the clock."""


class Durable:
    """What is durable of one fit. Thread: any.

    Args:
        dirpath: The directory of the run. What is committed elsewhere, to a local directory in front of it, is durable
            as well, but a machine that is lost takes it along.
        clock: Seconds.
    """

    def __init__(self, dirpath: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._dirpath = dirpath
        self._clock = clock
        self._lock = threading.Lock()
        self._newest = self._in_dirpath = _Safe(None, clock())
        self._last = ""
        self._begun: tuple[int, float] | None = None
        self._warned_at_secs = 0.0

    def note(self, event: events.Event) -> None:
        """`event` has happened to a checkpoint of the run."""
        now = self._clock()
        with self._lock:
            if isinstance(event, events.Resumed):
                # Older or newer: it is what training goes on from now.
                self._newest = self._in_dirpath = _Safe(event.step, now)
                self._warned_at_secs, self._last = 0.0, ""
            elif isinstance(event, events.SaveStarted):
                self._begun = event.step, now
            elif isinstance(event, events.Committed):
                self._committed(event, _Safe(event.step, now - event.secs))
            elif isinstance(event, events.SaveFailed):
                self._last, self._begun = f"the save of step {event.step} failed: {event.reason}", None
            elif isinstance(event, events.SaveSkipped):
                self._last = f"the save of step {event.step} was left out: {event.reason}"

    def _committed(self, event: events.Committed, safe: _Safe) -> None:
        if self._newest.step is None or event.step >= self._newest.step:
            self._newest = safe
        if _names.split(event.path)[0] == self._dirpath:
            self._in_dirpath = safe
            self._warned_at_secs, self._last = 0.0, ""
        if self._begun is not None and self._begun[0] == event.step:
            self._begun = None

    def words(self, *, in_one: bool = False) -> str:
        """For a progress bar: ``40 (12 s ago)``, the step and its age; ``nothing yet``.

        Args:
            in_one: As one word, where a bar would break the line within: ``40(12s)``, ``nothing``.
        """
        with self._lock:
            step, age_secs = self._newest.step, self._clock() - self._newest.at_secs
        if in_one:
            return "nothing" if step is None else f"{step}({_words.age(age_secs).replace(' ', '')})"
        return "nothing yet" if step is None else f"{step} ({_words.age(age_secs)} ago)"

    def warning(self, after_secs: float) -> str | None:
        """What to tell the user, if nothing has become durable in the run's directory for `after_secs`.

        Not again before that has gone on for twice as long as the last time.
        """
        with self._lock:
            now, safe = self._clock(), self._in_dirpath
            unsafe_secs = now - safe.at_secs
            if unsafe_secs < max(after_secs, 2 * self._warned_at_secs):
                return None
            self._warned_at_secs = unsafe_secs
            begun, last, newest = self._begun, self._last, self._newest
        since = "has become durable" if safe.step is None else f"after step {safe.step} has become durable"
        why = last or "no save was due: save more often, or allow for this with warn_if_not_durable_after"
        if begun is not None:
            why = f"the save of step {begun[0]} is under way since {_words.duration(now - begun[1])}"
        elif newest != safe and not last:
            why = f"step {newest.step} is saved locally, and not in there"
        return f"nothing {since} in {self._dirpath} for {_words.duration(unsafe_secs)}: a crash would lose it; {why}"
