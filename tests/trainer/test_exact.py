"""Killed and restarted, a run does what the uninterrupted run does: kinds of data x workers x places of the kill."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from lightning_ft.testing import assert_resume_exact
from tests.trainer import scenarios as s

# 8 batches per epoch, a save every 3 steps
KILLS = {
    "mid_epoch": [5],
    "last_batch": [8],
    "first_batch": [9],
    "twice_in_one_epoch": [12, 15],
}
KILLS_OF_7 = {**KILLS, "last_batch": [7], "first_batch": [8], "twice_in_one_epoch": [10, 13]}
"""The same places in the epochs of the custom batch sampler."""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", s.DATA)
def test_exact(data: str, workers: int, tmp_path: Path) -> None:
    places = KILLS_OF_7 if data == "batch_sampler" else KILLS
    kills = [point for points in places.values() for point in points]
    compared = assert_resume_exact(s.trainer, s.Net, partial(s.DATA[data], workers), kill_at=kills, root=tmp_path)
    assert compared.replayed > 0
    assert compared.validations > 0


@pytest.mark.parametrize("kill", KILLS)
def test_exact_by_kill(kill: str, tmp_path: Path) -> None:
    make_trainer = partial(s.trainer, callbacks=(s.Ema,), accumulate_grad_batches=2, every=2)
    assert_resume_exact(make_trainer, s.Net, partial(s.shuffled, 2), kill_at=KILLS[kill], root=tmp_path)


def test_manual_optimization_gan(tmp_path: Path) -> None:
    assert_resume_exact(s.trainer, s.Gan, partial(s.loader, 2, shuffle=True), kill_at=[5, 9], root=tmp_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_generators(workers: int, tmp_path: Path) -> None:
    make_data = partial(s.generator_sampled, workers, persistent=bool(workers))
    assert_resume_exact(s.trainer, s.Net, make_data, kill_at=[5, 12], root=tmp_path)


def test_plain_lightning_is_not_exact(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="differs"):
        assert_resume_exact(s.plain_trainer, s.Net, s.shuffled, kill_at=5, root=tmp_path)
