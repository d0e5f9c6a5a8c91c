"""The file `SAVE_NOW`: whoever makes it gets a checkpoint, and it is gone when that is durable."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable

from lightning_ft import _names

_log = logging.getLogger(__name__)

_EVERY_SECS = 3.0


class SaveNow:
    """Looks for the file, now and then. Ranks: zero.

    Args:
        dirpaths: Directories or URLs; only local directories are looked at. In an object store every look would be a
            request, which is paid for and may take long.
        clock: In seconds.
    """

    def __init__(self, dirpaths: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = [_names.join(path, _names.SAVE_NOW) for path in dirpaths if _names.is_local(path)]
        self._clock = clock
        self._looked_at = -float("inf")
        self._lock = threading.Lock()
        self._found: dict[str, int] = {}
        self._answered: dict[str, int] = {}  # what could not be removed
        self._asked_at_step: int | None = None

    def look(self) -> bool:
        """Whether a save is asked for that was not asked for yet. Thread: main. Blocks on: a `stat`, every 3 s."""
        if self._asked_at_step is not None:
            return False
        if not self._found:
            now = self._clock()
            if now - self._looked_at < _EVERY_SECS:
                return False
            self._looked_at = now
            found = {path: made for path in self._paths if (made := _made_at(path)) is not None}
            self._found = {path: made for path, made in found.items() if self._answered.get(path) != made}
        return bool(self._found)

    def asked(self, step: int) -> None:
        """The save was asked for, of the state after `step`."""
        if self._found:
            self._asked_at_step = step

    def saved(self, step: int) -> None:
        """A checkpoint of `step` is durable: what asked for it is removed. Thread: any."""
        with self._lock:
            if self._asked_at_step is None or step < self._asked_at_step:
                return
            for path, made in self._found.items():
                if _made_at(path) == made and not _removed(path):  # else it was touched again, and asks for another one
                    self._answered[path] = made
            self._found, self._asked_at_step = {}, None

    def went_back(self) -> None:
        """The run is at an older state: what is asked for is asked for again, and the file looked for at once."""
        with self._lock:
            self._asked_at_step, self._looked_at = None, -float("inf")

    def failed(self) -> None:
        """A save has failed: the file is still there, and is found again. Thread: any."""
        with self._lock:
            self._found, self._asked_at_step = {}, None


def _made_at(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:  # not there; a directory that does not answer makes the next save fail, and that is told
        return None


def _removed(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError as error:
        _log.warning("%s asked for the save that was made, and cannot be removed: %s", path, error)
        return False
    return True
