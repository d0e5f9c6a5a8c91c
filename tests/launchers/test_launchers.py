"""The examples for clusters, run by the launchers they are made for: interrupted, and exact all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_ft import exit_codes
from tests.launchers.slurm import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
WITHIN_SECS = 240.0
STEPS = 250
ENVIRONMENT = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}


def until(condition: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + WITHIN_SECS
    while not condition():
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(0.1)


def says(log: Path, what: str, times: int = 1) -> bool:
    return log.exists() and log.read_text().count(what) >= times


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text().splitlines() if line.startswith("step ")]
    assert len(lines) == 1, log.read_text()
    return lines[0]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the run says at its end that nobody has ended."""
    place = tmp_path_factory.mktemp("whole")
    done = subprocess.run(
        [sys.executable, "examples/cluster.py", "--steps", str(STEPS), "--dirpath", str(place)],
        cwd=ROOT, env={**os.environ, **ENVIRONMENT, "DEVICES": "2"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("step "))


def checkpoints(place: Path) -> int:
    return len(list(place.glob("*.ckpt")))


def requeued(cluster: Cluster, job: str, times: int) -> bool:
    return cluster.job(job).get("Restarts") == str(times)


@pytest.mark.needs("root", "slurmctld", "slurmd", "sbatch")
def test_i1_slurm_signalled_and_queued_again(uninterrupted: str, tmp_path: Path) -> None:
    """Two tasks; the early signal comes twice, as if by the time limit."""
    log, place = tmp_path / "log", tmp_path / "run"
    with Cluster(tmp_path / "slurm") as cluster:
        cluster.environment.update(ENVIRONMENT)
        job = cluster.call(
            "sbatch", "--parsable", f"--output={log}", "examples/slurm/job.sbatch",
            "--steps", str(STEPS), "--dirpath", str(place), cwd=ROOT,
        ).strip()  # fmt: skip
        for restarts in (1, 2):
            saved = checkpoints(place)
            until(lambda: says(log, "checkpoints are saved to", restarts) and checkpoints(place) >= 1, log)  # noqa: B023
            assert saved >= 0
            cluster.call("scancel", "--signal=USR1", job)
            until(lambda: requeued(cluster, job, restarts), log)  # noqa: B023
            until(lambda: (cluster.lift_hold(job) or cluster.job(job)["JobState"]) == "RUNNING", log)
        until(lambda: cluster.job(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"), log)
        assert cluster.job(job)["JobState"] == "COMPLETED", log.read_text()
    assert last_line(log) == uninterrupted


def worker(agent: int, rank: int) -> int | None:
    """The process of one of torchrun's workers."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    for child in children:
        with suppress(OSError):
            if f"LOCAL_RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return int(child)
    return None


@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_starts_again_what_was_killed(rank: int, uninterrupted: str, tmp_path: Path) -> None:
    log, place = tmp_path / "log", tmp_path / "run"
    with log.open("w") as file:
        agent = subprocess.Popen(
            ["examples/torchrun/run.sh", "--steps", str(STEPS), "--dirpath", str(place)],
            cwd=ROOT, env={**os.environ, **ENVIRONMENT}, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        until(lambda: checkpoints(place) >= 1 or agent.poll() is not None, log)
        pid = worker(agent.pid, rank)
        assert pid is not None, log.read_text()
        os.kill(pid, signal.SIGKILL)
        assert agent.wait(WITHIN_SECS) == 0, log.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
    assert says(log, "checkpoints are saved to", 2)
    assert last_line(log) == uninterrupted


@pytest.fixture
def two_hosts() -> list[str]:
    """Two network namespaces with a cable between them; their names."""
    names = [f"ft{os.getpid() % 10000}{side}" for side in "ab"]

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", f"{names[0]}v", "type", "veth", "peer", "name", f"{names[1]}v")
        for number, name in enumerate(names, start=1):
            ip("link", "set", f"{name}v", "netns", name)
            ip("-n", name, "link", "set", f"{name}v", "name", "eth0")
            ip("-n", name, "addr", "add", f"10.99.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.mark.needs("root", "ip")
def test_a_link_that_is_cut(two_hosts: list[str], tmp_path: Path) -> None:
    """Both sides end when the timeout of their collectives is over, and name the other."""
    logs, ranks = [], []
    for number, name in enumerate(two_hosts):
        logs.append(tmp_path / f"log{number}")
        environment = {
            **os.environ, **ENVIRONMENT, "GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": "10.99.0.1", "NODES": "2",
            "MASTER_PORT": "29600", "NODE_RANK": str(number), "LOCAL_RANK": "0",
        }  # fmt: skip
        command = [sys.executable, "examples/cluster.py", "--steps", "100000", "--timeout-secs", "10"]
        with logs[-1].open("w") as file:
            ranks.append(subprocess.Popen(
                ["ip", "netns", "exec", name, *command, "--dirpath", str(tmp_path / "run")],
                cwd=ROOT, env=environment, stdout=file, stderr=file,
            ))  # fmt: skip
    try:
        until(lambda: checkpoints(tmp_path / "run") >= 1 or any(rank.poll() is not None for rank in ranks), logs[0])
        subprocess.run(["ip", "-n", two_hosts[1], "link", "set", "eth0", "down"], check=True)
        codes = [rank.wait(60) for rank in ranks]  # 10 s, 9 s to find out who is there, and then some
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [exit_codes.PEER_LOST] * 2, [log.read_text() for log in logs]
    assert "rank 0 ends, since rank 1 failed" in logs[0].read_text()
    assert "rank 1 ends, since rank 0 failed" in logs[1].read_text()
