from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_ft._disk.lock import DirectoryLock
from lightning_ft._names import LOCK_NAME
from lightning_ft.errors import DirectoryInUseError

ROOT = str(Path(__file__).parents[2])
HOLD = """
import sys
from lightning_ft._disk.lock import DirectoryLock
DirectoryLock(sys.argv[1]).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(dirpath: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the directory until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(dirpath)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ROOT},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_another_process_is_named_and_its_death_frees_the_directory(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        lock = DirectoryLock(str(tmp_path))
        with pytest.raises(DirectoryInUseError, match=f"process {process.pid} on ") as caught:
            lock.acquire()
        assert str(tmp_path) in str(caught.value)
        assert caught.value.__suppress_context__
        process.send_signal(signal.SIGKILL)
        process.wait()
    lock.acquire()
    lock.release()


def test_a_failed_acquisition_does_not_free_the_holder(tmp_path: Path) -> None:
    with holder(tmp_path):
        for _ in range(2):
            with pytest.raises(DirectoryInUseError):
                DirectoryLock(str(tmp_path)).acquire()


def test_two_locks_of_one_process_conflict_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    first, second = DirectoryLock(str(tmp_path / "run")), DirectoryLock(str(tmp_path / "link"))
    first.acquire()
    with pytest.raises(DirectoryInUseError, match="another trainer of this process"):
        second.acquire()
    second.release()
    with pytest.raises(DirectoryInUseError):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_a_conflict_within_the_process_keeps_others_out(tmp_path: Path) -> None:
    # The kernel drops a record lock when any descriptor of its file is closed.
    lock = DirectoryLock(str(tmp_path))
    lock.acquire()
    with pytest.raises(DirectoryInUseError):
        DirectoryLock(str(tmp_path)).acquire()
    assert _held_by_another_process(tmp_path)
    lock.release()
    assert not _held_by_another_process(tmp_path)


def _held_by_another_process(dirpath: Path) -> bool:
    code = HOLD.replace("sys.stdin.read()", "")
    run = subprocess.run(
        [sys.executable, "-c", code, str(dirpath)],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0 or "DirectoryInUseError" in run.stderr
    return run.returncode != 0


def test_release_and_acquire_again(tmp_path: Path) -> None:
    lock = DirectoryLock(str(tmp_path / "new"))
    lock.release()
    for _ in range(2):
        lock.acquire()
        assert str(os.getpid()) in (tmp_path / "new" / LOCK_NAME).read_text()
        lock.release()
        lock.release()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    _refuse(monkeypatch, code)
    lock = DirectoryLock(str(tmp_path))
    lock.acquire()
    assert "has no locks" in caplog.text
    with pytest.raises(DirectoryInUseError):
        DirectoryLock(str(tmp_path)).acquire()
    lock.release()


def test_any_other_error_is_raised_and_nothing_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = DirectoryLock(str(tmp_path))
    _refuse(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        lock.acquire()
    monkeypatch.undo()
    lock.acquire()
    lock.release()


def _refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def lockf(*args: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", lockf)


def test_object_stores_have_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        DirectoryLock("memory://run").acquire()
    assert os.listdir(tmp_path) == []
