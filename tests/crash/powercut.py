"""A disk whose power can be cut, and processes that are killed right before a chosen system call.

The disk is a file, mounted through a loop device. The ioctl that stops ext4 and xfs at once drops what is only in the
page cache or the journal's memory, as a power cut does; mounting again recovers the journal. Not shown by this: a drive
that loses what it has acknowledged, or writes one sector only half.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import shutil
import signal
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Protocol

GOINGDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN are one number
CUTS = {
    "nothing more": 2,  # the journal in memory is lost too
    "journal": 1,  # names and sizes had been written back, data had not: a journal is, every few seconds
}
FILE_SYSTEMS = ("ext4", "xfs")
CHANGING = frozenset((
    "creat", "write", "pwrite64", "writev", "pwritev", "sendfile", "copy_file_range", "truncate", "ftruncate",
    "fallocate", "fsync", "fdatasync", "sync_file_range", "rename", "renameat", "renameat2", "link", "linkat",
    "symlink", "symlinkat", "unlink", "unlinkat", "rmdir", "mkdir", "mkdirat", "chmod", "fchmod", "fchmodat",
    "utimensat",
))  # fmt: skip
OTHER = frozenset(("openat", "open", "close", "read", "pread64", "fcntl", "getdents64", "lseek", "mmap"))


class Job(Protocol):
    """What a fresh process is to do; importable, and the same calls in the same order every time."""

    def warm_up(self) -> None:
        """What is imported and made on first use is there, so that `__call__` makes its own calls only."""

    def __call__(self) -> None: ...


Point = tuple[str, int]
"""A system call and its number, counted for each thread and each system call by itself, from 1."""


class Disk:
    """A mounted file system of its own in a temporary directory; root only.

    Args:
        kind: "ext4" or "xfs".
        mib: Size; xfs accepts no less than 300.
    """

    def __init__(self, kind: str, mib: int = 64) -> None:
        self.kind = kind
        self._place = Path(tempfile.mkdtemp(prefix="powercut-"))
        self._image, self.path = self._place / "image", self._place / "mnt"
        self.path.mkdir()
        with open(self._image, "wb") as file:
            file.truncate(max(mib, 300 if kind == "xfs" else 0) << 20)
        if kind == "xfs":
            _run("mkfs.xfs", "-q", "-f", self._image)
        else:
            _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", self._image)
        self._mount()

    def _mount(self) -> None:
        # Without the options ext4 flushes a file that is renamed over another one, which hides a missing fsync, and
        # its timer makes things durable by luck.
        options = "loop,commit=600,noauto_da_alloc" if self.kind == "ext4" else "loop"
        _run("mount", "-o", options, self._image, self.path)

    def sync(self) -> None:
        """Everything on this disk is durable."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            assert ctypes.CDLL(None).syncfs(descriptor) == 0
        finally:
            os.close(descriptor)

    def cut(self, what_is_written: str) -> None:
        """The power was cut and came back. Nothing may hold a file of the disk open.

        Args:
            what_is_written: One of `CUTS`.
        """
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, GOINGDOWN, struct.pack("I", CUTS[what_is_written]))
        finally:
            os.close(descriptor)
        _run("umount", self.path)
        self._mount()

    def __enter__(self) -> Disk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _run("umount", "-l", self.path)
        shutil.rmtree(self._place)


def _run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"


@dataclass(frozen=True)
class Call:
    """A system call, as strace shows it."""

    point: Point
    arguments: str
    """With the paths of descriptors."""

    @property
    def changes(self) -> bool:
        """Whether it may change a disk."""
        name = self.point[0]
        return name in CHANGING or (name in ("openat", "open") and "O_CREAT" in self.arguments)


def calls(job: Job, place: Path) -> list[Call]:
    """The system calls with which `job` touches anything below `place`, from a run of it in a fresh process."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "strace.log"
        code = traced(job, "-y", "-e", f"trace={','.join(sorted(CHANGING | OTHER))}", log=log)
        assert code == 0, f"the run that is only watched ended with {code}"
        seen: collections.Counter[tuple[str, str]] = collections.Counter()
        found: dict[Point, Call] = {}
        for line in log.read_text(errors="replace").splitlines():
            thread, _, rest = line.partition(" ")
            name, _, arguments = rest.strip().partition("(")
            if not name.isidentifier():
                continue  # the second half of a call during which another thread made one
            seen[thread, name] += 1
            point = name, seen[thread, name]
            if str(place) in arguments and point not in found:
                found[point] = Call(point, arguments)
    return list(found.values())


def points(job: Job, place: Path, only_changing: bool = False) -> list[Point]:
    """The points of these calls; killed before one that changes nothing, the disk is as before the next that does."""
    return [call.point for call in calls(job, place) if call.changes or not only_changing]


def kill_at(job: Job, point: Point | None) -> int:
    """The exit code of `job`, run in a fresh process and killed right before `point`; None: by nothing."""
    if point is None:
        return traced(job, "-e", "trace=none")
    name, number = point
    return traced(job, "-e", f"trace={name}", "-e", f"inject={name}:signal=SIGKILL:when={number}")


def traced(job: Job, *arguments: str, log: Path | None = None) -> int:
    """The exit code of `job` (-9 if killed), run in a fresh process under ``strace -f``."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_when_traced, args=(job, theirs))
    process.start()
    theirs.close()
    assert ours.recv() == "warm", f"{job} ended while it warmed up"
    command = ["strace", "-f", "-o", str(log or os.devnull), *arguments, "-p", str(process.pid)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        attached = strace.stderr.readline()
        assert "attached" in attached, attached
        with contextlib.suppress(BrokenPipeError):
            ours.send("go")
        ours.close()
        process.join(250)
        hangs = process.exitcode is None
        if hangs:
            process.kill()
            process.join()
        strace.communicate()
    assert not hangs, f"{job} hangs under strace {arguments}"
    assert process.exitcode is not None
    return process.exitcode


def _when_traced(job: Job, parent: Connection) -> None:
    signal.alarm(240)
    # Where Yama lets only a parent trace: strace is no parent of this process.
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1).value, 0, 0, 0)
    job.warm_up()
    parent.send("warm")
    parent.recv()
    job()
