"""After every prefix of what saves, rotations and restarts do to a disk, under a model that forgets whatever it may."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lightning_ft as ft
from lightning_ft import events
from lightning_ft._disk import attempt
from lightning_ft._saving import task
from lightning_ft.storage import Storage
from tests.crash import harness, parted_store
from tests.crash.explore import Explored, Explorer, LocalShop, lay_out
from tests.crash.harness import Saver, save_steps
from tests.crash.model import Disk, Operation, Reported
from tests.crash.parted_store import PartedStore
from tests.crash.recorded_os import Recording

PATH = ("runs", "1")

pytestmark = pytest.mark.usefixtures("small_buffers")


@contextlib.contextmanager
def reporting(log: list[Operation]) -> Iterator[None]:
    """What is said to be durable is logged."""

    def report(event: events.Event) -> None:
        if isinstance(event, events.Committed):
            log.append(Reported(event.step))

    stop = events.observe(report)
    try:
        yield
    finally:
        stop()


def record(
    root: Path, saver: Saver, breakage: Callable[[], None] = lambda: None, starts: int = 1
) -> tuple[list[Operation], Disk]:
    """The log of what `saver` does in so many starts, and what was there before."""
    recording = Recording(str(root))
    with reporting(recording.log), recording.recording():
        breakage()  # above the layer: what is left out is left out of the log
        for start in range(starts):
            with contextlib.suppress(*([ft.SaveError] if start < starts - 1 else [])):
                save_steps(saver)
    return recording.log, recording.base


def explored(tmp_path: Path, saver: Saver, breakage: Callable[[], None] = lambda: None, **how: object) -> Explored:
    place, root = tmp_path / "place", tmp_path / "root"
    place.mkdir()
    root.mkdir()
    log, base = record(root, saver, breakage)
    return Explorer(LocalShop(place), PATH, saver.keep).explore(log, base, **how)  # type: ignore[arg-type]


def a_saver(tmp_path: Path, keep: int = 2, rotates: str = "callback", steps: int = 4) -> Saver:
    return Saver(str(tmp_path.joinpath("root", *PATH)), keep, rotates, steps=steps, numbers=2500)


@pytest.mark.parametrize(
    ("keep", "rotates"),
    [
        (2, "callback"),
        (1, "user"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in [(1, "callback"), (2, "user")]),
    ],
)
def test_no_crash_loses_a_checkpoint(keep: int, rotates: str, tmp_path: Path) -> None:
    found = explored(tmp_path, a_saver(tmp_path, keep, rotates))
    print(f"{found.states} states after {found.prefixes} operations, {len(found.violations)} violations")
    assert found.violations == []
    assert found.states > 1000


@pytest.mark.parametrize("every", [401, pytest.param(83, marks=pytest.mark.slow)])
def test_no_crash_after_a_crash_loses_a_checkpoint(every: int, tmp_path: Path) -> None:
    """The next start is recorded in some of the states that the crashes before may have left, and explored too."""
    first = explored(tmp_path, a_saver(tmp_path), every=every)
    assert len(first.later) > 5
    states = 0
    for number, (disk, reported) in enumerate(first.later):
        root = tmp_path / f"again-{number}"
        (place := tmp_path / f"place-{number}").mkdir()
        root.mkdir()
        lay_out(disk, PATH, root)
        log, base = record(root, Saver(str(root.joinpath(*PATH)), 2, steps=2))
        found = Explorer(LocalShop(place), PATH, 2).explore(log, base, reported=reported)
        assert found.violations == []
        left = [name for name in os.listdir(root.joinpath(*PATH)) if name.startswith(".")]
        assert left == []
        states += found.states
    print(f"{states} states after {len(first.later)} restarts, 0 violations")


def test_a_disk_that_does_not_sync_is_not_believed(tmp_path: Path) -> None:
    """It acknowledges and forgets: checkpoints are torn under their final names. None of them is taken."""
    found = explored(tmp_path, a_saver(tmp_path, keep=3, steps=2), lying=True)
    print(f"{found.states} states after {found.prefixes} operations, {len(found.violations)} violations")
    assert found.violations == []
    assert found.states > 1000


@pytest.mark.slow
@pytest.mark.parametrize("lying", [False, True])
def test_no_crash_hides_the_newest_of_many(lying: bool, tmp_path: Path) -> None:
    """In a directory so large that not all of it need be read to find the newest."""
    saver = replace(a_saver(tmp_path, keep=12, steps=13), numbers=100)
    found = explored(tmp_path, saver, lying=lying)
    print(f"{found.states} states after {found.prefixes} operations, {len(found.violations)} violations")
    assert found.violations == []
    assert found.states > 150


@pytest.mark.parametrize("name", ["fsync", *(pytest.param(n, marks=pytest.mark.slow) for n in ("pwrite", "replace"))])
def test_no_crash_around_a_failed_save_loses_a_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of the third save fails, which ends the run; a second start follows."""
    (place := tmp_path / "place").mkdir()
    (root := tmp_path / "root").mkdir()
    failed = []

    def fail_once() -> None:
        original = getattr(os, name)

        def call(*args: Any) -> Any:
            committed = [path for path in Path(saver.dirpath).glob("*.ckpt") if not path.name.startswith(".")]
            if len(committed) == 2 and not failed:
                failed.append(name)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return original(*args)

        monkeypatch.setattr(os, name, call)

    saver = a_saver(tmp_path, keep=2, steps=3)
    with monkeypatch.context():
        log, base = record(root, saver, fail_once, starts=2)
    assert failed
    found = Explorer(LocalShop(place), PATH, 2).explore(log, base)
    print(f"{found.states} states after {found.prefixes} operations, {len(found.violations)} violations")
    assert found.violations == []
    # A sync that fails after the rename leaves the checkpoint there, whole: the second start goes on from it.
    reported = [op.step for op in log if isinstance(op, Reported)]
    assert reported == [step for step in range(1, reported[-1] + 1) if step != 2 or name != "fsync"]
    assert reported[-1] >= 5


