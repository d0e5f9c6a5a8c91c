"""The time between the process group and the session of a fit: an exception on one rank is known to the others.

Data are prepared, loggers begin, and `setup` of modules, data and callbacks runs before our own callback is asked, so
nothing has been agreed on by then. There is a line all the same (see `_ranks.peers`), over the store that the ranks
met at::

    who             what                                                        the others
    --------------  ----------------------------------------------------------  ----------------------------------------
    ``"last"``      a line, from before `prepare_data` on                       hear of a failure at once
    our `setup`     a line, unless there is one; waits until all ranks are here hear of it when they come here
    failing rank    a line, unless there is one; the reason goes over it        end with `PeerLostError`

Not before there is a process group, nor where torchrun shares its own store with its workers, which outlives a start:
there it ends the other workers by itself, as does the process that has spawned them with ``ddp_spawn`` and
``ddp_fork``.
"""

from __future__ import annotations

import logging
from datetime import timedelta

import torch.distributed as dist

from lightning_ft import _words
from lightning_ft._ranks import peers as _peers
from lightning_ft._ranks.dist import is_everywhere
from lightning_ft._ranks.exceptions import lost_peer
from lightning_ft._ranks.peers import Peers, Place, agent_shares_its_store
from lightning_ft.errors import RankFailure

_log = logging.getLogger(__name__)

_begun = 0  # as often on all ranks, so that it tells one fit from the next; the process group is that of this start


class Early:
    """One rank's end of the line until the session has one of its own.

    Ranks: all, once per fit; local, but for `meet`. Thread: main.
    """

    def __init__(self) -> None:
        self._peers: Peers | None = None
        self._begun = self._met = False

    def begin(self) -> None:
        """This rank hears of others that fail, if there are any, from now on. May be repeated."""
        global _begun
        if (
            self._begun
            or agent_shares_its_store()
            or not (dist.is_available() and dist.is_initialized())
            or dist.get_world_size() == 1
        ):
            return
        self._begun = True
        _begun += 1
        place = Place(dist.get_rank(), dist.get_world_size())
        self._peers = Peers(place, f"early/{_begun}", lambda: None)

    def meet(self, within: timedelta) -> None:
        """All ranks are here. Blocks on: the slowest.

        Raises:
            PeerLostError: Another rank has failed on its way, or does not come in time.
        """
        self.begin()
        if self._peers is not None and not self._met:
            self._peers.meet(within)
            self._met = True

    def failed(self, error: BaseException) -> BaseException:
        """`error` is about to end the fit of this rank: the others hear of it. Returns what is to be raised instead.

        Blocks on: nothing; a few seconds if a collective has failed and nobody has said why.
        """
        self.begin()
        peers = self._peers
        if peers is None:
            return error
        alone = not is_everywhere(error)
        lost = lost_peer(error, peers)
        if lost is not None:
            _log.error("%s", _peers.last_words(dist.get_rank(), lost))
            # Nobody else knows what this rank has found out by itself, as who did not come to `meet`.
            if alone and isinstance(error, RankFailure) and peers.lost in (None, error):
                peers.tell(error.message, error.rank if error.rank >= 0 else None)
                _peers.let_go()
            return lost
        if not alone:
            return error
        _log.error("rank %d failed before its fit began: %s", dist.get_rank(), _words.error(error), exc_info=error)
        peers.tell(_words.error(error))
        _peers.let_go()
        return error

    def close(self) -> None:
        """Nobody listens here any more. May be repeated."""
        peers, self._peers = self._peers, None
        if peers is not None:
            peers.close()
