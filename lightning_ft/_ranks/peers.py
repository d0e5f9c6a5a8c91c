"""A line between the ranks of a fit for when collectives are of no use: who fails says so, and who is gone is named.

A rank that waits in a collective learns nothing until the connection breaks, and a rank that has failed keeps its
connections as long as its process lives, which may be until a long write is over. The line is the store over which the
process group was made. A thread of every rank listens to it, on a connection of its own, and costs nothing meanwhile::

    who              does                                        afterwards
    ---------------  ------------------------------------------  ----------------------------------------------------
    failing rank     `tell`: the reason is in the store          whoever looks finds it
    failing rank     `tell`: all listeners are woken
    failing rank     `let_go`: its connections are broken        peers' collectives raise
    peer, listener   the reason is in the log; `let_go`          its own collectives raise, whoever else is in them
    peer, main       `blame`: who it was                         the fit ends with `PeerLostError`
    peer, listener   its main thread has not begun to leave      after `LEAVES_SECS` the process has ended: `PEER_LOST`

A rank whose collective fails, and that finds no reason, wakes all listeners as well. Every listener that is woken
answers, so that all of them know who does not.

Private to torch (2.13): where the store of the process group is kept, and what groups there are, with their backends;
there is no public way to either.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from lightning_ft import _words
from lightning_ft._ranks.dist import WRITERS, Ranks
from lightning_ft.errors import PeerLostError, RankFailure
from lightning_ft.exit_codes import PEER_LOST

_log = logging.getLogger(__name__)

ANSWERS_SECS = 3.0
"""Within this time a rank that is alive answers. Its listener does nothing else."""
SAYS_SECS = 2.0
"""Within this time the main thread of a peer has begun to leave; else what was heard is said for it."""
LEAVES_SECS = 20.0
"""Within this time the main thread of a peer has left whatever it was doing, or the process is ended."""

_LOOK_EVERY = timedelta(seconds=1)
_FOREVER = timedelta(days=365)
_CLOSED = "closed"
_NO_TAG_OF_A_TRAINING = 1_910_473_826  # nothing is ever sent under it


@dataclass(frozen=True)
class Place:
    """Which rank this is, where there is nothing yet that the ranks have made together."""

    rank: int
    world_size: int


class Peers:
    """One rank's end of the line.

    Ranks: construct on all ranks; local. Thread: main, but for the listener.

    Args:
        ranks: The ranks of the fit.
        fit: An id of the fit, the same on all ranks and never used before: a store may outlive a process.
        last_words: Called before the process is ended by force. Has to end by itself.
    """

    THREAD = "lightning-ft-peers"

    def __init__(self, ranks: Ranks | Place, fit: str, last_words: Callable[[], object]) -> None:
        self._rank = ranks.rank
        self._world_size = ranks.world_size
        self._prefix = f"lightning_ft/{fit}/"
        self._last_words = last_words
        self._out = threading.Event()  # the main thread needs no help any more
        self._heard = threading.Event()
        self._lost: RankFailure | None = None
        self._gone = ""  # why the store does not answer
        self._store: Store | None = None
        self._thread: threading.Thread | None = None
        lines = _lines() if ranks.world_size > 1 else None
        if lines is not None:
            self._store, line = lines
            # A daemon: behind a network that is cut it cannot be woken.
            self._thread = threading.Thread(target=self._listen, args=(line,), name=self.THREAD, daemon=True)
            self._thread.start()

    @property
    def lost(self) -> RankFailure | None:
        """The failure of another rank, if one was heard of. Thread: any. Blocks on: nothing."""
        return self._lost

    def leaves(self) -> None:
        """The main thread ends the fit by itself, however long that takes: the listener does not end the process."""
        self._out.set()

    def tell(self, reason: str, failed: int | None = None) -> None:
        """All others are about to hear why the fit has ended. Blocks on: nothing.

        Args:
            reason: The error.
            failed: The rank that has failed; None: this one.
        """
        self._out.set()
        if self._store is None:
            return
        try:
            self._store.set(self._key("cause"), json.dumps([self._rank if failed is None else failed, reason]))
            self._wake(rank for rank in range(self._world_size) if rank != self._rank)
        except RuntimeError as unreachable:
            _log.warning("rank %d cannot tell the others of its failure: %s", self._rank, _first_line(unreachable))

    def meet(self, within: timedelta) -> None:
        """All ranks have come here; once per line. Blocks on: the slowest.

        Raises:
            PeerLostError: Another rank has failed, has not come in time, or is gone with the store.
        """
        if self._store is None:
            return None
        everybody = [self._key(f"met/{rank}") for rank in range(self._world_size)]
        began = time.monotonic()
        try:
            self._store.set(everybody[self._rank], "")
            while self._lost is None:
                try:
                    return self._store.wait(everybody, _LOOK_EVERY)
                except dist.DistStoreError:  # not yet
                    if time.monotonic() - began > within.total_seconds():
                        self._lost = self._not_met(everybody, within)
        except dist.DistError as unreachable:
            self._lost = self.blame(unreachable)
            if self._lost is None:
                raise
        raise lost(self._lost)

    def _not_met(self, everybody: list[str], within: timedelta) -> RankFailure | None:
        assert self._store is not None
        absent = [rank for rank, key in enumerate(everybody) if not self._store.check([key])]
        if not absent:
            return None  # by now they have come
        message = f"it has not been set up{_like(absent[1:])}; others have waited for {within.total_seconds():.0f} s"
        return PeerLostError(absent[0], message, absent)

    def blame(self, error: BaseException) -> RankFailure | None:
        """Who has made the collective fail that raised `error`; None if that cannot be said.

        Blocks on: the other ranks' listeners, for a few seconds; not if the reason is known already.
        """
        self._out.set()
        if self._store is None:
            return None
        if not self._heard.is_set():
            try:
                self._wake(range(self._world_size))
            except RuntimeError as unreachable:
                _log.debug("the store of the run: %s", unreachable)
        heard = self._heard.wait(3 * ANSWERS_SECS)
        if heard and not self._gone:
            return self._lost
        return self._without_store(self._gone or _words.error(error))

    def close(self) -> None:
        """The line is closed. Local. Blocks on: the listener; not if it cannot be woken."""
        self._out.set()
        thread, self._thread = self._thread, None
        if thread is not None and self._store is not None:
            try:
                self._store.set(self._key(f"wake/{self._rank}"), _CLOSED)
            except RuntimeError as unreachable:  # with the process that held it; the listener has heard of that
                _log.debug("the store of the run: %s", unreachable)
            thread.join(ANSWERS_SECS)
        self._store = None

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _wake(self, ranks: Iterable[int]) -> None:
        assert self._store is not None
        for rank in ranks:
            self._store.set(self._key(f"wake/{rank}"), str(self._rank))

    def _without_store(self, reason: str) -> RankFailure | None:
        """Who is to blame when the store does not answer: rank 0 holds it, if torchrun's agent does not."""
        if self._rank == 0 or agent_shares_its_store():
            return None
        return RankFailure(0, f"it is gone or cannot be reached, and with it the store of the run ({reason})")

    # -- the listener ----------------------------------------------------------------------------------------------

    def _listen(self, line: Store) -> None:
        wake = self._key(f"wake/{self._rank}")
        try:
            line.wait([wake], _FOREVER)
            caller = line.get(wake).decode()
            if caller == _CLOSED:
                return
            line.set(self._key(f"here/{self._rank}"), "")
            self._lost = self._find_out(line, int(caller))
        except RuntimeError as unreachable:
            # Perhaps its holder has ended before this rank was done, and all is well. If not, collectives will say so.
            self._gone = _first_line(unreachable)
        finally:
            self._heard.set()
        if self._lost is not None:
            self._end()

    def _find_out(self, line: Store, caller: int) -> RankFailure | None:
        if line.check([self._key("cause")]):
            rank, reason = json.loads(line.get(self._key("cause")))
            if rank == self._rank:
                return RankFailure(caller, f"it has given this rank up: {reason}")
            return RankFailure(rank, reason)
        everybody = [self._key(f"here/{rank}") for rank in range(self._world_size)]
        try:
            line.wait(everybody, timedelta(seconds=ANSWERS_SECS))
        except dist.DistStoreError:
            missing = [rank for rank, key in enumerate(everybody) if not line.check([key])]
            if missing:
                message = f"it is gone, or cannot be reached: it does not answer{_like(missing[1:])}"
                return RankFailure(missing[0], message)
        if caller == self._rank:
            return None
        return RankFailure(caller, "it has lost its connections to other ranks, which all answer")

    def _end(self) -> None:
        """The main thread is freed from collectives, and ends the fit, or the process is ended."""
        let_go()
        says_secs = min(SAYS_SECS, LEAVES_SECS / 4)
        if self._out.wait(says_secs):
            return  # and says so itself
        _log.error("rank %d has heard that %s", self._rank, self._lost)
        if self._out.wait(LEAVES_SECS - says_secs):
            return
        _log.error("rank %d is still busy after %g s, and its process is ended; it is here:", self._rank, LEAVES_SECS)
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        try:
            self._last_words()
        finally:
            logging.shutdown()
            os._exit(PEER_LOST)


