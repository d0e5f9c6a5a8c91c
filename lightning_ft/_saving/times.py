"""The times of one save."""

from __future__ import annotations

import time
from typing import Protocol


class Copy(Protocol):
    """What took time before there was anything to write: see `_copying.staging.Staged`."""

    @property
    def blocked_secs(self) -> float: ...
    @property
    def staging_secs(self) -> float: ...


class SaveTimes:
    """Times of one save, in seconds. Thread: writer, or the one that saves at once."""

    def __init__(self, copy: Copy, asked_at: float, blocking: bool) -> None:
        self._copy = copy
        self._asked_at = asked_at
        self._blocking = blocking
        self._taken_up = self._write_began = self._written = time.monotonic()

    def write_begins(self) -> None:
        """Nothing is waited for any more."""
        self._write_began = time.monotonic()

    def after_read_back(self) -> dict[str, float | int]:
        """What changes if the checkpoint was read back since the last `metrics`."""
        now = time.monotonic()
        changed: dict[str, float | int] = {"read_back_secs": now - self._written, "total_secs": now - self._asked_at}
        return changed | ({"blocked_secs": changed["total_secs"]} if self._blocking else {})

    def metrics(self, size_bytes: int) -> dict[str, float | int]:
        """What is known by now; the last call has the whole."""
        now = self._written = time.monotonic()
        write_secs, total_secs = now - self._write_began, now - self._asked_at
        return {
            "blocked_secs": total_secs if self._blocking else self._copy.blocked_secs,
            "staging_secs": self._copy.staging_secs,
            "queue_secs": self._taken_up - self._asked_at,
            "write_secs": write_secs,
            "total_secs": total_secs,
            "size_bytes": size_bytes,
            "bytes_per_sec": size_bytes / write_secs if write_secs else 0.0,
        }
