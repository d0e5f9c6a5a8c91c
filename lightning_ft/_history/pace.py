"""How much time is to pass between two saves: as given, or from what saves cost and how often the run fails."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightning_ft import _words
from lightning_ft._history import interval
from lightning_ft._history.interval import Advice, advise, failure_secs
from lightning_ft._history.timeline import Start
from lightning_ft.triggers import Trigger

# Of so many saves the median counts: what a model, a disk and a cluster are like now, whatever one save met with.
RECENT = 20

# A change by less is not worth a line of the log.
NOTABLE = 1.5


@dataclass(frozen=True)
class Past:
    """What earlier starts tell."""

    running_secs: float = 0.0
    """For how long they were up, together."""
    failures: int = 0
    """How many were killed, or failed."""
    costs_secs: tuple[float, ...] = ()
    """For how long each save stopped the work."""
    durable_secs: tuple[float, ...] = ()
    """How long each save, or upload, took until it was durable."""

    @classmethod
    def of(cls, starts: Iterable[Start], is_first: Callable[[str], bool], is_final: Callable[[str], bool]) -> Past:
        """What `starts`, all over, add up to.

        Args:
            starts: The starts.
            is_first: Whether a path is where training hands over what is to be saved.
            is_final: Whether a path is in the directory of the run.
        """
        starts = tuple(starts)
        saves = [save for start in starts for save in start.saves][-2 * RECENT :]
        return cls(
            running_secs=sum(start.ended_at - start.began_at for start in starts),
            failures=sum(start.how in (None, "failed") for start in starts),
            costs_secs=tuple(save.blocked_secs for save in saves if is_first(save.path)),
            durable_secs=tuple(save.total_secs for save in saves if is_final(save.path)),
        )


class Pace:
    """The time between two saves of one fit. Ranks: zero knows it. Thread: any.

    Args:
        trigger: What the user asked for. With ``auto`` the interval is `_history.interval.advise`'s, from the median
            costs of the last saves and the failures so far; before anything was saved, the shortest there is.
        clock: Seconds.
    """

    def __init__(self, trigger: Trigger, clock: Callable[[], float] = time.monotonic) -> None:
        given = trigger.train_time_interval
        self._given_secs = None if given is None else given.total_seconds()
        self._auto = trigger.auto
        self._clock = clock
        self._began_secs = clock()
        self._lock = threading.Lock()
        self._past = Past()
        self._costs_secs: deque[float] = deque(maxlen=RECENT)
        self._durable_secs: deque[float] = deque(maxlen=RECENT)
        self._advice: Advice | None = None
        self._said_secs: float | None = None

    @property
    def is_measured(self) -> bool:
        """Whether it depends on what is measured."""
        return self._auto

    @property
    def interval_secs(self) -> float | None:
        """What is to pass between two saves at most; None: time does not decide."""
        if not self._auto:
            return self._given_secs
        advice = self._advice
        decided = interval.LEAST_SECS if advice is None else advice.interval_secs
        return decided if self._given_secs is None else min(decided, self._given_secs)

    @property
    def planned_secs(self) -> float:
        """The same; 0 where time does not decide."""
        return self.interval_secs or 0.0

    def is_over(self, secs: float) -> bool:
        """Whether a save is due `secs` after the one before.

        Ranks: zero; the answer is broadcast. Ranks that each ask their own clock disagree, and hang.
        """
        interval_secs = self.interval_secs
        return interval_secs is not None and secs >= interval_secs

    def recall(self, past: Past) -> None:
        """Earlier starts are taken into account."""
        with self._lock:
            self._past = past
            self._costs_secs = deque((*past.costs_secs, *self._costs_secs), maxlen=RECENT)
            self._durable_secs = deque((*past.durable_secs, *self._durable_secs), maxlen=RECENT)
            self._decide()

    def learn(self, cost_secs: float | None, durable_secs: float | None) -> None:
        """A save was made, or uploaded: what is known of it (see `Past`) is taken into account."""
        with self._lock:
            if cost_secs is not None:
                self._costs_secs.append(cost_secs)
            if durable_secs is not None:
                self._durable_secs.append(durable_secs)
            self._decide()

    def _decide(self) -> None:
        if self._auto and self._costs_secs and self._durable_secs:
            running_secs = self._past.running_secs + self._clock() - self._began_secs
            self._advice = advise(
                statistics.median(self._costs_secs),
                statistics.median(self._durable_secs),
                failure_secs(running_secs, self._past.failures),
                interval.LEAST_SECS,
                interval.MOST_SECS,
            )

    def news(self) -> str | None:
        """For the log: how often to save from now on, and why, if that was not said or is notably different by now."""
        with self._lock:
            advice, interval_secs = self._advice, self.interval_secs
            if advice is None or interval_secs is None:
                return None
            said_secs = self._said_secs
            if said_secs is not None and 1 / NOTABLE < interval_secs / said_secs < NOTABLE:
                return None
            self._said_secs = interval_secs
            durable_secs, failures = statistics.median(self._durable_secs), self._past.failures
        limits = {
            "write": ", and saves follow each other no faster than they are written",
            "least": ", and it is not to be shorter",
            "most": ", and it is not to be longer",
        }
        given = interval_secs < advice.interval_secs
        why = ", and train_time_interval is shorter" if given else limits.get(advice.limited_by, "")
        best = f": the best interval is {_words.duration(advice.optimum_secs)}{why}" if why else ""
        return (
            f"a checkpoint is saved every {_words.duration(interval_secs)} from now on: each stops training for "
            f"{_words.duration(advice.cost_secs)} and is durable after {_words.duration(durable_secs)}; failures "
            f"are assumed to come every {_words.duration(advice.failure_secs)} ({failures} so far){best}"
        )
