"""A training that several ranks run, in fresh processes, which find out by themselves which rank they are."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import ranks
from tests.ranks import WITHIN_SECS, Outcome, Rank


def run(world_size: int, function: Callable[..., Any], *args: Any, timeout_secs: float = WITHIN_SECS) -> list[Any]:
    """What the ranks return; all of them have ended by themselves, without an error."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as place:
        return ranks.values(_call, Path(place), function, args, world_size=world_size, within_secs=timeout_secs)


def start(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_secs: float = WITHIN_SECS
) -> list[Outcome]:
    """How the ranks have ended, all of them within the time; a rank that still runs then fails the test."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as place:
        ended = ranks.run(_call, Path(place), function, args, world_size=world_size, within_secs=timeout_secs)
    hanging = [number for number, outcome in enumerate(ended) if outcome.exit_code is None]
    assert not hanging, f"ranks {hanging} have not ended within {timeout_secs} s; the others: {ended}"
    return ended


def _call(rank: Rank, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)
