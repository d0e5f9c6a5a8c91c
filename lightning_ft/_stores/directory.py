"""A checkpoint that is a directory, written straight to its final place in a store: the manifest comes last.

A marker beside it, written first, tells what a kill leaves from what another tool has uploaded.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lightning_ft._disk.directory import DirectoryAttempt
from lightning_ft._disk.sink import Sink
from lightning_ft._names import attempt_name, join, parse_checkpoint_name, split
from lightning_ft.errors import SaveError
from lightning_ft.events import DataSynced, DataWritten, emit
from lightning_ft.manifest import DIRECTORY_MANIFEST, Manifest

if TYPE_CHECKING:
    from lightning_ft._stores.objects import ObjectStore

_log = logging.getLogger(__name__)


class StoreDirectoryAttempt(DirectoryAttempt):
    """Objects under the final name, and a marker until the manifest is there.

    Args:
        store: Where it goes.
        path: The final name.
        token: 16 hexadecimal digits, the same on every rank.
        leads: Whether what is there before is dealt with here; see `Storage.open_directory`.
    """

    def __init__(self, store: ObjectStore, path: str, token: str, leads: bool) -> None:
        super().__init__(path, path)
        self._store = store
        dirpath, name = split(path)
        self._marker = join(dirpath, attempt_name(name, token))
        self._committed = False
        if leads:
            self._make_room()
        store.mark(self._marker)
        store.make_directory(path)

    def _make_room(self) -> None:
        if self._store.exists(self._marker):
            self._store.remove_unfinished(self.path)  # of a try of this save that could not clean up
        if not self._store.exists(self.path):
            return
        if parse_checkpoint_name(split(self.path)[1]) is not None:
            raise SaveError(f"{self.path}: there is another checkpoint of this name, which was not touched", self.path)
        # Nothing can be exchanged here: until the commit there is none of this name.
        self._store.remove(self.path)

    def _open_sink(self, name: str, expected_bytes: int | None) -> Sink:
        return self._store.open_sink(join(self.path, name), expected_bytes)

    def _sizes(self) -> dict[str, int]:
        return self._store.sizes(self.path)

    def _publish(self, manifest: Manifest, sealed: bytes) -> None:
        emit(DataWritten(self.path, self.attempt, manifest.size_bytes + len(sealed)))
        self._store.create_manifest(join(self.path, DIRECTORY_MANIFEST), sealed, manifest)  # The commit.
        self._committed = True
        emit(DataSynced(self.path, self.attempt))
        try:
            self._store.unmark(self._marker)
        except Exception as error:  # stores have errors of their own classes
            _log.warning("%s: %s stays until the next start: %s", self.path, self._marker, error)

    def abort(self) -> None:
        if self._committed:
            return
        self._store.remove_unfinished(self.path)
        self._store.unmark(self._marker)

    def close(self) -> None:
        """Nothing is held in a store."""
