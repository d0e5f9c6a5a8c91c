"""Which watch does the work of which guard."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

from lightning_ft._divergence.watch import DivergenceWatch
from lightning_ft._fit import loops
from lightning_ft._fit.durability_watch import Durability
from lightning_ft._fit.watch import Fit, Request, Watch, Watches
from lightning_ft._hang import watch as _hang
from lightning_ft._hang.watch import HangWatch
from lightning_ft._history.chronicle import Chronicle
from lightning_ft._history.measuring import Measuring
from lightning_ft._preemption.watch import Preemption
from lightning_ft.guards import AnyGuard, DivergenceGuard, Guard, HangGuard, PreemptionGuard
from lightning_ft.state import Progress

_log = logging.getLogger(__name__)


def watches(guards: Sequence[AnyGuard], fit: Fit, start: int) -> Watches:
    """`guards` are at work in `fit`, once they are opened. Ranks: all, with the same guards in the same order.

    Args:
        guards: What the user asked for.
        fit: The fit.
        start: Its ordinal among those into this directory.

    Raises:
        ConfigurationError: One of them does not go with the fit. Nothing is left of the others.
    """
    found: list[Watch] = []
    with ExitStack() as unless_complete:
        for watch in _made(guards, fit, start):
            found.append(watch)
            unless_complete.callback(watch.close)
        unless_complete.pop_all()
    return Watches(found)


def _made(guards: Sequence[AnyGuard], fit: Fit, start: int) -> Iterator[Watch]:
    # Hangs are watched for as long as anything else is at work, so that one is closed last.
    yield from (HangWatch(guard, fit) for guard in guards if isinstance(guard, HangGuard))
    yield from (Preemption(guard, fit) for guard in guards if isinstance(guard, PreemptionGuard))
    yield from (DivergenceWatch(guard, fit) for guard in guards if isinstance(guard, DivergenceGuard))
    if polled := [guard for guard in guards if isinstance(guard, Guard)]:
        yield _Polled(polled, fit)
    if fit.plugin is not None and fit.ranks.is_zero:
        yield (chronicle := Chronicle(fit, fit.plugin, start))
        yield Durability(fit, fit.warn_after)
        if fit.pace.is_measured:
            yield Measuring(fit, fit.plugin, chronicle.path)


def arm(guards: Sequence[AnyGuard]) -> None:
    """What has to be on guard before any other rank is waited for is. Local; `disarm` ends it."""
    for guard in guards:
        if isinstance(guard, HangGuard):
            _hang.arm(guard)


def disarm() -> None:
    """Nothing of a fit that has ended, or never began, is on guard any more."""
    _hang.disarm()


class _Polled(Watch):
    """Guards that are asked before every batch: those of the user's own making."""

    topics = ("polled_stop",)

    def __init__(self, guards: Sequence[Guard], fit: Fit) -> None:
        self._guards = tuple(guards)
        self._fit = fit

    def ballot(self) -> dict[str, int]:
        step = loops.progress(self._fit.trainer).step
        verdicts = [v for guard in self._guards if (v := guard.poll(step)) is not None]
        for verdict in verdicts:
            _log.warning("rank %d asks to save and stop: %s", self._fit.ranks.rank, verdict.reason)
        return {"polled_stop": int(bool(verdicts))}

    def decide(self, votes: Mapping[str, int], progress: Progress) -> Request | None:
        return Request("a guard asks for it") if votes.get("polled_stop") else None
