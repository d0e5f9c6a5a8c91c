"""Preemption from the outside: real starts of a script, by hand, under SLURM's variables, by torchrun, as process 1."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import lightning_ft as ft
from lightning_ft import testing

WITHIN_SECS = 240.0
JOB = [sys.executable, "-m", "tests.guards.job"]


class Job:
    """A started script, in a process group of its own; none of it is left afterwards."""

    def __init__(self, place: Path, command: list[str], environment: dict[str, str]) -> None:
        place.mkdir(exist_ok=True)
        self.place = place
        self.log = place / "log"
        variables = {**os.environ, "MASTER_PORT": str(testing._free_port()), **environment}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)

    def await_file(self, name: str) -> int:
        """What is in the file that the script has made: a process id, or nothing."""
        deadline = time.monotonic() + WITHIN_SECS
        while not (self.place / name).exists():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {name} within {WITHIN_SECS} s:\n{self.text}"
            time.sleep(0.02)
        return int((self.place / name).read_text() or 0)

    def ended(self) -> int:
        """Its exit code, when it has ended by itself."""
        try:
            return self.process.wait(WITHIN_SECS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {WITHIN_SECS} s:\n{self.text}") from None

    @property
    def text(self) -> str:
        return self.log.read_text()


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the script; what is left of it is killed."""
    jobs: list[Job] = []

    def begin(*arguments: str, prefix: list[str] | None = None, place: str = "job", **environment: str) -> Job:
        directory = tmp_path / place
        jobs.append(Job(directory, [*(prefix or JOB), str(directory), *arguments], environment))
        return jobs[-1]

    yield begin
    for job in jobs:
        with suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()


def newest(place: Path) -> ft.CheckpointInfo:
    found = ft.last_good(str(place / "checkpoints"))
    assert found is not None
    return found


@pytest.mark.distributed
def test_i1_a_signal_to_the_process_that_was_started_stops_both_ranks(start: Start) -> None:
    """As Kubernetes does it: process 1 alone gets the signal, and the other rank is its child."""
    job = start("--devices", "2")
    job.await_file("trains0")
    job.process.send_signal(signal.SIGTERM)
    assert job.ended() == 75, job.text
    assert "saving and stopping after step" in job.text
    assert "Forcefully terminating" not in job.text
    assert not list(job.place.glob("went-on*"))
    assert "Traceback" not in job.text


def test_i1_signals_that_do_not_stop_until_it_has_ended_change_nothing(start: Start) -> None:
    """Neither the code nor what is saved: also while the interpreter ends, when Python handles no signal any more."""
    job = start()
    job.await_file("trains0")
    deadline = time.monotonic() + WITHIN_SECS
    while job.process.poll() is None and time.monotonic() < deadline:
        job.process.send_signal(signal.SIGTERM)
        time.sleep(1e-3)  # a thousand a second
    assert job.ended() == 75, job.text
    assert "Traceback" not in job.text
    found = ft.list_checkpoints(str(job.place / "checkpoints"))
    assert all(info.problem is None for info in found), found
    manifest = newest(job.place).manifest
    assert manifest is not None
    assert f"saving and stopping after step {manifest.step} " in job.text


CTRL_C_WHILE_IT_EXITS = """
import atexit, os, signal
atexit.register(os.kill, os.getpid(), signal.SIGINT)
from tests.guards import job
job.main(job.options.parse_args())
"""


def test_j5_ctrl_c_once_more_while_the_process_exits_leaves_no_traceback(start: Start) -> None:
    job = start(prefix=[sys.executable, "-c", CTRL_C_WHILE_IT_EXITS])
    job.await_file("trains0")
    job.process.send_signal(signal.SIGINT)
    assert job.ended() in (-signal.SIGINT, 130), job.text
    assert "Traceback" not in job.text
    assert "KeyboardInterrupt" not in job.text
    assert f"saved {newest(job.place).path}. Exit code 130: start the same command again to go on" in job.text


@pytest.mark.slow
@pytest.mark.distributed
def test_i1_a_signal_to_the_whole_group_with_loader_workers_and_an_exact_restart(start: Start, tmp_path: Path) -> None:
    arguments = ("--devices", "2", "--workers", "1", "--steps", "60")
    whole = start(*arguments, "--run-name", "uninterrupted", place="whole")
    assert whole.ended() == 0, whole.text
    for _ in range(2):
        job = start(*arguments)
        job.await_file("trains1")
        os.killpg(job.process.pid, signal.SIGTERM)
        assert job.ended() == 75, job.text
        assert not list(job.place.glob("went-on*"))
        for told in job.place.glob("trains*"):
            told.unlink()
    job = start(*arguments)
    assert job.ended() == 0, job.text
    assert len(list(job.place.glob("went-on*"))) == 2
    for rank in range(2):
        actual = testing._read(job.place / "run", rank)
        actual = [record for record in actual if record["kind"] != "end" or record["start"] == 2]
        assert testing._compare(testing._read(tmp_path / "whole" / "uninterrupted", rank), actual, rank) == 0


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_i1_ranks_that_are_spawned_hear_of_a_signal_to_their_parent(start: Start, strategy: str) -> None:
    job = start("--devices", "2", "--strategy", strategy)
    job.await_file("trains0")
    job.process.send_signal(signal.SIGTERM)
    assert job.ended() == 75, job.text
    assert "saving and stopping after step" in job.text
    assert not list(job.place.glob("went-on*"))


