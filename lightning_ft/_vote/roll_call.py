"""The ballots of ranks on several hosts: an all-reduce, and, when it takes too long, a list of who is there."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_ft._ranks.dist import Ranks

_T = TypeVar("_T")

_SIGN_AFTER_SECS = 1.0
_SIGNED_WITHIN_SECS = 3 * _SIGN_AFTER_SECS
_STORE_SECS = 10.0
_MARGIN = timedelta(seconds=30)


class GroupBox:
    """Ballots by one asynchronous all-reduce on a gloo group of their own.

    Gloo does not say who is missing. So a rank that has waited for a second signs a list in the store that the ranks
    met at; who has not signed is late. As long as nobody is, the store is not asked for anything.

    Args:
        ranks: The ranks of the run.
        group: Gloo; its timeout is a little longer than a ballot may take.
        words: How many topics.
        name: Of this vote, among all that the store has seen.
    """

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup, words: int, name: str) -> None:
        self._ranks = ranks
        self._group: dist.ProcessGroup | None = group
        self._words = words
        self._store = _store(f"lightning_ft/vote/{name}")
        self._number = 0
        self._ballot: torch.Tensor | None = None
        self._work: dist.Work | None = None
        self._signed = 0
        self.hopeless = False
        """See `Box`."""

    @classmethod
    def open(cls, ranks: Ranks, words: int, within: timedelta) -> GroupBox:
        """A box of all ranks. Ranks: all. Blocks on: all ranks."""
        name = ranks.decide(lambda: uuid.uuid4().hex)
        return cls(ranks, dist.new_group(backend="gloo", timeout=within + _MARGIN), words, name)

    def put(self, votes: Sequence[int]) -> None:
        """See `Box`."""
        self._number += 1
        self._ballot = torch.tensor(votes, dtype=torch.int64, device="cpu")
        self._work = dist.all_reduce(self._ballot, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def ready(self) -> bool:
        """See `Box`."""
        assert self._work is not None
        return bool(self._work.is_completed()) and self._finish(0.0)

    def wait(self, secs: float) -> bool:
        """See `Box`."""
        began = time.monotonic()
        if self._finish(min(secs, _SIGN_AFTER_SECS)):
            return True
        self._sign()
        return not self.hopeless and self._finish(secs - (time.monotonic() - began))

    def _finish(self, secs: float) -> bool:
        """Whether the all-reduce is over within so many seconds, and well."""
        assert self._work is not None
        try:
            # Zero would mean for ever.
            self._work.wait(timedelta(seconds=max(secs, 1e-3)))
        except RuntimeError:
            # Its own time is over, or a connection is gone: then it is completed, too.
            self.hopeless = self.hopeless or bool(self._work.is_completed())
            return False
        return True

    def _sign(self) -> None:
        if self._signed < self._number:
            self._signed = self._number
            _within(_STORE_SECS, lambda: self._store.set(self._key(self._ranks.rank), "1"))

    def _key(self, rank: int) -> str:
        return f"{self._number}/{rank}"

    def absent(self) -> dict[int, str]:
        """See `Box`. Blocks on: the others having signed, if the connection to one of them is gone."""
        self._sign()
        until = time.monotonic() + (_SIGNED_WITHIN_SECS if self.hopeless else 0.0)
        others = [rank for rank in range(self._ranks.world_size) if rank != self._ranks.rank]
        late: list[int] | None = None
        while True:
            signed = _within(_STORE_SECS, lambda: [self._store.check([self._key(rank)]) for rank in others])
            if signed is None and late is None:
                return {0: "or whoever holds the store that the ranks met at: it does not answer"}
            if signed is None:
                break  # its holder has gone, who knew as much
            late = [rank for rank, there in zip(others, signed, strict=True) if not there]
            if not late or time.monotonic() >= until:
                break
            time.sleep(_SIGN_AFTER_SECS / 10)
        why = "the connection to it, or to one that waited for it, is gone" if self.hopeless else "it has not come here"
        return dict.fromkeys(late or [], why)

    def take(self) -> list[int]:
        """See `Box`."""
        assert self._ballot is not None
        return [int(vote) for vote in self._ballot.tolist()]

    def close(self) -> None:
        """See `Box`."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def _store(name: str) -> Any:
    """A part of the store that the ranks met at."""
    c10d: Any = dist.distributed_c10d  # neither of these is declared to be exported
    return c10d.PrefixStore(name, c10d._get_default_store())


def _within(secs: float, call: Callable[[], _T]) -> _T | None:
    """What `call` returned; None if it failed or took longer. The store waits for its server much longer than we do."""
    answers: list[_T] = []

    def ask() -> None:
        try:
            answers.append(call())
        except RuntimeError:
            return  # the server is gone: no answer, as said above

    thread = threading.Thread(target=ask, name="lightning_ft-roll-call", daemon=True)
    thread.start()
    thread.join(secs)
    return answers[0] if answers else None
