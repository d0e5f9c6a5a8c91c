"""A checkpoint directory is verified by all ranks together, each reading its share of the bytes, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_ft import discovery
from lightning_ft.discovery import Depth, Verifying
from lightning_ft.manifest import CheckpointInfo, Manifest


@dataclass(frozen=True)
class Question:
    """What rank 0 asks all ranks: which of these files are not as they were written?"""

    path: str
    manifest: Manifest
    shares: tuple[tuple[str, ...], ...]
    """Names of files, one item for each rank."""


Ask = Callable[[Question], "list[str | None]"]


def share_out(manifest: Manifest, ranks: int) -> tuple[tuple[str, ...], ...]:
    """The files of a directory in so many shares of about equal size; a file is never split. The same everywhere."""
    shares: list[list[str]] = [[] for _ in range(ranks)]
    loads_bytes = [0] * ranks
    for name, record in sorted(manifest.files.items(), key=lambda item: (-item[1].size_bytes, item[0])):
        least = loads_bytes.index(min(loads_bytes))
        shares[least].append(name)
        loads_bytes[least] += record.size_bytes
    return tuple(map(tuple, shares))


class SharedVerification:
    """One rank's part in it.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        storage_options: For `fsspec`, used with URLs only.
    """

    def __init__(self, rank: int, world_size: int, storage_options: Mapping[str, Any] | None) -> None:
        self._rank = rank
        self._world_size = world_size
        self._storage_options = storage_options
        self.took_part_in: set[str] = set()
        """Directories of which this rank has read its share."""

    def help_with(self, question: Question) -> str | None:
        """What is wrong with this rank's share, None if nothing. Blocks on: reading it.

        Raises:
            StorageError: The store does not answer, which says nothing of the directory.
        """
        self.took_part_in.add(question.path)
        names = question.shares[self._rank]
        return discovery.verify_files(question.path, question.manifest, names, self._storage_options)

    def verifying(self, ask: Ask, otherwise: Verifying) -> Verifying:
        """As `otherwise`, but directories are verified by all ranks, which answer to `ask`. Ranks: zero."""

        def verify(path: str, depth: Depth, storage_options: Mapping[str, Any] | None) -> CheckpointInfo:
            if depth != "full":
                return otherwise(path, depth, storage_options)
            info = discovery.verify(path, "size", storage_options)
            if info.problem is not None or info.manifest is None or not info.manifest.files:
                return otherwise(path, depth, storage_options)
            answers = ask(Question(path, info.manifest, share_out(info.manifest, self._world_size)))
            problems = [f"{what} (read by rank {rank})" for rank, what in enumerate(answers) if what is not None]
            return replace(info, problem="; ".join(problems[:5]) or None)

        return verify
