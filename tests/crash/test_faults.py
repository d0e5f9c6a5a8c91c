"""Full disks, failing system calls, directories that cannot be written: the checkpoints that were there stay."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import subprocess
from pathlib import Path

import pytest

import lightning_ft as ft
from lightning_ft._names import checkpoint_name
from lightning_ft.storage import Storage
from tests.crash.faults import (
    ABOUT_BYTES,
    Run,
    check_failure,
    check_next_save,
    contents,
    mounted_tmpfs,
    two_saved,
)
from tests.crash.powercut import Call, calls, traced

# -- one system call fails, once ---------------------------------------------------------------------------------

CALLS = {
    "write": lambda call: call.point[0] == "pwrite64" and ".attempt" in call.arguments,
    "fsync": lambda call: call.point[0] == "fsync" and ".attempt" in call.arguments,
    "close": lambda call: call.point[0] == "close" and ".attempt" in call.arguments,
    "rename": lambda call: call.point[0] == "rename",
    "fsync of the directory": lambda call: call.point[0] == "fsync" and ".attempt" not in call.arguments,
    "open": lambda call: call.point[0] == "openat" and ".attempt" in call.arguments,
    "ftruncate": lambda call: call.point[0] == "ftruncate" and ".attempt" in call.arguments,
}
ERRORS = ("EIO", "ENOSPC", "EDQUOT", "ESTALE")


@pytest.fixture(scope="module")
def of_a_save(tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """The calls that the save of step 3 makes."""
    place = tmp_path_factory.mktemp("calls")
    two_saved(place / "run")
    return calls(Run(str(place / "run"), str(place / "result"), (3,)), place / "run")


def run_with(inject: str, run: Run) -> dict[str, str]:
    name = inject.partition(":")[0]
    assert traced(run, "-e", f"trace={name}", "-e", f"inject={inject}") == 0
    failures: dict[str, str] = json.loads(Path(run.result).read_text())
    return failures


def one_each(pairs: list[tuple[str, str]]) -> list[object]:
    """All but the first of each call are for the slow run."""
    slow = pytest.mark.slow
    return [pair if number % 4 == 0 else pytest.param(*pair, marks=slow) for number, pair in enumerate(pairs)]


PAIRS = [(what, ERRORS[(row + column) % 4]) for row, what in enumerate(CALLS) for column in range(4)]


@pytest.mark.needs("strace")
@pytest.mark.parametrize(("what", "error"), one_each(PAIRS))
def test_a_call_fails(what: str, error: str, of_a_save: list[Call], tmp_path: Path) -> None:
    before = two_saved(tmp_path / "run")
    name, number = next(call.point for call in of_a_save if CALLS[what](call))
    run = Run(str(tmp_path / "run"), str(tmp_path / "result"), (3,))
    failures = run_with(f"{name}:error={error}:when={number}", run)
    check_failure(tmp_path / "run", before, failures, os.strerror(getattr(errno, error)))
    assert (checkpoint_name(3) in contents(tmp_path / "run")) == (what == "fsync of the directory")
    check_next_save(tmp_path / "run")


AGAIN = [what for what in CALLS if what != "write"]  # each try writes in a thread of its own, counted anew


@pytest.mark.needs("strace")
@pytest.mark.parametrize("what", [AGAIN[0], *(pytest.param(what, marks=pytest.mark.slow) for what in AGAIN[1:])])
def test_a_stale_handle_is_tried_again(what: str, of_a_save: list[Call], tmp_path: Path) -> None:
    before = two_saved(tmp_path / "run")
    name, number = next(call.point for call in of_a_save if CALLS[what](call))
    run = Run(str(tmp_path / "run"), str(tmp_path / "result"), (3, 4), retries=1)
    assert run_with(f"{name}:error=ESTALE:when={number}", run) == {}
    after = contents(tmp_path / "run")
    assert sorted(after) == [checkpoint_name(step) for step in (1, 2, 3, 4)]
    assert {name: after[name] for name in before} == before
    assert all(info.problem is None for info in ft.list_checkpoints(str(tmp_path / "run")))


@pytest.mark.needs("strace")
def test_every_call_fails_until_it_is_given_up(of_a_save: list[Call], tmp_path: Path) -> None:
    """Not one call but all of them, so that cleaning up fails too: the next start does it."""
    before = two_saved(tmp_path / "run")
    run = Run(str(tmp_path / "run"), str(tmp_path / "result"), (3,))
    failures = run_with("fsync,unlink,unlinkat:error=EIO", run)
    assert os.strerror(errno.EIO) in failures["3"]
    after = contents(tmp_path / "run")
    assert {name: after.pop(name) for name in before} == before
    assert len(after) == 1, "what could not be removed"
    Storage().remove_leftovers(str(tmp_path / "run"))
    assert contents(tmp_path / "run") == before
    check_next_save(tmp_path / "run")


# -- full disks --------------------------------------------------------------------------------------------------


@pytest.mark.needs("root", "mount")
@pytest.mark.parametrize(
    ("small", "large"),
    [
        (f"size={2 * ABOUT_BYTES + ABOUT_BYTES // 2}", "size=16m"),
        ("size=16m,nr_inodes=4", "nr_inodes=100"),  # the root directory, that of the checkpoints, and two of these
    ],
    ids=["bytes", "inodes"],
)
def test_a_full_disk(small: str, large: str, tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", small) as disk:
        before = two_saved(disk / "run")
        for _ in range(2):  # the first failure must not have used up what was left
            failures = Run(str(disk / "run"), "", (3,)).save()
            check_failure(disk / "run", before, failures, os.strerror(errno.ENOSPC))
        subprocess.run(["mount", "-o", f"remount,{large}", str(disk)], check=True)
        check_next_save(disk / "run")


# -- directories that cannot be written --------------------------------------------------------------------------


@pytest.mark.needs("root", "mount")
def test_a_file_system_that_became_read_only(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", "size=16m") as disk:
        before = two_saved(disk / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        failures = Run(str(disk / "run"), "", (3,)).save()
        check_failure(disk / "run", before, failures, os.strerror(errno.EROFS))
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        check_next_save(disk / "run")


@pytest.mark.needs("root")
def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    """Permissions mean nothing to root, so another user saves."""
    before = two_saved(tmp_path / "run")
    for place in [tmp_path, *tmp_path.parents[:-2]]:  # pytest's directories are for its user alone
        place.chmod(place.stat().st_mode | 0o011)
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o777)
    run = Run(str(tmp_path / "run"), str(tmp_path / "out" / "result"), (3,), uid=65534)
    process = multiprocessing.get_context("forkserver").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == 0
    failures = json.loads(Path(run.result).read_text())
    check_failure(tmp_path / "run", before, failures, os.strerror(errno.EACCES))
    check_next_save(tmp_path / "run")
