"""Which losses are bad, and what follows from that: on values, without a trainer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from lightning_ft.guards.divergence import DivergenceGuard


class Badness(IntEnum):
    """How bad a loss is. Of the losses of all ranks the worst counts, so the order is that of the vote."""

    GOOD = 0
    HIGH = 1
    """Finite, but above its limit: the weights that a step makes of it are finite, too."""
    NOT_FINITE = 2
    """A step with it leaves no weight that is a number."""


@dataclass(frozen=True)
class Finding:
    """What is wrong with a loss."""

    badness: Badness
    words: str


class Judge:
    """Judges the losses of one rank, each kind of them (the n-th of its batch) by those of its kind before.

    The losses it remembers are part of a run's state: see `state`.
    """

    def __init__(self, guard: DivergenceGuard) -> None:
        self._max_loss = guard.max_loss
        self._sigmas = guard.spike_sigmas
        self._window = guard.spike_window
        self._seen: dict[int, deque[float]] = {}

    def judge(self, loss: float, kind: int = 0) -> Finding | None:
        """What is wrong with `loss`, None if nothing is. A finite one is remembered, also if it is bad."""
        if not math.isfinite(loss):
            return Finding(Badness.NOT_FINITE, f"loss {loss}")
        found = None
        if self._max_loss is not None and loss > self._max_loss:
            found = Finding(Badness.HIGH, f"loss {loss:.6g} is above max_loss={self._max_loss:.6g}")
        if self._sigmas is not None:
            seen = self._seen.setdefault(kind, deque(maxlen=self._window))
            if found is None and (limit := spike_limit(seen, self._sigmas, self._window)) is not None and loss > limit:
                found = Finding(
                    Badness.HIGH,
                    f"loss {loss:.6g} is above {limit:.6g}, {self._sigmas:g} standard deviations over the mean of the "
                    f"last {len(seen)}",
                )
            seen.append(loss)
        return found

    def state(self) -> dict[str, Any]:
        """What it remembers, as plain data."""
        return {str(kind): list(seen) for kind, seen in self._seen.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """It remembers what it did at `state`, as far as its window goes."""
        self._seen = {int(kind): deque(seen, maxlen=self._window) for kind, seen in state.items()}


def spike_limit(losses: Iterable[float], sigmas: float, window: int) -> float | None:
    """Above which value a loss is a spike; None as long as too few losses are known, or if they are all the same."""
    known = list(losses)
    if len(known) < max(2, window // 2):
        return None
    try:
        mean = math.fsum(known) / len(known)
        spread = math.sqrt(math.fsum((loss - mean) ** 2 for loss in known) / (len(known) - 1))
    except OverflowError:  # in double precision: nothing finite is above such losses
        return None
    return mean + sigmas * spread if spread > 0 else None


class Move(IntEnum):
    """What a run does about the losses of one step."""

    GO_ON = 0
    WARN = 1
    LEAVE_OUT = 2
    """The step is not taken."""
    TOLERATE = 3
    """The step was taken before its loss was known, and nothing is lost by that."""
    ROLL_BACK = 4
    STOP = 5


@dataclass(frozen=True)
class Course:
    """Where a run stands with its bad steps; part of its state, the same on all ranks."""

    in_a_row: int = 0
    """Bad steps up to now, without a good one in between."""
    rollbacks: int = 0

    def after(self, badness: Badness, guard: DivergenceGuard, *, undone: bool) -> tuple[Course, Move]:
        """What to do about a step whose worst loss is of this `badness`, and where the run stands then.

        Args:
            badness: The worst loss of all ranks.
            guard: What the user asked for.
            undone: Whether the step was not taken yet, so that it can be left out.
        """
        if badness == Badness.GOOD:
            return replace(self, in_a_row=0), Move.GO_ON
        bad = replace(self, in_a_row=self.in_a_row + 1)
        if guard.action == "warn":
            return bad, Move.WARN
        if bad.in_a_row <= guard.patience and (undone or badness == Badness.HIGH):
            return bad, Move.LEAVE_OUT if undone else Move.TOLERATE
        return self.without_tolerance(guard)

    def without_tolerance(self, guard: DivergenceGuard) -> tuple[Course, Move]:
        """The same, for a step that cannot be left out without harm."""
        if guard.action == "rollback" and self.rollbacks < guard.max_rollbacks:
            return replace(self, rollbacks=self.rollbacks + 1), Move.ROLL_BACK
        return self, Move.STOP


def is_worth_a_line(count: int) -> bool:
    """Whether the `count`-th of many like occurrences is to be logged: the first five, then at each doubling."""
    return count <= 5 or (count % 5 == 0 and (count // 5) & (count // 5 - 1) == 0)


def step_of_batch(batch: int, in_epoch: int, window: int, epoch_batches: float) -> range:
    """The batches, numbered over the run, that make up the optimizer step of one of them.

    Args:
        batch: Its number in the run, from 1 on.
        in_epoch: Its number in the epoch, from 1 on.
        window: How many batches are accumulated.
        epoch_batches: How many batches the epoch has; its last step may have fewer.
    """
    first = (in_epoch - 1) // window * window + 1
    last = min(first + window - 1, epoch_batches)
    return range(batch - (in_epoch - first), batch + int(last) - in_epoch + 1)


def parse_batches(text: str) -> list[int]:
    """The numbers of ``"17,20-22"``, each from 1 on.

    Raises:
        ValueError: It is no such list.
    """
    numbers: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, dash, last = part.partition("-")
        numbers.update(range(int(first), int(last if dash else first) + 1))
    if any(number < 1 for number in numbers):
        raise ValueError(f"{text!r}: batches are numbered from 1 on")
    return sorted(numbers)


def batches_in_words(numbers: Iterable[int]) -> str:
    """``batch 17``, ``batches 17,20-22``."""
    numbers = set(numbers)
    return f"batch{'es' if len(numbers) > 1 else ''} {ranges(numbers)}"


def ranges(numbers: Iterable[int]) -> str:
    """What `parse_batches` reads, as short as can be."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
