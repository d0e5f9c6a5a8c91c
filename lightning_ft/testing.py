"""Proof that a restart is exact, on the user's own trainer, model and data."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch

from lightning_ft._fit import loops
from lightning_ft._proof.kill_point import KillPoint, check_kill_point
from lightning_ft._proof.recorder import KillSwitch, Recorder
from lightning_ft._proof.traces import Record, differences, replayed, words
from lightning_ft._proof.traces import read as _read

__all__ = ["Comparison", "KillPoint", "assert_resume_exact"]

PRELOADED = ["lightning_ft.callback", "lightning_ft.testing", "torch._dynamo"]
"""What fresh processes have imported from the start: all that a training imports, which takes seconds."""


@dataclass(frozen=True)
class Comparison:
    """What was compared, after it was found equal."""

    steps: int
    """Batches trained by the uninterrupted run, per rank."""
    replayed: int
    """Batches trained again after a restart because they came after the last checkpoint, over all ranks."""
    validations: int
    """Validation batches of the uninterrupted run, over all ranks."""
    dirpath: str
    """The directory given to `make_trainer` for the killed and restarted run."""


@dataclass(frozen=True)
class _Run:
    """One start of the user's training, in as many fresh processes as there are ranks."""

    make_trainer: Callable[..., pl.Trainer]
    make_model: Callable[[], pl.LightningModule]
    make_data: Callable[[], Any]
    dirpath: str
    trace: str
    steps: int | None
    kill_at: KillPoint | None
    world_size: int
    port: int
    start_method: str
    path: list[str] = field(default_factory=lambda: list(sys.path))


def assert_resume_exact(
    make_trainer: Callable[..., pl.Trainer],
    make_model: Callable[[], pl.LightningModule],
    make_data: Callable[[], Any],
    *,
    kill_at: KillPoint | Sequence[KillPoint],
    steps: int | None = None,
    world_size: int = 1,
    root: str | os.PathLike[str] | None = None,
    timeout: timedelta = timedelta(minutes=5),
) -> Comparison:
    """A run that was killed and started again did, step by step and bit by bit, what the uninterrupted run did.

    The training is run once uninterrupted, then killed with SIGKILL and started again once per kill point and a last
    time to its end, each time in fresh processes and with ``ckpt_path="last"``. Compared at every step, on every rank:
    batch, output, learning rates, weights, frozen parameters, optimizer and scheduler state, random state, state of
    callbacks; every validation batch; the metrics of every step, validation and epoch; the weights at the end.

    Args:
        make_trainer: ``make_trainer(dirpath)`` seeds the run and returns a trainer that saves into `dirpath`. All three
            functions are called in the fresh processes, so they must be importable (module level, or
            `functools.partial` of such).
        make_model: Returns the module.
        make_data: Returns a datamodule, the train dataloaders, a pair (train, val) of dataloaders, or None where the
            module has them.
        kill_at: Where to kill: a batch number, counted over the whole run; an event of the save protocol
            (`events.KILL_POINTS`) such as ``"Renamed"`` for the first or ``"Renamed:2"`` for the second in that
            process; either on one rank alone, ``"DataSynced@1"``; or a sequence of these, one per start.
        steps: End training after so many optimizer steps (in place of the trainer's `max_steps`); default: where the
            trainer ends.
        world_size: Number of ranks; the trainer must be made for as many (``strategy="ddp", devices=2``).
        root: Directory for checkpoints and traces; default: a temporary one, removed afterwards.
        timeout: For each start.

    Raises:
        ValueError: There is no such kill point.
        AssertionError: The runs differ (naming the first quantity and its step), a kill point was never reached, or a
            run failed by itself.
    """
    points = [kill_at] if isinstance(kill_at, (int, str)) else list(kill_at)
    for point in points:
        check_kill_point(point)
    if root is None:
        with tempfile.TemporaryDirectory(prefix="lightning-ft-") as made:
            return assert_resume_exact(
                make_trainer, make_model, make_data,
                kill_at=points, steps=steps, world_size=world_size, root=made, timeout=timeout,
            )  # fmt: skip
    base = Path(root)
    start_method = multiprocessing.get_start_method()

    def start(name: str, number: int, point: KillPoint | None) -> None:
        (base / name).mkdir(parents=True, exist_ok=True)
        run = _Run(
            make_trainer, make_model, make_data, str(base / name / "checkpoints"), str(base / name / f"{number}"),
            steps, point, world_size, _free_port(), start_method,
        )  # fmt: skip
        _start(run, timeout)

    start("uninterrupted", 0, None)
    for number, point in enumerate(points):
        start("restarted", number, point)
    start("restarted", len(points), None)
    again = 0
    for rank in range(world_size):
        expected = _read(base / "uninterrupted", rank)
        actual = _read(base / "restarted", rank)
        again += _compare(expected, actual, rank)
    records = [r for rank in range(world_size) for r in _read(base / "uninterrupted", rank)]
    kinds = [r["kind"] for r in records]
    return Comparison(
        steps=kinds.count("step") // world_size,
        replayed=again,
        validations=kinds.count("validation"),
        dirpath=str(base / "restarted" / "checkpoints"),
    )


