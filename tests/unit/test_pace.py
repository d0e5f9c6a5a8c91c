"""How often to save, from what is measured: tables, under a clock of the test's own."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lightning_ft._history.interval import ASSUMED_FAILURE_SECS, daly
from lightning_ft._history.pace import RECENT, Pace, Past
from lightning_ft._history.timeline import Save, Start
from lightning_ft.triggers import Trigger

AUTO = Trigger(auto=True)
DAY = ASSUMED_FAILURE_SECS


class Clock:
    def __init__(self) -> None:
        self.secs = 0.0

    def __call__(self) -> float:
        return self.secs


@pytest.mark.parametrize(
    ("trigger", "interval_secs", "is_over_after"),
    [
        (Trigger(every_n_train_steps=10), None, None),
        (Trigger(train_time_interval=timedelta(minutes=2)), 120.0, 120.0),
        (AUTO, 60.0, 60.0),  # nothing is known
        (Trigger(auto=True, train_time_interval=timedelta(seconds=5)), 5.0, 5.0),
        (Trigger(auto=True, train_time_interval=timedelta(hours=5)), 60.0, 60.0),
    ],
)
def test_before_anything_is_measured(trigger: Trigger, interval_secs: float | None, is_over_after: float) -> None:
    pace = Pace(trigger)
    assert pace.interval_secs == interval_secs
    assert pace.planned_secs == (interval_secs or 0.0)
    if is_over_after is None:
        assert not pace.is_over(1e9)
    else:
        assert not pace.is_over(is_over_after - 0.1)
        assert pace.is_over(is_over_after)
    assert pace.news() is None


@pytest.mark.parametrize(
    ("past", "cost_secs", "durable_secs", "interval_secs"),
    [
        (Past(), 0.1, 5.0, daly(0.1, DAY)),
        (Past(running_secs=DAY, failures=1), 0.1, 5.0, daly(0.1, DAY)),
        (Past(running_secs=DAY, failures=7), 0.1, 5.0, daly(0.1, DAY / 4)),
        (Past(), 0.001, 5.0, 60.0),  # 13 s would be best, and is not allowed
        (Past(), 0.001, 100.0, 100.0),  # a save takes longer than that
        (Past(running_secs=99 * DAY), 60.0, 100.0, 3600.0),
        (Past(costs_secs=(0.3, 0.3), durable_secs=(5.0,)), 0.1, 5.0, daly(0.3, DAY)),  # the median of all three
    ],
)
def test_after_a_save(past: Past, cost_secs: float, durable_secs: float, interval_secs: float) -> None:
    pace = Pace(AUTO, Clock())
    pace.recall(past)
    pace.learn(cost_secs, durable_secs)
    assert pace.interval_secs == pytest.approx(interval_secs)


def test_earlier_starts_count_before_the_first_save() -> None:
    pace = Pace(AUTO, Clock())
    pace.recall(Past(costs_secs=(0.1,), durable_secs=(2.0,)))
    assert pace.interval_secs == pytest.approx(daly(0.1, DAY))


def test_a_copy_that_is_uploaded_later_is_needed_to_know_how_long_a_save_takes() -> None:
    pace = Pace(AUTO, Clock())
    pace.learn(0.1, None)
    assert pace.interval_secs == 60.0
    pace.learn(None, 900.0)
    assert pace.interval_secs == 900.0


def test_only_recent_saves_count() -> None:
    pace = Pace(AUTO, Clock())
    for cost_secs in [10.0] * RECENT + [0.1] * RECENT:
        pace.learn(cost_secs, 1.0)
    assert pace.interval_secs == pytest.approx(daly(0.1, DAY))


def test_time_without_a_failure_makes_saves_rarer() -> None:
    clock = Clock()
    pace = Pace(AUTO, clock)
    clock.secs += 3 * DAY
    pace.learn(0.1, 1.0)
    assert pace.interval_secs == pytest.approx(daly(0.1, 4 * DAY))


def test_the_log_hears_of_the_first_decision_and_of_notable_changes() -> None:
    pace = Pace(AUTO, Clock())
    said = []
    for cost_secs in (0.1, 0.101, 0.102, 2.0, 2.0, 2.0, 2.0):
        pace.learn(cost_secs, 1.0)
        said.append(pace.news())
    assert [news is not None for news in said] == [True, False, False, False, False, True, False]
    assert said[0] is not None
    assert said[0].count("2.2 min") == 1
    assert "every 2.2 min from now on: each stops training for 100.0 ms and is durable after 1.0 s" in said[0]
    assert "failures are assumed to come every 24.0 h (0 so far)" in said[0]


@pytest.mark.parametrize(
    ("trigger", "cost_secs", "durable_secs", "why"),
    [
        (AUTO, 0.001, 1.0, "the best interval is 13.1 s, and it is not to be shorter"),
        (AUTO, 0.001, 99.0, "the best interval is 13.1 s, and saves follow each other no faster than they are written"),
        (AUTO, 400.0, 1.0, "and it is not to be longer"),
        (Trigger(auto=True, train_time_interval=timedelta(seconds=9)), 1.0, 1.0, "and train_time_interval is shorter"),
    ],
)
def test_the_log_says_what_limits(trigger: Trigger, cost_secs: float, durable_secs: float, why: str) -> None:
    pace = Pace(trigger, Clock())
    pace.learn(cost_secs, durable_secs)
    news = pace.news()
    assert news is not None
    assert news.endswith(why)


def start(began_at: float, ended_at: float, how: str | None, *saves: Save) -> Start:
    return Start("f", "r", 1, began_at, began_at, 0, (), saves, (), ended_at, how, "")


def save(path: str, blocked_secs: float, total_secs: float) -> Save:
    return Save(0.0, path, 1, blocked_secs, 1.0, total_secs, 10)


def test_the_past_of_a_local_directory_and_the_one_behind_it() -> None:
    past = Past.of(
        [
            start(0.0, 100.0, None, save("/local/a", 0.1, 1.0), save("/run/a", 0.0, 30.0)),
            start(200.0, 250.0, "failed", save("/local/b", 0.2, 2.0), save("/elsewhere/b", 7.0, 70.0)),
            start(300.0, 310.0, "stopped"),
        ],
        lambda path: path.startswith("/local/"),
        lambda path: path.startswith("/run/"),
    )
    assert past == Past(160.0, 2, (0.1, 0.2), (30.0,))
