"""Planted faults: each is found, and its cause is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Answer, program

SCRIPT = Path(__file__).with_name("faulty.py")

DIVERGES = "SILENT DIVERGENCE"
# Fault: verdict, where the first difference is, and words of the cause.
FAULTS: dict[str, tuple[str, str, str]] = {
    "augmentation in a thread": (DIVERGES, "step 1: batch", "two uninterrupted runs are not equal either: the order"),
    "not seeded": (DIVERGES, "step 1: batch", "two uninterrupted runs are not equal either"),
    "generator of its own": (DIVERGES, "FIRST: batch", "random numbers that are not restored"),
    "loader position lost": (DIVERGES, "FIRST: batch", "the loader has lost its position: batch 1 of"),
    "optimizer state dropped": (DIVERGES, "FIRST: weights", "the state of the optimizer was dropped"),
    "scheduler state dropped": (DIVERGES, "learning rates", "the learning rate scheduler was not restored"),
    "draws after the restart": (DIVERGES, "FIRST: output", "something draws random numbers"),
    "state outside of state_dict": (DIVERGES, "FIRST: output", "the module has state outside of its state_dict"),
    "buffer that is not saved": (DIVERGES, "FIRST: output", "weights or buffers were not restored"),
    "validation skipped": (DIVERGES, "the restarted run has not", "a validation was left out"),
    "callback that takes nothing back": (DIVERGES, "FIRST: callbacks", "a callback has state"),
    "metric of its own": (DIVERGES, ": metrics differs", "a metric is not restored"),
    "unfrozen in a hook": (DIVERGES, "FIRST: requires_grad", "which parameters are frozen"),
    "no ckpt_path": ("LOST WORK", "from the beginning", 'not given ckpt_path="last"'),
    "crash after the restart": ("HARD FAILURE", "the restart failed: it ended with exit code 1", "cannot go on"),
}


def drilled(fault: str, tmp_path: Path, *options: str) -> Answer:
    dirpath = tmp_path / "users own"
    answer = program("drill", "--json", *options, "--", sys.executable, SCRIPT, fault, dirpath)
    assert not dirpath.exists()  # nothing of the user's is touched
    return answer


def trial_of(answer: Answer) -> dict[str, Any]:
    (trial,) = json.loads(answer.out)["trials"]
    return dict(trial)


def test_a_sound_script_passes(tmp_path: Path) -> None:
    answer = drilled("none", tmp_path, "--kill-at-step", "10")
    assert answer.code == 0, answer.out
    trial = trial_of(answer)
    assert trial["verdict"] == "PASS"
    assert trial["durable_batch"] == trial["resumed_batch"] in (4, 8)  # that of batch 8 may have been on its way
    assert trial["replayed"] == 10 - trial["resumed_batch"]
    document = json.loads(answer.out)
    assert (document["batches"], document["validations"], document["world_size"]) == (16, 4, 1)
    assert "several ranks" in document["not_covered"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(fault: str, tmp_path: Path) -> None:
    verdict, reason, cause = FAULTS[fault]
    answer = drilled(fault, tmp_path, "--kill-at-step", "10")
    trial = trial_of(answer)
    assert (answer.code, trial["verdict"]) == (1, verdict), answer.out
    # The save of step 8 is durable at the kill, or still on its way.
    first = (trial["resumed_batch"] or 0) + 1
    assert reason.replace("FIRST", f"step {first}") in trial["reason"]
    assert cause in trial["cause"]


def test_state_that_is_not_saved_is_found(tmp_path: Path) -> None:
    trial = trial_of(drilled("state outside of state_dict", tmp_path, "--kill-at-step", "10"))
    assert (trial["verdict"], "outside of its state_dict" in trial["cause"]) == (DIVERGES, True)
