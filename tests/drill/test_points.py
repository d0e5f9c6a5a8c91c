"""Where a drill kills a run."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_ft._proof.traces import Record
from lightning_ft.drill.points import in_a_later_epoch, points
from lightning_ft.drill.runs import Point


def steps(*epochs: int, accumulated: int = 1) -> list[Record]:
    """Epochs of so many batches; each optimizer step takes several."""
    of = [epoch for epoch, batches in enumerate(epochs) for _ in range(batches)]
    return [
        {"kind": "step", "key": [n], "values": {"epoch": epoch}, "steps": n // accumulated}
        for n, epoch in enumerate(of, 1)
    ]


def lines(*saved_steps: int, event: str = "SaveStarted", name: str = "step={:08d}.ckpt") -> list[dict[str, Any]]:
    return [{"event": event, "path": f"/runs/{name.format(step)}", "step": step} for step in saved_steps]


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


@pytest.mark.parametrize("kill_at", [5, "5"])
def test_a_batch_that_is_asked_for_waits_for_the_first_save(kill_at: int | str) -> None:
    assert points(kill_at, False, steps(16), lines(4, 8, 12)) == [Point(5, once_durable=True, durable_from=4)]
    assert points(kill_at, False, steps(16), lines(5, 8)) == points(kill_at, False, steps(16), lines()) == []


@pytest.mark.parametrize("kill_at", ["Renamed:2", "5@1"])
def test_what_else_is_asked_for_is_taken_as_it_is(kill_at: str) -> None:
    assert points(kill_at, False, steps(16), lines(8)) == [Point(kill_at)]


def test_a_save_is_where_its_step_was_taken_though_it_is_begun_later() -> None:
    """The copy of a save may be made while training goes on, and it may wait for the save before."""
    late = [{**line, "batch": line["step"] + 30} for line in lines(10, 20)]
    assert points(None, False, steps(40), late) == [Point(21, once_durable=True, durable_from=10)]
    (found,) = points(None, False, steps(40, accumulated=4), lines(4, 8))
    assert found == Point(21, once_durable=True, durable_from=4)  # of batch 16
    (found,) = points(None, False, steps(40, 40, accumulated=4), lines(12))
    assert found == Point(60, once_durable=True, durable_from=12)  # of batch 48


def test_files_of_other_callbacks_are_no_saves() -> None:
    others = lines(8, 16, name="epoch=0-step={}.ckpt")
    assert points(None, False, steps(16, 16), others) == []
    assert points(None, False, steps(16, 16), [*others, *lines(20)]) == [Point(24, once_durable=True, durable_from=20)]
    renamed = [*lines(8, event="Renamed", name="last.ckpt"), *lines(4, 8, 12, event="Renamed")]
    assert points(None, True, steps(16), renamed) == [Point("Renamed:3")]  # the second of ours
    assert points(None, True, steps(16), renamed[:2]) == [Point("Renamed:2")]
    assert points(None, True, steps(16), renamed[:1]) == []


def test_nothing_is_killed_where_no_restart_could_begin() -> None:
    assert points(None, False, steps(16), lines()) == []
    assert points(None, False, steps(16), lines(15, 16)) == []
    assert points(None, False, [], lines(4)) == []


def test_a_restart_at_the_edge_of_an_epoch_is_one_in_the_next() -> None:
    trained = steps(4, 4)
    assert [in_a_later_epoch(trained, resumed) for resumed in (None, 3, 4, 5)] == [False, False, True, True]
    assert not in_a_later_epoch(steps(8), 7)
