"""Damaged files, full disks, failing system calls: noticed before anything is restored, and never the end of a run."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import lightning_ft as ft
from lightning_ft import events
from lightning_ft._names import parse_leftover
from lightning_ft._saving.engine import SaveTask, Writer
from lightning_ft.manifest import EOCD_SIGNATURE
from tests.trainer import runs
from tests.trainer.runs import Line, fit, trainer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small file system of its own; really small: writing more to it really fails."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"disk{len(mounted)}"
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=True)
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)


class Ballast(Callback):
    """Makes every checkpoint 1 MiB larger than it would be."""

    def state_dict(self) -> dict[str, Any]:
        return {"ballast": torch.zeros(2**18)}


class Kept(Callback):
    """Fails if anything is restored: nothing of a damaged file may get so far."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("state of a damaged checkpoint was applied")

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}


def ours(dirpath: Any, **kwargs: Any) -> ft.FaultTolerantCheckpoint:
    return ft.FaultTolerantCheckpoint(dirpath, **{"every_n_train_steps": 2, **kwargs})


def no_attempts(dirpath: Path) -> bool:
    return not [name for name in os.listdir(dirpath) if parse_leftover(name)]


# -- E2: the system's temporary directory ------------------------------------------------------------------------


def test_e2_no_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))

    def start(epochs: int) -> Line:
        callbacks = ours(tmp_path / "run"), runs.every_step(tmp_path / "best")
        return fit(trainer(*callbacks, max_epochs=epochs), ckpt_path="last")

    assert start(1).epochs == [0]
    assert len(runs.good(tmp_path / "run")) == 3
    assert len(runs.good(tmp_path / "best")) == 1
    assert start(2).epochs == [1]


@pytest.mark.needs("root", "mount")
def test_e2_a_tiny_temporary_directory(
    tmp_path: Path, small_disk: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller than a checkpoint, and on another file system, where a rename would be a copy."""
    tiny = small_disk("size=64k")
    monkeypatch.setattr(tempfile, "tempdir", str(tiny))
    fit(trainer(ours(tmp_path / "run"), Ballast()))
    assert len(runs.good(tmp_path / "run")) == 3
    assert os.listdir(tiny) == []


def test_e2_plain_lightning_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError, match="missing"):
        fit(trainer(runs.every_step(tmp_path / "best")))


# -- E4: truncated files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [0.0, "one byte", 0.5, 0.99])
def test_e4_truncated_newest(left: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs.first_run(tmp_path)
    newest = tmp_path / "step=00000006.ckpt"
    runs.damage(newest, 1.5 / newest.stat().st_size if left == "one byte" else left)
    model = fit(trainer(ours(tmp_path)), ckpt_path="last")
    assert model.steps[0][1] == 4
    assert f"passed over {newest}: truncated or not a zip archive" in caplog.text


@pytest.mark.parametrize("left", [0.5, 0.99])
def test_e4_plain_lightning_ends_there(left: float, tmp_path: Path) -> None:
    def start() -> Line:
        plain = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, save_last=True)
        return fit(trainer(plain), ckpt_path="last")

    start()
    runs.damage(tmp_path / "last.ckpt", left)
    with pytest.raises((RuntimeError, OSError, EOFError)):
        start()


# -- E4: a full disk ---------------------------------------------------------------------------------------------


@pytest.mark.needs("root", "mount")
def test_e4_full_disk_ends_the_run_with_the_reason(tmp_path: Path, small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("size=2m")  # for one checkpoint and a half
    with pytest.raises(ft.SaveError, match=r"step=00000004.ckpt.*No space left on device"):
        fit(trainer(ours(disk), Ballast()))
    assert runs.good(disk) == ["step=00000002.ckpt"] == runs.names(disk)
    assert no_attempts(disk)
    # There is room again: the restart takes the one before.
    subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
    assert fit(trainer(ours(disk), Ballast()), ckpt_path="last").steps[0][1] == 2


@pytest.mark.needs("root", "mount")
@pytest.mark.parametrize("options", ["size=4m", "size=64m,nr_inodes=6"])
def test_e4_full_for_a_while(
    options: str, tmp_path: Path, small_disk: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """With ``on_error="warn"`` training goes on, and saves again as soon as it can."""
    disk = small_disk(options)
    plugin = ft.FaultTolerantCheckpointIO(on_error="warn", retries=0)

    def fill(trainer: Any) -> None:
        plugin.drain()
        if trainer.global_step == 3:
            (disk / "filler").mkdir()
            for number in range(8):
                with contextlib.suppress(OSError):
                    (disk / "filler" / str(number)).write_bytes(bytes(2**19))
        elif trainer.global_step == 5:
            shutil.rmtree(disk / "filler")

    fit(trainer(runs.Each(fill), ours(disk, keep_last=1, guards=()), Ballast(), plugins=[plugin]))
    assert runs.good(disk) == ["step=00000008.ckpt"] == runs.names(disk)
    assert no_attempts(disk)
    failed = [r.message for r in caplog.records if "was not saved" in r.message]
    assert len(failed) == 1
    assert "step=00000004.ckpt" in failed[0]
    assert "No space left on device" in failed[0]


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
def test_e4_injected(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No space in write, flush and rename, once: nothing is left of that save, and the next one succeeds."""
    original, where = getattr(os, call), tmp_path / "run"
    armed: list[bool] = []

    def arm(event: events.Event) -> None:
        if isinstance(event, events.AttemptOpened) and event.path.endswith("step=00000004.ckpt"):
            armed.append(True)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if armed:
            armed.clear()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args, **kwargs)

    monkeypatch.setattr(os, call, failing)
    plugin = ft.FaultTolerantCheckpointIO(on_error="warn")
    with runs.observing(arm), runs.recorded() as seen:
        fit(trainer(ours(where, keep_last=-1), plugins=[plugin]))
    (failed,) = [e for e in seen if isinstance(e, events.SaveFailed)]
    assert failed.step == 4
    assert runs.good(where) == [f"step=0000000{step}.ckpt" for step in (8, 6, 2)] == runs.names(where)[::-1]
    assert no_attempts(where)


