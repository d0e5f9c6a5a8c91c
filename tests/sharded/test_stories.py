"""H1, H2, A18: one run on changing numbers of ranks, and under changing strategies; killed in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sharded.story import Chapter, check_loaded, samples, tell

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]
slow = pytest.mark.slow

SHARDED = ("fsdp-sharded", "fsdp2-sharded")


@pytest.mark.parametrize(
    "kind",
    [*SHARDED, "ddp-sharded", "ddp", pytest.param("fsdp-full", marks=slow), pytest.param("fsdp2-full", marks=slow)],
)
def test_h1_two_ranks_then_one_then_two(kind: str, tmp_path: Path) -> None:
    """48 samples, batches of 4: 6 steps of an epoch on two ranks."""
    told = tell(tmp_path, [Chapter(2, kind, kill_at=3), Chapter(1, kind, kill_at=4), Chapter(2, kind)], max_epochs=2)
    check_loaded(told)
    assert samples(told) == {epoch: list(range(48)) for epoch in range(2)}


@pytest.mark.parametrize("kind", [SHARDED[0], pytest.param(SHARDED[1], marks=slow), pytest.param("ddp", marks=slow)])
def test_h1_two_ranks_then_four_then_three(kind: str, tmp_path: Path) -> None:
    told = tell(
        tmp_path, [Chapter(2, kind, kill_at=2), Chapter(4, kind, kill_at=2), Chapter(3, kind)], "sgd", max_epochs=2
    )
    check_loaded(told)
    assert samples(told) == {epoch: list(range(48)) for epoch in range(2)}


def test_h2_from_one_kind_to_the_next(tmp_path: Path) -> None:
    """Full to sharded, sharded to full, FSDP to FSDP2, to shares of DDP and back, and to its file."""
    kinds = ["fsdp-sharded", "fsdp2-full", "fsdp2-sharded", "fsdp-full", "ddp-sharded", "fsdp2-sharded", "ddp"]
    chapters = [Chapter(2, kind, kill_at=2) for kind in kinds[:-1]] + [Chapter(2, kinds[-1])]
    told = tell(tmp_path, chapters, max_epochs=2)
    check_loaded(told)
    assert samples(told) == {epoch: list(range(48)) for epoch in range(2)}