# -- an object store ---------------------------------------------------------------------------------------------


@pytest.fixture
def _empty_store() -> Iterator[None]:
    yield
    PartedStore.objects, PartedStore.log, PartedStore.shows_parts = {}, [], False


def explored_store(breakage: Callable[[], None] = lambda: None, **how: Any) -> Explored:
    PartedStore.objects, PartedStore.log = {}, []
    log = PartedStore.log
    with reporting(log):
        breakage()
        save_steps(Saver("parted://bucket/run", keep=2, steps=4, numbers=2500))
    return Explorer(parted_store.Shop(), (), keep=2).explore(log, Disk(), **how)


@pytest.mark.usefixtures("_empty_store")
def test_no_crash_loses_an_object() -> None:
    found = explored_store()
    print(f"{found.states} states after {found.prefixes} operations, {len(found.violations)} violations")
    assert found.violations == []
    assert found.states >= 10


@pytest.mark.usefixtures("_empty_store")
def test_a_store_that_loses_parts_is_not_believed() -> None:
    """It publishes what it has of an object. None of these is taken, and the newest that is whole is."""
    found = explored_store(lying=True)
    print(f"{found.states} states after {found.prefixes} operations, {len(found.violations)} violations")
    assert found.violations == []
    assert found.states > 1000


# -- that all this can fail --------------------------------------------------------------------------------------


def syncs_no(what: str) -> None:
    fsync = os.fsync

    def fsync_the_other(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) != (what == "directory"):
            fsync(descriptor)

    os.fsync = fsync_the_other  # type: ignore[assignment]


def make_dirs_and_sync_nothing(dirpath: str) -> None:
    os.makedirs(dirpath, exist_ok=True)


BREAKAGES: dict[str, tuple[Callable[[], None], str]] = {
    "no_file_sync": (lambda: syncs_no("file"), "not whole under their final names"),
    "no_directory_sync": (lambda: syncs_no("directory"), "was reported, and of"),
    "no_sync_of_parents": (
        lambda: setattr(attempt, "make_dirs", make_dirs_and_sync_nothing),
        "was reported, and of",
    ),
    "early_rename": (harness.BREAKAGES["early_rename"], "not whole under their final names"),
    "in_place": (harness.BREAKAGES["in_place"], "not whole under their final names"),
    "delete_first": (harness.BREAKAGES["delete_first"], "was reported, and of"),
    "early_commit": (harness.BREAKAGES["early_commit"], "was reported, and of"),
}


@pytest.fixture
def unbroken() -> Iterator[None]:
    """What the breakages replace is put back."""
    patched = [
        (os, "fsync"),
        (attempt, "attempt_name"),
        (attempt, "make_dirs"),
        (attempt.LocalAttempt, "_put"),
        (Storage, "open_attempt"),
        (task.SaveTask, "write"),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name in patched]
    yield
    for owner, name, original in originals:
        setattr(owner, name, original)


@pytest.mark.usefixtures("unbroken")
@pytest.mark.parametrize("broken", BREAKAGES)
def test_the_model_catches_a_protocol_that_is_wrong(broken: str, tmp_path: Path) -> None:
    breakage, what = BREAKAGES[broken]
    found = explored(tmp_path, a_saver(tmp_path), breakage)
    assert [violation for violation in found.violations if what in violation]


def shows_parts() -> None:
    PartedStore.shows_parts = True


@pytest.mark.usefixtures("unbroken", "_empty_store")
@pytest.mark.parametrize(
    ("breakage", "what"),
    [
        (shows_parts, "not whole under their final names"),
        (harness.BREAKAGES["delete_first"], "was reported, and of"),
        (harness.BREAKAGES["early_commit"], "was reported, and of"),
    ],
    ids=["shows_parts", "delete_first", "early_commit"],
)
def test_the_model_catches_uploads_that_are_wrong(breakage: Callable[[], None], what: str) -> None:
    found = explored_store(breakage)
    assert [violation for violation in found.violations if what in violation]
