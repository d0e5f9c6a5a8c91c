"""Trainings that hang, or seem to: each runs in processes of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, IterableDataset

import lightning_ft as ft
from lightning_ft import events
from lightning_ft._hang import headway
from tests.hangs.ways import c_code_keeps_the_interpreter, it_is_stopped, the_lock_is_never_released  # noqa: F401 - by name
from tests.ranks import Rank
from tests.trainer import scenarios as s
from tests.trainer.runs import Line


def secs(value: float) -> timedelta:
    return timedelta(seconds=value)


class Hanging(Line):
    """Calls `what` at step 5 of training, or in the second batch of its validation."""

    def __init__(self, what: str, where: str = "train") -> None:
        super().__init__()
        self.what = what
        self.where = where

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.where == "train" and self.global_step == 5:
            globals()[self.what]()

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.where == "validation" and batch_idx == 1 and not self.trainer.sanity_checking:
            globals()[self.what]()


class Slow(Line):
    """Slower than a step may be, where a step's limit does not apply."""

    def on_fit_start(self) -> None:
        time.sleep(3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 and not self.trainer.sanity_checking:
            time.sleep(3)

    def on_train_epoch_end(self) -> None:
        time.sleep(3)


class Stream(IterableDataset[Any]):
    """Keeps no state: a restart fetches it again. The second time it hangs, at item 9."""

    def __init__(self, hangs: bool) -> None:
        self.hangs = hangs

    def __iter__(self) -> Iterator[Any]:
        for number in range(40):
            if self.hangs and number == 9:
                the_lock_is_never_released()
            yield torch.tensor([float(number)]), torch.ones(s.FEATURES)


def _say_into(path: Path) -> None:
    """What this process and its watcher say from now on goes into the file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 2)


def trainer(dirpath: str, *guards: Any, devices: int = 1, **kwargs: Any) -> L.Trainer:
    L.seed_everything(1, verbose=False)
    callback = ft.FaultTolerantCheckpoint(dirpath, every_n_train_steps=2, guards=guards)
    common = {**s.COMMON, "max_steps": 12, "max_epochs": -1, "callbacks": [callback]}
    if devices > 1:
        common |= {"strategy": "ddp", "devices": devices}
    return L.Trainer(**{**common, **kwargs})


def hang(rank: Rank, dirpath: str, what: str, where: str = "train", hangs_on: int = 0) -> int:
    """A training that hangs on the rank `hangs_on`; returns its last step if it does not."""
    _say_into(rank.root / f"{rank.number}.stderr")
    guard = ft.HangGuard(step_timeout=secs(3), validation_timeout=secs(4), startup_timeout=secs(60))
    model = Hanging(what if rank.number == hangs_on else "nothing", where)
    training = trainer(dirpath, guard, ft.DivergenceGuard(), devices=rank.world_size)
    training.fit(model, s.loader(shuffle=True), s.val_loader(), ckpt_path="last")
    return model.trainer.global_step


def nothing() -> None:
    """Goes on."""


def slow(rank: Rank, dirpath: str) -> tuple[int, bool]:
    """A training with slow parts; its last step, and whether its watcher has gone when the fit is over."""
    _say_into(rank.root / "0.stderr")
    guard = ft.HangGuard(step_timeout=secs(2), validation_timeout=secs(30), startup_timeout=secs(60))
    model = Slow()
    training = trainer(dirpath, guard, max_steps=-1, max_epochs=1)
    training.fit(model, s.loader(shuffle=True), s.val_loader(), ckpt_path="last")
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return training.global_step, not children


def stream(rank: Rank, dirpath: str, hangs: bool) -> int:
    """A training on data that are fetched again at a restart."""
    _say_into(rank.root / "0.stderr")
    training = trainer(dirpath, ft.HangGuard(startup_timeout=secs(6 if hangs else 60)), max_steps=12 if hangs else 4)
    training.fit(Line(), DataLoader(Stream(hangs), batch_size=4), ckpt_path="last")
    return training.global_step


def save(rank: Rank, dirpath: str) -> None:
    """A training whose file system blocks in a save."""
    _say_into(rank.root / "0.stderr")
    guard = ft.HangGuard(step_timeout=secs(60), save_timeout=secs(3))
    trainer(dirpath, guard).fit(Line(), s.loader(shuffle=True), ckpt_path="last")


def slow_save(rank: Rank, dirpath: str) -> int:
    """A training of which rank 0 writes the last checkpoint, piece by piece, for longer than any step may take."""
    _say_into(rank.root / f"{rank.number}.stderr")

    def write_slowly(event: events.Event) -> None:
        if isinstance(event, events.Renamed) and "00000005" in event.path:
            for _ in range(20):
                time.sleep(0.2)
                headway.made()

    stop = events.observe(write_slowly)
    guard = ft.HangGuard(step_timeout=secs(1.5), validation_timeout=secs(1.5), startup_timeout=secs(60))
    training = trainer(dirpath, guard, devices=rank.world_size, max_steps=5)
    training.fit(Line(), s.loader(shuffle=True), ckpt_path="last")
    stop()
    return training.global_step


def one_is_absent(rank: Rank, dirpath: str, absent: int, startup_secs: list[float]) -> int:
    """A training to which one rank does not come, until the others have said all they know.

    Args:
        rank: This one.
        dirpath: Of the checkpoints.
        absent: The one that does not come.
        startup_secs: How long each rank waits.
    """
    if rank.number == absent:
        others = [rank.root / f"{number}.stderr" for number in range(rank.world_size) if number != absent]
        while not all(other.exists() and "it has left with exit code 78" in other.read_text() for other in others):
            time.sleep(0.05)
        return absent
    rank.tell(f"{rank.number} is here")
    for number in range(rank.world_size):  # their imports are no part of what is limited here
        if number != absent:
            rank.wait_for(f"{number} is here")
    _say_into(rank.root / f"{rank.number}.stderr")
    guard = ft.HangGuard(startup_timeout=secs(startup_secs[rank.number]))
    trainer(dirpath, guard, devices=rank.world_size).fit(Line(), s.loader(shuffle=True), ckpt_path="last")
    return -1
