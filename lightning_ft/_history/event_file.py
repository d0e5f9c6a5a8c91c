"""What happened to a run, line by line, in a file beside its checkpoints: what a report and an advice are made of.

Every start writes a file of its own, ``ft_events/<UTC time>-<token>.jsonl``: JSON, one object per line, each with
``at`` (seconds since 1970, by the clock of the machine of rank 0 when the start began) and ``event``:

============  =====================================================================================================
event         what is true then; further keys
============  =====================================================================================================
started       a fit was set up; ``start``, ``world_size``, ``host``, ``pid``; of the first fit of a process, where it is
              known, ``process_at``: when that began; under SLURM ``job``, and ``job_restarts``: how often that was
              queued again
resumed       it continues from a checkpoint, or, after ``training``, goes back to one; ``path``, ``step``
training      the first batch is about to be trained; ``run_id``, ``step``, ``batch``: where it goes on from
progress      so much is trained; ``step``, ``batch``; at most one line a second, and after ten hours one in ten
              seconds; in a store as of the last write
committed     a checkpoint is durable; ``path``, ``step`` and the figures of the save
save_failed   a save was given up; ``path``, ``step``, ``reason``
save_skipped  a due save was not made; ``path``, ``step``, ``reason``
ended         the fit is over; ``how``: ``finished``, ``stopped`` (asked to, before its end) or ``failed``; ``reason``.
              A killed run has no such line
============  =====================================================================================================

Lines that begin with another event, and keys that are not named here, are to be passed over by readers.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from lightning_ft import events
from lightning_ft._disk.disk_file import make_dirs
from lightning_ft._names import is_local, join, normalise, split
from lightning_ft.storage import Storage

_log = logging.getLogger(__name__)

DIRECTORY = "ft_events"
SUFFIX = ".jsonl"

# A line of 70 bytes: nothing beside a step, and a kill costs the report a second at most.
PROGRESS_SECS = 1.0
# After as many hours: the file is read whole at the next start, and a month of seconds would be 180 MB.
_LONG_PROGRESS_SECS = 10.0
# An object of a store cannot be appended to and is written anew each time.
STORE_PROGRESS_SECS = 60.0


def _steady() -> Callable[[], float]:
    since_1970 = time.time() - time.monotonic()
    return lambda: since_1970 + time.monotonic()


class History:
    """The file of one start. Ranks: zero. Thread: any, unless said.

    A file that cannot be written does no harm to the training: that is said once, and nothing more is written.

    Args:
        dirpath: The directory of the checkpoints, which is there. Local: lines are appended, and survive a SIGKILL of
            this process. Of a store, the file is one object, replaced after each commit, and once a minute.
        storage: Of it.
        later: Runs a function in the background, soon and in order.
        progress_secs: Between two lines of progress, in the first hour.
        clock: Seconds since 1970; by default those of the machine's clock at construction, and from then on what has
            passed, so that a clock that is set meanwhile puts nothing out of order.
    """

    def __init__(
        self,
        dirpath: str,
        storage: Storage,
        later: Callable[[Callable[[], None]], None],
        progress_secs: float | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._dirpath = normalise(dirpath)
        self._storage = storage
        self._later = later
        self._clock = _steady() if clock is None else clock
        self._began_at = self._clock()
        began = datetime.fromtimestamp(self._began_at, timezone.utc)
        name = f"{began:%Y%m%dT%H%M%S.%fZ}-{secrets.token_hex(4)}{SUFFIX}"
        self.path = join(join(self._dirpath, DIRECTORY), name)
        self._local = is_local(self.path)
        if progress_secs is None:
            progress_secs = PROGRESS_SECS if self._local else STORE_PROGRESS_SECS
        self._progress_secs = progress_secs
        self._progress_at = float("-inf")
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._descriptor: int | None = None
        self._given_up = False
        self._position: tuple[int, int] | None = None

    def write(self, event: str, **values: Any) -> None:
        """A line says that `event` has happened now. In a store: the next `flush` takes it along."""
        line = json.dumps({"at": round(self._clock(), 3), "event": event, **values}).encode() + b"\n"
        with self._lock:
            if self._given_up:
                return
            if not self._local:
                self._lines.append(line)
                return
            try:
                if self._descriptor is None:
                    make_dirs(split(self.path)[0])
                    self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
                os.write(self._descriptor, line)
            except OSError as error:
                self._give_up(error)

    def flush(self) -> None:
        """In a store: the object has every line so far. Blocks on: the store. Thread: not the main one."""
        with self._lock:
            if self._local or self._given_up:
                return
            content = b"".join(self._lines)
        try:
            self._storage.put(self.path, content)
        except Exception as error:  # stores have errors of their own classes, and none of them may end the training
            with self._lock:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._given_up = True
        self._lines.clear()
        _log.warning(
            "%s cannot be written (%s: %s): the report of this run will lack what happens from now on",
            self.path, type(error).__name__, error,
        )  # fmt: skip

    def progress(self, step: int, batch: int) -> None:
        """`step` optimizer steps and `batch` batches are trained. Thread: main. Blocks on: nothing but a local disk."""
        self._position = step, batch
        now = self._clock()
        hours = (now - self._began_at) / 3600
        secs = max(self._progress_secs, min(_LONG_PROGRESS_SECS, self._progress_secs * hours))
        if 0 <= now - self._progress_at < secs:
            return
        self._progress_at = now
        self.write("progress", step=step, batch=batch)
        if not self._local:
            self._later(self.flush)

    def note(self, event: events.Event) -> None:
        """`event` is written down, if it is one of a save. Thread: any; of a store, of a commit: not the main one."""
        if isinstance(event, events.Committed):
            self.write("committed", path=event.path, step=event.step, **event.metrics)
            if not self._local:
                self._later(self.flush)
        elif isinstance(event, events.SaveFailed):
            self.write("save_failed", path=event.path, step=event.step, reason=event.reason)
        elif isinstance(event, events.SaveSkipped):
            self.write("save_skipped", path=event.path, step=event.step, reason=event.reason)

    def close(self, how: str, reason: str = "") -> None:
        """The last line says `how` the fit has ended, and why, and everything is written. Blocks on: the store."""
        if self._position is not None:  # whatever was left out since the last line of progress
            self.write("progress", step=self._position[0], batch=self._position[1])
        self.write("ended", how=how, reason=reason)
        self.flush()
        with self._lock:
            self._given_up = True
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
