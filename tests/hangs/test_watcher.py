"""The watcher, seen from outside: real processes, which hang, end or are killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_ft._watcher import peers
from lightning_ft._watcher.page import Phase
from lightning_ft._watcher.report import Status

ROOT = Path(__file__).parents[2]
WITHIN_SECS = 60


class Job:
    """`job.py`, started.

    Attributes:
        watcher: The number of its watcher.
        pid: Its own.
    """

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hangs.job", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.watcher, self.pid = map(int, self._process.stdout.readline().split())
        self.output = self.errors = ""

    def says(self, word: str) -> None:
        """Its next line is this one: ``met``, when its watcher and that of the other rank know each other, ..."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == f"{word}\n"

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def end(self) -> int:
        """Its exit code, when it has ended and what it and its watcher had to say is read."""
        self.output, self.errors = self._process.communicate(timeout=WITHIN_SECS)
        return self._process.returncode

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        return self._process.wait(WITHIN_SECS)

    def kill(self) -> None:
        """Nothing of it is left."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Jobs that are killed at the end, and none of whose watchers is left then."""
    started: list[Job] = []
    yield started
    for job in started:
        job.kill()
    for job in started:
        assert gone(job.watcher)


def gone(pid: int, within_secs: float = WITHIN_SECS) -> bool:
    """Whether the process ends within the time; a zombie that nobody has waited for counts as ended."""
    deadline = time.monotonic() + within_secs
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    "what",
    [
        "the_lock_is_never_released",
        "it_sleeps",
        "c_code_keeps_the_interpreter",
        "a_regular_expression_explodes",
        "a_builtin_never_returns",
    ],
)
def test_k3_a_hang_ends_with_the_exit_code_and_the_stacks(jobs: list[Job], what: str) -> None:
    jobs.append(job := Job(what))
    assert job.end() == 78
    assert "hang: the start has not gone on" in job.errors
    assert f"in {what}" in job.errors, "the stack names the function that hangs"
    assert gone(job.watcher)


def test_a_stopped_process_ends_and_its_state_is_said(jobs: list[Job]) -> None:
    jobs.append(job := Job("it_is_stopped"))
    assert job.end() == 78
    assert "no Python stacks of rank 0" in job.errors
    assert "stopped in do_signal_stop" in job.errors


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("it_ends", 3),
        ("it_leaves", 4),
        ("it_is_killed", -signal.SIGKILL),
        ("it_crashes", -signal.SIGSEGV),
        ("it_becomes_another_program", 5),
        ("workers_live_on", -signal.SIGKILL),
    ],
)
def test_the_watcher_ends_with_the_process_however_that_ends(jobs: list[Job], what: str, code: int) -> None:
    jobs.append(job := Job(what))
    assert job.wait() == code
    assert gone(job.watcher, 10)


def test_progress_is_no_hang(jobs: list[Job]) -> None:
    jobs.append(job := Job("steps_are_made"))
    assert job.end() == 0
    assert job.errors == ""


def test_released_means_released(jobs: list[Job]) -> None:
    jobs.append(job := Job("nobody_watches_any_more"))
    assert job.end() == 0
    assert job.errors == ""


def test_a_save_being_written_is_waited_for(jobs: list[Job]) -> None:
    jobs.append(job := Job("a_save_is_written"))
    assert job.end() == 78
    assert job.output == "written\n"
    assert "a save is being written: waiting for it" in job.errors


def test_workers_that_hang_are_not_left_behind(jobs: list[Job]) -> None:
    jobs.append(job := Job("workers_hang_too"))
    assert job.wait() == 78
    # They hold the other end of the pipe: it ends with the last of them.
    job.end()
    assert gone(job.watcher)


def test_what_ends_a_job_does_not_end_the_watching(jobs: list[Job]) -> None:
    jobs.append(job := Job("it_sleeps"))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(job.watcher, number)
    assert job.end() == 78


def test_the_watcher_is_small(jobs: list[Job]) -> None:
    jobs.append(job := Job("steps_are_made"))
    maps = ""
    while job.runs:  # and not once: at first it may not be the watcher's program yet
        with contextlib.suppress(OSError):
            maps += Path(f"/proc/{job.watcher}/maps").read_text()
        time.sleep(0.05)
    assert "python" in maps
    assert "site-packages" not in maps
    assert job.end() == 0


