"""A run told over several starts, each on its own number of ranks: what was loaded, and who saw which sample."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from lightning_ft._fit import loops
from lightning_ft._state.digest import digest
from tests.sharded import job, processes
from tests.trainer import cases as c


@dataclass(frozen=True)
class Chapter:
    """One start of the run."""

    ranks: int
    kind: str
    kill_at: int | None = None
    """After how many batches of this start it is killed, before that batch is saved; None: it runs to its end."""
    ckpt_path: str = "last"


@dataclass(frozen=True)
class Told:
    """What one start did."""

    world_size: int
    resumed_at: int
    """Its global step when training started."""
    loaded: dict[str, Any]
    """Digest of everything that was loaded, gathered, by name."""
    steps: dict[int, dict[str, Any]]
    """Per global step: epoch, ids of all ranks, and the digests of the state after it."""


class Notes(Callback):
    """Writes down what this rank does; whole tensors, so that it is the same on any number of ranks."""

    def __init__(self, path: str, kill_at: int | None) -> None:
        self.path = path
        self.kill_at = kill_at
        self.batches = 0

    def _write(self, values: dict[str, Any]) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, (json.dumps(values) + "\n").encode())
        os.close(descriptor)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write({"resumed at": trainer.global_step, "state": gathered(trainer)})

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        ids = [int(i) for i in args[1][0].flatten()]
        values = {"step": trainer.global_step, "epoch": trainer.current_epoch, "ids": ids}
        self._write({**values, "state": gathered(trainer)})
        self.batches += 1
        if self.batches == self.kill_at:
            trainer.strategy.barrier()  # every rank has written down that it was here
            os.kill(os.getpid(), 9)


def gathered(trainer: L.Trainer) -> dict[str, Any]:
    """Digests of the whole weights and moments, by name. Ranks: all."""
    model = trainer.strategy.model
    options = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=options)
    found = {f"weights.{name}": digest(value) for name, value in weights.items()}
    for number, optimizer in enumerate(trainer.optimizers):
        if not optimizer.state:  # else torch takes a step to make one
            continue
        state: Any = get_optimizer_state_dict(model, optimizer, options=options)["state"]
        for name, values in state.items():
            found.update({f"optimizer {number}.{name}.{key}": digest(value) for key, value in values.items()})
    return found


def start(dirpath: str, path: str, chapter: Chapter, optimizer: str, kwargs: dict[str, Any]) -> None:
    """One rank of one start."""
    torch.set_num_threads(1)
    plugin = job.plugin(chapter.kind, async_save=False)
    trainer = job.trainer(
        dirpath, chapter.kind, chapter.ranks, **{"every": 1, "plugins": [plugin], "limit_val_batches": 0, **kwargs}
    )
    loops.callbacks(trainer)[:0] = [Notes(f"{path}.rank{job.rank()}", chapter.kill_at)]
    trainer.fit(job.Net(optimizer), c.plain_loader(48, 4, shuffle=True), ckpt_path=chapter.ckpt_path)


def tell(root: Path, chapters: Sequence[Chapter], optimizer: str = "adamw", **kwargs: Any) -> list[Told]:
    """What each of the starts did, one after the other in one directory."""
    told = []
    for number, chapter in enumerate(chapters):
        path = str(root / f"chapter{number}")
        args = (str(root / "checkpoints"), path, chapter, optimizer, kwargs)
        ended = processes.start(chapter.ranks, start, *args)
        killed = [outcome.exit_code == -9 for outcome in ended]
        errors = "\n".join(outcome.error for outcome in ended)
        assert killed == [chapter.kill_at is not None] * chapter.ranks, f"chapter {number} {killed}: {errors}"
        told.append(_read(path, chapter.ranks))
    return told


def _read(path: str, world_size: int) -> Told:
    lines = [[json.loads(line) for line in Path(f"{path}.rank{r}").read_text().splitlines()] for r in range(world_size)]
    starts = [of_rank[0] for of_rank in lines]
    assert all(s == starts[0] for s in starts), "the ranks have loaded different things"
    steps: dict[int, dict[str, Any]] = {}
    for of_rank in lines:
        for line in of_rank[1:]:
            step = steps.setdefault(line["step"], {"epoch": line["epoch"], "ids": [], "state": line["state"]})
            step["ids"] += line["ids"]
            assert step["epoch"] == line["epoch"]
            assert step["state"] == line["state"], f"the ranks differ in step {line['step']}"
    return Told(world_size, starts[0]["resumed at"], starts[0]["state"], steps)


def check_loaded(told: Sequence[Told]) -> None:
    """Every start but the first began with exactly the state after the step that it was resumed at."""
    for before, after in itertools.pairwise(told):
        assert after.resumed_at in before.steps, f"resumed at {after.resumed_at}"
        expected = before.steps[after.resumed_at]["state"]
        assert set(after.loaded) == set(expected)
        differ = [name for name, value in expected.items() if after.loaded[name] != value]
        assert not differ, f"differs after the load at step {after.resumed_at}: {differ}"


def samples(told: Sequence[Told]) -> dict[int, list[int]]:
    """Per epoch the ids of all samples that count: those of batches lost in a kill do not."""
    found: dict[int, list[int]] = {}
    for number, chapter in enumerate(told):
        last = told[number + 1].resumed_at if number + 1 < len(told) else max(chapter.steps)
        for step, values in chapter.steps.items():
            if step <= last:
                found.setdefault(values["epoch"], []).extend(values["ids"])
    return {epoch: sorted(ids) for epoch, ids in found.items()}
