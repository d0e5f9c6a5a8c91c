"""A function on several ranks, each a fresh process, with all that a gloo group needs; and what became of each."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_ft import testing

WITHIN_SECS = 240
"""Far below the half hour after which a collective gives up: who waits for that long is hanging.

And far above what any of these takes, also where the machine has much else to do."""


@dataclass
class Rank:
    """One of the processes, as its function sees it."""

    number: int
    world_size: int
    root: Path
    signals: dist.Store

    def tell(self, what: str) -> None:
        """Whoever waits for `what` goes on."""
        self.signals.set(what, "1")

    def wait_for(self, what: str) -> None:
        """Another rank has told."""
        self.signals.wait([what], timedelta(seconds=WITHIN_SECS))

    def die(self) -> None:
        """As if by the kernel."""
        self.signals.set(f"{self.number} dies", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)

    def wait_for_death_of(self, other: int) -> None:
        """That rank, which is about to `die`, has: its connections are closed, and it answers nobody."""
        self.wait_for(f"{other} dies")
        with contextlib.suppress(ProcessLookupError):  # by now there is nothing of it
            ended = os.pidfd_open(int(self.signals.get(f"{other} dies")))
            select.select([ended], [], [], WITHIN_SECS)
            os.close(ended)


@dataclass
class Outcome:
    """How a process ended."""

    exit_code: int | None
    """None: it had to be killed, since it did not end by itself."""
    value: Any
    error: str


def run(
    function: Callable[..., Any], root: Path, *arguments: Any, world_size: int = 2, within_secs: float = WITHIN_SECS
) -> list[Outcome]:
    """What `function(rank, *arguments)` returned on each rank, or how it ended; no process is left.

    Nobody is killed because another one has ended; but all that are left are after `within_secs`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(testing.PRELOADED)
    root.mkdir(parents=True, exist_ok=True)
    port = testing._free_port()
    ranks = [
        context.Process(target=_main, args=(function, number, world_size, port, str(root), arguments, sys.path))
        for number in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    waiting = {rank.sentinel for rank in ranks}
    deadline = time.monotonic() + within_secs
    codes = []
    try:
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            waiting -= set(ready)  # type: ignore[arg-type]
    finally:  # also if the test has taken too long as a whole
        for rank in ranks:
            rank.join(0)
            codes.append(rank.exitcode)
            rank.kill()
            rank.join()
    return [_outcome(root, number, code) for number, code in enumerate(codes)]


def values(
    function: Callable[..., Any], root: Path, *arguments: Any, world_size: int = 2, within_secs: float = WITHIN_SECS
) -> list[Any]:
    """As `run`, of ranks that all end well."""
    outcomes = run(function, root, *arguments, world_size=world_size, within_secs=within_secs)
    assert [outcome.exit_code for outcome in outcomes] == [0] * world_size, "\n".join(o.error for o in outcomes)
    return [outcome.value for outcome in outcomes]


def _outcome(root: Path, number: int, code: int | None) -> Outcome:
    value, error = root / f"{number}.value", root / f"{number}.error"
    return Outcome(
        code,
        pickle.loads(value.read_bytes()) if value.exists() else None,
        error.read_text() if error.exists() else "",
    )


def _main(
    function: Callable[..., Any],
    number: int,
    world_size: int,
    port: int,
    root: str,
    arguments: tuple[Any, ...],
    path: list[str],
) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(number), WORLD_SIZE=str(world_size),
        NODE_RANK="0", LOCAL_RANK=str(number),
    )  # fmt: skip
    signals = dist.FileStore(f"{root}/signals", -1)
    try:
        value = function(Rank(number, world_size, Path(root), signals), *arguments)
        Path(f"{root}/{number}.value").write_bytes(pickle.dumps(value))
    except BaseException:
        Path(f"{root}/{number}.error").write_text(traceback.format_exc())
        raise
