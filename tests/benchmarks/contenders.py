"""The ways to save, each as arguments of a `Trainer`.

All of them are asked for a save after every step and make one when `Pace` lets it through. Lightning's own plugins do
not sync: what they have written is synced for them, and the time counts up to there, since data still in memory is
not on disk.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

import lightning_ft as ft
from lightning_ft import events
from tests.benchmarks.limits import write_raw
from tests.benchmarks.pace import Pace, Save

Arguments = dict[str, Any]


def _nothing(pace: Pace, dirpath: str) -> Arguments:
    return {"enable_checkpointing": False}


def _lightning(pace: Pace, dirpath: str) -> Arguments:
    def sync_aside(save: Save) -> None:
        def sync() -> None:
            sync_file(save.path)
            pace.durable()

        pace.aside(sync)

    pace.on_return = sync_aside
    return {"callbacks": [_model_checkpoint(dirpath)]}


def _lightning_async(pace: Pace, dirpath: str) -> Arguments:
    return {"callbacks": [_model_checkpoint(dirpath)], "plugins": [AsyncCheckpointIO(_SyncedIO(pace))]}


def _model_checkpoint(dirpath: str) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath, filename="{step}", every_n_train_steps=1, save_top_k=-1)


class _SyncedIO(TorchCheckpointIO):
    """Lightning's own, and a sync, in the thread of whoever calls it."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        try:
            super().save_checkpoint(checkpoint, path, storage_options)
            sync_file(str(path))
        except BaseException as error:
            self._pace.fail(error)
            raise
        self._pace.durable()


def _dcp(pace: Pace, dirpath: str) -> Arguments:
    return {"callbacks": [_DistributedCheckpoint(pace, dirpath)], "enable_checkpointing": False}


class _DistributedCheckpoint(Callback):
    """`torch.distributed.checkpoint.async_save` of weights and optimizer, in one process."""

    def __init__(self, pace: Pace, dirpath: str) -> None:
        self._pace = pace
        self._dirpath = dirpath

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if not self._pace.due:
            return
        path = str(Path(self._dirpath, f"step={trainer.global_step}"))
        with self._pace.saving(path):
            state = {"model": pl_module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
            answer: Any = dcp.async_save(state, checkpoint_id=path, no_dist=True)
        future = getattr(answer, "upload_completion", answer)  # depends on how it stages
        future.add_done_callback(partial(self._done, path))

    def _done(self, path: str, future: Any) -> None:
        error = future.exception()
        if error is not None:
            self._pace.fail(error)
            return
        sync_name(path)  # it syncs its files itself
        self._pace.durable()


def _floor(pace: Pace, dirpath: str) -> Arguments:
    return {"callbacks": [_Floor(pace, dirpath)], "enable_checkpointing": False}


class _Floor(Callback):
    """No checkpoint, but what none can be without: Lightning's dictionary is made, and as many bytes are written.

    By a thread, past the page cache where the file system can, from memory that was filled before: nothing is copied,
    pickled or hashed.
    """

    def __init__(self, pace: Pace, dirpath: str) -> None:
        self._pace = pace
        self._dirpath = dirpath
        self._bytes: mmap.mmap | None = None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if not self._pace.due:
            return
        path = str(Path(self._dirpath, f"step={trainer.global_step}"))
        with self._pace.saving(path):
            checkpoint = trainer._checkpoint_connector.dump_checkpoint()
            if self._bytes is None:
                self._bytes = self._filled(checkpoint)
            self._pace.aside(partial(self._write, path, memoryview(self._bytes)))

    def _write(self, path: str, data: memoryview) -> None:
        try:
            write_raw(path, data, os.O_DIRECT)
        except OSError:  # not on this file system
            write_raw(path, data, 0)
        sync_name(path)
        self._pace.durable()

    @staticmethod
    def _filled(checkpoint: dict[str, Any]) -> mmap.mmap:
        states = [state for optimizer in checkpoint["optimizer_states"] for state in optimizer["state"].values()]
        tensors = [*checkpoint["state_dict"].values(), *(t for state in states for t in state.values())]
        size_bytes = sum(tensor.nbytes for tensor in tensors) // mmap.PAGESIZE * mmap.PAGESIZE
        memory = mmap.mmap(-1, size_bytes)
        memory.write(os.urandom(min(size_bytes, 1 << 20)) * (size_bytes >> 20))
        return memory


def _ours(staging: Literal["overlap", "blocking"], pace: Pace, dirpath: str) -> Arguments:
    pace.removes = False

    def on_event(event: events.Event) -> None:
        if isinstance(event, events.Committed):
            pace.durable(getattr(event, "metrics", None))
        elif isinstance(event, events.SaveFailed):
            pace.fail(event.reason)

    events.observe(on_event)  # for as long as the process lives, which is this one run
    callback = ft.FaultTolerantCheckpoint(
        dirpath, every_n_train_steps=1, keep_last=1, guards=(), save_on_train_end=False
    )
    return {"callbacks": [callback], "plugins": [ft.FaultTolerantCheckpointIO(staging=staging)]}


def sync_file(path: str) -> None:
    """The file `path` and its name are durable."""
    _sync(path)
    sync_name(path)


def sync_name(path: str) -> None:
    """The name `path` is durable."""
    _sync(os.path.dirname(path))


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


CONTENDERS: dict[str, Callable[[Pace, str], Arguments]] = {
    "none": _nothing,
    "floor": _floor,
    "lightning": _lightning,
    "lightning_async": _lightning_async,
    "dcp_async": _dcp,
    "overlap": partial(_ours, "overlap"),
    "blocking": partial(_ours, "blocking"),
}

TITLES = {
    "none": "no checkpoint",
    "floor": "the least: dictionary, raw write",
    "lightning": "ModelCheckpoint",
    "lightning_async": "ModelCheckpoint, AsyncCheckpointIO",
    "dcp_async": "torch dcp.async_save",
    "overlap": 'lightning_ft, staging="overlap"',
    "blocking": 'lightning_ft, staging="blocking"',
}
