"""Saves of two DDP ranks in both layouts: rank 0 writes one file, or each rank writes its share of a directory.

One pair of processes makes all of it, one training after the other, in turns. Blocked time is that of the rank that was
held up longer, by its own clock; durable is the save when rank 0 knows that all of it is on disk. Both ranks have the
same disk, so what a second writer can gain is what one alone leaves of it; machines with disks of their own gain more.
"""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy

import lightning_ft as ft
from lightning_ft import events
from tests.benchmarks.fresh import silence
from tests.benchmarks.model import Layers, loader, quiet
from tests.benchmarks.plan import Shape
from tests.benchmarks.sharded import RANKS, Gate, tell
from tests.sharded import processes

TITLES = {"file": 'lightning_ft, layout="file"', "sharded": 'lightning_ft, layout="sharded"'}
LAYOUTS = tuple(TITLES)
Measured = dict[str, dict[str, list[float]]]


def measure(dirpath: str, shape: Shape, rows: int, threads: int, saves: int, rounds: int) -> Measured:
    """Samples by layout and quantity; times without those of the first save."""
    os.sync()
    measured = processes.run(RANKS, _train_all, dirpath, shape, rows, threads, saves, rounds, timeout_secs=300)
    return {layout: _of_both([each[layout] for each in measured]) for layout in LAYOUTS}


def _of_both(ranks: list[dict[str, list[list[float]]]]) -> dict[str, list[float]]:
    """Each training of each rank has a list of values, one for a save."""
    found: dict[str, list[float]] = {"first_blocked_secs": [], "blocked_secs": [], "durable_secs": []}
    for trainings in zip(*(rank["blocked_secs"] for rank in ranks), strict=True):
        blocked = [max(of_save) for of_save in zip(*trainings, strict=True)]
        found["first_blocked_secs"] += blocked[:1]
        found["blocked_secs"] += blocked[1:]
    for durable in ranks[0]["durable_secs"]:
        found["durable_secs"] += durable[1:]
    for number, rank in enumerate(ranks):
        found[f"rank_{number}_bytes"] = [of_training[0] for of_training in rank["written_bytes"]]
    return found


# -- in the ranks ------------------------------------------------------------------------------------------------


def _train_all(
    dirpath: str, shape: Shape, rows: int, threads: int, saves: int, rounds: int
) -> dict[str, dict[str, list[list[float]]]]:
    silence()
    torch.set_num_threads(threads)
    found: dict[str, dict[str, list[list[float]]]] = {layout: {} for layout in LAYOUTS}
    for turn in range(rounds):
        for layout in LAYOUTS if turn % 2 == 0 else LAYOUTS[::-1]:
            for name, values in _train(f"{dirpath}/{turn}-{layout}", layout, shape, rows, saves).items():
                found[layout].setdefault(name, []).append(values)
    return found


def _train(dirpath: str, layout: Any, shape: Shape, rows: int, saves: int) -> dict[str, list[float]]:
    gate = Gate(saves, removes=False)
    written = _Written()
    undo = [tell(gate), events.observe(written)]
    callback = ft.FaultTolerantCheckpoint(
        dirpath, every_n_train_steps=1, keep_last=1, guards=(), save_on_train_end=False
    )
    trainer = L.Trainer(
        **quiet(default_root_dir=dirpath, devices=RANKS, plugins=[ft.FaultTolerantCheckpointIO(layout=layout)]),
        strategy=DDPStrategy(process_group_backend="gloo"), callbacks=[gate, callback],
    )  # fmt: skip
    gate.install(trainer)
    trainer.fit(Layers(shape, rows), loader())
    for step in undo:
        step()
    return {
        "blocked_secs": [save.blocked_secs for save in gate.saves],
        "durable_secs": [save.durable_secs for save in gate.saves],
        "written_bytes": [written.total_bytes / len(gate.saves)],
    }


class _Written:
    """What this rank has handed to the operating system, as our events tell. Thread: any, one at a time."""

    def __init__(self) -> None:
        self.total_bytes = 0

    def __call__(self, event: events.Event) -> None:
        # A directory has one of these for each of its files, and for all of them together one more, on rank 0.
        one_file = isinstance(event, events.DataWritten) and os.path.isfile(event.attempt)
        if isinstance(event, events.FileWritten) or one_file:
            self.total_bytes += event.size_bytes  # type: ignore[attr-defined]
