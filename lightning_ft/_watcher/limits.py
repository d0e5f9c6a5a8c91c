"""How long is too long: limits for each phase of a training, learned where none are given. Pure.

Time is counted in the watcher's own ticks, and a tick counts for `MOST_TICKS` of them at most. What stops the watcher
too, a laptop asleep, a frozen container, a job that its scheduler has suspended, is nobody's hang. No clock can jump.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from lightning_ft._watcher.page import Phase, Seen

FLOOR_SECS = 300.0
"""No learned limit is below this: the next validation, the next shape to compile, a busy file system take a while."""
FACTOR = 10.0
"""A learned limit is so many times the slowest of its phase in this process."""
CEILING_SECS = 3600.0
"""No learned limit is above this, unless the slowest took more than half of it."""
MOST_TICKS = 5


@dataclass(frozen=True)
class Limits:
    """In seconds; None: learned."""

    startup_secs: float
    step_secs: float | None = None
    validation_secs: float | None = None
    save_secs: float | None = None

    @property
    def tick_secs(self) -> float:
        """How often to look: so that a limit is overrun by a tenth at most, and by a second."""
        given: list[float] = [secs for secs in asdict(self).values() if secs is not None]
        return min(1.0, max(0.02, min(given) / 10))

    def given(self, phase: Phase) -> float | None:
        """What the user has set for `phase`."""
        return {
            Phase.STARTUP: self.startup_secs,
            Phase.STEP: self.step_secs,
            Phase.VALIDATION: self.validation_secs,
            Phase.BETWEEN: self.validation_secs,
            Phase.SAVE: self.save_secs,
        }[phase]


@dataclass(frozen=True)
class Overdue:
    """Something takes too long."""

    what: str
    still_secs: float
    limit_secs: float
    in_save: bool
    """Whether it is a save, which is then not waited for."""
    alone: bool = False
    """Whether no other rank can be what it waits for."""


@dataclass
class _Timeline:
    """How long it is since a number has grown."""

    still_secs: float = 0.0
    slowest: dict[Phase, float] = field(default_factory=dict)

    def moved(self, phase: Phase, *, learn: bool = True) -> None:
        if learn:
            self.slowest[phase] = max(self.slowest.get(phase, 0.0), self.still_secs)
        self.still_secs = 0.0


class Vigil:
    """Looks at the page every `Limits.tick_secs`, and knows when something is overdue.

    Args:
        limits: What is too long.
        now: Seconds, of any clock.
        seen: The page now.
    """

    def __init__(self, limits: Limits, now: float, seen: Seen) -> None:
        self._limits = limits
        self._at = now
        self._seen = seen
        self._main = _Timeline()
        self._save = _Timeline()

    def look(self, now: float, seen: Seen, *, paused: bool = False) -> Overdue | None:
        """What is overdue, if anything is.

        Args:
            now: Seconds, of the same clock.
            seen: The page now.
            paused: Whether the training is in the hands of a debugger, and this time does not count.
        """
        before, self._seen = self._seen, seen
        tick_secs = min(now - self._at, MOST_TICKS * self._limits.tick_secs)
        self._at = now
        # Then it was for another rank that it waited, which says nothing of how long this takes.
        waited = self._main.still_secs > self.limit_secs(before.phase)
        if not paused:
            self._main.still_secs += tick_secs
            self._save.still_secs += tick_secs
        save_moved = _of_saves(seen) != _of_saves(before)
        # Who waits for a save waits rightly as long as that goes on.
        waits = seen.phase == before.phase == Phase.SAVE and save_moved
        if (seen.phase, seen.progress) != (before.phase, before.progress) or waits:
            self._main.moved(_completed(before, seen), learn=not waited)
        if not before.saving:
            self._save.still_secs = 0.0
        elif save_moved:
            self._save.moved(Phase.SAVE)
        return self._overdue(seen)

    def _overdue(self, seen: Seen) -> Overdue | None:
        limit_secs = self.limit_secs(seen.phase)
        if self._main.still_secs > limit_secs:
            in_save = seen.phase == Phase.SAVE
            return Overdue(_WHAT[seen.phase], self._main.still_secs, limit_secs, in_save)
        limit_secs = self.limit_secs(Phase.SAVE)
        if seen.saving and self._save.still_secs > limit_secs:
            return Overdue("a save has not gone on", self._save.still_secs, limit_secs, True, alone=True)
        return None

    @property
    def still_secs(self) -> float:
        """How long the training itself has not gone on, at the last look."""
        return self._main.still_secs

    def limit_secs(self, phase: Phase) -> float:
        """How long `phase` may stand still, as far as is known by now."""
        given = self._limits.given(phase)
        if given is not None:
            return given
        slowest = max(self._main.slowest.get(phase, -1.0), self._save.slowest.get(phase, -1.0))
        if slowest < 0:
            return self._limits.startup_secs  # it was never completed: everything may be done for the first time
        return max(FLOOR_SECS, min(FACTOR * slowest, max(CEILING_SECS, 2 * slowest)))


def _of_saves(seen: Seen) -> tuple[int, int, int]:
    return seen.saves_begun, seen.saves_over, seen.save_progress


def _completed(before: Seen, seen: Seen) -> Phase:
    """The phase to which the time counts that has passed before the last move."""
    # The first step of a process is one, though it was part of the start: it compiles, and so may a later one.
    first_step = before.phase == Phase.STARTUP and seen.phase == Phase.STEP
    return Phase.STEP if first_step else before.phase


_WHAT = {
    Phase.STARTUP: "the start has not gone on",
    Phase.STEP: "no step was completed",
    Phase.VALIDATION: "the validation has not gone on",
    Phase.BETWEEN: "the end of the epoch has not gone on",
    Phase.SAVE: "training has waited for a save",
}
