"""After every prefix of what saves, rotations and restarts do to a disk, under a model that forgets whatever it may."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_ft import _attempt, _direct, _engine, events
from lightning_ft.storage import Storage
from tests.crash import harness
from tests.crash.explore import Explored, Explorer, lay_out
from tests.crash.harness import Saver, save_steps
from tests.crash.model import Disk, Operation
from tests.crash.recorded_os import Recording

PATH = ("runs", "1")


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kilobytes take several writes, as a large checkpoint would."""
    monkeypatch.setattr(_attempt, "BUFFER_BYTES", 1024)
    monkeypatch.setattr(_attempt, "CHUNK_BYTES", 2048)
    monkeypatch.setattr(_direct, "BUFFERS", _direct.DiskBuffers(4096, 3))


def record(root: Path, saver: Saver, breakage: Callable[[], None] = lambda: None) -> tuple[list[Operation], Disk]:
    """The log of what `saver` does, and what was there before."""
    recording = Recording(str(root))

    def report(event: events.Event) -> None:
        if isinstance(event, events.Committed):
            recording.report(event.step)

    stop = events.observe(report)
    try:
        with recording.recording():
            breakage()  # above the layer: what is left out is left out of the log
            save_steps(saver)
    finally:
        stop()
    return recording.log, recording.base


def explored(tmp_path: Path, saver: Saver, breakage: Callable[[], None] = lambda: None, **how: object) -> Explored:
    place, root = tmp_path / "place", tmp_path / "root"
    place.mkdir()
    root.mkdir()
    log, base = record(root, saver, breakage)
    return Explorer(place, PATH, saver.keep).explore(log, base, **how)  # type: ignore[arg-type]


def a_saver(tmp_path: Path, keep: int = 2, rotates: str = "callback", steps: int = 4) -> Saver:
    return Saver(str(tmp_path.joinpath("root", *PATH)), keep, rotates, steps=steps, numbers=2500)


@pytest.mark.parametrize("rotates", ["callback", "user"])
@pytest.mark.parametrize("keep", [1, 2])
def test_no_crash_loses_a_checkpoint(keep: int, rotates: str, tmp_path: Path) -> None:
    found = explored(tmp_path, a_saver(tmp_path, keep, rotates))
    print(f"{found.states} states after {found.prefixes} operations, {len(found.violations)} violations")
    assert found.violations == []
    assert found.states > 1000


@pytest.mark.parametrize("every", [401, pytest.param(29, marks=pytest.mark.slow)])
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
        found = Explorer(place, PATH, 2).explore(log, base, reported=reported)
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


# -- that all this can fail --------------------------------------------------------------------------------------


def syncs_no(what: str) -> None:
    fsync = os.fsync

    def fsync_the_other(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) != (what == "directory"):
            fsync(descriptor)

    os.fsync = fsync_the_other  # type: ignore[assignment]


BREAKAGES: dict[str, tuple[Callable[[], None], str]] = {
    "no_file_sync": (lambda: syncs_no("file"), "not whole under their final names"),
    "no_directory_sync": (lambda: syncs_no("directory"), "was reported, and of"),
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
        (_attempt, "attempt_name"),
        (_attempt.LocalAttempt, "_write_all"),
        (Storage, "open_attempt"),
        (_engine.Writer, "_write"),
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
