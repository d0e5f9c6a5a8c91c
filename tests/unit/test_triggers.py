from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from lightning_ft.errors import ConfigurationError
from lightning_ft.triggers import Facts, LastSave, Pending, Trigger, advance, due, resolve

MINUTE = timedelta(minutes=1)
STEPS = Trigger(every_n_train_steps=10)
EPOCHS = Trigger(every_n_epochs=2)
TIME = Trigger(train_time_interval=MINUTE)
AUTO = Trigger(auto=True)
ALL = Trigger(every_n_train_steps=10, every_n_epochs=2, train_time_interval=MINUTE)


def at(step: int, epochs: int = 0, **fields: Any) -> Facts:
    return Facts(step=step, epochs=epochs, **{"epoch_finished": False, **fields})


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("every_n_train_steps", 0, "at least 1"),
        ("every_n_train_steps", -1, "at least 1"),
        ("every_n_train_steps", True, "not bool"),
        ("every_n_train_steps", 2.0, "not float"),
        ("every_n_train_steps", "2", "not str"),
        ("every_n_epochs", 0, "at least 1"),
        ("every_n_epochs", False, "not bool"),
        ("every_n_epochs", 1.5, "not float"),
        ("train_time_interval", 60, "not int"),
        ("train_time_interval", True, "not bool"),
        ("train_time_interval", timedelta(0), "positive"),
        ("train_time_interval", timedelta(seconds=-1), "positive"),
    ],
)
def test_refused_with_field_value_and_reason(field: str, value: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why) as caught:
        Trigger(**{field: value})
    assert f"{field}={value!r}" in str(caught.value)


def test_another_word_than_auto_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="every_n_train_steps='Auto': a whole number, or \"auto\""):
        Trigger.of("Auto", None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trigger", "expected"),
    [(Trigger(), Trigger(every_n_epochs=1)), (STEPS, STEPS), (EPOCHS, EPOCHS), (TIME, TIME), (AUTO, AUTO), (ALL, ALL)],
    ids=["none", "steps", "epochs", "time", "auto", "all"],
)
def test_resolve(trigger: Trigger, expected: Trigger) -> None:
    assert resolve(trigger) == expected


@pytest.mark.parametrize(
    ("trigger", "facts", "last", "reason"),
    [
        (STEPS, at(9), LastSave(8), None),
        (STEPS, at(10), LastSave(9), "periodic"),
        (STEPS, at(10), LastSave(10), None),
        (STEPS, at(11), LastSave(10), None),
        (STEPS, at(13), LastSave(9), "periodic"),
        (STEPS, at(45), LastSave(9), "periodic"),
        (STEPS, at(0), LastSave(0), None),
        (STEPS, at(5), LastSave(25), None),
        (EPOCHS, at(7, 2, epoch_finished=True), LastSave(0, 1), "epoch_end"),
        (EPOCHS, at(7, 1, epoch_finished=True), LastSave(0, 0), None),
        (EPOCHS, at(7, 2, epoch_finished=False), LastSave(0, 1), None),
        (EPOCHS, at(7, 2, epoch_finished=True), LastSave(0, 2), None),
        (EPOCHS, at(7, 5, epoch_finished=True), LastSave(0, 1), "epoch_end"),
        (TIME, at(7), LastSave(6), None),
        (TIME, at(7, time_due=True), LastSave(6), "time"),
        (AUTO, at(7), LastSave(6), None),
        (AUTO, at(7, time_due=True), LastSave(6), "time"),
        (STEPS, at(7, time_due=True), LastSave(6), None),
        (ALL, at(10, 2, epoch_finished=True, time_due=True), LastSave(9, 1), "epoch_end"),
        (ALL, at(10, 2, time_due=True), LastSave(9, 1), "periodic"),
    ],
)
def test_due(trigger: Trigger, facts: Facts, last: LastSave, reason: str | None) -> None:
    assert due(trigger, facts, last) == reason


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((None, None, None), Trigger(every_n_epochs=1)),
        ((10, None, None), STEPS),
        (("auto", None, None), AUTO),
        (("auto", 2, MINUTE), Trigger(None, 2, MINUTE, auto=True)),
    ],
)
def test_of_the_arguments_of_the_callback(arguments: Any, expected: Trigger) -> None:
    assert Trigger.of(*arguments) == expected


def test_no_other_word_than_auto() -> None:
    with pytest.raises(ConfigurationError, match="every_n_train_steps='often'"):
        Trigger.of("often", None, None)  # type: ignore[arg-type]


def run(trigger: Trigger, boundaries: list[Facts], state: Pending | None = None) -> list[str | None]:
    state = state or Pending()
    reasons = []
    for facts in boundaries:
        state, reason = advance(trigger, state, facts)
        reasons.append(reason)
    return reasons


@pytest.mark.parametrize(
    ("trigger", "boundaries", "reasons"),
    [
        (STEPS, [at(9), at(10), at(11), at(20)], [None, "periodic", None, "periodic"]),
        (STEPS, [at(10), at(10), at(10)], ["periodic", None, None]),
        (STEPS, [at(10, accumulating=True), at(10), at(11)], [None, "periodic", None]),
        (
            TIME,
            [at(1, time_due=True, accumulating=True), at(1, accumulating=True), at(2), at(3)],
            [None, None, "time", None],
        ),
        (
            EPOCHS,
            [at(5, 1), at(5, 1, epoch_finished=True), at(10, 2), at(10, 2, epoch_finished=True)],
            [None, None, None, "epoch_end"],
        ),
        (STEPS, [at(19), at(20), at(10), at(15), at(20)], ["periodic", "periodic", None, None, "periodic"]),
        (ALL, [at(10, 1, time_due=True), at(11, 1)], ["periodic", None]),
        (
            ALL,
            [at(10, 1, accumulating=True), at(10, 2, epoch_finished=True), at(11, 2)],
            [None, "epoch_end", None],
        ),
    ],
    ids=[
        "steps", "stands-still", "postponed", "time-postponed", "epoch-boundary-only", "rolled-back",
        "one-save-for-two-rules", "postponed-and-due",
    ],
)  # fmt: skip
def test_a_run(trigger: Trigger, boundaries: list[Facts], reasons: list[str | None]) -> None:
    assert run(trigger, boundaries) == reasons


@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.parametrize("jump", [1, 2, 5])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_no_multiple_is_missed(n: int, jump: int, accumulate: int) -> None:
    boundaries = [at(step, accumulating=bool(index % accumulate)) for index, step in enumerate(range(0, 400, jump))]
    reasons = run(Trigger(every_n_train_steps=n), boundaries)
    saved = [facts.step for facts, reason in zip(boundaries, reasons, strict=True) if reason]
    assert saved
    # A multiple of n is followed by a save before the end of the accumulation that it falls into.
    for multiple in range(n, boundaries[-1].step - n - jump * accumulate, n):
        assert any(multiple <= step < multiple + jump * accumulate for step in saved)
    assert not any(facts.accumulating and reason for facts, reason in zip(boundaries, reasons, strict=True))


def test_a_resumed_run_does_not_save_what_it_came_from() -> None:
    state = Pending(LastSave(step_seen=10, epochs_seen=2))
    assert run(ALL, [at(10, 2, epoch_finished=True), at(11, 2)], state) == [None, None]
