"""Planted faults: each is found, and its cause is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_ft.drill.verdict import Outcome, Verdict
from tests.drill import forked

SCRIPT = Path(__file__).with_name("faulty.py")

DIVERGES = "SILENT DIVERGENCE"
# Fault: verdict, where the first difference is, and words of the cause.
FAULTS: dict[str, tuple[str, str, str]] = {
    "augmentation in a thread": (
        DIVERGES, "step 1: batch",
        "two uninterrupted runs are not equal either: seed_everything was called: the order of the data, or random "
        "augmentation, follows what no seed reaches: a generator of its own, a thread",
    ),
    "kernel that is not deterministic": (DIVERGES, "step 13: output", "the same batch gave another result: a kernel"),
    "not seeded": (DIVERGES, "step 1: random state", "runs are not equal either: random numbers are not seeded"),
    "generator of its own": (DIVERGES, "FIRST: batch", "random numbers that are not restored"),
    "loader position lost": (DIVERGES, "FIRST: batch", "the loader has lost its position: batch 1 of"),
    "optimizer state dropped": (DIVERGES, "FIRST: weights", "the state of the optimizer was dropped"),
    "scheduler state dropped": (DIVERGES, "FIRST: scheduler state", "the learning rate scheduler was not restored"),
    "draws after the restart": (DIVERGES, "FIRST: output", "something draws random numbers"),
    "seeded again after the restart": (DIVERGES, "FIRST: output", "the random state was not restored"),
    "weights not restored": (DIVERGES, "FIRST: output", "weights or buffers were not restored"),
    "state outside of state_dict": (
        DIVERGES, "FIRST: output",
        "the module has state outside of its state_dict: the first batch after the restart, with the same weights, "
        "optimizer state and random numbers, gave another result; `Net.scale` was 1.0",
    ),
    "buffer that is not saved": (DIVERGES, "FIRST: output", "gave another result; `Net.level` was 0."),
    "batch changed by a callback": (
        DIVERGES, "FIRST: batch",
        "what makes or changes the batch has state that is not restored: `Curriculum.scale` was 0.9",
    ),
    "stream that goes on": (
        "HARD FAILURE", "the restart was refused its checkpoint (RestoreError)", "The loader does not repeat itself",
    ),
    "validation skipped": (DIVERGES, "the restarted run has not", "a validation was left out"),
    "callback that takes nothing back": (DIVERGES, "FIRST: callbacks", "a callback has state"),
    "ModelCheckpoint without a dirpath": (DIVERGES, "FIRST: callbacks", "a ModelCheckpoint has forgotten its best"),
    "metric of a few steps": (DIVERGES, "FIRST: metrics", "a metric is not restored: it is kept outside of self.log"),
    "validation of a few steps": (DIVERGES, "the end of the validation at step", "a metric is not restored"),
    "average put in at the end": (DIVERGES, "the end of the fit: weights", "changes the weights, and its state"),
    "metric of its own": (DIVERGES, ": metrics differs", "a metric is not restored"),
    "unfrozen in a hook": (DIVERGES, "FIRST: requires_grad", "which parameters are frozen"),
    "no ckpt_path": ("LOST WORK", "from the beginning", 'not given ckpt_path="last"'),
    "crash after the restart": ("HARD FAILURE", "the restart ended with exit code 1", ""),
}  # fmt: skip
NOT_REPEATABLE = ("augmentation in a thread", "kernel that is not deterministic", "not seeded")
# Of two epochs; it would pass if it were killed in the first.
KILLED_AT = {"stream that goes on": "24"}


def drilled(fault: str, tmp_path: Path) -> Outcome:
    dirpath = tmp_path / "users own"
    outcome = forked.drill(SCRIPT, fault, dirpath, scratch=tmp_path / "scratch")
    assert not dirpath.exists()  # nothing of the user's is touched
    return outcome


def test_a_sound_script_passes(tmp_path: Path) -> None:
    outcome = drilled("none", tmp_path)
    (trial,) = outcome.trials
    assert (outcome.verdict, trial.reason, trial.cause) == (Verdict.PASS, "", "")
    assert (outcome.batches, outcome.validations, outcome.world_size) == (16, 4, 1)
    assert trial.kill_at == "9"  # in the middle
    assert trial.durable_batch == trial.resumed_batch in (4, 8)  # that of batch 8 may have been on its way
    assert "several ranks" in outcome.not_covered


def test_a_restart_from_an_older_checkpoint_is_lost_work(tmp_path: Path) -> None:
    """The third save is begun when the one before is durable."""
    outcome = forked.drill(
        SCRIPT, "older checkpoint", tmp_path / "users own", scratch=tmp_path / "scratch", kill_at="AttemptOpened:3"
    )
    (trial,) = outcome.trials
    assert (outcome.verdict, trial.repeatable) == (Verdict.LOST_WORK, True)
    assert trial.reason == "the restart began after batch 4, though a checkpoint of batch 8 was durable"
    assert "trainer.fit was given the path of another one" in trial.cause


QUICK = (
    "augmentation in a thread", "loader position lost", "optimizer state dropped", "seeded again after the restart",
    "validation skipped", "stream that goes on", "state outside of state_dict", "metric of a few steps",
    "average put in at the end",
)  # fmt: skip


@pytest.mark.parametrize(
    "fault", [fault if fault in QUICK else pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS]
)
def test_a_planted_fault_is_found_and_named(fault: str, tmp_path: Path) -> None:
    verdict, reason, cause = FAULTS[fault]
    outcome = drilled(fault, tmp_path)
    (trial,) = outcome.trials
    assert (outcome.verdict.value, trial.kill_at) == (verdict, KILLED_AT.get(fault, "9")), trial
    assert trial.repeatable == (fault not in NOT_REPEATABLE)
    assert next(trial.text()).startswith(verdict if trial.repeatable else "NOT REPEATABLE: two uninterrupted runs")
    # The save of step 8 is durable at the kill, or still on its way.
    first = (trial.resumed_batch or 0) + 1
    assert reason.replace("FIRST", f"step {first}") in trial.reason
    assert cause in trial.cause
    assert ("RuntimeError: cannot go on" in trial.output) == (fault == "crash after the restart")
    assert (trial.output == "") == (fault != "crash after the restart")  # with a known cause it is in the way
