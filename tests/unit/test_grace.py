"""The grace period: who says how long it is, and whether a save fits into it."""

from __future__ import annotations

import pytest

from lightning_ft._preemption.grace import Budget, Durations, grace_secs
from lightning_ft.errors import ConfigurationError

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"}


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        (None, {}, (None, "")),
        (20.0, {"LIGHTNING_FT_GRACE_SECS": "10", **TORCHRUN}, (20.0, "grace")),
        (None, {"LIGHTNING_FT_GRACE_SECS": "10.5", **TORCHRUN}, (10.5, "LIGHTNING_FT_GRACE_SECS")),
        (None, TORCHRUN, (30.0, "torchrun")),
        (None, {**TORCHRUN, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}, (120.0, "torchrun")),
        (None, {**TORCHRUN, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}, (30.0, "torchrun")),
        (None, {"TORCHELASTIC_RESTART_COUNT": "2"}, (None, "")),
    ],
)
def test_who_says_it(given: float | None, environment: dict[str, str], expected: tuple[float | None, str]) -> None:
    assert grace_secs(given, environment) == expected


@pytest.mark.parametrize("text", ["a minute", "-1", "0", "inf", "nan"])
def test_a_variable_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"LIGHTNING_FT_GRACE_SECS='{text}': must be a positive number"):
        grace_secs(None, {"LIGHTNING_FT_GRACE_SECS": text})


def test_a_save_takes_what_the_longest_of_the_last_few_took() -> None:
    durations = Durations()
    assert durations.expected_secs(busy=True) is None
    durations.resumed_from({"total_secs": 9.0, "queue_secs": 2.0})
    assert durations.expected_secs(busy=False) == 7
    for secs in (100.0, 1.0, 3.0, 2.0, 1.0, 1.0):
        durations.note("runs/1", {"total_secs": secs, "queue_secs": 0.5})
    assert durations.expected_secs(busy=False) == 2.5
    durations.note("runs/1", {})
    assert durations.expected_secs(busy=False) == 2.5
    assert durations.expected_secs(busy=True) == 5
    durations.note("s3://bucket/run1", {"total_secs": 10.0})
    assert durations.expected_secs(busy=False) == 12.5


@pytest.mark.parametrize(
    ("grace", "elapsed", "expected", "allowed"),
    [
        (None, 1e6, 1e6, True),
        (30, 1, 20, True),
        (30, 11, 20, False),
        (30, 1, None, True),
        (30, 31, None, False),
    ],
)
def test_what_fits(grace: float | None, elapsed: float, expected: float | None, allowed: bool) -> None:
    budget = Budget(grace, elapsed, expected)
    assert budget.allows_save is allowed
    assert ("of the grace period of 30.0 s" in str(budget)) is (grace is not None and elapsed < grace)
    assert ("the grace period of 30.0 s is over" in str(budget)) is (grace is not None and elapsed >= grace)
