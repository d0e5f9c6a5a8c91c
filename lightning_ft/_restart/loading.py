"""Reading a checkpoint back: verified as deep as asked before anything in it is unpickled."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import Any, BinaryIO, Literal

import torch

from lightning_ft import _names, discovery
from lightning_ft._names import KEY
from lightning_ft._sharded.assembling import assemble
from lightning_ft._sharded.shards import Shards
from lightning_ft.errors import CorruptCheckpointError
from lightning_ft.manifest import Manifest
from lightning_ft.storage import Storage

_log = logging.getLogger(__name__)


class Loading:
    """Loads checkpoints of one plugin, and remembers which one its run was resumed from.

    Thread: main. Every rank loads for itself.

    Args:
        storage: Where they are.
        verify: How deep they are checked: see `FaultTolerantCheckpointIO`.
        storage_options: What `storage` was made with.
    """

    def __init__(
        self, storage: Storage, verify: Literal["full", "size", "off"], storage_options: dict[str, Any] | None
    ) -> None:
        self._storage = storage
        self._storage_options = storage_options
        self._depth: Literal["full", "size", "off"] = verify
        self._verified: str | None = None
        self._fetched: BinaryIO | None = None
        self.loaded_path: str | None = None
        """What was loaded last; None, or a file that a tuner put aside for a moment, is not remembered."""

    def mark_verified(self, path: str, fetched: BinaryIO | None = None) -> None:
        """`path` was verified in full by this process a moment ago; loading it does not hash it, or fetch it, again."""
        self.forget_fetched()
        self._verified, self._fetched = path, fetched

    def forget_fetched(self) -> None:
        """What was fetched to be verified, and not loaded, is closed."""
        fetched, self._fetched = self._fetched, None
        if fetched is not None:
            fetched.close()

    def knows(self, path: str) -> bool:
        """Whether `path` was verified a moment ago, by this process."""
        return self._verified == path

    def is_sharded(self, path: str) -> bool:
        """Whether there is a directory at `path`, and not a file.

        Raises:
            FileNotFoundError: There is nothing.
            CheckpointError: There is one file of a directory.
        """
        if not self._storage.exists(path):
            raise FileNotFoundError(f"checkpoint not found: {path}")
        if not self._storage.is_file(path):
            return True
        self._storage.refuse_part(path)
        return False

    def open_shards(self, path: str) -> Shards:
        """The directory `path`, to be read in parts and closed; only its ``.metadata`` is verified yet.

        Raises:
            CheckpointError: It is no checkpoint, or damaged.
        """
        shards = Shards(self._storage, path, self._depth)
        if shards.manifest is None:
            _log.warning("%s has no manifest (plain Lightning wrote it?): loaded without verification", path)
        return shards

    def load(
        self, path: str, map_location: Any | None, weights_only: bool | None, *, mapped: bool = False
    ) -> dict[str, Any]:
        """See `FaultTolerantCheckpointIO.load_checkpoint`.

        With `mapped`, tensors of a local file are read when they are looked at, from memory that all processes of this
        machine share.
        """
        if self.is_sharded(path):
            return self._load_directory(path, weights_only)
        manifest = self._verify(path)
        checkpoint: dict[str, Any]
        if mapped and _names.is_local(path):
            checkpoint = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True)
        else:
            with self._open(path, manifest) as file:
                checkpoint = torch.load(file, map_location=map_location or "cpu", weights_only=weights_only)
        self.check_identity(path, manifest, checkpoint)
        return checkpoint

    def _load_directory(self, path: str, weights_only: bool | None) -> dict[str, Any]:
        """What the same checkpoint in one file holds; memory: all of it."""
        with closing(self.open_shards(path)) as shards:
            known = self.knows(path)
            self._verified = None
            if known:
                shards.trust()
            if shards.manifest is not None and self._depth == "size":
                self._refuse_damaged(path, "size")
            checkpoint = assemble(shards, weights_only)
            self.check_identity(path, shards.manifest, checkpoint)
        return checkpoint

    def check_identity(self, path: str, manifest: Manifest | None, checkpoint: dict[str, Any]) -> None:
        """What was loaded belongs to that manifest, and is remembered as what the run was resumed from.

        Raises:
            CorruptCheckpointError: It is of another save, or has lost its manifest.
        """
        ours = checkpoint.get(KEY)
        if manifest is None and ours is not None and self._depth != "off":
            raise CorruptCheckpointError(
                path,
                "holds the state of a run but no manifest, so another tool has written it anew and nothing in it can "
                'be verified; FaultTolerantCheckpointIO(verify="off") loads it all the same',
            )
        if manifest is not None and (ours or {}).get("generation", manifest.generation) != manifest.generation:
            raise CorruptCheckpointError(path, "the state inside and the manifest are of different saves")
        if manifest is None or manifest.run_id:  # not a file that a tuner put aside for a moment
            self.loaded_path = path

    def verify(self, path: str) -> None:
        """The file `path` is good, as deep as asked for; loading it does not verify it again.

        Raises:
            CheckpointError: It is not.
        """
        if _names.is_local(path):
            self._verify(path)
            self._verified = path

    def _verify(self, path: str) -> Manifest | None:
        manifest, _ = self._storage.read_manifest(path)
        if manifest is None:
            _log.warning("%s has no manifest (plain Lightning wrote it?): loaded without verification", path)
            return None
        known = self._depth == "full" and self._verified == path
        depth = "size" if known else self._depth
        self._verified = None
        if not known:
            self.forget_fetched()
        if depth != "off" and not self._verifies_while_reading(path):
            self._refuse_damaged(path, depth)
        return manifest

    def _refuse_damaged(self, path: str, depth: Literal["full", "size"]) -> None:
        info = discovery.verify(path, depth, self._storage_options)
        if info.problem is not None:
            raise CorruptCheckpointError(path, info.problem)

    def _verifies_while_reading(self, path: str) -> bool:
        """Of a store, what is read now may be damaged on the way, however often it was verified before."""
        return self._depth == "full" and not _names.is_local(path)

    def _open(self, path: str, manifest: Manifest | None) -> BinaryIO:
        if manifest is None or not self._verifies_while_reading(path):
            return self._storage.open_read(path)
        fetched, self._fetched = self._fetched, None
        return fetched or self._storage.open_verified(path)[0]
