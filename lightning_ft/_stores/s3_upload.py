"""A checkpoint that takes the place of no other one of a run: one object of an S3 store, published on a condition."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_ft._disk.attempt import Attempt
from lightning_ft._stores.errors import is_refusal, is_transient
from lightning_ft._stores.s3_parts import S3Parts, differ
from lightning_ft.errors import CheckpointError, SaveError, StorageError
from lightning_ft.events import DataSynced, emit
from lightning_ft.manifest import Manifest, parse_tail

if TYPE_CHECKING:
    from lightning_ft._stores.s3 import S3Store

_log = logging.getLogger(__name__)


class Publication:
    """The object that makes a checkpoint visible: the archive itself, or the manifest of a directory.

    A checkpoint of a run never takes the place of another one: the store is asked to refuse that, where it was seen to
    do so, and is looked at before, where it was not. If a refusal, or a lost answer, leaves open whether the
    object is this one, it is read back: generation and digest of its manifest tell.

    Args:
        store: Where it goes.
        path: The name of the object.
        parts: Its bytes, all of them.
        manifest: What it says.
        look: The manifest in the object as it is now, or what is wrong with it, and its ETag; raises FileNotFoundError.
    """

    def __init__(
        self,
        store: S3Store,
        path: str,
        parts: S3Parts,
        manifest: Manifest,
        look: Callable[[], tuple[Manifest | str, str]],
    ) -> None:
        self._store = store
        self._path = path
        self._parts = parts
        self._manifest = manifest
        self._look = look

    def publish(self, exclusive: bool) -> None:
        """The checkpoint is visible and durable: the commit.

        Args:
            exclusive: Whether there must be none of its name. Other callbacks may write over their own files, and
                mean to.

        Raises:
            SaveError: There is another one.
            StorageError: The store holds something else than was sent; it was removed.
        """
        refuses = exclusive and self._store.refuses_existing(self._path)
        if exclusive and not refuses:
            # Nothing keeps another one from coming between this look and the request below.
            there = self._found()
            if there is not None:
                if not self._is_this(there):
                    raise self._taken()
                return
        self._verify(self._put(refuses))

    def _put(self, refuses: bool) -> str:
        """The object is there; returns its ETag, "" if the answer to that was lost."""
        unfinished = self._parts.unfinished
        try:
            return self._parts.put({"IfNoneMatch": "*"} if refuses else {})
        except Exception as error:
            refused = is_refusal(error) or is_refusal(error.__cause__ or error)
            # A finished upload is no longer known: the request was repeated after its first answer was lost.
            lost = is_transient(error) or (isinstance(error, FileNotFoundError) and unfinished)
            if not refused and not lost:
                raise
            there = self._found()
            if there is not None and self._is_this(there):
                _log.info("%s is there, although the store answered: %s", self._path, error)
                return ""
            if refused:
                raise self._taken() from error
            raise

    def _found(self) -> Manifest | str | None:
        """The manifest of what is under the name now, or what is wrong with it; None: nothing is there."""
        try:
            return self._look()[0]
        except FileNotFoundError:
            return None

    def _is_this(self, found: Manifest | str) -> bool:
        # Another attempt at the same save has other timings in its manifest, and the same bytes.
        return isinstance(found, Manifest) and (found.generation, found.digest, found.size_bytes) == (
            self._manifest.generation,
            self._manifest.digest,
            self._manifest.size_bytes,
        )

    def _taken(self) -> SaveError:
        return SaveError(
            f"{self._path}: there is another checkpoint of this name, which was not touched; does another run write "
            "into this directory?",
            self._path,
        )

    def _verify(self, etag: str) -> None:
        """What a reader finds under the name now is this checkpoint, as far as its manifest and its ETag tell."""
        found, found_etag = self._look()
        if self._is_this(found) and not differ(etag, found_etag):
            return
        if isinstance(found, Manifest) and not self._is_this(found):
            raise self._taken()  # It came after this one, and is somebody's.
        problem = found if isinstance(found, str) else f"ETag {found_etag} and not {etag}"
        self._store.request(self._path, "delete_object", **self._store.place(self._path))
        raise StorageError(
            f"{self._path}: the store holds something else than was uploaded: {problem}", self._path, True
        )


class S3Attempt(Attempt):
    """A checkpoint of one file, straight to its final key. Memory: see `S3Parts`.

    Args:
        store: Where it goes.
        path: The final name.
        expected_bytes: About so many will be written.
    """

    def __init__(self, store: S3Store, path: str, expected_bytes: int | None) -> None:
        self._store = store
        self._parts = S3Parts(store, path, expected_bytes)
        super().__init__(path, path, self._parts)

    def _publish(self, total_bytes: int) -> None:
        assert self.manifest is not None
        publication = Publication(self._store, self.path, self._parts, self.manifest, self._look)
        with self._own_error():
            publication.publish(self.manifest.is_exclusive(self.path))
        emit(DataSynced(self.path, self.attempt))

    def _look(self) -> tuple[Manifest | str, str]:
        tail, size_bytes, etag = self._store.tail_and_etag(self.path)
        try:
            return parse_tail(tail, size_bytes, self.path) or "it has no manifest", etag
        except CheckpointError as error:
            return str(error), etag
