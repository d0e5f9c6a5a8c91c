"""Where a drill kills a run by default."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_ft._proof.traces import Record
from lightning_ft.drill.points import in_a_later_epoch, points
from lightning_ft.drill.runs import Point


def steps(*epochs: int) -> list[Record]:
    """Epochs of so many batches."""
    of = [epoch for epoch, batches in enumerate(epochs) for _ in range(batches)]
    return [{"kind": "step", "key": [n], "values": {"epoch": epoch}} for n, epoch in enumerate(of, 1)]


def lines(*saves: int) -> list[dict[str, Any]]:
    return [{"event": "SaveStarted", "batch": batch} for batch in saves]


@pytest.mark.parametrize(
    ("epochs", "saves", "kill_at", "durable_from"),
    [
        ((44, 44, 44), range(10, 133, 10), 66, 50),  # in the middle of the second epoch, after a save within it
        ((44, 36), range(10, 81, 10), 62, 50),  # which --steps has cut short
        ((44, 44), (80,), 81, 80),  # a late save: right after it
        ((44, 44), (44, 88), 66, 44),  # saves at the edges of epochs only
        ((44, 44, 44), (100,), 110, 100),  # none in the second epoch
        ((44, 2), (10, 20), 24, 10),  # a second epoch that has no middle
        ((16,), (4, 8, 12), 9, 4),  # one epoch
        ((16,), (12,), 13, 12),
        ((1, 1, 1, 1), (1, 2, 3), 3, 1),
    ],
)
def test_by_default_it_is_killed_within_the_second_epoch(
    epochs: tuple[int, ...], saves: Any, kill_at: int, durable_from: int
) -> None:
    found = points(None, False, steps(*epochs), lines(*saves))
    assert found == [Point(kill_at, once_durable=True, durable_from=durable_from)]


def test_nothing_is_killed_where_no_restart_could_begin() -> None:
    assert points(None, False, steps(16), lines()) == []
    assert points(None, False, steps(16), lines(15, 16)) == []
    assert points(None, False, [], lines(4)) == []


def test_a_restart_at_the_edge_of_an_epoch_is_one_in_the_next() -> None:
    trained = steps(4, 4)
    assert [in_a_later_epoch(trained, resumed) for resumed in (None, 3, 4, 5)] == [False, False, True, True]
    assert not in_a_later_epoch(steps(8), 7)
