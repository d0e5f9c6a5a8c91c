"""What writes in the background in one process: saves, and copies of them to a second directory."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

from lightning_ft._saving.engine import Writer
from lightning_ft._saving.failure import Failure, take_failure
from lightning_ft._saving.read_back import ReadBackDepth
from lightning_ft._saving.uploads import Uploads
from lightning_ft.storage import Storage

_log = logging.getLogger(__name__)

GRACE_SECS = 300.0
"""How long a run that has failed waits for what is being written. What takes longer is cut off, and never visible."""


class Writers:
    """Each of the two is made when it is first asked for, so this can be pickled into processes that are spawned.

    Thread: main.

    Args:
        storage: Where they write.
        retries: See `Writer`.
        verify_after_write: See `Writer`.
    """

    def __init__(self, storage: Storage, retries: int, verify_after_write: ReadBackDepth | None) -> None:
        self.storage = storage
        self._retries = retries
        self._verify_after_write = verify_after_write
        self._saves: Writer | None = None
        self._uploads: Uploads | None = None
        self._deadline: float | None = None
        self._abandoned = False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_saves": None, "_uploads": None}

    @property
    def saves(self) -> Writer:
        """What writes checkpoints."""
        if self._saves is None:
            self._saves = Writer(self.storage, self._retries, self._verify_after_write)
        return self._saves

    @property
    def uploads(self) -> Uploads:
        """What copies checkpoints from a local directory to that of the run."""
        if self._uploads is None:
            self._uploads = Uploads(self.storage, self._retries, self._verify_after_write)
        return self._uploads

    def _in_turn(self) -> Iterator[Writer]:
        """What is saved may have to be uploaded, and what is uploaded makes room where it was saved."""
        if self._saves is not None:
            yield self._saves
        if self._uploads is not None:  # looked at now: the last save may have been the first to be uploaded
            yield self._uploads
            yield self.saves

    def hurry(self, within_secs: float | None = None) -> None:
        """The run has failed: all waiting ends within this time from now, and what is not written then is lost.

        Args:
            within_secs: Default: `GRACE_SECS`. The shortest of several holds.
        """
        deadline = time.monotonic() + (GRACE_SECS if within_secs is None else within_secs)
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def wait(self, deadline: float) -> bool:
        """Whether everything submitted is durable, or recorded as failed, by then. Thread: any."""
        return all(writer.drain(max(0.0, deadline - time.monotonic())) for writer in self._in_turn())

    def drain(self) -> None:
        """Everything submitted is durable, or recorded as failed. Blocks on: the writers."""
        if self._deadline is not None:
            self._drain_until(self._deadline)
            return
        for writer in self._in_turn():
            writer.drain()

    def _drain_until(self, deadline: float) -> None:
        if self._abandoned or self.wait(deadline):
            return
        self._abandoned = True
        unfinished = sorted({path for writer in self._in_turn() for path in writer.paths})
        _log.error("not written in the time there was after the failure, and given up: %s", ", ".join(unfinished))
        for writer in self._in_turn():
            writer.abandon()

    def close(self) -> None:
        """As `drain`, and no thread is left but one that was given up. Failures can still be taken."""
        self.drain()
        if self._abandoned:
            return
        for writer in self._in_turn():
            writer.close()

    def forget(self) -> None:
        """New ones are made when they are needed; what nobody has taken of the failures of these is lost."""
        self._saves = self._uploads = self._deadline = None
        self._abandoned = False

    def holds(self, path: str) -> bool:
        """Whether a save or upload to `path` is queued or being written."""
        return any(writer.holds(path) for writer in self._in_turn())

    @property
    def failed(self) -> bool:
        """Whether a failed save or upload waits to be reported."""
        return any(writer.failed for writer in self._in_turn())

    def take_failure(self, on_error: str) -> Failure | None:
        """The oldest failure not yet taken, of saves before uploads; each is taken once."""
        return take_failure(self._saves, self._uploads, on_error)

    def settle_failure(self) -> None:
        """A failed save of all ranks, of which another rank has heard, waits to be taken here, too."""
        if self._saves is not None:
            self._saves.settle_failure()
