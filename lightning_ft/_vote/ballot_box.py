"""The ballots of ranks on one host: each rank writes into memory that all of them see."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import stat
import time
from collections.abc import Sequence

from lightning_ft._ranks.dist import Ranks

_log = logging.getLogger(__name__)

_VOTE_BITS = 47
HIGHEST_VOTE = (1 << _VOTE_BITS) - 1
_NUMBERS = 1 << (64 - _VOTE_BITS - 1)
_TOKEN_BYTES = 16
_WORD_BYTES = 8

_YIELDS = 20
_LONGEST_SLEEP_SECS = 1e-3
_LOOK_AFTER_SECS = 0.5  # whether a rank that is late still lives


class SharedBox:
    """Ballots in shared memory: a microsecond or two, where an all-reduce takes some hundred.

    Each rank writes into a row of its own, one 8-byte word per topic: the number of the ballot and the vote. A word
    is written at once, and one with the right number says so by itself, so that no order between words matters. There
    are two sets of rows, used in turns: whoever writes ballot n has read n-1, so all have written n-1 and read n-2.

    Who waits gives up its core at once and then sleeps for a tenth of the time waited, at most a millisecond: training
    threads of other ranks need the core. Every rank holds a record lock on its own byte, which the kernel drops when
    the process ends: a dead rank is told from a late one.

    The memory has no name (memfd): nothing is left behind, whoever is killed when.

    Args:
        fd: Of the memory; it is this object's own from now on.
        rank: Of this process.
        world_size: How many ranks there are.
        words: How many topics.
    """

    def __init__(self, fd: int, rank: int, world_size: int, words: int) -> None:
        self._fd = fd
        self._rank = rank
        self._words = words
        self._memory = mmap.mmap(fd, _size_bytes(world_size, words))
        self._view = memoryview(self._memory)[_TOKEN_BYTES:].cast("Q")
        self._own = [self._row(turn, world_size, rank) for turn in (0, 1)]
        others = [other for other in range(world_size) if other != rank]
        self._others = [{other: self._row(turn, world_size, other) for other in others} for turn in (0, 1)]
        self._number = 0
        self._low = 0
        self._ballot: list[int] = []
        self._gone: set[int] = set()
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    def _row(self, turn: int, world_size: int, rank: int) -> memoryview:
        begin = (turn * world_size + rank) * self._words
        return self._view[begin : begin + self._words]

    @classmethod
    def open(cls, ranks: Ranks, words: int) -> SharedBox | None:
        """A box of all ranks; None on all of them if they do not run on one host, or it has no such memory.

        Ranks: all. Blocks on: all ranks.
        """
        fd = _create(ranks.world_size, words) if ranks.is_zero else None
        try:
            token = secrets.token_bytes(_TOKEN_BYTES)
            if fd is not None:
                os.pwrite(fd, token, 0)
            path, token = ranks.decide(lambda: ("" if fd is None else f"/proc/{os.getpid()}/fd/{fd}", token))
            if fd is None and path:
                fd = _join(path, token, _size_bytes(ranks.world_size, words))
            # Rank 0 keeps its descriptor until all have opened it.
            if all(ranks.all_gather(fd is not None)):
                assert fd is not None
                box = cls(fd, ranks.rank, ranks.world_size, words)
                fd = None
                ranks.all_gather(None)  # a rank that holds no lock yet would look as if it had died
                return box
            return None
        finally:
            if fd is not None:
                os.close(fd)

    def put(self, votes: Sequence[int]) -> None:
        """See `Box`."""
        self._number += 1
        self._low = low = (self._number % _NUMBERS) << _VOTE_BITS
        self._ballot = list(votes)
        own = self._own[self._number & 1]
        for word, vote in enumerate(votes):
            own[word] = low | vote

    def _in(self, row: memoryview) -> bool:
        words = row.tolist()
        return bool(self._low <= min(words) and max(words) <= self._low | HIGHEST_VOTE)

    def ready(self) -> bool:
        """See `Box`."""
        return all(map(self._in, self._others[self._number & 1].values()))

    def wait(self, secs: float) -> bool:
        """See `Box`."""
        began = time.monotonic()
        turns, look_at = 0, _LOOK_AFTER_SECS
        while not self.ready():
            waited = time.monotonic() - began
            if waited >= secs:
                return False
            if waited >= look_at:
                look_at += _LOOK_AFTER_SECS
                self._gone |= {rank for rank in self._late() if self._let_go(rank)}
                if self._gone:
                    return self.ready()  # its last ballot may have come before its end
            turns += 1
            if turns < _YIELDS:
                os.sched_yield()
            else:
                time.sleep(min(waited / 10, _LONGEST_SLEEP_SECS))
        return True

    def _late(self) -> list[int]:
        return [rank for rank, row in self._others[self._number & 1].items() if not self._in(row)]

    def _let_go(self, rank: int) -> bool:
        """Whether nobody holds the lock of `rank` any more."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, rank)
        return True

    @property
    def hopeless(self) -> bool:
        """See `Box`."""
        return bool(self._gone)

    def absent(self) -> dict[int, str]:
        """See `Box`."""
        late = self._late()
        gone = [rank for rank in late if rank in self._gone]
        # Who is late with a dead rank waits for it somewhere else, and is not to blame.
        why = "its process, or its fit, has ended" if gone else "alive, and late"
        return dict.fromkeys(gone or late, why)

    def take(self) -> list[int]:
        """See `Box`."""
        rows = [row.tolist() for row in self._others[self._number & 1].values()]
        low = self._low
        return [max(own, *(word - low for word in words)) for own, *words in zip(self._ballot, *rows, strict=True)]

    def close(self) -> None:
        """See `Box`."""
        if self._fd < 0:
            return
        for row in (*self._own, *(row for turn in self._others for row in turn.values())):
            row.release()
        self._view.release()
        self._memory.close()
        os.close(self._fd)
        self._fd = -1


def _size_bytes(world_size: int, words: int) -> int:
    return _TOKEN_BYTES + 2 * world_size * words * _WORD_BYTES


def _create(world_size: int, words: int) -> int | None:
    if not hasattr(os, "memfd_create") or not os.path.isdir("/proc/self/fd"):
        return None
    try:
        fd = os.memfd_create("lightning_ft_vote", os.MFD_CLOEXEC)
    except OSError as error:
        _log.debug("no shared memory for the vote: %s", error)
        return None
    os.ftruncate(fd, _size_bytes(world_size, words))
    return fd


def _join(path: str, token: bytes, size_bytes: int) -> int | None:
    """Rank 0's memory, if it is there: on another host, or in another container, that path is something else."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size_bytes:
            return None
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if os.pread(fd, _TOKEN_BYTES, 0) == token:
        return fd
    os.close(fd)
    return None
