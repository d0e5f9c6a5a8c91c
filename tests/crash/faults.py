"""A directory with two good checkpoints, a save into it that meets a fault, and what must be true after that."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lightning_ft as ft
from lightning_ft import events
from lightning_ft._disk import direct, sink
from lightning_ft._names import checkpoint_name, parse_leftover
from tests.crash.harness import checkpoint

NUMBERS = 20_000
BUFFER_BYTES = 16 << 10
ABOUT_BYTES = 4 * NUMBERS * 5 // 2
"""Of one checkpoint, and a little more for what is not tensors."""


@dataclass(frozen=True)
class Run:
    """Saves some steps, one after the other, each durable or failed before the next; goes on after failures.

    A `powercut.Job`.
    """

    dirpath: str
    result: str
    steps: tuple[int, ...]
    retries: int = 0
    uid: int = 0

    def warm_up(self) -> None:
        with tempfile.TemporaryDirectory() as place:
            Run(f"{place}/run", f"{place}/result", (1,))()

    def __call__(self) -> None:
        torch.set_num_threads(1)
        sink.BUFFER_BYTES, sink.CHUNK_BYTES = BUFFER_BYTES // 4, BUFFER_BYTES // 2
        direct.BUFFERS = direct.DiskBuffers(BUFFER_BYTES, 3)
        if self.uid:
            os.setuid(self.uid)
        Path(self.result).write_text(json.dumps(self.save()))

    def save(self) -> dict[str, str]:
        """What each failed step failed of."""
        plugin = ft.FaultTolerantCheckpointIO(async_save=False, retries=self.retries)
        failures = {}
        for step in self.steps:
            try:
                plugin.save_checkpoint(checkpoint(step, NUMBERS), f"{self.dirpath}/{checkpoint_name(step)}")
            except ft.SaveError as error:
                failures[str(step)] = str(error)
        plugin.teardown()
        return failures


def contents(dirpath: Path) -> dict[str, bytes]:
    """Every file in a directory, hidden ones too."""
    return {path.name: path.read_bytes() for path in dirpath.iterdir()}


def two_saved(dirpath: Path) -> dict[str, bytes]:
    """Steps 1 and 2 are there; returns the files."""
    assert Run(str(dirpath), "", (1, 2)).save() == {}
    return contents(dirpath)


def check_failure(dirpath: Path, before: dict[str, bytes], failures: dict[str, str], why: str) -> None:
    """Step 3 failed of `why`, was said to by path, left nothing, and changed nothing of what was there before.

    A checkpoint that is there all the same is whole: the last thing a save does is to sync the directory.
    """
    assert list(failures) == ["3"]
    assert f"{dirpath}/{checkpoint_name(3)} (step 3) was not saved" in failures["3"]
    assert why in failures["3"]
    after = contents(dirpath)
    assert {name: after.get(name) for name in before} == before
    assert not [name for name in after if parse_leftover(name)]
    assert all(ft.verify(str(dirpath / name)).problem is None for name in after)


def check_next_save(dirpath: Path) -> None:
    """Step 4 is saved, now that the fault is gone, and taken by the next start."""
    assert Run(str(dirpath), "", (4,)).save() == {}
    good = ft.last_good(str(dirpath))
    assert good is not None
    assert good.name == checkpoint_name(4)


@contextmanager
def mounted_tmpfs(place: Path, options: str) -> Iterator[Path]:
    """A file system of its own, as small as `options` say."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


@contextmanager
def events_of(kind: type[events.Event]) -> Iterator[list[Any]]:
    """The events of one kind that were emitted meanwhile."""
    found: list[Any] = []
    stop = events.observe(lambda event: found.append(event) if isinstance(event, kind) else None)
    try:
        yield found
    finally:
        stop()
