"""The examples for clusters, run by the launchers they are made for: interrupted, and exact all the same."""

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

from lightning_ft import exit_codes
from tests.launchers.slurm import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
WITHIN_SECS = 400.0
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


def whole(place: Path, steps: int) -> str:
    """What a run says at its end that nobody has ended."""
    done = subprocess.run(
        [sys.executable, "examples/cluster.py", "--steps", str(steps), "--dirpath", str(place)],
        cwd=ROOT, env={**os.environ, **ENVIRONMENT, "DEVICES": "2"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("step "))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    return whole(tmp_path_factory.mktemp("whole"), STEPS)


def checkpoints(place: Path) -> int:
    return len(list(place.glob("*.ckpt")))


OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def submit(cluster: Cluster, log: Path, place: Path, steps: int, *options: str) -> str:
    cluster.environment.update(ENVIRONMENT)
    command = ["sbatch", "--parsable", f"--output={log}", *options, "examples/slurm/job.sbatch"]
    return cluster.call(*command, "--steps", str(steps), "--dirpath", str(place), cwd=ROOT).strip()


def state(cluster: Cluster, job: str) -> str:
    """Of the job, which is not held back when it was queued again."""
    found = cluster.job(job)["JobState"]
    if found == "PENDING":
        cluster.lift_hold(job)
    return found


@pytest.mark.needs("root", "slurmctld", "slurmd", "sbatch")
def test_i1_slurm_signalled_and_queued_again(uninterrupted: str, tmp_path: Path) -> None:
    """Two tasks, the early signal twice."""
    log, place = tmp_path / "log", tmp_path / "run"
    with Cluster(tmp_path / "slurm") as cluster:
        job = submit(cluster, log, place, STEPS)
        for number in (1, 2):
            until(lambda: says(log, "checkpoints are saved to", number) and checkpoints(place) > 0, log)  # noqa: B023
            cluster.call("scancel", "--signal=USR1", job)
            until(lambda: cluster.job(job)["Restarts"] == str(number), log)  # noqa: B023
            until(lambda: state(cluster, job) == "RUNNING", log)
        until(lambda: state(cluster, job) in OVER, log)
        assert cluster.job(job)["JobState"] == "COMPLETED", log.read_text()
    assert last_line(log) == uninterrupted


@pytest.mark.needs("root", "slurmctld", "slurmd", "sbatch")
def test_i1_slurm_a_job_longer_than_its_time(tmp_path: Path) -> None:
    """The shortest limit there is; SLURM looks every half minute, and its early signal comes as late as that."""
    log, steps = tmp_path / "log", 3000  # of 20 ms at least: more than a minute
    with Cluster(tmp_path / "slurm") as cluster:
        job = submit(cluster, log, tmp_path / "run", steps, "--time=1", "--signal=SIGUSR1@30")
        # A job that is being queued again has failed for a moment.
        until(lambda: state(cluster, job) == "COMPLETED", log)
        assert int(cluster.job(job)["Restarts"]) >= 1
    assert last_line(log) == whole(tmp_path / "whole", steps)


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


def on(host: str) -> list[str]:
    """What a command there begins with. Not `ip netns exec`, which would hold every disk that other tests unmount."""
    return ["nsenter", f"--net=/run/netns/{host}"]


@pytest.fixture
def two_hosts() -> Iterator[list[str]]:
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


def environment_of(host: int) -> dict[str, str]:
    return {
        **os.environ, **ENVIRONMENT, "GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": "10.99.0.1", "NODES": "2",
        "MASTER_PORT": "29600", "NODE_RANK": str(host), "LOCAL_RANK": "0",
    }  # fmt: skip


@pytest.mark.needs("root", "ip")
@pytest.mark.parametrize(("what", "late"), [("c_code_keeps_the_interpreter", 1), ("it_is_stopped", 0)])
def test_a_hang_on_another_host(two_hosts: list[str], what: str, late: int, tmp_path: Path) -> None:
    """Both end within the limit, and the host that is not late says which one is."""
    logs, ranks = [], []
    for number, name in enumerate(two_hosts):
        logs.append(tmp_path / f"log{number}")
        hangs = what if number == late else "nothing"
        with logs[-1].open("w") as file:
            ranks.append(subprocess.Popen(
                [*on(name), sys.executable, "-m", "tests.hangs.host", str(tmp_path), hangs, "90"],
                cwd=ROOT, env=environment_of(number), stdout=file, stderr=file,
            ))  # fmt: skip
    try:
        codes = [rank.wait(WITHIN_SECS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = [log.read_text() for log in logs]
    assert codes == [exit_codes.HUNG] * 2, said
    for text in said:
        assert f"late: rank {late}\n" in text
        assert f"rank {1 - late} (" in text
    assert ("stopped" if what == "it_is_stopped" else f"in {what}") in said[
        late if what != "it_is_stopped" else 1 - late
    ]


@pytest.mark.needs("root", "ip")
@pytest.mark.parametrize("absent", [0, 1])
def test_a_host_that_does_not_come(two_hosts: list[str], absent: int, tmp_path: Path) -> None:
    """Its cable is there, and nothing answers."""
    here = 1 - absent
    training = [sys.executable, "-m", "tests.hangs.host", str(tmp_path), "nothing", "8"]
    done = subprocess.run(
        [*on(two_hosts[here]), *training],
        cwd=ROOT, env=environment_of(here), capture_output=True, text=True, check=False, timeout=WITHIN_SECS,
    )  # fmt: skip
    assert done.returncode == exit_codes.HUNG, done.stderr
    assert f"late: rank {absent}: not come to the process group" in done.stderr


@pytest.mark.needs("root", "ip")
def test_a_link_that_is_cut(two_hosts: list[str], tmp_path: Path) -> None:
    """Both sides end when the timeout of their collectives is over, and name the other."""
    logs, ranks = [], []
    for number, name in enumerate(two_hosts):
        logs.append(tmp_path / f"log{number}")
        command = [sys.executable, "examples/cluster.py", "--steps", "100000", "--timeout-secs", "10"]
        with logs[-1].open("w") as file:
            ranks.append(subprocess.Popen(
                [*on(name), *command, "--dirpath", str(tmp_path / "run")],
                cwd=ROOT, env=environment_of(number), stdout=file, stderr=file,
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
