"""The line of training at hand: which checkpoints led to the state of now, and what those that follow say of it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ft import _names
from lightning_ft.manifest import CheckpointInfo


@dataclass
class Line:
    """A fit begins one, and so does going back to an older checkpoint within a fit. The same on all ranks."""

    run_id: str
    """Of the run that it continues; a branch off an older checkpoint has one of its own, since rotation must not count,
    or delete, the checkpoints of the line it left."""
    start: int
    """Its ordinal, that of the manifests: a later line supersedes an earlier one."""
    from_batch: int = 0
    """How many batches were trained when it began; checkpoints of earlier lines up to there lead to it."""
    from_path: str = ""
    """What it began from; empty: from nothing."""
    parent: str | None = None
    """The save that it began from."""
    going_back: bool = False
    """Whether the checkpoint that is about to be loaded is an older one of this very fit."""

    def go_back(self) -> None:
        """What is trained after the next load supersedes what was trained after that checkpoint before."""
        self.going_back = True
        self.start += 1

    def begin(self, saved: Mapping[str, Any] | None, path: str, new_run_id: str, continues: Callable[[], bool]) -> bool:
        """It begins from the checkpoint `path`; returns whether it continues the run of that one anew.

        Args:
            saved: What this package has put into the checkpoint; None if another tool wrote it.
            path: The checkpoint, normalised.
            new_run_id: For a branch.
            continues: Whether the run of `saved` goes on, and no branch of it begins. Asked on all ranks, or on none.
        """
        going_back, self.going_back = self.going_back, False
        self.from_path = path
        self.from_batch, self.parent = (0, None) if saved is None else (saved["batch"], saved["generation"])
        if going_back:
            return False
        self.run_id = new_run_id
        if saved is None or not continues():
            return False
        self.run_id = saved["run_id"]
        return True

    def stamp(self, reason: str) -> dict[str, Any]:
        """What identifies a new checkpoint of the line."""
        return {
            "generation": uuid.uuid4().hex,
            "run_id": self.run_id,
            "start": self.start,
            "parent": self.parent,
            "reason": reason,
        }


def is_superseded(saved: Mapping[str, Any], infos: list[CheckpointInfo]) -> bool:
    """Whether newer good checkpoints than `saved` are there."""
    position = saved["start"], saved["batch"]
    newer = [i for i in infos if i.problem is None and i.order[:2] > position]
    return any(_names.parse_checkpoint_name(i.name) for i in newer)
