"""Why a run has ended: what this package has said of it is the cause, and the traceback is in the way."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_ft.cli.drill import _code
from lightning_ft.cli.exits import Code
from lightning_ft.drill.command import Ended
from lightning_ft.drill.endings import problem
from lightning_ft.drill.runs import Run
from lightning_ft.drill.verdict import Outcome, Trial, Verdict

TRACEBACK = """Traceback (most recent call last):
  File "/x/_restore.py", line 3, in go
    raise RestoreError(message)
"""


def ended(tmp_path: Path, output: str, code: int = 1) -> Trial:
    (tmp_path / "output").write_text(output)
    found = problem(Ended(code, False, tmp_path / "output"), Run(tmp_path), 5.0, "the restart")
    assert found is not None
    return found


def test_a_checkpoint_that_is_refused_is_told_by_its_error(tmp_path: Path) -> None:
    message = "lightning_ft.errors.RestoreError: train dataloader 0: batch 16 is not the one.\n  Give it state_dict.\n"
    lost = "lightning_ft.errors.PeerLostError: rank 0 ends, since rank 1 failed\n"
    for output in (
        TRACEBACK + message,
        "".join(f"[rank1]: {line}\n" for line in TRACEBACK.splitlines()) + "[rank1]: " + message + lost,
    ):
        found = ended(tmp_path, output)
        assert found.reason == "the restart was refused its checkpoint (RestoreError)"
        assert found.cause == "train dataloader 0: batch 16 is not the one. Give it state_dict."
        assert found.output == ""


def test_another_error_of_ours_keeps_the_exit_code(tmp_path: Path) -> None:
    found = ended(tmp_path, TRACEBACK + "lightning_ft.errors.SaveError: the disk is full\n", 3)
    assert (found.reason, found.cause) == ("the restart ended with exit code 3 (SaveError)", "the disk is full")


def test_a_traceback_that_follows_is_no_part_of_the_message(tmp_path: Path) -> None:
    found = ended(
        tmp_path, "lightning_ft.errors.SaveError: the disk is full\n  Free some.\n" + TRACEBACK.partition("\n")[2]
    )
    assert found.cause == "the disk is full Free some."


def test_a_signal_without_a_name_has_its_number(tmp_path: Path) -> None:
    assert ended(tmp_path, "", -signal.SIGTERM).reason == "the restart ended by SIGTERM"
    assert ended(tmp_path, "", -(signal.SIGRTMIN + 3)).reason == f"the restart ended by signal {signal.SIGRTMIN + 3}"


def test_an_error_of_the_script_is_quoted(tmp_path: Path) -> None:
    found = ended(tmp_path, TRACEBACK + "lightning_ft.errors.Invented: x\nRuntimeError: mine\n")
    assert (found.cause, found.output.splitlines()[-1]) == ("", "RuntimeError: mine")


def test_a_restart_that_never_went_on_went_on_nowhere(tmp_path: Path) -> None:
    (tmp_path / "0.rank0.jsonl").write_text('{"kind": "step", "key": [67], "values": {}}\n')
    assert Run(tmp_path).resumed_batch(ended=False) is None
    assert Run(tmp_path).resumed_batch(ended=True) == 67  # the run was over


UNLIKE = Trial("9", Verdict.SILENT_DIVERGENCE, killed=True, resumed_batch=8, replayed=1, differ_from="step 1")


@pytest.mark.parametrize(
    ("trial", "head", "code"),
    [
        (replace(UNLIKE, differ_from=""), "SILENT DIVERGENCE: killed at batch 9, went on after batch 8, 1 trained", 1),
        (UNLIKE, "NOT REPEATABLE: two uninterrupted runs differ from step 1 on; nothing can be said of restarts (", 7),
        (replace(UNLIKE, verdict=Verdict.HARD_FAILURE, resumed_batch=None), "HARD FAILURE: killed at batch 9, 1", 1),
        (Trial("9", Verdict.PASS, killed=True), "PASS: killed at batch 9", 0),
    ],
)
def test_a_script_that_does_not_repeat_itself_has_a_headline_and_an_exit_code(
    trial: Trial, head: str, code: int
) -> None:
    outcome = Outcome(("true",), 16, 1, 0, (trial,))
    assert next(trial.text()).startswith(head)
    assert _code(outcome) == Code(code)
    assert outcome.document()["repeatable"] == trial.repeatable
