"""What of a run is durable, told by its events, under a clock of the test's own."""

from __future__ import annotations

import pytest

from lightning_ft import events
from lightning_ft._fit.newest_durable import Durable

DIR = "/runs/1"


class Clock:
    def __init__(self) -> None:
        self.secs = 1000.0

    def __call__(self) -> float:
        return self.secs


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def durable(clock: Clock) -> Durable:
    return Durable(DIR, clock)


def committed(step: int, secs: float = 0.0, dirpath: str = DIR) -> events.Committed:
    return events.Committed(f"{dirpath}/step={step}.ckpt", step, "g", 10, secs)


def started(step: int) -> events.SaveStarted:
    return events.SaveStarted(f"{DIR}/step={step}.ckpt", step)


def test_the_age_is_that_of_the_state_not_of_the_file(durable: Durable, clock: Clock) -> None:
    assert durable.words() == "nothing yet"
    durable.note(committed(40, secs=5.0))
    clock.secs += 7
    assert durable.words() == "40 (12 s ago)"
    clock.secs += 600
    assert durable.words() == "40 (10 min ago)"


def test_what_is_resumed_from_is_durable(durable: Durable, clock: Clock) -> None:
    durable.note(committed(80))
    durable.note(events.Resumed(f"{DIR}/step=40.ckpt", 40))  # a run that has gone back
    clock.secs += 3
    assert durable.words() == "40 (3 s ago)"


def test_an_upload_of_an_older_step_is_not_the_newest(durable: Durable) -> None:
    durable.note(committed(80, dirpath="/local"))
    durable.note(committed(40))
    assert durable.words().startswith("80 ")


def test_a_warning_comes_when_the_time_is_over_and_again_after_twice_as_long(durable: Durable, clock: Clock) -> None:
    said = []
    for _ in range(100):
        clock.secs += 10
        if durable.warning(30.0) is not None:
            said.append(clock.secs - 1000)
    assert said == [30, 60, 120, 240, 480, 960]
    durable.note(committed(40))
    assert durable.warning(30.0) is None
    clock.secs += 30
    assert durable.warning(30.0) is not None


NOT_DUE = "no save was due"


@pytest.mark.parametrize(
    ("happened", "said"),
    [
        ([], NOT_DUE),
        ([events.SaveFailed(f"{DIR}/a", 8, "disk full")], "the save of step 8 failed: disk full"),
        ([events.SaveSkipped(f"{DIR}/a", 8, "busy")], "the save of step 8 was left out: busy"),
        ([started(8)], "the save of step 8 is under way since 40.0 s"),
        ([started(8), events.SaveFailed(f"{DIR}/a", 8, "disk full")], "failed: disk full"),
        ([started(8), committed(8, dirpath="/local")], "step 8 is saved locally, and not in there"),
        ([committed(8)], "nothing after step 8 has become durable in /runs/1"),
        ([events.SaveFailed(f"{DIR}/a", 8, "disk full"), committed(16)], NOT_DUE),
    ],
)
def test_a_warning_says_why(durable: Durable, clock: Clock, happened: list[events.Event], said: str) -> None:
    for event in happened:
        durable.note(event)
    clock.secs += 40
    warning = durable.warning(30.0)
    assert warning is not None
    assert said in warning
    assert DIR in warning
