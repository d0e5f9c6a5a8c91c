"""Checkpoints on their way from a local directory to the directory of the run, in the background.

A writer of its own, so that local saves do not wait for a slow store, with everything that a writer has: order,
retries, one failure kept for the run to hear of, reading back, rotation only after a commit. It holds no copy of the
state: what it reads is the local file, byte for byte, and what the file's manifest does not confirm is never published.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

from lightning_ft import events
from lightning_ft._names import split
from lightning_ft._saving.engine import Writer
from lightning_ft._saving.read_back import ReadBackDepth
from lightning_ft._saving.serialise import Reductions
from lightning_ft._saving.task import SaveTask
from lightning_ft._saving.times import SaveTimes
from lightning_ft.errors import CorruptCheckpointError
from lightning_ft.manifest import EOCD_BYTES, Manifest
from lightning_ft.storage import Attempt, Storage

# What is read of the local file at a time. Memory of its own every time: a store may still be sending the piece before.
PIECE_BYTES = 8 << 20


@dataclass(frozen=True)
class _NoCopy:
    """Stands where other saves have a copy of the state."""

    size_bytes: int
    blocked_secs: float = 0.0
    staging_secs: float = 0.0

    @property
    def reductions(self) -> Reductions:
        return {}

    def wait(self) -> dict[str, Any]:
        return {}

    def check(self) -> None:
        pass

    def release(self) -> None:
        pass


@dataclass(frozen=True)
class UploadTask(SaveTask):
    """One checkpoint to copy."""

    source: str = ""

    def _write(self, storage: Storage, times: SaveTimes) -> Manifest:
        times.write_begins()
        events.emit(events.UploadStarted(self.path, self.manifest.step, self.source))
        manifest, _ = storage.read_manifest(self.source)
        if manifest is None or manifest.generation != self.manifest.generation:
            raise CorruptCheckpointError(self.source, "is not the checkpoint that was to be uploaded")

        if manifest.files:
            return self._write_directory(storage, manifest)

        def confirmed(size_bytes: int, digest: str) -> Manifest:
            if digest != manifest.digest:
                raise CorruptCheckpointError(self.source, "data is damaged: its digest does not match the manifest")
            return manifest

        with (
            storage.open_read(self.source) as file,
            storage.open_attempt(self.path, expected_bytes=manifest.size_bytes) as attempt,
        ):
            _copy(file, attempt, manifest.size_bytes, self.source)
            return attempt.commit(confirmed)

    def _write_directory(self, storage: Storage, manifest: Manifest) -> Manifest:
        attempt = storage.open_directory(self.path, manifest.generation[:16], leads=True)
        try:
            for name, record in manifest.files.items():
                with (
                    storage.open_file(self.source, name) as file,
                    attempt.open_file(name, record.size_bytes) as copy,
                ):
                    while piece := file.read(PIECE_BYTES):
                        copy.write(piece)
                    if copy.finish() != record:
                        raise CorruptCheckpointError(
                            self.source, f"{name} is damaged: its digest does not match the manifest"
                        )
            return attempt.commit(manifest)
        finally:
            attempt.abort()


class Uploads(Writer):
    """Copies checkpoints in the background, in order: one at a time, and at most one waits."""

    THREAD = "lightning-ft-uploads"

    def __init__(self, storage: Storage, retries: int, verify_after_write: ReadBackDepth | None = None) -> None:
        super().__init__(storage, retries, verify_after_write)
        self._sources: dict[str, str] = {}

    @property
    def sources(self) -> frozenset[str]:
        """Local checkpoints that must stay, since they are still to be copied. Thread: any."""
        with self._condition:
            return frozenset(source for path, source in self._sources.items() if path in self.paths)

    def upload(self, source: str, path: str, manifest: Manifest, on_commit: Callable[[Manifest], None]) -> None:
        """The checkpoint `source` will be copied to `path`, in place of one that still waits.

        Thread: writer. Blocks on: nothing. What is left out is on the local disk, and older than what takes its place.

        Args:
            source: A local checkpoint; must stay until it is over (see `sources`).
            path: The final name.
            manifest: That of `source`.
            on_commit: Called in the thread of the uploads.
        """
        self.make_room(replace=True)
        with self._condition:
            unfinished = self.paths
            self._sources = {p: s for p, s in self._sources.items() if p in unfinished} | {path: source}
        self.save(UploadTask(path, _NoCopy(manifest.size_bytes), manifest, on_commit, replaceable=True, source=source))

    def _what_failed(self, path: str, step: int) -> str:
        return f"checkpoint {split(path)[1]} (step {step}) was not uploaded to {split(path)[0]}"


def _copy(file: BinaryIO, attempt: Attempt, size_bytes: int, source: str) -> None:
    """`attempt` has the archive in `file` as it was before its manifest was written into it."""
    left = size_bytes
    while left:
        piece = file.read(min(left, PIECE_BYTES))
        if not piece:
            raise CorruptCheckpointError(source, f"ends {left} bytes before its end-of-archive record")
        attempt.write(piece)
        left -= len(piece)
    # Without the length of the comment, which the commit adds: what comes out is the same record.
    attempt.write(file.read(EOCD_BYTES)[:-2] + bytes(2))
