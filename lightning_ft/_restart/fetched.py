"""A checkpoint in a store is verified by being fetched, and then read from what was fetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, BinaryIO

from lightning_ft import _names, discovery
from lightning_ft.discovery import Depth, Verifying
from lightning_ft.manifest import CheckpointInfo


class Fetched:
    """Verifies candidates for a restart, and keeps the bytes of the good one of a store until they are taken.

    Attributes:
        damaged: Those that were read and are not what was written.

    Ranks: zero. Memory: none; one file without a name in the system's temporary directory (`Storage.open_verified`).
    """

    def __init__(self) -> None:
        self._kept: tuple[str, BinaryIO] | None = None
        self.damaged: list[CheckpointInfo] = []

    def noting(self, verifying: Verifying) -> Verifying:
        """As `verifying`; what that finds damaged is known here, too."""

        def verify(path: str, depth: Depth, storage_options: Mapping[str, Any] | None) -> CheckpointInfo:
            info = verifying(path, depth, storage_options)
            if info.problem is not None and info.manifest is not None:
                self.damaged.append(info)
            return info

        return verify

    def verify(self, path: str, depth: Depth, storage_options: Mapping[str, Any] | None) -> CheckpointInfo:
        """What `discovery.verify` says of `path`."""
        if depth != "full" or _names.is_local(path):
            return discovery.verify(path, depth, storage_options)
        self.close()
        info, file = discovery.verify_and_keep(path, storage_options)
        if file is not None:
            self._kept = path, file
        return info

    def take(self, path: str) -> BinaryIO | None:
        """The bytes of `path`, each compared with its manifest; None if it was not fetched. The caller closes them."""
        kept, self._kept = self._kept, None
        if kept is None:
            return None
        if kept[0] == path:
            return kept[1]
        kept[1].close()
        return None

    def close(self) -> None:
        """Nothing is kept."""
        self.take("")
