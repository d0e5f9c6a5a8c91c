"""Signals at random moments: all ranks stop after the same step with one checkpoint, and the restart is exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guards.interrupted import interrupted_equals_uninterrupted

pytestmark = pytest.mark.distributed


def test_i1_ten_signals_at_random_moments(tmp_path: Path) -> None:
    interrupted_equals_uninterrupted(tmp_path, trials=10, max_steps=160, seed=1, within_secs=0.1, workers=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [0, 2])
def test_i1_a_hundred_signals_at_random_moments(tmp_path: Path, workers: int) -> None:
    interrupted_equals_uninterrupted(
        tmp_path, trials=100, max_steps=1500, seed=2, within_secs=0.1, workers=workers, run_within_secs=800
    )