def test_e4_noticed_after_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that is heard of when the last state is already on its way does not have that state saved twice."""
    queued, where = threading.Event(), tmp_path / "run"
    original = Writer.save

    def save(writer: Writer, task: SaveTask) -> None:
        original(writer, task)
        if task.path.endswith("step=00000008.ckpt"):
            queued.set()

    def fail(event: events.Event) -> None:
        if isinstance(event, events.AttemptOpened) and event.path.endswith("step=00000006.ckpt"):
            assert queued.wait(60)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Writer, "save", save)
    with runs.observing(fail), runs.recorded() as seen:
        fit(trainer(ours(where, keep_last=-1), plugins=[ft.FaultTolerantCheckpointIO(on_error="warn")]))
    assert [e.step for e in seen if isinstance(e, events.SaveFailed)] == [6]
    assert runs.good(where) == [f"step=0000000{step}.ckpt" for step in (8, 4, 2)] == runs.names(where)[::-1]


SAVER = """
import sys, torch, lightning_ft as ft
plugin = ft.FaultTolerantCheckpointIO(async_save=False, retries=0)
for step in (1, 2, 3):
    try:
        state = {"state_dict": {"w": torch.zeros(5000)}, "global_step": step}
        plugin.save_checkpoint(state, f"{sys.argv[1]}/{step}.ckpt")
    except ft.SaveError as error:
        print(step, error)
"""


@pytest.mark.needs("strace")
@pytest.mark.parametrize(
    ("inject", "word", "failed"),
    [
        # Each save syncs its file, then its directory: the third sync is the second save's file.
        ("fsync:error=EIO:when=3", "Input/output error", "2"),
        ("rename:error=ENOSPC:when=2", "No space left on device", "2"),
    ],
)
def test_e4_by_the_kernel(inject: str, word: str, failed: str, tmp_path: Path) -> None:
    """One of three saves fails in a real system call."""
    trace = ["-e", f"trace={inject.partition(':')[0]}", "-e", f"inject={inject}"]
    done = subprocess.run(
        ["strace", "--seccomp-bpf", "-f", "-qq", "-o", "/dev/null", *trace, sys.executable, "-c", SAVER, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert word in done.stdout
    assert done.stdout.startswith(f"{failed} ")
    assert sorted(os.listdir(tmp_path)) == [f"{step}.ckpt" for step in "123" if step != failed]
    assert all(info.problem is None for info in ft.list_checkpoints(str(tmp_path)))


# -- E5: bits ----------------------------------------------------------------------------------------------------


def places(path: Path) -> dict[str, tuple[int, int]]:
    """The parts of a checkpoint as ranges of bytes."""
    data = path.read_bytes()
    end = data.rfind(EOCD_SIGNATURE, 0, data.find(b'{"lightning_ft"'))
    parts = {"end record": (end, end + 22), "manifest": (end + 22, len(data))}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            name = info.filename.partition("/")[2]
            first = info.header_offset + 30 + len(info.filename)
            first += int.from_bytes(data[info.header_offset + 28 : info.header_offset + 30], "little")
            if name in ("data.pkl", "data/0") and info.file_size:
                parts[name] = (first, first + info.file_size)
        parts["directory"] = (archive.start_dir, end)
    return parts


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("part", ["data/0", "data.pkl", "directory", "end record", "manifest"])
def test_e5_one_bit(part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Noticed before any state is applied, explicitly and by "last", which falls back to the one before."""
    runs.first_run(tmp_path, Kept())
    newest = tmp_path / "step=00000006.ckpt"
    first, last = places(newest)[part]
    chosen = random.Random(part).sample(range(8 * first, 8 * last), 12)
    for bit in chosen:
        flip(newest, bit)
        assert ft.verify(str(newest)).problem is not None
        flip(newest, bit)
    assert ft.verify(str(newest)).problem is None
    flip(newest, chosen[0])
    with pytest.raises(ft.CheckpointError, match=r"damaged|truncated|digest"):
        fit(trainer(ours(tmp_path), Kept()), ckpt_path=newest)
    flip(tmp_path / "step=00000004.ckpt", 8000)
    with pytest.raises(AssertionError, match="was applied"):  # the oldest is good: now it is applied
        fit(trainer(ours(tmp_path), Kept()), ckpt_path="last")
    assert caplog.text.count("passed over") == 2


