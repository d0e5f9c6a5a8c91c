"""One of two ranks fails: both end soon and by themselves, with the reason, and a restart is exact."""

from __future__ import annotations

import errno
import multiprocessing
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import lightning_ft as ft
from lightning_ft import storage, testing
from tests.ranks import WITHIN_SECS
from tests.trainer import cases as c
from tests.trainer import scenarios as s

every_step = partial(s.ddp, every=1)


class Raises(s.Net):
    """Raises once, on one rank, in its fourth step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == self.rank and self.trainer.global_step == 3:
            raise ZeroDivisionError(f"on rank {self.rank}")
        return super().training_step(batch, batch_idx)


class NoSpace(s.Net):
    """From the fourth step on the disk of rank 0 is full."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == 0 and self.trainer.global_step == 3:

            def full(self: Any, path: str, expected_bytes: int | None = None) -> Any:
                raise OSError(errno.ENOSPC, "No space left on device", path)

            storage.Storage.open_attempt = full  # type: ignore[method-assign]


def start(root: Path, make_model: Any, make_trainer: Any = every_step) -> list[str]:
    """The errors of two ranks that have ended by themselves."""
    run = _run(root, 0, make_model, make_trainer)
    root.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=testing._train, args=(run, rank)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(WITHIN_SECS)
    alive = [r.is_alive() for r in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    assert alive == [False, False]
    assert all(r.exitcode for r in ranks)
    return [Path(f"{run.trace}.rank{rank}.error").read_text() for rank in range(2)]


def _run(root: Path, number: int, make_model: Any, make_trainer: Any) -> testing._Run:
    return testing._Run(
        make_trainer, make_model, s.shuffled, str(root / "checkpoints"), str(root / f"{number}"), 12, None, 2,
        testing._free_port(), multiprocessing.get_start_method(),
    )  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_j1_one_rank_raises(rank: int, tmp_path: Path) -> None:
    root = tmp_path / "restarted"
    errors = start(root, partial(Raises, rank))
    assert f"ZeroDivisionError: on rank {rank}" in errors[rank]
    assert f"PeerLostError: rank {rank} failed: ZeroDivisionError: on rank {rank}" in errors[1 - rank]
    good = ft.last_good(str(root / "checkpoints"))
    assert good is not None
    assert good.manifest is not None
    assert good.manifest.step == 3
    # J2: the restart begins with the batch that failed, and is exact.
    whole = tmp_path / "uninterrupted"
    whole.mkdir()
    testing._start(_run(whole, 0, s.Net, every_step), timedelta(seconds=WITHIN_SECS))
    testing._start(_run(root, 1, s.Net, every_step), timedelta(seconds=WITHIN_SECS))
    replayed = [testing._compare(testing._read(whole, r), testing._read(root, r), r) for r in range(2)]
    assert replayed == [0, 0]


def test_f2_a_failed_save_is_known_to_both_ranks_at_the_next_step(tmp_path: Path) -> None:
    errors = start(tmp_path, NoSpace)
    assert all("SaveError" in e and "No space left on device" in e for e in errors)
    steps = [len(testing._read(tmp_path, rank)) for rank in range(2)]
    assert steps[0] == steps[1]
    good = ft.last_good(str(tmp_path / "checkpoints"))
    assert good is not None
    assert good.manifest is not None
    assert good.manifest.step == 2


def test_two_failed_saves_are_lived_with(tmp_path: Path) -> None:
    warn = partial(s.ddp, every=1, plugins=[ft.FaultTolerantCheckpointIO(on_error="warn")])
    errors = start(tmp_path, NoSpace, warn)
    assert all("SaveError" in e for e in errors)
    steps = [len(testing._read(tmp_path, rank)) for rank in range(2)]
    assert steps[0] == steps[1] > 5


class SlowerOnRankZero(s.Net):
    """Its step is over on the other rank long before."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self.global_rank == 0:
            time.sleep(0.3)


def test_no_rank_is_killed_at_a_batch_that_another_has_not_ended(tmp_path: Path) -> None:
    make_trainer = partial(c.trainer, every=1, strategy="ddp", devices=2)
    kills = [2, 3]
    c.exact(make_trainer, SlowerOnRankZero, s.shuffled, kill_at=kills, root=tmp_path, world_size=2, replayed=2 * 2)
