from __future__ import annotations

import math

import pytest

from lightning_ft._history.interval import ASSUMED_FAILURE_SECS, advise, daly, failure_secs, lost_share, young


def test_young_is_the_square_root_of_twice_the_product() -> None:
    assert young(50.0, 3600.0) == 600.0


def test_daly_is_near_young_where_saves_are_cheap_and_below_it_where_they_are_not() -> None:
    assert daly(0.001, 86400.0) == pytest.approx(young(0.001, 86400.0), rel=1e-3)
    # Worked out by hand: 600 * (1 + sqrt(1/144) / 3 + 1/1296) - 50.
    assert daly(50.0, 3600.0) == pytest.approx(600 * (1 + 1 / 36 + 1 / 1296) - 50)


def test_daly_gives_up_where_a_save_costs_more_than_there_is_between_two_failures() -> None:
    assert daly(7200.0, 3600.0) == 3600.0


@pytest.mark.parametrize(("cost_secs", "mean_failure_secs"), [(1.0, 3600.0), (30.0, 7200.0), (0.01, 86400.0)])
def test_the_optimum_loses_less_than_its_neighbours(cost_secs: float, mean_failure_secs: float) -> None:
    best = daly(cost_secs, mean_failure_secs)
    lost = lost_share(best, cost_secs, mean_failure_secs)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert lost < lost_share(best * factor, cost_secs, mean_failure_secs)


@pytest.mark.parametrize(
    ("running_secs", "failures", "expected"),
    [
        (0.0, 0, ASSUMED_FAILURE_SECS),
        (ASSUMED_FAILURE_SECS, 0, 2 * ASSUMED_FAILURE_SECS),
        (3600.0, 5, (ASSUMED_FAILURE_SECS + 3600.0) / 6),
    ],
)
def test_failures_are_counted_with_one_that_is_assumed(running_secs: float, failures: int, expected: float) -> None:
    assert failure_secs(running_secs, failures) == expected


@pytest.mark.parametrize(
    ("cost_secs", "write_secs", "mean_failure_secs", "interval_secs", "limited_by"),
    [
        (1.0, 10.0, 86400.0, daly(1.0, 86400.0), "optimum"),
        (0.003, 10.0, 3600.0, 60.0, "least"),  # 4.6 s would be best, if writing were free
        (0.003, 90.0, 3600.0, 90.0, "write"),
        (60.0, 70.0, 864000.0, 3600.0, "most"),
        (60.0, 7200.0, 864000.0, 7200.0, "write"),
        (0.003, 7200.0, 3600.0, 7200.0, "write"),  # more often than it can be written is impossible
    ],
)
def test_advice_is_the_optimum_within_limits(
    cost_secs: float, write_secs: float, mean_failure_secs: float, interval_secs: float, limited_by: str
) -> None:
    advice = advise(cost_secs, write_secs, mean_failure_secs)
    assert advice.interval_secs == pytest.approx(interval_secs)
    assert advice.limited_by == limited_by
    assert advice.optimum_secs == daly(cost_secs, mean_failure_secs)


@pytest.mark.parametrize("arguments", [(-1.0, 1.0, 1.0), (1.0, -1.0, 1.0), (1.0, 1.0, 0.0)])
def test_times_that_cannot_be_are_refused(arguments: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="costs of at least 0"):
        advise(*arguments)


def test_limits_the_wrong_way_round_are_refused() -> None:
    with pytest.raises(ValueError, match="least <= most"):
        advise(1.0, 1.0, 1.0, least_secs=10.0, most_secs=5.0)


def test_nothing_lost_is_more_than_all() -> None:
    assert lost_share(1e9, 1.0, 1.0) == 1.0
    assert math.isclose(lost_share(100.0, 0.0, 1000.0, restart_secs=50.0), 0.1)
