"""The vote of the ranks at every step: what one of them knows, all of them act on after the same batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

from lightning_ft._ranks.dist import Ranks
from lightning_ft._vote.ballot_box import HIGHEST_VOTE, SharedBox
from lightning_ft._vote.roll_call import GroupBox
from lightning_ft.errors import PeerLostError

_log = logging.getLogger(__name__)

WITHIN = timedelta(minutes=30)
"""How long a rank may be late, unless somebody knows better: as long as a collective of the training may take."""

_NOTICE_SECS = 30.0


class Box(Protocol):
    """Where ballots are put in and counted; one ballot at a time."""

    def put(self, votes: Sequence[int]) -> None:
        """This rank's ballot is in. Blocks on: nothing."""

    def ready(self) -> bool:
        """Whether all ranks' are."""

    def wait(self, secs: float) -> bool:
        """Whether all are within so many seconds; earlier, if no more will come."""

    def absent(self) -> dict[int, str]:
        """The ranks whose ballot is not in, each with what is known of it."""

    @property
    def hopeless(self) -> bool:
        """Whether somebody's ballot will never come."""

    def take(self) -> list[int]:
        """The maximum of all ballots, which are all in."""

    def close(self) -> None:
        """Local: asks nothing of other ranks."""


class Vote:
    """One tiny ballot per step: cast at the start of a batch, read at its end.

    Each topic is a non-negative integer and the result is the maximum over the ranks, so every rank reads the same
    and acts at the same step. Nothing waits unless a rank is late. Ranks on one host vote in memory that they share,
    others with one asynchronous all-reduce on a gloo group of its own.

    Ranks: all, at the same points.

    Args:
        ranks: The ranks of the run.
        topics: What is voted on.
        within: How long a rank may be late.
        where: What this rank is doing, in words, for the message about a late one.
    """

    def __init__(
        self, ranks: Ranks, topics: Sequence[str], within: timedelta = WITHIN, where: Callable[[], str] = lambda: ""
    ) -> None:
        if len(set(topics)) != len(topics):
            raise ValueError(f"topics={topics!r}: one is named twice, and its votes would be mixed up")
        self._topics = tuple(topics)
        self._none = dict.fromkeys(self._topics, 0)
        self._within_secs = within.total_seconds()
        self._where = where
        self._ballot: dict[str, int] | None = None
        self._box: Box | None = None
        self.read_count = 0
        self.waited_count = 0
        """Of the ballots that were read, those that not all ranks had cast by then: this rank had to wait."""
        if ranks.world_size > 1 and self._topics:
            self._box = SharedBox.open(ranks, len(topics)) or GroupBox.open(ranks, len(topics), within)

    @property
    def within_one_host(self) -> bool:
        """Whether the ranks vote in shared memory."""
        return isinstance(self._box, SharedBox)

    @property
    def cast_open(self) -> bool:
        """Whether a ballot was cast and not yet read."""
        return self._ballot is not None

    def cast(self, votes: Mapping[str, int]) -> None:
        """The ballot of this step is on its way: 0 for topics that are not in `votes`.

        Ranks: all, once per step. Thread: main. Blocks on: nothing.
        """
        assert self._ballot is None, "a ballot is cast once per step and read before the next"
        ballot = {**self._none, **votes}
        numbers = list(ballot.values())
        if len(numbers) > len(self._none) or min(numbers, default=0) < 0 or max(numbers, default=0) > HIGHEST_VOTE:
            raise ValueError(f"votes={dict(votes)!r}: must be 0 to {HIGHEST_VOTE}, on {', '.join(self._topics)}")
        if self._box is not None:
            self._box.put(numbers)
        self._ballot = ballot

    def read(self) -> dict[str, int]:
        """The agreed result of the ballot. Ranks: all. Blocks on: the slowest rank having cast its own.

        Raises:
            PeerLostError: A rank has not cast its own within the time it has, or never will.
        """
        ballot = self._ballot
        assert ballot is not None, "read follows cast"
        self.read_count += 1
        if self._box is not None:
            if not self._box.ready():
                self.waited_count += 1
                self._wait(self._box)
            ballot = dict(zip(self._topics, self._box.take(), strict=True))
        self._ballot = None
        return ballot

    def _wait(self, box: Box) -> None:
        began = time.monotonic()
        for until_secs in (min(_NOTICE_SECS, self._within_secs), self._within_secs):
            if box.wait(max(0.0, began + until_secs - time.monotonic())):
                return
            waited_secs = time.monotonic() - began
            absent = box.absent()
            if box.hopeless or waited_secs >= self._within_secs:
                break
            if absent:
                _log.warning(
                    "%s: waiting for %s for %.0f s now (until %.0f s)",
                    self._where(), _named(absent), waited_secs, self._within_secs,
                )  # fmt: skip
        message = f"{self._where()}: {_named(absent)}, waited for {waited_secs:.1f} s"
        raise PeerLostError(min(absent, default=-1), message, sorted(absent))

    def close(self) -> None:
        """Nothing is left of the vote. Local: asks nothing of other ranks."""
        if self._box is not None:
            self._box.close()


def _named(absent: Mapping[int, str]) -> str:
    if not absent:
        return "no rank in particular (they have all come by now)"
    return ", ".join(f"rank {rank} ({why})" for rank, why in absent.items())