def _compare(expected: list[Record], actual: list[Record], rank: int) -> int:
    """How many steps were replayed; every record of the restarted run must equal the one of the uninterrupted run."""
    for difference in differences(expected, actual, rank):
        if difference.kind == "value" and difference.start == 0 and difference.key[0] == "step":
            where = f" on rank {rank}" if rank else ""
            raise AssertionError(
                f"{words(difference.key)}{where}: {difference.name} differs before anything was killed: two "
                "uninterrupted runs are not equal. Seed the run (seed_everything in make_trainer), or find what does "
                "not repeat"
            )
        raise AssertionError(str(difference))
    return replayed(actual)


def _start(run: _Run, timeout: timedelta) -> None:
    """The run has ended as it should: by its kill point, or by itself without an error."""
    # A server forks the fresh processes: they have torch and lightning imported, and nothing else of this process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes = [context.Process(target=_train, args=(run, rank)) for rank in range(run.world_size)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        waiting = {p.sentinel: p for p in processes}
        while waiting:
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"a run did not end within {timeout}; its trace is {run.trace}.*")
            for sentinel in ready:
                ended = waiting.pop(cast(int, sentinel))
                ended.join()
                if ended.exitcode != 0:
                    break
            if any(p.exitcode not in (None, 0) for p in processes):
                break
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    codes = [p.exitcode for p in processes]
    if run.kill_at is not None and -signal.SIGKILL not in codes:
        raise AssertionError(f"kill point {run.kill_at!r} was never reached: exit codes {codes}")
    if run.kill_at is None and any(codes):
        errors = "".join(p.read_text() for p in sorted(Path(run.trace).parent.glob(f"{Path(run.trace).name}*.error")))
        raise AssertionError(f"a run failed by itself: exit codes {codes}\n{errors}")


def _train(run: _Run, rank: int) -> None:
    """One rank of one start, in a fresh process."""
    sys.path[:] = run.path
    # Loader workers start as they would under `python train.py`, not as this process was started.
    multiprocessing.set_start_method(run.start_method, force=True)
    torch.set_num_threads(1)
    if run.world_size > 1:
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(run.port), WORLD_SIZE=str(run.world_size),
            NODE_RANK="0", LOCAL_RANK=str(rank),
        )  # fmt: skip
    try:
        takes_dirpath = bool(inspect.signature(run.make_trainer).parameters)
        trainer = run.make_trainer(run.dirpath) if takes_dirpath else run.make_trainer()
        if run.steps is not None:
            trainer.fit_loop.epoch_loop.max_steps = run.steps
        ours: list[pl.Callback] = [Recorder(f"{run.trace}.rank{rank}.jsonl")]
        if run.kill_at is not None:
            ours.append(KillSwitch(run.kill_at, rank))
        loops.callbacks(trainer)[:0] = ours
        model, data = run.make_model(), run.make_data()
        if isinstance(data, pl.LightningDataModule):
            trainer.fit(model, datamodule=data, ckpt_path="last")
        else:
            train, val = data if isinstance(data, tuple) else (data, None)
            trainer.fit(model, train, val, ckpt_path="last")
    except BaseException:
        Path(f"{run.trace}.rank{rank}.error").write_text(traceback.format_exc())
        raise


# Below those that the kernel gives to whoever asks for any: ranks listen there seconds later, when they are started.
_PORTS = range(12_000, 32_000)


def _free_port() -> int:
    """A port on which nobody listens, and that no other process is likely to be given meanwhile."""
    for port in secrets.SystemRandom().sample(_PORTS, k=100):
        with socket.socket() as s, contextlib.suppress(OSError):  # somebody listens there
            s.bind(("", port))
            return port
    raise AssertionError(f"of a hundred ports from {_PORTS.start} to {_PORTS.stop} none is free")
