"""One save: what is to be written, and how; the writer that queues it need not know whether it is a file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import tenacity

from lightning_ft import events
from lightning_ft._saving import serialise
from lightning_ft._saving.read_back import ReadBackDepth, read_back, take_away
from lightning_ft._saving.times import SaveTimes
from lightning_ft.manifest import Manifest
from lightning_ft.storage import Storage


class Snapshot(Protocol):
    """What is to be written: see `_copying.staging.Staged`."""

    @property
    def blocked_secs(self) -> float: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def reductions(self) -> serialise.Reductions: ...
    @property
    def staging_secs(self) -> float: ...
    def wait(self) -> dict[str, Any]: ...
    def check(self) -> None: ...
    def release(self) -> None: ...


@dataclass(frozen=True)
class Target:
    """Where saves go, and what is done about errors on the way."""

    storage: Storage
    retrying: Callable[[], tenacity.Retrying]
    """Calls a function again, and again, after an error that may pass."""
    verify_after_write: ReadBackDepth | None
    """How deep a checkpoint is read back before it counts as saved; None: not at all."""


@dataclass(frozen=True)
class SaveTask:
    """A checkpoint in one file: `snapshot` belongs to the writer from now on, which releases it."""

    path: str
    snapshot: Snapshot
    manifest: Manifest
    """Complete but for what is known when the bytes are: size, digest and metrics."""
    on_commit: Callable[[Manifest], None] | None = None
    replaceable: bool = False
    """Whether a newer save may take its place while it waits."""
    asked_at: float = field(default_factory=time.monotonic)

    @property
    def speaks(self) -> bool:
        """Whether this process is the one that tells of it when it has committed, and that follows it up."""
        return True

    def write(self, target: Target, times: SaveTimes) -> Manifest:
        """The checkpoint is durable under its name.

        Thread: writer. Blocks on: the disk or the store.

        Raises:
            SnapshotError: The copy was not good, and another one will be taken.
            SnapshotWithdrawnError: Nobody knows.
            Exception: What the storage raises, and what cannot be pickled.
        """
        return target.retrying()(self._write, target.storage, times)

    def read_back(self, target: Target, manifest: Manifest) -> bool:
        """Whether the checkpoint was read, and is what was written; nothing is read unless that was asked for.

        Thread: writer, after the snapshot was released.

        Raises:
            SaveError: It is not what was written; it is gone then.
        """
        if target.verify_after_write is None:
            return False
        try:
            target.retrying()(read_back, target.storage, self.path, manifest, target.verify_after_write)
        except Exception as error:
            raise take_away(target.storage, self.path, error) from error
        return True

    def _write(self, storage: Storage, times: SaveTimes) -> Manifest:
        checkpoint = self.snapshot.wait()
        times.write_begins()
        events.emit(events.SaveStarted(self.path, self.manifest.step))

        def complete(size_bytes: int, digest: str) -> Manifest:
            self.snapshot.check()
            return replace(self.manifest, size_bytes=size_bytes, digest=digest, metrics=times.metrics(size_bytes))

        # The attempt is aborted on errors, and raises the storage's own.
        with storage.open_attempt(self.path, expected_bytes=self.snapshot.size_bytes) as attempt:
            serialise.save(checkpoint, attempt, self.snapshot.reductions)
            return attempt.commit(complete)
