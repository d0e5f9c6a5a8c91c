"""A fit is watched for hangs: what its process tells its watcher (`_watcher`), and from when to when.

Watched from the first moment that Lightning gives us, before any other rank is waited for: a restart hangs too.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor

from lightning_ft import events, exit_codes
from lightning_ft._fit import loops
from lightning_ft._fit.watch import Fit, Request, Watch
from lightning_ft._hang import headway
from lightning_ft._hang.arrivals import Arrivals
from lightning_ft._ranks.peers import agent_shares_its_store
from lightning_ft._watcher import peers
from lightning_ft._watcher.limits import Limits
from lightning_ft._watcher.page import Cell, Phase
from lightning_ft._watcher.start import Watching
from lightning_ft.guards.hang import HangGuard
from lightning_ft.state import Progress

_log = logging.getLogger(__name__)

_PHASE, _PROGRESS, _STEPS, _POSITION = Cell.PHASE, Cell.PROGRESS, Cell.STEPS, Cell.POSITION
_STARTUP, _STEP, _BETWEEN = int(Phase.STARTUP), int(Phase.STEP), int(Phase.BETWEEN)
_NO_VOTES: dict[str, int] = {}


class Armed:
    """This process is being watched for hangs, from now until `close`; it says what it does by itself where it can.

    Thread: main.
    """

    def __init__(self, guard: HangGuard) -> None:
        self.startup_timeout = guard.startup_timeout
        self.watching = Watching(_limits(guard), exit_codes.HUNG)
        self.cells = self.watching.page.cells
        self._pid = os.getpid()
        self._main = threading.get_ident()
        self._written: set[str] = set()
        self._place: dict[str, Any] | None = None
        self._listener: socket.socket | None = None
        self._stop_listening = [headway.listen(self._headway), events.observe(self._event)]

    def _headway(self) -> None:
        # Not atomic: one of two at the same time may be lost, but not the last one for long.
        self.cells[Cell.PROGRESS if threading.get_ident() == self._main else Cell.SAVE_PROGRESS] += 1

    def _event(self, event: events.Event) -> None:
        if isinstance(event, (events.SaveStarted, events.UploadStarted)):
            self._written.add(event.path)
            self.cells[Cell.SAVES_BEGUN] += 1
        elif isinstance(event, (events.Committed, events.SaveFailed, events.SaveSkipped)):
            self._written.discard(event.path)
        self.cells[Cell.SAVES_OVER] = self.cells[Cell.SAVES_BEGUN] - len(self._written)
        self._headway()

    def place(self, host: str, world_size: int) -> dict[str, Any]:
        """Where the other ranks' watchers find this one, by the name or address `host`; asked again, the same.

        Ranks: 0.
        """
        if self._place is None:
            if world_size > 1:
                self._listener = peers.listen(host)
            port = self._listener.getsockname()[1] if self._listener else 0
            self._place = {"host": host, "port": port, "token": secrets.token_hex(16), "world_size": world_size}
        return self._place

    def take_place(self, place: Mapping[str, Any], rank: int, absent: list[int] | None = None) -> None:
        """The watcher knows where it belongs, and which ranks are `absent` yet; None: all have met. Thread: any."""
        listener, self._listener = self._listener, None
        waits_for = {} if absent is None else {"absent": absent}
        self.watching.take_place({**place, "rank": rank, **waits_for}, listener)

    @property
    def of_this_process(self) -> bool:
        """False in a process that was forked from the one that is watched."""
        return os.getpid() == self._pid

    def close(self) -> None:
        """This process is watched no longer."""
        for stop in self._stop_listening:
            stop()
        if not self.watching.alive and self.of_this_process:
            _log.warning("the process that watched this one for hangs (pid %d) has died", self.watching.pid)
        self.watching.close()


def _limits(guard: HangGuard) -> Limits:
    def secs(limit: timedelta | None) -> float | None:
        return None if limit is None else limit.total_seconds()

    return Limits(
        guard.startup_timeout.total_seconds(),
        secs(guard.step_timeout),
        secs(guard.validation_timeout),
        secs(guard.save_timeout),
    )


_armed: Armed | None = None


def arm(guard: HangGuard) -> Armed:
    """This process is being watched as `guard` says, if it was not already.

    Raises:
        ConfigurationError: It cannot be, here.
    """
    global _armed
    if _armed is None or not _armed.of_this_process:
        _armed = Armed(guard)
    return _armed


@contextmanager
def awaited(trainer: pl.Trainer) -> Iterator[None]:
    """The process group is made in here; if this process is watched and hangs there, it is said for which ranks.

    Those that have come end together then, as in a fit. Not where torchrun shares its own store with its workers: that
    one knows of ranks of an earlier start.
    """
    armed = _armed
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if armed is None or environment is None or agent_shares_its_store() or dist.is_initialized():
        yield
        return
    # A process that Lightning has spawned takes itself for rank 0 until then, which the group's own set-up begins with.
    if hasattr(trainer.strategy, "set_world_ranks"):
        trainer.strategy.set_world_ranks()
    host, port, rank = environment.main_address, environment.main_port, trainer.global_rank
    own = None
    if rank == 0:
        own = armed.place(host, trainer.world_size)
        armed.take_place(own, rank, absent=[])

    def told(absent: list[int], place: dict[str, Any] | None) -> None:
        armed.take_place(place or {}, rank, absent=absent)

    arrivals = Arrivals(host, port, rank, trainer.world_size, told, armed.startup_timeout, own)
    try:
        yield
    finally:
        arrivals.close()


def disarm() -> None:
    """This process is watched no longer. May be repeated."""
    global _armed
    armed, _armed = _armed, None
    if armed is not None:
        armed.close()


class HangWatch(Watch):
    """A fit, as its process's watcher sees it.

    Ranks: all (a broadcast): rank 0's watcher is made known to the others.
    """

    def __init__(self, guard: HangGuard, fit: Fit) -> None:
        self._fit = fit
        self._armed = arm(guard)
        self._cells = self._armed.cells
        self._began_batch = False
        self._meet()
        # Lightning's own `ModelCheckpoint` saves, too.
        self._undo: list[Callable[[], None]] = [
            loops.around(fit.trainer, "save_checkpoint", inside=self._saving),
        ]
        if fit.plugin is not None:
            self._undo.append(loops.around(fit.plugin, "drain", inside=self._saving))

    def _meet(self) -> None:
        """The ranks' watchers know each other, if they did not yet."""
        ranks = self._fit.ranks
        # Under this name every rank has found rank 0 before.
        host = os.environ.get("MASTER_ADDR") or "127.0.0.1"
        place = ranks.decide(lambda: self._armed.place(host, ranks.world_size))
        self._armed.take_place(place, ranks.rank)

    def open(self) -> None:
        progress = loops.progress(self._fit.trainer)
        self._cells[Cell.POSITION] = 2 * progress.batch
        self._cells[Cell.STEPS] = progress.step

    def close(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []
        disarm()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        phase = self._cells[Cell.PHASE]
        self._enter(Phase.SAVE)
        try:
            yield
        finally:
            self._enter(Phase(phase))

    def _enter(self, phase: Phase) -> None:
        self._cells[Cell.PHASE] = phase
        self._cells[Cell.PROGRESS] += 1

    @property
    def _started(self) -> bool:
        return self._cells[Cell.PHASE] != Phase.STARTUP

    # Every batch goes through the following: nothing but stores.

    def ballot(self) -> dict[str, int]:
        self._began_batch = True
        cells = self._cells
        if cells[_PHASE] != _STARTUP:
            cells[_PHASE] = _STEP
        return _NO_VOTES

    def loss_known(self, loss: Tensor) -> None:
        self._cells[_POSITION] |= 1

    def batch_over(self) -> None:
        self._cells[_PROGRESS] += 1

    def decide(self, votes: Mapping[str, int], progress: Progress) -> Request | None:
        cells = self._cells
        # Here, and not where the ballot is cast: with a `DivergenceGuard` that is behind the loss.
        cells[_POSITION] = 2 * progress.batch
        cells[_STEPS] = progress.step
        # Ranks agree where training begins and ends, too, and what they do there is no step.
        if self._began_batch or cells[_PHASE] == _STEP:
            self._began_batch = False
            cells[_PHASE] = _BETWEEN if progress.last_batch else _STEP
        cells[_PROGRESS] += 1
        return None

    def training_over(self) -> None:
        if self._started:
            self._enter(Phase.BETWEEN)

    def phase(self, name: str) -> None:
        if self._started:
            # What follows a validation is no step yet: callbacks act on its results.
            self._enter(Phase.VALIDATION if name == "validate" else Phase.BETWEEN)

    def failed(self, error: BaseException) -> None:
        self._enter(Phase.BETWEEN)
