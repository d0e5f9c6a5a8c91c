"""A job's own name under SLURM, and asking for it to be queued again, with a `scontrol` of our own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_ft._preemption import slurm


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "17"}, "17"),
        ({"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "train"}, "17"),
        ({"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "interactive"}, None),
        ({"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "bash"}, None),
        ({"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2"}, "17_2"),
        ({"SLURM_JOB_ID": "17; rm -rf /"}, None),
    ],
)
def test_the_jobs_name(environment: dict[str, str], expected: str | None) -> None:
    assert slurm.job_id(environment) == expected


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes down how it is called; `answer` is what it does then."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n. {tmp_path}/answer\n')
    program.chmod(0o755)
    (tmp_path / "answer").write_text("exit 0\n")
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return tmp_path


def test_a_job_is_queued_again(scontrol: Path) -> None:
    assert slurm.requeue("17_2", unless_cancelled=False)
    assert (scontrol / "called").read_text() == "requeue 17_2\n"


def test_a_refusal_is_said(scontrol: Path, caplog: pytest.LogCaptureFixture) -> None:
    (scontrol / "answer").write_text(
        "echo 'slurm_requeue error: Requested operation is presently disabled' >&2; exit 1"
    )
    assert not slurm.requeue("17", unless_cancelled=False)
    assert (
        "job 17 is not queued again: scontrol requeue failed (slurm_requeue error: Requested operation" in caplog.text
    )


def test_a_missing_program_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert not slurm.requeue("17", unless_cancelled=False)
    assert "scontrol requeue failed" in caplog.text


ENDING = (
    "JobId=1 JobName=train Priority=1 JobState=COMPLETING Reason=None Restarts=0 RunTime=00:00:02 TimeLimit={limit} "
    "StartTime=2026-11-30T09:00:00 EndTime={end} PreemptEligibleTime=2026-11-30T09:00:00 PreemptTime={preempted}\n"
)


@pytest.mark.parametrize(
    ("description", "cancelled"),
    [
        (ENDING.format(limit="01:00:00", end="2026-11-30T09:20:00", preempted="None"), True),
        (ENDING.format(limit="1-00:00:00", end="2026-11-30T10:00:00", preempted="None"), True),
        (ENDING.format(limit="UNLIMITED", end="2026-11-30T10:00:00", preempted="None"), True),
        (ENDING.format(limit="01:00:00", end="2026-11-30T09:59:31", preempted="None"), False),
        (ENDING.format(limit="01:00:00", end="2026-11-30T10:00:25", preempted="None"), False),
        (ENDING.format(limit="01:00:00", end="2026-11-30T09:20:00", preempted="2026-11-30T09:20:00"), False),
        (ENDING.format(limit="Partition_Limit", end="2026-11-30T09:20:00", preempted="None"), False),
        ("JobId=1 JobState=RUNNING TimeLimit=01:00:00 PreemptTime=None", False),
        ("slurm_load_jobs error: Invalid job id specified", False),
        ("", False),
    ],
)
def test_a_job_that_was_cancelled(description: str, cancelled: bool) -> None:
    assert slurm.is_cancelled(description) is cancelled


def test_a_cancelled_job_is_not_brought_back(scontrol: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = ENDING.format(limit="01:00:00", end="2026-11-30T09:20:00", preempted="None")
    (scontrol / "answer").write_text(f"echo '{text.strip()}'")
    assert not slurm.requeue("17", unless_cancelled=True)
    assert (scontrol / "called").read_text() == "show job -o 17\n"
    assert "job 17 was cancelled, so it is not queued again" in caplog.text


def test_last_words_come_after_whatever_was_registered_later() -> None:
    script = (
        "from lightning_ft._preemption import slurm; slurm.last_words.prepare(); "
        "import atexit; atexit.register(print, 'theirs');"
        "slurm.last_words.leave(lambda: print('last')); print('body'); raise SystemExit(75)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()) == (75, ["body", "theirs", "last"])
