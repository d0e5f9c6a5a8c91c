"""From a directory with a checkpoint to its content in memory, beside Lightning's plain load of the same file."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

import lightning_ft as ft
from lightning_ft._restart import choose
from tests.benchmarks import limits
from tests.benchmarks.model import Layers
from tests.benchmarks.pace import Pace
from tests.benchmarks.plan import Shape
from tests.benchmarks.training import follow

WAYS = ("read", "lightning", "ours")


def prepare(dirpath: str, shape: Shape, threads: int) -> str:
    """The path of a checkpoint that training with our callback has left in `dirpath`."""

    def script(pace: Pace, model: Layers) -> Iterator[None]:
        yield
        pace.allow(1)
        yield
        pace.wait()

    return follow(script, "blocking", shape, 1, threads, dirpath).saves[-1].path


def measure(path: str, way: str, threads: int) -> dict[str, list[float]]:
    """Seconds until the content of `path` is in memory; the file is in the page cache, the memory is not there yet."""
    torch.set_num_threads(threads)
    limits.read(path, memoryview(mmap.mmap(-1, os.path.getsize(path))))
    if way == "read":
        room = mmap.mmap(-1, os.path.getsize(path))
        view = memoryview(room)
        limits.read(path, view)
        return {"secs": [limits.read(path, view)]}  # into memory that is there
    began = time.perf_counter()
    loaded = TorchCheckpointIO().load_checkpoint(path, weights_only=True) if way == "lightning" else _ours(path)
    secs = time.perf_counter() - began
    if not loaded["optimizer_states"]:
        raise RuntimeError(f"{path}: nothing was loaded")
    return {"secs": [secs]}


def _ours(path: str) -> dict[str, object]:
    """What ``ckpt_path="last"`` does: every byte is verified before anything is used."""
    plugin = ft.FaultTolerantCheckpointIO()
    chosen, ours = choose.choose(str(Path(path).parent), "full", None)
    if chosen != path or not ours:
        raise RuntimeError(f"{chosen} was chosen in place of {path}")
    plugin.mark_verified(chosen)
    return plugin.load_checkpoint(chosen, weights_only=True)
