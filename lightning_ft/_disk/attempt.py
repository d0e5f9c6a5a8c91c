"""A checkpoint of one file being written: the bytes of its archive in, one commit or nothing."""

from __future__ import annotations

import contextlib
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable

from lightning_ft._disk.disk_file import DiskFile, make_dirs, sync_dir
from lightning_ft._disk.sink import HashedFile
from lightning_ft._names import attempt_name, join, split
from lightning_ft.errors import ManifestError, SaveError
from lightning_ft.events import DataSynced, DataWritten, Renamed, emit
from lightning_ft.manifest import EOCD_BYTES, Manifest, seal


class Attempt(HashedFile, ABC):
    """A checkpoint being written: a file for `_saving.serialise.save`, invisible under its final name until `commit`.

    The last 22 bytes are always held back, because at commit the end-of-archive record must be replaced by one that
    carries the manifest.
    """

    HELD_BACK_BYTES = EOCD_BYTES

    manifest: Manifest | None = None
    """Known once it is being committed."""

    def commit(self, make_manifest: Callable[[int, str], Manifest]) -> Manifest:
        """The checkpoint is whole and durable under its final name, or this raises.

        Thread: writer. Blocks on: the disk or the store.
        On disk after: the checkpoint. After an error nothing under the final name, or, if only the last sync
        failed, the whole checkpoint.

        Args:
            make_manifest: Called with the size and the digest of everything before the end-of-archive record.

        Raises:
            SaveError: What was written is no zip archive, the manifest is too long, or the store holds
                another size than was uploaded.
            OSError: A write failed, now or earlier. Stores raise their client's own classes besides.
        """
        with self._own_error():
            self._put_pending()
        manifest = make_manifest(self._size_bytes, self._hash.hexdigest())
        assert (manifest.size_bytes, manifest.digest) == (self._size_bytes, self._hash.hexdigest())
        self.manifest = manifest
        try:
            ending = seal(bytes(self._pending), manifest)
        except ManifestError as error:
            raise SaveError(f"{self.path}: {error}", self.path, manifest.step) from error
        with self._own_error():
            self._sink.append(memoryview(ending))
            self._sink.complete()
        total_bytes = self._size_bytes + len(ending)
        emit(DataWritten(self.path, self.attempt, total_bytes))
        self._publish(total_bytes)
        return manifest

    @abstractmethod
    def _publish(self, total_bytes: int) -> None:
        """What was written is the checkpoint, and durable: the commit."""


class LocalAttempt(Attempt):
    """A hidden file in the target directory: across file systems the rename would be a copy.

    Args:
        path: The final name.
        expected_bytes: At least so many will be written; without room for them nothing is.
    """

    def __init__(self, path: str, expected_bytes: int | None = None) -> None:
        self._dirpath, name = split(path)
        attempt = join(self._dirpath, attempt_name(name, secrets.token_hex(8)))
        make_dirs(self._dirpath)
        super().__init__(path, attempt, DiskFile(attempt, expected_bytes, held=True))

    def _publish(self, total_bytes: int) -> None:
        with self._own_error():
            self._sink.publish(total_bytes)
        emit(DataSynced(self.path, self.attempt))
        with self._own_error():
            os.replace(self.attempt, self.path)
        emit(Renamed(self.path))
        with self._own_error():
            sync_dir(self._dirpath)  # The commit: from here on the checkpoint survives everything.

    def abort(self) -> None:
        super().abort()
        # Synced and not renamed; or renamed by a commit, or aborted before.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.attempt)
