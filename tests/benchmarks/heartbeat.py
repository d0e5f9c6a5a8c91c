"""How long the main thread stands still while a save is being written by others."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_LIMIT_SECS = 60.0


def worst_gap(over: Callable[[], bool]) -> float:
    """The longest time in seconds between two beats of Python and small torch operations, until `over`.

    Raises:
        RuntimeError: It is not over after a minute (a save that only goes on with the training, perhaps).
    """
    values = torch.ones(64, 64)
    worst = 0.0
    began = last = time.perf_counter()
    while not over():
        values = values * 0.5 + 0.5
        now = time.perf_counter()
        worst = max(worst, now - last)
        last = now
        if now - began > _LIMIT_SECS:
            raise RuntimeError(f"the save was not durable after {_LIMIT_SECS:.0f} s of a training step")
    return worst


def worst_gap_of_secs(secs: float) -> float:
    """The same for so many seconds: what the machine does by itself."""
    end = time.perf_counter() + secs
    return worst_gap(lambda: time.perf_counter() >= end)