def test_the_late_rank_is_named_on_the_other_ones_standard_error(jobs: list[Job], tmp_path: Path) -> None:
    place = str(tmp_path / "place")
    zero, one = Job("it_sleeps", "0", place), Job("it_is_stopped", "1", place)
    jobs += [zero, one]
    assert [zero.end(), one.end()] == [78, 78]
    for errors in (zero.errors, one.errors):
        assert "late: rank 1\n" in errors
        assert "rank 1 (" in errors
        assert "stopped" in errors
    assert "in it_sleeps" in zero.errors


def test_a_rank_whose_process_has_ended_is_named(jobs: list[Job], tmp_path: Path) -> None:
    place = str(tmp_path / "place")
    zero, one = Job("it_sleeps", "0", place), Job("it_is_killed", "1", place)
    jobs += [zero, one]
    assert [zero.end(), one.end()] == [78, -signal.SIGKILL]
    assert "late: rank 1\n" in zero.errors
    assert "not come" not in zero.errors
    assert "its process has ended" in zero.errors


@pytest.mark.parametrize("waits", [0, 1])
def test_who_waits_for_a_rank_that_goes_on_does_not_hang(jobs: list[Job], tmp_path: Path, waits: int) -> None:
    place = str(tmp_path / "place")
    ranks = [Job("it_sleeps" if rank == waits else "steps_are_made", str(rank), place) for rank in (0, 1)]
    jobs += ranks
    assert ranks[1 - waits].end() == 0, "twice as long as the other one's limit"
    assert ranks[waits].end() == 78
    if waits == 0:
        assert "late: rank 1\n" in ranks[0].errors
        assert "its process has ended" in ranks[0].errors


def test_a_rank_whose_fit_is_over_is_not_late(jobs: list[Job], tmp_path: Path) -> None:
    place = str(tmp_path / "place")
    zero, one = Job("it_sleeps", "0", place), Job("nobody_watches_any_more", "1", place)
    jobs += [zero, one]
    assert [zero.end(), one.end()] == [78, 0]
    assert "late: rank 0\n" in zero.errors
    assert "rank 1: its fit is over\n" in zero.errors
    assert "does not answer" not in zero.errors


def test_without_rank_zeros_watcher_a_rank_ends_by_itself(jobs: list[Job], tmp_path: Path) -> None:
    place = str(tmp_path / "place")
    zero, one = Job("it_sleeps", "0", place), Job("it_sleeps", "1", place)
    jobs += [zero, one]
    zero.says("met")
    one.says("met")
    os.kill(zero.watcher, signal.SIGKILL)
    assert one.end() == 78
    assert "watchers of other ranks than 1 cannot be reached" in one.errors


class Other:
    """What the watcher of another rank says to that of rank 0, and hears of it."""

    def __init__(self, place: Path, rank: int) -> None:
        where = json.loads(place.read_text())
        connection = peers.connect(where["host"], where["port"], {"rank": rank, "token": where["token"]})
        assert connection is not None
        connection.socket.settimeout(WITHIN_SECS)
        self.connection = connection
        self._came: list[dict[str, Any]] = []

    def say(self, kind: str, **content: Any) -> None:
        self.connection.send(kind, **content)

    def hear(self, kind: str) -> dict[str, Any]:
        """The next message, which is of this kind; to be asked how long its rank has not gone on is none of them."""
        while self.connection.open:
            while self._came:
                message = self._came.pop(0)
                if message["kind"] != "still?":
                    assert message["kind"] == kind
                    return message
                self.say("still", secs=1e3)
            self._came = self.connection.receive()
        raise AssertionError(f"no {kind!r} has come")


def test_who_comes_while_the_others_are_ending_ends_with_them(jobs: list[Job], tmp_path: Path) -> None:
    place = tmp_path / "place"
    jobs.append(zero := Job("it_sleeps", "0", str(place), "3"))
    zero.says("listens")
    one = Other(place, 1)
    asked = one.hear("ask")
    two = Other(place, 2)
    assert two.hear("ask") == asked
    for number, other in enumerate((one, two), start=1):
        other.say("status", status=Status(number, "here", number, Phase.STARTUP, 0, 0, "sleeping", 1.0).to_message())
    said = one.hear("verdict")
    assert two.hear("verdict") == said
    assert "late: rank 3: not come to the process group" in said["text"]
    assert "its watcher does not answer" not in said["text"]
    for other in (one, two):
        other.say("settled")
        other.hear("leave")
        other.say("left")
    assert zero.end() == 78
    assert f"rank 0 (pid {zero.pid}): " in zero.errors
    one.connection.close()
    two.connection.close()
