"""How long a process has from the signal to its end, and whether a save fits into that."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_ft import _words
from lightning_ft.errors import ConfigurationError

ENVIRONMENT = "LIGHTNING_FT_GRACE_SECS"
"""The variable with the grace period in seconds, for a value that belongs to a cluster and not to a program."""

_TORCHRUN_SECS = 30.0  # from SIGTERM to SIGKILL: `--shutdown-timeout`, whose default this is
_REMEMBERED = 5


def grace_secs(given: float | None, environment: Mapping[str, str] = os.environ) -> tuple[float | None, str]:
    """How long there is from the first signal, and who says so; None if nobody does.

    `given` by the argument; else ``LIGHTNING_FT_GRACE_SECS``; else, for a worker of torchrun, what its agent waits.

    Raises:
        ConfigurationError: The variable holds no positive number.
    """
    if given is not None:
        return given, "grace"
    text = environment.get(ENVIRONMENT)
    if text:
        try:
            secs = float(text)
        except ValueError:
            secs = math.nan
        if not 0 < secs < math.inf:
            raise ConfigurationError(f"{ENVIRONMENT}={text!r}: must be a positive number of seconds")
        return secs, ENVIRONMENT
    if "TORCHELASTIC_RUN_ID" in environment:
        return _torchrun_secs(environment), "torchrun"
    return None, ""


def _torchrun_secs(environment: Mapping[str, str]) -> float:
    # The agent's variable; one given to it as an option is not told to the workers.
    text = environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    return float(text) if text.isdecimal() and int(text) else _TORCHRUN_SECS


class Durations:
    """How long a save takes: from the request until it is durable wherever it goes, as the last few have shown."""

    def __init__(self) -> None:
        self._of_saves: dict[str, deque[float]] = {}
        self._of_an_earlier_start: float | None = None

    def resumed_from(self, metrics: Mapping[str, float | int]) -> None:
        """`metrics` are those in the manifest of the checkpoint that the run has started from."""
        self._of_an_earlier_start = _secs(metrics)

    def note(self, dirpath: str, metrics: Mapping[str, float | int]) -> None:
        """A save with these figures is durable in `dirpath`: where there are two directories, first in one of them."""
        secs = _secs(metrics)
        if secs is not None:
            self._of_saves.setdefault(dirpath, deque(maxlen=_REMEMBERED)).append(secs)

    def expected_secs(self, *, busy: bool) -> float | None:
        """What the next one takes: the longest of the last few; None if nothing is known.

        Args:
            busy: Another one is being written, which has to be over first; how far it is, nobody knows.
        """
        one = sum(map(max, self._of_saves.values())) if self._of_saves else self._of_an_earlier_start
        return 2 * one if busy and one is not None else one


def _secs(metrics: Mapping[str, float | int]) -> float | None:
    """Of a save that starts at once: without what it has waited for the one before it."""
    total = metrics.get("total_secs")
    return None if total is None else max(0.0, float(total) - float(metrics.get("queue_secs", 0.0)))


@dataclass(frozen=True)
class Budget:
    """What is left of the grace period at a step boundary, and what a save would take. In seconds."""

    grace_secs: float | None
    elapsed_secs: float
    expected_secs: float | None

    @property
    def left_secs(self) -> float | None:
        """Until the process is killed; None if nobody knows."""
        return None if self.grace_secs is None else self.grace_secs - self.elapsed_secs

    @property
    def allows_save(self) -> bool:
        """Whether a save is begun: unless it is known that it would not be over in time."""
        if self.left_secs is None:
            return True
        return self.left_secs > (0.0 if self.expected_secs is None else self.expected_secs)

    def __str__(self) -> str:
        takes = "nothing is known of how long a save takes"
        if self.expected_secs is not None:
            takes = f"a save takes about {_words.duration(self.expected_secs)}"
        if self.left_secs is None:
            return takes
        grace = f"the grace period of {_words.duration(self.grace_secs or 0.0)}"
        if self.left_secs <= 0:
            return f"{takes}, {grace} is over"
        return f"{takes}, {_words.duration(self.left_secs)} are left of {grace}"
