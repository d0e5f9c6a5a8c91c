"""A function run by all ranks of a process group, each in a fresh process."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_ft.testing import _free_port

ENDS_WITHIN_SECS = 90


@dataclass(frozen=True)
class Outcome:
    """How one rank has ended: by itself, with a value or an error, or killed."""

    value: Any
    error: str
    exitcode: int


def run(world_size: int, function: Callable[..., Any], *args: Any, timeout_secs: float = ENDS_WITHIN_SECS) -> list[Any]:
    """What the ranks return; all of them have ended by themselves, without an error."""
    ended = start(world_size, function, *args, timeout_secs=timeout_secs)
    errors = [f"rank {rank}: {o.error or o.exitcode}" for rank, o in enumerate(ended) if o.exitcode]
    assert not errors, "\n".join(errors)
    return [outcome.value for outcome in ended]


def start(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_secs: float = ENDS_WITHIN_SECS
) -> list[Outcome]:
    """How the ranks have ended, all of them within the time; a rank that still runs then fails the test.

    Nobody is killed because another one has ended.
    """
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(prefix="ranks-") as place:
        port = _free_port()
        ranks = [
            context.Process(target=_enter, args=(place, rank, world_size, port, list(sys.path), function, args))
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + timeout_secs
        for rank in ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        hanging = [number for number, rank in enumerate(ranks) if rank.is_alive()]
        for rank in ranks:
            rank.kill()
            rank.join()
        ended = [_outcome(Path(place, str(number)), rank.exitcode) for number, rank in enumerate(ranks)]
    assert not hanging, f"ranks {hanging} have not ended within {timeout_secs} s; the others: {ended}"
    return ended


def _outcome(path: Path, exitcode: int | None) -> Outcome:
    assert exitcode is not None
    value = path.with_suffix(".value")
    error = path.with_suffix(".error")
    return Outcome(
        pickle.loads(value.read_bytes()) if value.exists() else None,
        error.read_text() if error.exists() else "",
        exitcode,
    )


def _enter(
    place: str, rank: int, world_size: int, port: int, path: list[str], function: Callable[..., Any], args: Any
) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world_size), NODE_RANK="0", LOCAL_RANK=str(rank)
    )
    try:
        value = function(*args)
    except BaseException:
        Path(place, f"{rank}.error").write_text(traceback.format_exc())
        raise
    Path(place, f"{rank}.value").write_bytes(pickle.dumps(value))
