"""Sharded saves of two ranks: ours, Lightning's synchronous one and `torch.distributed.checkpoint.async_save`.

Each measurement is a training of its own, of the same state with `fully_shard`; the contenders take turns. Saves are
some steps apart, and each is durable before the next begins. Blocked time is that of the rank that was held up longer,
by its own clock; durable is the save when rank 0 knows that all of it is on disk.
"""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import get_state_dict

import lightning_ft as ft
from lightning_ft import events
from tests.benchmarks import limits
from tests.benchmarks.contenders import sync_file, sync_name
from tests.benchmarks.fresh import silence
from tests.benchmarks.model import Layers, loader, quiet
from tests.benchmarks.pace import Save
from tests.benchmarks.plan import Shape
from tests.sharded import job, processes

RANKS = 2
STEPS_BETWEEN = 4
"""The last of them waits until the save is durable."""
_TIMEOUT_SECS = 120.0
TITLES = {
    "overlap": 'lightning_ft, staging="overlap"',
    "blocking": 'lightning_ft, staging="blocking"',
    "lightning": "Lightning's sharded save",
    "dcp_async": "torch dcp.async_save",
}
CONTENDERS = tuple(TITLES)


def measure(dirpath: str, contender: str, shape: Shape, rows: int, threads: int, saves: int) -> dict[str, list[float]]:
    """Samples by quantity, without those of the first save."""
    os.sync()
    measured = processes.run(RANKS, _train, dirpath, contender, shape, rows, threads, saves, timeout_secs=300)
    blocked = [max(of_save) for of_save in zip(*(each["blocked_secs"] for each in measured), strict=True)]
    return {
        "first_blocked_secs": blocked[:1],
        "blocked_secs": blocked[1:],
        "durable_secs": measured[0]["durable_secs"][1:],
    }


def measure_limits(dirpath: str, size_bytes: int) -> dict[str, list[float]]:
    """Seconds for both ranks at once, each with its half of the bytes: copied, and written and synced."""
    os.sync()
    measured = processes.run(RANKS, _limits, dirpath, size_bytes // RANKS, timeout_secs=300)
    return {name: [max(each[name] for each in measured)] for name in measured[0]}


# -- in the ranks ------------------------------------------------------------------------------------------------


class ShardedLayers(Layers):
    """The same layers, each of them sharded."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        if not hasattr(self, "sharded"):
            for layer in self.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            self.sharded = True


class Gate(Callback):
    """Lets a save through every few steps, and times it; the first of the callbacks. Ranks: all, alike."""

    def __init__(self, saves: int, removes: bool) -> None:
        self.saves: list[Save] = []
        self._left = saves
        self._removes = removes
        self._durable = threading.Event()
        self._error: BaseException | str | None = None
        self._hook_began = 0.0
        self._due = False

    def install(self, trainer: L.Trainer) -> None:
        """Every `trainer.save_checkpoint` is timed, and does nothing unless it is due."""
        original = trainer.save_checkpoint

        def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> None:
            if self.take():
                with self.saving(str(filepath)):
                    original(filepath, *args, **kwargs)

        vars(trainer)["save_checkpoint"] = save_checkpoint

    def take(self) -> bool:
        """Whether the save asked for now is made; once a turn."""
        due, self._due = self._due, False
        return due

    @contextmanager
    def saving(self, path: str) -> Iterator[None]:
        """The save is made inside; when it returns, the training goes on."""
        self._durable.clear()
        save = Save(path, time.perf_counter())
        self.saves.append(save)
        yield
        save.returned = time.perf_counter()

    def durable(self, metrics: dict[str, float] | None = None) -> None:
        """The save under way is on disk. Thread: any."""
        self.saves[-1].durable = time.perf_counter()
        self.saves[-1].metrics = dict(metrics or {})
        self._durable.set()

    def fail(self, error: BaseException | str) -> None:
        """The save under way failed. Thread: any."""
        self._error = error
        self._durable.set()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._hook_began = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        turn = trainer.global_step % STEPS_BETWEEN
        if turn == 1 and self.saves:
            self.saves[-1].waited_secs = pl_module.callbacks_done - self._hook_began
        if turn == STEPS_BETWEEN - 1:
            self._wait(trainer)
        if turn == 0:
            trainer.should_stop = not self._left
            self._due = bool(self._left)
            self._left -= 1
            trainer.strategy.barrier()

    def _wait(self, trainer: L.Trainer) -> None:
        if self.saves and trainer.is_global_zero:
            path = self.saves[-1].path
            if not self._durable.wait(_TIMEOUT_SECS) or self._error is not None:
                raise RuntimeError(f"{path} was not saved: {self._error or f'not within {_TIMEOUT_SECS} s'}")
            if self._removes:
                shutil.rmtree(path)
        trainer.strategy.barrier()


def _train(dirpath: str, contender: str, shape: Shape, rows: int, threads: int, saves: int) -> dict[str, list[float]]:
    silence()
    torch.set_num_threads(threads)
    ours = contender in ("overlap", "blocking")
    gate = Gate(saves, removes=not ours)
    callbacks: list[Callback] = [gate]
    arguments: dict[str, Any] = {}
    if ours:
        tell(gate)
        arguments["plugins"] = [ft.FaultTolerantCheckpointIO(staging=contender)]  # type: ignore[arg-type]
        callbacks.append(
            ft.FaultTolerantCheckpoint(dirpath, every_n_train_steps=1, keep_last=1, guards=(), save_on_train_end=False)
        )
    elif contender == "lightning":
        callbacks.append(ModelCheckpoint(dirpath, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    else:
        arguments["enable_checkpointing"] = False
        callbacks.append(_DistributedCheckpoint(gate, dirpath))
    kind = (
        ft.ModelParallelStrategy if ours else (_SyncedStrategy if contender == "lightning" else ModelParallelStrategy)
    )
    strategy = kind(data_parallel_size=RANKS, tensor_parallel_size=1, process_group_backend="gloo")
    if isinstance(strategy, _SyncedStrategy):
        strategy.gate = gate
    trainer = L.Trainer(
        **quiet(default_root_dir=dirpath, **{**arguments, "devices": RANKS}), strategy=strategy, callbacks=callbacks
    )
    gate.install(trainer)
    trainer.fit(ShardedLayers(shape, rows), loader())
    return {
        "blocked_secs": [save.blocked_secs for save in gate.saves],
        "durable_secs": [save.durable_secs for save in gate.saves],
    }


def tell(gate: Gate) -> Callable[[], None]:
    """What our events say of a save reaches `gate`, until the returned function is called."""

    def on_event(event: events.Event) -> None:
        if isinstance(event, events.Committed):
            gate.durable({name: float(value) for name, value in event.metrics.items()})
        elif isinstance(event, events.SaveFailed):
            gate.fail(event.reason)

    return events.observe(on_event)


class _SyncedStrategy(ModelParallelStrategy):
    """Lightning's own. It syncs the shards and not the rest, which is synced for it after the save has returned."""

    gate: Gate

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath)
        if self.is_global_zero:
            threading.Thread(target=self._sync, args=(str(filepath),)).start()

    def _sync(self, path: str) -> None:
        sync_file(f"{path}/meta.pt")
        sync_name(path)
        self.gate.durable()


