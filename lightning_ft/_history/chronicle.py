"""Writes down what happens in a fit, for the report: a watch that asks for nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from lightning_ft import _words, events
from lightning_ft._fit import loops
from lightning_ft._fit.watch import Fit, Request, Watch
from lightning_ft._history.event_file import History
from lightning_ft._history.process_age import began_at
from lightning_ft._preemption import slurm
from lightning_ft.plugin import FaultTolerantCheckpointIO
from lightning_ft.state import Progress
from lightning_ft.storage import Storage


class Chronicle(Watch):
    """The event file of one fit, from its set-up to its end. Ranks: zero.

    Args:
        fit: The fit.
        plugin: Its plugin, in whose writer thread the object of a store is written.
        start: The ordinal of this start.
    """

    def __init__(self, fit: Fit, plugin: FaultTolerantCheckpointIO, start: int) -> None:
        self._fit = fit
        self._history = history = History(
            fit.dirpath, Storage(plugin.storage_options), lambda flush: plugin.writer.then(history.path, flush)
        )
        self.path = history.path
        """Of the file."""
        self._trains = False
        self._error: BaseException | None = None
        self._closed = False
        self._forget = events.observe(self._note)
        process_at = began_at()
        process = {} if process_at is None else {"process_at": round(process_at, 3)}
        job = slurm.job_id()
        queued = {} if job is None else {"job": job, "job_restarts": slurm.restarts()}
        history.write(
            "started", start=start, world_size=fit.ranks.world_size, host=socket.gethostname(), pid=os.getpid(),
            **process, **queued,
        )  # fmt: skip

    def _note(self, event: events.Event) -> None:
        if isinstance(event, events.Resumed):
            self._history.write("resumed", path=event.path, step=event.step)
        else:
            self._history.note(event)

    def ballot(self) -> dict[str, int]:
        if not self._trains:
            self._trains = True
            progress = loops.progress(self._fit.trainer)
            self._history.write("training", run_id=self._fit.run_id(), step=progress.step, batch=progress.batch)
        return {}

    def decide(self, votes: Mapping[str, int], progress: Progress) -> Request | None:
        self._history.progress(progress.step, progress.batch)
        return None

    def failed(self, error: BaseException) -> None:
        self._error = error

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._forget()
        stop = self._fit.stop()
        if isinstance(self._error, KeyboardInterrupt):
            self._history.close("stopped", "Ctrl-C" if stop is None else f"at once, by a second Ctrl-C ({stop.reason})")
        elif self._error is not None:
            self._history.close("failed", _words.error(self._error).removesuffix(": "))
        elif stop is not None:
            self._history.close("stopped", stop.reason)
        else:
            self._history.close("finished")
