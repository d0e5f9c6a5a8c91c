"""Scripts of many kinds: what is not to be disturbed is not, and what cannot be drilled is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_ft import events
from lightning_ft.drill import runs
from lightning_ft.drill.verdict import Outcome, Verdict
from tests.drill import forked

SCRIPT = Path(__file__).with_name("varied.py")


def tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def drilled(what: str, tmp_path: Path, *args: object, **options: object) -> Outcome:
    return forked.drill(SCRIPT, what, tmp_path / "users", *args, scratch=tmp_path / "scratch", **options)


def test_a_script_with_everything_passes_and_nothing_of_the_user_is_touched(tmp_path: Path) -> None:
    users = tmp_path / "users"
    for name in ("slow/step=00000004.ckpt", "fast/step=00000004.ckpt", "best/last.ckpt", "final.ckpt", "logs/old.csv"):
        (users / name).parent.mkdir(parents=True, exist_ok=True)
        (users / name).write_text("precious")
    before = tree(users)
    outcome = drilled("rich", tmp_path)
    assert outcome.verdict is Verdict.PASS, outcome
    assert tree(users) == before
    # Validations and fits around the one that was compared are not part of it.
    assert (outcome.batches, outcome.validations) == (16, 4)
    assert {
        "fits without a FaultTolerantCheckpoint",
        "further fits of the trainer: the first was compared",
        "fits of further trainers: that of the first was compared",
        "what trainer.test gives: the fit alone was compared",
        "s3://bucket/run: the checkpoints were on a local disk instead",
    } <= set(outcome.not_covered)
    assert not list((tmp_path / "scratch").rglob("*.ckpt"))  # which may be large


def test_values_of_other_kinds_are_compared_all_the_same(tmp_path: Path) -> None:
    outcome = drilled("odd", tmp_path)
    assert outcome.verdict is Verdict.PASS, outcome
    records = runs.Run(tmp_path / "scratch" / "uninterrupted").traces()[0]
    batches = [record["values"]["batch"] for record in records if record["kind"] == "step"]
    assert len(set(batches)) == len(batches) == 16
    assert None not in batches


def test_of_trainings_in_several_processes_the_first_is_compared(tmp_path: Path) -> None:
    outcome = drilled("two processes", tmp_path)
    assert (outcome.verdict, outcome.batches) == (Verdict.PASS, 16), outcome
    assert "fits of further processes: that of the first was compared" in outcome.not_covered


def test_steps_end_every_run(tmp_path: Path) -> None:
    outcome = drilled("plain", tmp_path, steps=8, kill_at="Committed", keep=True)
    assert (outcome.verdict, outcome.batches) == (Verdict.PASS, 8)
    assert "what happens after 8 steps" in outcome.not_covered
    assert list((tmp_path / "scratch").rglob("step=00000008.ckpt"))  # which was asked for


def test_a_kill_before_anything_is_durable_is_a_pass_that_says_so(tmp_path: Path) -> None:
    outcome = drilled("plain", tmp_path, kill_at="AttemptOpened")
    assert outcome.verdict is Verdict.PASS
    assert "the restart began from the beginning" in outcome.trials[0].reason
    assert outcome.not_covered[0] == "restarts from a checkpoint: none began with one"


def test_a_kill_at_a_batch_before_the_first_save_proves_nothing(tmp_path: Path) -> None:
    outcome = drilled("plain", tmp_path, kill_at=2)
    (trial,) = outcome.trials
    assert (outcome.verdict, trial.reason) == (Verdict.HARD_FAILURE, "there is nothing to restart from")
    assert trial.cause == "no save was begun before batch 2: save more often, or kill later"


@pytest.mark.parametrize("what", ["preset", pytest.param("by the clock", marks=pytest.mark.slow)])
def test_a_script_that_saves_by_the_clock_is_saved_in_time(what: str, tmp_path: Path) -> None:
    """With the defaults of `fault_tolerance` the first save is due after a minute, and no drill is that long."""
    outcome = drilled(what, tmp_path)
    (trial,) = outcome.trials
    assert (outcome.verdict, trial.resumed_batch in (4, 8)) == (Verdict.PASS, True), outcome
    assert "when the script saves: by the clock, and not in time, so it was saved every 4 steps" in outcome.not_covered


@pytest.mark.parametrize(
    ("kill_at", "durable"),
    [(14, (4, 8, 12)), pytest.param("Committed", (4, 8), marks=pytest.mark.slow)],
)
def test_it_is_saved_in_time_wherever_it_is_killed(kill_at: Any, durable: tuple[int, ...], tmp_path: Path) -> None:
    outcome = drilled("preset", tmp_path, kill_at=kill_at)
    (trial,) = outcome.trials
    assert (outcome.verdict, trial.resumed_batch) == (Verdict.PASS, trial.durable_batch), outcome
    assert trial.durable_batch in durable
    assert "when the script saves: by the clock, and not in time, so it was saved every 4 steps" in outcome.not_covered


def test_a_second_uninterrupted_run_that_fails_says_nothing_of_repeating(tmp_path: Path) -> None:
    outcome = drilled("runs three times", tmp_path, "--noise", "1e-2", kill_at="Committed")
    (trial,) = outcome.trials
    assert (outcome.verdict, trial.killed, trial.repeatable) == (Verdict.HARD_FAILURE, True, True)
    assert trial.reason == "a second uninterrupted run ended with exit code 1"
    assert trial.output.splitlines()[-1] == "RuntimeError: a fourth time"


def test_a_sweep_that_ends_early_says_where_it_did_not_kill(tmp_path: Path) -> None:
    outcome = drilled("plain", tmp_path, "--noise", "1e-2", sweep=True, steps=8)
    assert [trial.repeatable for trial in outcome.trials] == [False]
    assert outcome.trials[0].kill_at == "SaveStarted:2"
    assert (
        "kills at AttemptOpened:2, DataWritten:2, DataSynced:2, Renamed:2, Committed:2: not tried, since two "
        "uninterrupted runs differ"
    ) in outcome.not_covered


@pytest.mark.parametrize(
    ("kill_at", "where", "cause"),
    [
        (1000, "batch 1000", "it trains 16 batches"),
        ("Renamed:100", "Renamed:100", "there are not so many events of that kind"),
    ],
)
def test_a_kill_that_never_comes_is_not_said_to_have_come(
    kill_at: int | str, where: str, cause: str, tmp_path: Path
) -> None:
    outcome = drilled("plain", tmp_path, kill_at=kill_at)
    (trial,) = outcome.trials
    assert (outcome.verdict, trial.killed) == (Verdict.HARD_FAILURE, False)
    assert next(trial.text()) == f"HARD FAILURE: to be killed at {where}"
    assert (trial.reason, trial.cause[: len(cause)]) == (f"the script ended before {where}", cause)


@pytest.mark.slow
def test_numbers_may_be_as_far_apart_as_is_said(tmp_path: Path) -> None:
    outcome = drilled("plain", tmp_path / "a", "--noise", "1e-6")
    assert outcome.verdict is Verdict.SILENT_DIVERGENCE
    assert not outcome.repeatable
    assert "not equal either" in outcome.trials[0].cause
    assert "a kernel is not deterministic" in outcome.trials[0].cause
    outcome = drilled("plain", tmp_path / "b", "--noise", "1e-6", atol=1e-3)
    assert outcome.verdict is Verdict.PASS, outcome
    outcome = drilled("plain", tmp_path / "c", "--noise", "1e-2", atol=1e-6)
    assert outcome.verdict is Verdict.SILENT_DIVERGENCE


@pytest.mark.slow
def test_a_sweep_kills_at_every_event_of_a_save(tmp_path: Path) -> None:
    outcome = drilled("plain", tmp_path, sweep=True)
    assert outcome.verdict is Verdict.PASS, outcome
    assert [trial.kill_at.partition(":")[0] for trial in outcome.trials if trial.kill_at] == list(events.KILL_POINTS)
    assert all(trial.resumed_batch for trial in outcome.trials if trial.kill_at != "SaveStarted:2"), outcome
    assert {trial.kill_at for trial in outcome.trials if trial.resumed_batch == 16} == set(events.KILL_POINTS[-3:])


@pytest.mark.parametrize(
    ("what", "reason", "cause"),
    [
        ("crashes", "the uninterrupted run ended with exit code 1", ""),
        ("has no room", "the uninterrupted run ended with exit code 1", "there is no room for the checkpoints"),
        ("asks by name", "the uninterrupted run ended with exit code 1", "its trainers write elsewhere in a drill"),
        ("diverges", "the uninterrupted run ended with exit code 77 (DIVERGED", ""),
        ("never saves", "there is nothing to restart from", "no save was begun before the last batch"),
        ("beside a ModelCheckpoint", "there is nothing to restart from", "no save was begun before the last batch"),
        ("hangs", "the uninterrupted run did not end within 5 s", "it hangs, or --timeout is too short"),
    ],
)
def test_what_cannot_be_drilled_is_a_hard_failure(what: str, reason: str, cause: str, tmp_path: Path) -> None:
    outcome = drilled(what, tmp_path, **({"timeout_secs": 5.0} if what == "hangs" else {}))
    (trial,) = outcome.trials
    assert (outcome.verdict, trial.kill_at) == (Verdict.HARD_FAILURE, None)
    assert (trial.reason[: len(reason)], trial.cause[: len(cause)]) == (reason, cause)
    assert ("cannot even begin" in trial.output) == (what == "crashes")
