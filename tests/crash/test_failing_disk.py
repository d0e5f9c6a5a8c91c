"""A disk whose writes fail: the file system on it gives up, and everything that had been saved is there afterwards."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import lightning_ft as ft
from lightning_ft._names import parse_leftover
from lightning_ft.storage import Storage
from tests.crash.faults import Run, check_next_save, contents, two_saved


def _run(*command: object) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout.strip()


class FailingDisk:
    """An ext4 on a block device (nbdkit, and a loop device over nbdfuse) whose writes fail while `failing` is set."""

    def __init__(self, place: Path, device: str) -> None:
        self.path = place / "mnt"
        self._device = device
        self._flag = place / "fail"

    @property
    def failing(self) -> bool:
        """Whether writes fail."""
        return self._flag.exists()

    @failing.setter
    def failing(self, failing: bool) -> None:
        if failing:
            self._flag.touch()
        else:
            self._flag.unlink(missing_ok=True)

    def mount(self) -> None:
        _run("mount", self._device, self.path)

    def unmount(self) -> None:
        _run("umount", self.path)


@contextmanager
def failing_disk(place: Path) -> Iterator[FailingDisk]:
    with ExitStack() as stack:
        for name in ("mnt", "fuse"):
            (place / name).mkdir(parents=True)
        device_file = place / "fuse" / "disk"
        device_file.touch()
        errors = ["error-pwrite=EIO", "error-pwrite-rate=100%", f"error-pwrite-file={place / 'fail'}"]
        ends = ["--foreground", "--exit-with-parent", "-U", place / "socket", "-P", place / "pid"]
        server = subprocess.Popen(["nbdkit", *ends, "--filter=error", "memory", "32M", *errors])
        stack.callback(server.wait)
        stack.callback(server.terminate)
        _until(lambda: (place / "pid").exists(), server)
        fuse = subprocess.Popen(["nbdfuse", device_file, f"nbd+unix:///?socket={place / 'socket'}"])
        stack.callback(fuse.wait)
        stack.callback(_run, "fusermount3", "-u", device_file)
        _until(lambda: os.path.ismount(device_file), fuse)
        device = _run("losetup", "-f", "--show", device_file)
        stack.callback(_run, "losetup", "-d", device)
        _run("mkfs.ext4", "-q", device)
        disk = FailingDisk(place, device)
        disk.mount()
        stack.callback(disk.unmount)
        yield disk
        disk.failing = False


def _until(there: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    while not there():
        with pytest.raises(subprocess.TimeoutExpired):  # it ends only if it could not do it
            process.wait(0.02)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.needs("root", "loop", "fuse", "fusermount3", "nbdkit", "nbdfuse", "mkfs.ext4")
def test_a_disk_that_fails_and_comes_back(tmp_path: Path) -> None:
    with failing_disk(tmp_path / "disk") as disk:
        run = disk.path / "run"
        before = two_saved(run)
        disk.failing = True
        failures = Run(str(run), "", (3,)).save()
        assert list(failures) == ["3"]
        assert os.strerror(errno.EIO) in failures["3"] or os.strerror(errno.EROFS) in failures["3"]
        assert f"{run}/step=00000003.ckpt (step 3) was not saved" in failures["3"]
        # It reads what it has, and is read-only until somebody looks at it.
        assert ft.last_good(str(run)) is not None
        disk.failing = False
        disk.unmount()
        disk.mount()
        Storage().remove_leftovers(str(run))
        after = contents(run)
        assert {name: after.get(name) for name in before} == before
        assert not [name for name in after if parse_leftover(name)]
        check_next_save(run)
