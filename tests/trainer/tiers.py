"""A local directory and the one behind it, and a store that is slow or refuses, for runs within the test process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lightning_ft as ft
from lightning_ft import events
from lightning_ft._names import checkpoint_name
from tests.trainer import runs
from tests.trainer.runs import fit, names, trainer

WAIT_SECS = runs.WAIT_SECS


class Place:
    """A local directory and the one behind it."""

    def __init__(self, root: Path) -> None:
        self.local = root / "local"
        self.remote = root / "remote"

    def ours(self, **kwargs: Any) -> ft.FaultTolerantCheckpoint:
        arguments = {
            "every_n_train_steps": 4, "keep_last": 2, "local_dirpath": self.local, "local_every_n_train_steps": 1,
            **kwargs,
        }  # fmt: skip
        return ft.FaultTolerantCheckpoint(self.remote, **arguments)

    def run(self, *callbacks: Any, ckpt_path: Any = "last", max_steps: int = 6, io: Any = None, **kwargs: Any) -> Any:
        """One start: 8 batches per epoch; returns the module."""
        made = trainer(*callbacks, self.ours(**kwargs), max_steps=max_steps, plugins=io and [io])
        return fit(made, ckpt_path=ckpt_path)

    def steps(self, dirpath: Any) -> list[int]:
        return [int(name[5:13]) for name in names(dirpath)]

    def same(self, step: int) -> bool:
        """Whether the file of this step is the same in both directories."""
        name = checkpoint_name(step)
        return (self.local / name).read_bytes() == (self.remote / name).read_bytes()


class Gate:
    """A store that is slow without a clock: uploads stand at their beginning until they are let go."""

    def __init__(self, *, fails: int = 0) -> None:
        self.open = threading.Event()
        self.stands = threading.Event()
        self.fails = fails

    def __call__(self, event: events.Event) -> None:
        if not isinstance(event, events.UploadStarted):
            return
        self.stands.set()
        assert self.open.wait(WAIT_SECS)
        if self.fails:
            self.fails -= 1
            raise PermissionError("the store says no")
