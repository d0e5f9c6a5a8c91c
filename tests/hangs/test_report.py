"""Who is late, as far as their watchers can tell."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_ft._watcher.page import Phase
from lightning_ft._watcher.report import Status, late, verdict

ZERO = Status(0, "a", 10, Phase.STEP, 5, 11, "sleeping in futex_do_wait", 30.0)
ONE = replace(ZERO, rank=1, host="b", pid=20)


@pytest.mark.parametrize(
    ("statuses", "world_size", "names"),
    [
        ([ZERO, ONE], 2, []),
        ([ZERO, replace(ONE, position=10)], 2, [1]),
        ([replace(ZERO, position=9), ONE, replace(ONE, rank=2, position=9)], 3, [0, 2]),
        ([ZERO, replace(ONE, state="stopped in do_signal_stop")], 2, [1]),
        ([replace(ZERO, position=9), replace(ONE, state="stopped")], 2, [1]),
        ([ZERO, replace(ONE, state="in a wait that the kernel does not interrupt in nfs_wait")], 2, [1]),
        ([ZERO, replace(ONE, ended=True, state="")], 2, [1]),
        ([ZERO], 2, [1]),
        ([ZERO, replace(ONE, position=1)], 3, [2]),
        ([replace(ZERO, ended=True)], 2, [0]),
    ],
)
def test_who_is_late(statuses: list[Status], world_size: int, names: list[int]) -> None:
    assert late(statuses, world_size) == names


def test_what_is_said() -> None:
    text = verdict("hang: no step", [replace(ONE, position=10, state="stopped"), ZERO], 3)
    assert text.splitlines() == [
        "hang: no step",
        "late: rank 2",
        "rank 0 (a, pid 10): 5 steps completed, behind the loss of batch 6, not gone on for 30.0 s; sleeping in "
        "futex_do_wait",
        "rank 1 (b, pid 20): 5 steps completed, before the loss of batch 6, not gone on for 30.0 s; stopped",
        "rank 2: its watcher does not answer",
    ]


def test_one_rank_alone_is_not_late() -> None:
    assert "late" not in verdict("hang", [ZERO], 1)


def test_a_status_travels() -> None:
    assert Status.from_message(ONE.to_message()) == ONE
