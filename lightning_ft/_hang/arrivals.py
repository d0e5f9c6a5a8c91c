"""Which ranks have come to the process group, known while this one waits there, and told to its watcher.

Until the group exists the ranks cannot tell each other anything, and `init_process_group` does not say for whom it
waits. But the store that it is made over is there as soon as rank 0 is, and takes other connections. The watchers meet
over it, too: rank 0 takes the store with it when it ends, so all that have come have to end before, together.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

_log = logging.getLogger(__name__)

_LOOK_EVERY_SECS = 0.5
# The group is made over this very store, by all ranks at once, and it answers some ten thousand questions in a second:
# nobody asks before the group is late, nor twice about a rank that has come, and many ranks ask less often.
_RANKS_AT_THAT_RATE = 16


class Arrivals:
    """This rank has come, and knows who has not, until `close`.

    Thread: main, but for the one that asks, which may not be freed from a network that does not answer.

    Args:
        host: Of the store of the run.
        port: Its port.
        rank: Of this process.
        world_size: How many ranks there will be.
        told: Called with the ranks that have not come, whenever others are missing than before, and with the `place` of
            rank 0, None until that has come. With no ranks after `close`. Thread: another one.
        within: How long rank 0 is waited for.
        place: Where this rank's watcher is to be found; plain values.
    """

    THREAD = "lightning-ft-arrivals"

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        told: Callable[[list[int], dict[str, Any] | None], None],
        within: timedelta,
        place: dict[str, Any] | None = None,
    ) -> None:
        self._rank = rank
        self._place = place
        self._keys = [f"lightning_ft/arrived/{number}" for number in range(world_size)]
        self._look_every_secs = _LOOK_EVERY_SECS * max(1.0, world_size / _RANKS_AT_THAT_RATE)
        self._told = told
        self._over = threading.Event()
        threading.Thread(target=self._ask, args=(host, port, within), name=self.THREAD, daemon=True).start()

    def close(self) -> None:
        """Nobody asks any more. Blocks on: nothing."""
        self._over.set()

    def _ask(self, host: str, port: int, within: timedelta) -> None:
        absent = [] if self._rank == 0 else [0]  # who brings the store
        place = None
        self._told(absent, place)
        try:
            store = TCPStore(host, port, is_master=False, timeout=within, wait_for_workers=False)
            store.set(self._keys[self._rank], json.dumps(self._place))
            asked = [rank for rank in range(len(self._keys)) if rank != self._rank]
            while not self._over.wait(self._look_every_secs):
                asked = [rank for rank in asked if not store.check([self._keys[rank]])]
                if place is None and 0 not in asked:
                    place = json.loads(store.get(self._keys[0]))
                if asked != absent:
                    absent = asked
                    self._told(absent, place)
                if not absent:
                    return
        except dist.DistError as unreachable:
            _log.debug("who comes to the process group is not known: %s", unreachable)
            if not self._over.is_set():
                return
        self._told([], place)