@pytest.mark.slow
@pytest.mark.distributed
def test_i1_plain_lightning_hangs_or_loses_the_run(start: Start) -> None:
    """What the case is about: both ranks are signalled at once, and its handlers wait for each other."""
    job = start("--devices", "2", "--plain")
    pids = [job.await_file(f"trains{rank}") for rank in range(2)]
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        job.process.wait(30)
    assert not list((job.place / "checkpoints").glob("*.ckpt"))


def test_i_pid1_a_signal_while_it_imports_is_not_lost(start: Start) -> None:
    job = start("--wait-before-imports")
    job.await_file("importing")
    job.process.send_signal(signal.SIGTERM)
    (job.place / "go-on").touch()
    assert job.ended() == 75, job.text
    assert "stopping before any batch, at step 0" in job.text
    assert not (job.place / "trains0").exists()


@pytest.mark.needs("root", "unshare")
def test_i_pid1_as_process_1_of_a_container(start: Start) -> None:
    """Which the kernel sends no signal that it does not handle, but SIGKILL."""
    job = start("--wait-before-imports", prefix=["unshare", "--pid", "--fork", "--kill-child", *JOB])
    job.await_file("importing")
    children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGTERM)
    (job.place / "go-on").touch()
    assert job.ended() == 75, job.text


SLURM = {
    "SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1",
}  # fmt: skip


def scontrol(place: Path, answer: str) -> str:
    """A PATH with a `scontrol` that writes down what is there when it is called, and then does `answer`."""
    program = place / "bin" / "scontrol"
    program.parent.mkdir(parents=True)
    said = f'echo "$@" $(ls {place}/job/checkpoints) >> {place}/scontrol'
    program.write_text(f'#!/bin/sh\n[ "$1" = show ] && exit\n{said}\n{answer}\n')
    program.chmod(0o755)
    return f"{program.parent}:{os.environ['PATH']}"


@pytest.mark.parametrize("number", [signal.SIGUSR1, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_i3_slurm_queues_the_job_again_and_ends_it(start: Start, tmp_path: Path, number: int) -> None:
    """The signals that come back come to a process that has nothing left to do."""
    path = scontrol(tmp_path, "kill -CONT $PPID; kill -TERM $PPID")
    job = start(PATH=path, **SLURM)
    job.await_file("trains0")
    job.process.send_signal(number)
    assert job.ended() in (75, -signal.SIGTERM), job.text
    command, job_id, *files = (tmp_path / "scontrol").read_text().split()
    assert (command, job_id) == ("requeue", "17")
    assert newest(job.place).name in files, "called when all was durable"
    assert not list(job.place.glob("hpc_ckpt*"))
    assert len((tmp_path / "scontrol").read_text().splitlines()) == 1


@pytest.mark.slow
def test_i3_a_refused_requeue_is_said_and_the_exit_code_asks_for_another_start(start: Start, tmp_path: Path) -> None:
    path = scontrol(tmp_path, "echo 'Requested operation is presently disabled' >&2; exit 1")
    job = start(PATH=path, **SLURM)
    job.await_file("trains0")
    job.process.send_signal(signal.SIGTERM)
    assert job.ended() == 75, job.text
    assert "job 17 is not queued again: scontrol requeue failed (Requested operation" in job.text
    assert newest(job.place)


TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node=2",
    "-m",
    "tests.guards.job",
]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("saves_take", "code", "says"), [("5", 75, "saving and"), ("60", 76, "without a new save")])
def test_i6_torchrun_gives_thirty_seconds(start: Start, saves_take: str, code: int, says: str) -> None:
    job = start("--devices", "2", "--workers", "1", "--saves-take", saves_take, prefix=TORCHRUN)
    job.await_file("trains0")
    before = newest(job.place).name
    job.process.send_signal(signal.SIGTERM)
    job.ended()
    assert f"{says}" in job.text
    assert "the grace period of 30.0 s" in job.text
    assert "torchrun shares its store with its workers" in job.text
    assert (newest(job.place).name > before) or code == 76
    assert not list(job.place.glob("went-on*"))
