"""What the callback adds to a step when nothing is due, and the least it can: one process, or two ranks on one host."""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ft as ft
from tests.benchmarks.fresh import silence
from tests.benchmarks.model import quiet

CHUNK_STEPS = 100
_WARM_STEPS = 50
_BATCH_ROWS = 4
_TIMEOUT_SECS = 240.0


class Toy(L.LightningModule):
    """So small a model that a step is nothing but overhead."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(Callback):
    """Seconds per step, of every `CHUNK_STEPS` steps after the first `_WARM_STEPS`."""

    def __init__(self) -> None:
        self._began = 0.0
        self.secs: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= _WARM_STEPS and (batch_idx - _WARM_STEPS) % CHUNK_STEPS == 0:
            now = time.perf_counter()
            if batch_idx > _WARM_STEPS:
                self.secs.append((now - self._began) / CHUNK_STEPS)
            self._began = now


class Floor(Callback):
    """What no callback of this kind can be without, and nothing else.

    A loader without workers makes each batch under a seed of its own, and the training's random state is put back. What
    ranks of one host tell each other passes through memory that they share, which costs next to nothing.
    """

    def __init__(self) -> None:
        self._numbers = np.random.MT19937()  # it is exchanged: copying numpy's state costs more than all the others

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        outer_torch, outer_python = torch.default_generator.get_state(), random.getstate()
        outer_numpy = np.random.get_bit_generator()
        np.random.set_bit_generator(self._numbers)
        torch.default_generator.manual_seed(batch_idx)
        random.seed(batch_idx)
        np.random.seed(batch_idx)
        torch.default_generator.set_state(outer_torch)
        random.setstate(outer_python)
        np.random.set_bit_generator(outer_numpy)


WAYS = ("none", "floor", "ours", "guarded")
"""Without the callback; with what none can be without; with the callback, without guards and with all there are."""


def trainer(dirpath: str, steps: int, ranks: int, *callbacks: Callback, way: str) -> L.Trainer:
    """One epoch of so many steps in which nothing is saved."""
    extra: dict[str, Any] = {"enable_checkpointing": False}
    if way == "floor":
        callbacks = (*callbacks, Floor())
    if way in ("ours", "guarded"):
        guards = (ft.PreemptionGuard(), ft.DivergenceGuard(), ft.HangGuard()) if way == "guarded" else ()
        # Due at the end of a second epoch, which the run does not have, and asked after every step all the same.
        saver = ft.FaultTolerantCheckpoint(dirpath, every_n_epochs=2, save_on_train_end=False, guards=guards)
        extra, callbacks = {}, (*callbacks, saver)
    if ranks > 1:
        extra |= {"strategy": "ddp", "devices": ranks}
    arguments = quiet(default_root_dir=dirpath, callbacks=list(callbacks), max_epochs=1, limit_train_batches=steps)
    return L.Trainer(**{**arguments, **extra})


def loader(steps: int, ranks: int) -> DataLoader[Any]:
    """Shuffled, without workers, with enough batches for every rank."""
    rows = torch.zeros(steps * ranks * _BATCH_ROWS, 8)
    return DataLoader(TensorDataset(rows), batch_size=_BATCH_ROWS, shuffle=True)


def measure(dirpath: str, steps: int, rounds: int, ranks: int = 1) -> dict[str, list[float]]:
    """Seconds per step in each way, and what two of them add; one run of each per round, in turns.

    Of each run the median of its chunks: whatever else runs on the machine disturbs some of them, a cost of the
    callback is in all.
    """
    torch.set_num_threads(1)
    samples: dict[str, list[float]] = {f"{way}_secs": [] for way in WAYS}
    samples |= {"added_secs": [], "floor_added_secs": [], "guards_secs": []}
    steps = max(1, steps // CHUNK_STEPS) * CHUNK_STEPS
    for turn in range(rounds + 1):
        total = _WARM_STEPS + 1 + (steps if turn else CHUNK_STEPS)
        secs = {}
        for way in (*WAYS[turn % len(WAYS) :], *WAYS[: turn % len(WAYS)]):
            clock = Clock()
            trainer(dirpath, total, ranks, clock, way=way).fit(Toy(), loader(total, ranks))
            secs[way] = statistics.median(clock.secs)
        if turn:  # in the runs before that, things are imported and allocated
            for way in WAYS:
                samples[f"{way}_secs"].append(secs[way])
            samples["added_secs"].append(secs["ours"] - secs["none"])
            samples["floor_added_secs"].append(secs["floor"] - secs["none"])
            samples["guards_secs"].append(secs["guarded"] - secs["ours"])
    return samples


def measure_two_ranks(dirpath: str, steps: int, rounds: int) -> dict[str, list[float]]:
    """The same with two processes; what rank 0 measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = Path(dirpath, "idle.json")
    command = [sys.executable, "-m", "tests.benchmarks.idle", dirpath, str(steps), str(rounds), str(path)]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    processes = [
        subprocess.Popen(command, env={**os.environ, **shared, "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"})
        for rank in range(2)
    ]
    try:
        codes = [process.wait(_TIMEOUT_SECS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RuntimeError(f"the two ranks of the idle measurement ended with {codes}")
    samples: dict[str, list[float]] = json.loads(path.read_text())
    return samples


def _rank() -> None:
    silence()
    dirpath, steps, rounds, path = sys.argv[1:]
    samples = measure(dirpath, int(steps), int(rounds), ranks=2)
    if os.environ["LOCAL_RANK"] == "0":
        Path(path).write_text(json.dumps(samples))
    # Lightning leaves the group to the end of the interpreter, where gloo's threads may bring the process down.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank()