def strip_manifest(path: Path) -> None:
    """The file is as `torch.save` would have written it: a whole archive that says nothing of itself."""
    data = path.read_bytes()
    end, _ = places(path)["end record"]
    path.write_bytes(data[: end + 20] + b"\0\0")
    assert zipfile.ZipFile(path).testzip() is None


def test_e5_stripped_manifest_is_not_good(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs.first_run(tmp_path)
    strip_manifest(tmp_path / "step=00000006.ckpt")
    assert ft.verify(str(tmp_path / "step=00000006.ckpt")).problem is not None
    model = fit(trainer(ours(tmp_path)), ckpt_path="last")
    assert model.steps[0][1] == 4
    assert "passed over" in caplog.text


@pytest.mark.parametrize("verify", ["full", "size", "off"])
def test_e5_stripped_manifest_given_by_hand(verify: Any, tmp_path: Path) -> None:
    runs.first_run(tmp_path)
    path = tmp_path / "step=00000006.ckpt"
    strip_manifest(path)
    plugin = ft.FaultTolerantCheckpointIO(verify=verify)
    if verify == "off":
        assert fit(trainer(ours(tmp_path), plugins=[plugin]), ckpt_path=path).steps[0][1] == 6
        return
    with pytest.raises(ft.CorruptCheckpointError, match="manifest"):
        fit(trainer(ours(tmp_path), plugins=[plugin]), ckpt_path=path)


def test_e5_plain_lightning_loads_it(tmp_path: Path) -> None:
    """The same bit of tensor data, by plain Lightning: other weights, without a word."""
    runs.first_run(tmp_path, Ballast())
    path = tmp_path / "step=00000006.ckpt"
    before = torch.load(path, weights_only=True)["state_dict"]["layer.weight"]
    offset = path.read_bytes().find(before.numpy().tobytes())
    flip(path, 8 * offset + 3)
    plain = Line()
    trainer().validate(plain, runs.s.val_loader(), ckpt_path=path, verbose=False)
    assert not torch.equal(plain.layer.weight, before)
    with pytest.raises(ft.CorruptCheckpointError, match="digest"):
        trainer(plugins=[ft.FaultTolerantCheckpointIO()]).validate(Line(), runs.s.val_loader(), ckpt_path=path)


# -- E10: never into an existing file ----------------------------------------------------------------------------


def test_e10_existing_checkpoints_are_not_written_into(tmp_path: Path) -> None:
    runs.first_run(tmp_path, keep_last=-1)
    before = {name: (tmp_path / name).read_bytes() for name in runs.names(tmp_path)}
    fit(trainer(ours(tmp_path, keep_last=-1), max_steps=6))
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert set(runs.names(tmp_path)) - set(before) == {f"step=0000000{step}-v1.ckpt" for step in (2, 4, 6)}


def test_e10_saving_by_hand_over_a_file_replaces_it_as_a_whole(tmp_path: Path) -> None:
    """The user's own path is the user's decision; until the new file is durable, the old one is there and whole."""
    path = tmp_path / "mine.ckpt"
    seen: list[int] = []

    def look(event: events.Event) -> None:
        if isinstance(event, (events.AttemptOpened, events.DataSynced)) and event.path == str(path) and path.exists():
            info = ft.verify(str(path))
            assert info.problem is None
            assert info.manifest is not None
            seen.append(info.manifest.step)

    def save(trainer: Any) -> None:
        if trainer.global_step in (2, 4):
            trainer.save_checkpoint(path)

    with runs.observing(look):
        fit(trainer(runs.Each(save), ours(tmp_path / "run")))
    assert seen == [2, 2]
    info = ft.verify(str(path))
    assert info.manifest is not None
    assert (info.problem, info.manifest.step) == (None, 4)