class _DistributedCheckpoint(Callback):
    """Weights and optimizer by `async_save`, on a group of its own."""

    def __init__(self, gate: Gate, dirpath: str) -> None:
        self._gate = gate
        self._dirpath = dirpath
        self._group: Any = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._group = dist.new_group(backend="gloo")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if not self._gate.take():
            return
        path = str(Path(self._dirpath, f"step={trainer.global_step}"))
        with self._gate.saving(path):
            model, optimizer = get_state_dict(pl_module, trainer.optimizers)
            answer: Any = dcp.async_save(
                {"model": model, "optimizer": optimizer}, checkpoint_id=path, process_group=self._group
            )
        future = getattr(answer, "upload_completion", answer)  # depends on how it stages
        future.add_done_callback(lambda done: self._done(path, done))

    def _done(self, path: str, future: Any) -> None:
        error = future.exception()
        if error is not None:
            self._gate.fail(error)
            return
        sync_name(path)  # it syncs its files itself
        self._gate.durable()


def _limits(dirpath: str, size_bytes: int) -> dict[str, float]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=job.rank(), world_size=RANKS)
    size_bytes = max(mmap.PAGESIZE, size_bytes // mmap.PAGESIZE * mmap.PAGESIZE)
    source, target = mmap.mmap(-1, size_bytes), mmap.mmap(-1, size_bytes)
    path = str(Path(dirpath, f"limit{job.rank()}"))
    with memoryview(source) as data, memoryview(target) as room:
        limits.fill(data)
        limits.fill(room)
        limits.copy(data, room, 1)
        dist.barrier()
        secs = {"memcpy_secs": limits.copy(data, room, 1)}
        for name, flag in (("write_secs", 0), ("direct_secs", os.O_DIRECT)):
            dist.barrier()
            try:
                secs[name] = limits.write_raw(path, data, flag)
            except OSError:  # no O_DIRECT on this file system
                if not flag:
                    raise
            Path(path).unlink(missing_ok=True)
    dist.destroy_process_group()
    return secs
