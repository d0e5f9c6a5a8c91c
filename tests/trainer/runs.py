"""Runs within the test process: a small module that remembers its steps, observers, and writers that wait on command.

For what needs no fresh process: which file is there, which is taken, what is said.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn

import lightning_ft as ft
from lightning_ft import events
from lightning_ft._saving import engine
from tests.trainer import scenarios as s

WAIT_SECS = 60.0
"""Nothing here takes so long: a wait that runs out is a failure, and no hang."""


class Line(L.LightningModule):
    """Two weights, SGD with momentum. `steps` is what it was trained on: (epoch, global_step, batch_idx, ids)."""

    def __init__(self, width: int = 1, **hparams: Any) -> None:
        super().__init__()
        self.save_hyperparameters(hparams)
        self.layer = nn.Linear(s.FEATURES, width)
        self.steps: list[tuple[int, int, int, tuple[int, ...]]] = []
        self.validated_at: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = tuple(int(i) for i in batch[0].flatten())
        self.steps.append((self.current_epoch, self.global_step, batch_idx, ids))
        loss = self.layer(batch[1]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated_at.append(self.global_step)
        self.log("val", self.layer(batch[1]).pow(2).mean(), batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)

    @property
    def epochs(self) -> list[int]:
        return sorted({step[0] for step in self.steps})


def trainer(*callbacks: Callback, seed: int = 1, **kwargs: Any) -> L.Trainer:
    L.seed_everything(seed, verbose=False)
    return L.Trainer(**{**s.COMMON, "max_epochs": 1, **kwargs}, callbacks=list(callbacks))


def fit(
    trainer: L.Trainer,
    model: L.LightningModule | None = None,
    ckpt_path: str | Path | None = None,
    data: Any = None,
    val: Any = None,
    **kwargs: Any,
) -> Any:
    """The module after the fit: 8 shuffled batches per epoch."""
    model = Line() if model is None else model
    trainer.fit(model, data or s.loader(shuffle=True), val, ckpt_path=ckpt_path, **kwargs)
    return model


def first_run(dirpath: Any, *callbacks: Callback, max_steps: int = 6, **ft_args: Any) -> Any:
    """A run that ended before the end of its first epoch: with checkpoints of the last steps in `dirpath`."""
    ours = ft.FaultTolerantCheckpoint(dirpath, **{"every_n_train_steps": 2, **ft_args})
    return fit(trainer(*callbacks, ours, max_steps=max_steps))


def names(dirpath: str | Path) -> list[str]:
    """The checkpoints in `dirpath`, by name."""
    return sorted(info.name for info in ft.list_checkpoints(str(dirpath)))


def good(dirpath: str | Path) -> list[str]:
    """Those that are good to the last bit."""
    return [info.name for info in ft.list_checkpoints(str(dirpath)) if ft.verify(info.path).problem is None]


def damage(path: str | Path, share: float) -> None:
    """Only the first `share` of the file is left."""
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[: int(len(data) * share)])


@contextmanager
def observing(*observers: Callable[[events.Event], None]) -> Iterator[None]:
    stops = [events.observe(observer) for observer in observers]
    try:
        yield
    finally:
        for stop in stops:
            stop()


@contextmanager
def recorded() -> Iterator[list[events.Event]]:
    """Every event of the block, in order."""
    seen: list[events.Event] = []
    with observing(seen.append):
        yield seen


class Slow:
    """A slow disk without a clock: the writer thread stands at an event until it is let on.

    It is let on by `let_one`, and where the main thread would otherwise wait for it: for a place in the queue, and in
    the end for everything.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: type[events.Event] = events.DataWritten) -> None:
        self._at = at
        self._permits = threading.Semaphore(0)
        self._free = False
        self._stands = threading.Event()
        self.stood = 0
        make_room, drain, close = engine.Writer.make_room, engine.Writer.drain, engine.Writer.close

        def make_room_(writer: Any, **kwargs: Any) -> None:
            replaces = kwargs["replace"] and any(getattr(task, "replaceable", False) for task in writer._tasks)
            if writer.full and not replaces:
                self.let_one()
            make_room(writer, **kwargs)

        def drain_(writer: Any, *args: Any) -> bool:
            self.let_all()
            return drain(writer, *args)

        def close_(writer: Any) -> None:
            self.let_all()
            close(writer)

        monkeypatch.setattr(engine.Writer, "make_room", make_room_)
        monkeypatch.setattr(engine.Writer, "close", close_)
        monkeypatch.setattr(engine.Writer, "drain", drain_)

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, self._at) and not self._free:
            self.stood += 1
            self._stands.set()
            assert self._permits.acquire(timeout=WAIT_SECS)

    def wait_until_it_stands(self) -> None:
        assert self._stands.wait(WAIT_SECS)

    def let_one(self) -> None:
        self._permits.release()

    def let_all(self) -> None:
        self._free = True
        self._permits.release(100)


class Each(Callback):
    """Calls a function at the start of every training batch."""

    def __init__(self, function: Callable[[L.Trainer], None]) -> None:
        self.function = function

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.function(trainer)


class CrashAt(Callback):
    """Training ends in an exception at the start of the batch after so many steps."""

    def __init__(self, step: int, error: type[BaseException] = RuntimeError) -> None:
        self.step = step
        self.error = error

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise self.error("the test's own crash")


def every_step(dirpath: Any, **kwargs: Any) -> ModelCheckpoint:
    """The user's own callback beside ours."""
    return ModelCheckpoint(dirpath, **{"every_n_train_steps": 1, "save_top_k": 1, **kwargs})


class GatedTorchIO(TorchCheckpointIO):
    """Plain Lightning's writer, slow without a clock: every save waits for `gate(path)`."""

    def __init__(self, gate: Callable[[str], None]) -> None:
        self.gate = gate

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.gate(str(path))
        super().save_checkpoint(checkpoint, path, storage_options)


@contextmanager
def memory() -> Iterator[str]:
    """The URL of an empty directory in fsspec's memory file system."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield "memory://bucket"
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
