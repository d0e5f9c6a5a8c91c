"""Which losses are bad and what follows: as tables, without a trainer."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest

import lightning_ft as ft
from lightning_ft import _names
from lightning_ft._divergence import left_out
from lightning_ft._divergence.criteria import (
    Badness,
    Course,
    Judge,
    Move,
    batches_in_words,
    is_worth_a_line,
    parse_batches,
    ranges,
    spike_limit,
    step_of_batch,
)
from lightning_ft._divergence.last_finite import candidates
from lightning_ft._fit.lineage import Line
from lightning_ft.manifest import CheckpointInfo, Manifest

GOOD, HIGH, NOT_FINITE = Badness.GOOD, Badness.HIGH, Badness.NOT_FINITE


def test_of_many_indices_a_line_has_the_first_few() -> None:
    assert left_out.words([list(range(8)), None]) == "indices [0, 1, 2, 3, 4, 5, 6, 7]"
    assert left_out.words([list(range(4096))]) == "indices [0, 1, 2, 3, 4, 5, 6, 7, and 4088 more]"
    assert left_out.words([None]) == "indices unknown"
    assert batches_in_words([26]) == "batch 26"
    assert batches_in_words([26, 27, 29]) == "batches 26-27,29"


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("action", "halt"), ("offending", "drop"), ("max_loss", math.nan), ("max_loss", math.inf), ("max_loss", "3"),
        ("max_loss", True), ("patience", -1), ("patience", True), ("patience", 1.5), ("max_rollbacks", 0),
        ("spike_sigmas", 0), ("spike_sigmas", math.inf), ("spike_window", 3),
    ],
)  # fmt: skip
def test_an_argument_that_cannot_be_is_named(argument: str, value: Any) -> None:
    with pytest.raises(ft.ConfigurationError, match=rf"{argument}="):
        ft.DivergenceGuard(**{argument: value})


@pytest.mark.parametrize(
    ("loss", "badness"),
    [
        (1.0, GOOD), (0.0, GOOD), (-5.0, GOOD), (3.0, GOOD), (3.1, HIGH), (1e30, HIGH), (math.nan, NOT_FINITE),
        (math.inf, NOT_FINITE), (-math.inf, NOT_FINITE),
    ],
)  # fmt: skip
def test_a_loss_above_its_limit(loss: float, badness: Badness) -> None:
    found = Judge(ft.DivergenceGuard(max_loss=3)).judge(loss)
    assert (GOOD if found is None else found.badness) == badness


def test_without_limits_every_finite_loss_is_good() -> None:
    judge = Judge(ft.DivergenceGuard())
    assert [judge.judge(loss) for loss in (0.0, 1e30, -1e30)] == [None] * 3
    assert judge.judge(math.nan) is not None


@pytest.mark.parametrize(
    ("losses", "limit"),
    [
        ([1.0, 2.0, 3.0], None),  # fewer than half of the window
        ([1.0, 2.0, 1.0, 2.0], 1.5 + 2 * math.sqrt(1 / 3)),
        ([2.0] * 8, None),  # without a spread, every loss would be one
        ([1.0, 1e200, 1.0, 1.0], None),  # in double precision, whose square is no number
    ],
)
def test_the_limit_of_a_spike(losses: list[float], limit: float | None) -> None:
    assert spike_limit(losses, sigmas=2, window=8) == pytest.approx(limit)


def test_a_spike_is_judged_by_the_losses_of_its_kind_and_counts_afterwards() -> None:
    judge = Judge(ft.DivergenceGuard(spike_sigmas=3, spike_window=8))
    for loss in (1.0, 1.1, 0.9, 1.0):
        assert judge.judge(loss, 0) is None
        assert judge.judge(100 * loss, 1) is None
    found = judge.judge(2.0, 0)
    assert found is not None
    assert found.badness == HIGH
    assert "3 standard deviations" in found.words
    assert judge.judge(2.0, 1) is None  # far below the others of its kind
    assert judge.judge(2.0, 0) is None  # the window has seen one


def test_the_window_is_part_of_the_state() -> None:
    guard = ft.DivergenceGuard(spike_sigmas=3, spike_window=8)
    one, other = Judge(guard), Judge(guard)
    for loss in (1.0, 1.1, 0.9, 1.0, math.nan):
        one.judge(loss)
    other.restore(pickle.loads(pickle.dumps(one.state())))
    assert other.judge(2.0) == one.judge(2.0) != None  # noqa: E711
    assert other.state() == one.state() == {"0": [1.0, 1.1, 0.9, 1.0, 2.0]}


def moves(guard: ft.DivergenceGuard, badness: list[Badness], *, undone: bool = True) -> list[Move]:
    course, found = Course(), []
    for each in badness:
        course, move = course.after(each, guard, undone=undone)
        found.append(move)
    return found


@pytest.mark.parametrize(
    ("arguments", "badness", "expected"),
    [
        ({}, [GOOD, HIGH], [Move.GO_ON, Move.STOP]),
        ({}, [GOOD, NOT_FINITE], [Move.GO_ON, Move.STOP]),
        ({"action": "warn"}, [NOT_FINITE, HIGH, GOOD], [Move.WARN, Move.WARN, Move.GO_ON]),
        ({"patience": 2}, [HIGH, NOT_FINITE, HIGH], [Move.LEAVE_OUT, Move.LEAVE_OUT, Move.STOP]),
        ({"patience": 1}, [HIGH, GOOD, HIGH, GOOD], [Move.LEAVE_OUT, Move.GO_ON] * 2),
        ({"action": "rollback", "max_rollbacks": 1}, [HIGH, HIGH], [Move.ROLL_BACK, Move.STOP]),
        ({"action": "rollback", "patience": 1}, [HIGH] * 2, [Move.LEAVE_OUT, Move.ROLL_BACK]),
    ],
)
def test_what_follows_before_the_step(arguments: Any, badness: list[Badness], expected: list[Move]) -> None:
    assert moves(ft.DivergenceGuard(**arguments), badness) == expected


@pytest.mark.parametrize(
    ("arguments", "badness", "expected"),
    [
        ({"patience": 1}, [HIGH, HIGH], [Move.TOLERATE, Move.STOP]),
        ({"patience": 1}, [NOT_FINITE], [Move.STOP]),  # its step was taken: nothing is left to tolerate
        ({"patience": 1, "action": "rollback"}, [NOT_FINITE], [Move.ROLL_BACK]),
    ],
)
def test_what_follows_a_step_that_was_taken(arguments: Any, badness: list[Badness], expected: list[Move]) -> None:
    assert moves(ft.DivergenceGuard(**arguments), badness, undone=False) == expected


def test_lines_in_the_log_are_bounded() -> None:
    assert [count for count in range(1, 100) if is_worth_a_line(count)] == [1, 2, 3, 4, 5, 10, 20, 40, 80]


@pytest.mark.parametrize(
    ("batch", "in_epoch", "window", "epoch_batches", "step"),
    [
        (7, 7, 1, 8, [7]),
        (7, 7, 4, 16, [5, 6, 7, 8]),
        (13, 5, 4, 8, [13, 14, 15, 16]),  # the second epoch of 8
        (16, 8, 3, 8, [15, 16]),  # the last step of an epoch has fewer
        (9, 1, 4, math.inf, [9, 10, 11, 12]),
    ],
)
def test_the_batches_of_a_step(batch: int, in_epoch: int, window: int, epoch_batches: float, step: list[int]) -> None:
    assert list(step_of_batch(batch, in_epoch, window, epoch_batches)) == step


@pytest.mark.parametrize("numbers", [[], [3], [1, 2, 3], [1, 3, 4, 9]])
def test_numbers_of_batches_as_text(numbers: list[int]) -> None:
    assert parse_batches(ranges(numbers)) == numbers


def test_numbers_of_batches_are_short_and_start_at_one() -> None:
    assert ranges([4, 3, 9, 3]) == "3-4,9"
    assert parse_batches(" 3 , 5-6,") == [3, 5, 6]
    for text in ("0", "x", "3-", "1.5"):
        with pytest.raises(ValueError):  # noqa: PT011
            parse_batches(text)


def info(name: str, batch: int, *, start: int = 2, run_id: str = "ours", boundary: str = "step") -> CheckpointInfo:
    manifest = Manifest("g", run_id, start, batch, batch, 0, "periodic", boundary, "", 1, "")
    return CheckpointInfo(name, name, 1, manifest, None)


def test_only_what_led_to_the_state_of_now_can_be_gone_back_to() -> None:
    line = Line("ours", start=2, from_batch=10, from_path="")
    names = {
        "step=00000014.ckpt": {"batch": 14},  # after the bad batch
        "step=00000013.ckpt": {"batch": 13},
        "step=00000012.ckpt": {"batch": 12, "start": 1},  # of the line that was left at 10
        "step=00000011.ckpt": {"batch": 11, "run_id": "another"},
        "step=00000010.ckpt": {"batch": 10, "start": 1},
        "step=00000009.ckpt": {"batch": 9, "boundary": "none"},
        "diverged-step=00000008.ckpt": {"batch": 8},
        "best.ckpt": {"batch": 7},
    }
    infos = [info(name, **facts) for name, facts in names.items()]  # type: ignore[arg-type]
    found = [i.name for i in candidates([*infos, CheckpointInfo("x", "x", 1, None, "damaged")], line, before=14)]
    assert found == ["step=00000013.ckpt", "step=00000010.ckpt"]


def test_the_names_of_emergency_checkpoints_are_no_others() -> None:
    name = _names.emergency_name(12, [])
    again = _names.emergency_name(12, [name])
    assert (name, again) == ("diverged-step=00000012.ckpt", "diverged-step=00000012-v1.ckpt")
    assert [_names.parse_emergency_name(n) for n in (name, again)] == [(12, 0), (12, 1)]
    assert [_names.parse_checkpoint_name(n) for n in (name, again)] == [None, None]
    for other in ("step=00000012.ckpt", "diverged-step=12.ckpt", "diverged-last.ckpt", f"{name}x"):
        assert _names.parse_emergency_name(other) is None


def test_the_error_is_an_exit_code_and_survives_pickling() -> None:
    error = ft.DivergenceError("it diverged", step=3, batch=4, losses=[[math.inf], []], restart_from="x")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, ft.FaultToleranceError)
    assert isinstance(again, SystemExit)
    assert (str(again), again.code, again.losses, again.restart_from) == ("it diverged", 77, ((math.inf,), ()), "x")