def agent_shares_its_store() -> bool:
    """Whether the process group is made over the store of torchrun's own agent, which outlives a start."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def lost(failure: RankFailure) -> PeerLostError:
    """What this rank ends with when that has happened to another."""
    return failure if isinstance(failure, PeerLostError) else PeerLostError(failure.rank, failure.message)


def last_words(rank: int, failure: PeerLostError) -> str:
    """The last line of a rank that ends, since another one has failed."""
    return f"rank {rank} ends, since {failure}. Exit code {PEER_LOST}: start the same command again to go on"


def _lines() -> tuple[Store, Store] | None:
    """The store of the run, and a connection of its own to it for the listener; None if there is no such store.

    Requests on one connection wait for each other, and the listener's takes as long as the fit.
    """
    store: Store = distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return store, TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)
    if isinstance(store, FileStore):
        return store, FileStore(getattr(store, "path"), -1)  # noqa: B009 - missing in torch's type stubs
    _log.debug("ranks cannot tell each other of failures: %s cannot be opened twice", type(store).__name__)
    return None


def let_go() -> None:
    """Collectives of this rank, and collectives that others are in with it, raise an error now. None works after that.

    Not those of the threads that write. Local: asks nothing of other ranks. Thread: any. Blocks on: nothing.
    """
    for group in list(distributed_c10d._world.pg_map):
        if dist.get_world_size(group) < 2 or group.group_desc == WRITERS:
            continue
        for backend in {_backend(group, device) for device in group._device_types}:
            if isinstance(backend, dist.ProcessGroupGloo):
                _break(backend)
            else:  # NCCL ends what it is doing. In a thread: it may wait for a device that does not answer.
                threading.Thread(target=backend.abort, daemon=True).start()


def _backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    backend: Any = group._get_backend(device)
    return getattr(backend, "wrapped_pg", backend)  # wrapped if TORCH_DISTRIBUTED_DEBUG=DETAIL


def _break(group: Any) -> None:
    """Gloo can neither abort nor close, but what it is asked to receive and does not in time closes its connections."""
    try:
        work = group.recv([torch.zeros(1, device="cpu")], 1 if group.rank() == 0 else 0, _NO_TAG_OF_A_TRAINING)
        work.wait(timedelta(milliseconds=1))
    except RuntimeError as broken:  # as was to be expected
        _log.debug("%s", broken)


def _like(others: list[int]) -> str:
    return f", like {', '.join(f'rank {rank}' for rank in others)}" if others else ""


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
