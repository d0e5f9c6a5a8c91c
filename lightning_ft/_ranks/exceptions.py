"""An exception that ends the fit of one rank: said at once, known to all ranks, and nothing that is written is lost.

In the order in which it happens, all of it local and in the main thread::

    where                    what                                                     how long it may take
    -----------------------  -------------------------------------------------------  ---------------------------------
    the loops are left       the traceback is in the log                              at once
    the loops are left       the other ranks hear of it (see `_ranks.peers`)          at once
    `on_exception`           what is being written is written                         `writers.GRACE_SECS`
    `on_exception`           the directory is given up

Private to Lightning (2.5.5 to 2.6): `Trainer._run_stage`, the loops. Its `on_exception` comes after what a user's own
code has done about the error, and cannot put another one in its place.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_ft import _words
from lightning_ft._fit import loops
from lightning_ft._ranks import launched, out_of_memory
from lightning_ft._ranks import peers as _peers
from lightning_ft._ranks.dist import Ranks, is_everywhere
from lightning_ft._ranks.peers import Peers
from lightning_ft._saving.writers import GRACE_SECS
from lightning_ft.errors import PeerLostError, RankFailure
from lightning_ft.plugin import FaultTolerantCheckpointIO

_log = logging.getLogger(__name__)

_LOST = re.compile(r"gloo/transport|caused pair closure|remote process exited|NCCL communicator was aborted")


class Exceptions:
    """What ends the fit of this rank in a way it was not meant to end.

    Ranks: construct on all ranks at the same point. Thread: main.

    Args:
        trainer: The trainer.
        plugin: Our plugin; None if the user gave another one.
        ranks: The ranks of the fit.
        fit: An id of the fit, the same on all ranks and never used before.
        release: Called when this rank will not come to the others any more, so that none waits for it.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        plugin: FaultTolerantCheckpointIO | None,
        ranks: Ranks,
        fit: str,
        release: Callable[[], None],
    ) -> None:
        self._trainer = trainer
        self._plugin = plugin
        self._ranks = ranks
        self._release = release
        self._dealt_with: BaseException | None = None
        self._fit_is_over = threading.Event()
        self.peers = Peers(ranks, fit, self._finish_writing)
        self._unwatch = loops.replaced(trainer, "_run_stage", self._watched(trainer._run_stage))
        self._undo = [
            launched.be_patient(trainer, self._fit_is_over, self._finish_writing),
            self._save_alone_on_exception(),
        ]

    def close(self, *, leaves: bool) -> None:
        """The fit is over, and the trainer as it was; but for what would hinder a process that is about to end.

        Args:
            leaves: Whether the process is about to end with a code of its own, as are the others.
        """
        self._unwatch()
        self._fit_is_over.set()
        self.peers.close()
        if self._dealt_with is None and not leaves:
            for step in self._undo:
                step()

    def check(self) -> None:
        """No other rank is known to have failed. Blocks on: nothing.

        Raises:
            PeerLostError: One has.
        """
        if self.peers.lost is not None:
            raise _peers.lost(self.peers.lost)

    def deal_with(self, error: BaseException) -> BaseException:
        """`error` is about to end the fit: it is said, and others hear of it. Returns what is to be raised instead.

        Blocks on: nothing; a few seconds if a collective has failed and nobody has said why.
        """
        if self._dealt_with is not None:
            return self._dealt_with
        lost = lost_peer(error, self.peers)
        self._dealt_with = lost or error
        if lost is None:
            self._say(error)
        else:
            _log.error("%s", _peers.last_words(self._ranks.rank, lost))
        if self._ranks.world_size > 1:
            if not is_everywhere(error):
                self._leave_the_others(error, lost)
            loops.replaced(self._trainer.strategy, "barrier", _nobody_waits)
        if self._plugin is not None:
            self._plugin.writers.hurry()
        return self._dealt_with

    def _leave_the_others(self, error: BaseException, lost: PeerLostError | None) -> None:
        if lost is None:
            self.peers.tell(_words.error(error))
        elif isinstance(error, RankFailure) and self.peers.lost is None:
            self.peers.tell(error.message, error.rank if error.rank >= 0 else None)
        _peers.let_go()
        self._release()

    def _say(self, error: BaseException) -> None:
        out_of_memory.advise(error, self._trainer.accumulate_grad_batches)
        writing = self._plugin is not None and not self._plugin.writers.wait(time.monotonic())
        if self._ranks.world_size == 1 and not writing:
            return  # Python says it, and nothing comes before that
        progress = loops.progress(self._trainer)
        briefly = isinstance(error, KeyboardInterrupt) or is_everywhere(error)
        _log.error(
            "rank %d failed, after %d steps and %d batches of the run: %s", self._ranks.rank, progress.step,
            progress.batch, _words.error(error),
            exc_info=None if briefly else error,
        )  # fmt: skip

    def _finish_writing(self) -> None:
        """Thread: any. Blocks on: the writers, for a bounded time."""
        if self._plugin is not None:
            self._plugin.writers.wait(time.monotonic() + GRACE_SECS)

    def _watched(self, run_stage: Callable[[], Any]) -> Callable[[], Any]:
        def watched() -> Any:
            try:
                return run_stage()
            except BaseException as error:
                raised = self.deal_with(error)
                if raised is error:
                    raise
                raise raised from error

        return watched

    def _save_alone_on_exception(self) -> Callable[[], None]:
        """Callbacks that save on an exception do so only if there is nobody whom they would wait for."""
        savers = [
            callback
            for callback in loops.callbacks(self._trainer)
            if isinstance(callback, OnExceptionCheckpoint)
            or (isinstance(callback, ModelCheckpoint) and callback.save_on_exception)
        ]
        if self._ranks.world_size == 1 or not savers:
            return lambda: None
        if self._ranks.is_zero:
            names = ", ".join(sorted({type(saver).__name__ for saver in savers}))
            _log.warning(
                "%s will not save on an exception: all ranks take part in a save, and only those that fail would come "
                "to it. A restart goes on from the last checkpoint of FaultTolerantCheckpoint",
                names,
            )
        undo = [loops.replaced(saver, "on_exception", _nobody_waits) for saver in savers]

        def remove() -> None:
            for step in undo:
                step()

        return remove


def lost_peer(error: BaseException, peers: Peers) -> PeerLostError | None:
    """That another rank has failed, or is gone, if this is what `error` comes of. This rank leaves by itself.

    Blocks on: nothing; a few seconds if a collective has failed and nobody has said why.
    """
    peers.leaves()  # what is being written may take longer than a listener waits
    if isinstance(error, RankFailure):
        failure: RankFailure | None = peers.lost or error  # who has failed may have said more than was found out
    else:
        failure = peers.blame(error) if _is_lost_connection(error) else None
    if failure is None:
        return None
    lost = _peers.lost(failure)
    if lost is not error:
        lost.__cause__ = error
    return lost


def _nobody_waits(*args: Any, **kwargs: Any) -> None:
    """In place of what all ranks would have to come to."""


def _is_lost_connection(error: BaseException) -> bool:
    """Whether `error` is that of a collective, and so probably the fault of another rank."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, dist.DistError) or (isinstance(found, RuntimeError) and _LOST.search(str(found))):
            return True
        found = found.__cause__
    return False
