from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ft._disk import threaded_file
from lightning_ft._disk.threaded_file import ThreadedFile
from lightning_ft.storage import Storage

PIECE = 1 << 10
WAIT_SECS = 30
MIB = 1 << 20

Preadv = Callable[[int, Any, int], int]


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threaded_file, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(threaded_file, "usable_threads", lambda: 3)


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "file").write_bytes(os.urandom(20 * PIECE + 17))
    return str(tmp_path / "file")


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning-ft-read")]


def replace_preadv(monkeypatch: pytest.MonkeyPatch, make: Callable[[Preadv], Preadv]) -> None:
    monkeypatch.setattr(os, "preadv", make(os.preadv))


@pytest.mark.parametrize("start", [0, 1, PIECE, 5 * PIECE - 3, 20 * PIECE + 17, 30 * PIECE])
@pytest.mark.parametrize("size", [0, 1, 2 * PIECE - 1, 2 * PIECE, 7 * PIECE + 5, 40 * PIECE])
def test_it_reads_what_a_plain_file_reads(path: str, start: int, size: int) -> None:
    found = []
    for kind in (ThreadedFile, partial(open, mode="rb")):
        with kind(path) as file:
            buffer = bytearray(size)
            file.seek(start)
            file.read(3)  # leaves bytes in the file's own buffer
            count = file.readinto(buffer)
            found.append((count, bytes(buffer), file.tell(), file.read(5)))
    assert found[0] == found[1]


def test_every_byte_is_read_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def make(real: Preadv) -> Preadv:
        def counted(fd: int, buffers: Any, offset: int) -> int:
            count = real(fd, buffers, offset)
            read.extend(range(offset, offset + count))
            return count

        return counted

    replace_preadv(monkeypatch, make)
    with ThreadedFile(path) as file:
        assert file.readinto(bytearray(20 * PIECE)) == 20 * PIECE
    assert sorted(read) == list(range(20 * PIECE))


def test_a_system_call_may_read_less_than_asked(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_preadv(monkeypatch, lambda real: lambda fd, buffers, at: real(fd, [buffers[0][:100]], at))
    buffer = bytearray(20 * PIECE)
    with ThreadedFile(path) as file:
        assert file.readinto(buffer) == 20 * PIECE
    assert buffer == Path(path).read_bytes()[: 20 * PIECE]


def test_the_work_is_shared_and_no_thread_outlives_the_file(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3)

    def make(real: Preadv) -> Preadv:
        def meets(fd: int, buffers: Any, offset: int) -> int:
            if offset < 3 * PIECE:  # the first three pieces: none goes on until three threads are here
                together.wait(WAIT_SECS)
            return real(fd, buffers, offset)

        return meets

    replace_preadv(monkeypatch, make)
    with ThreadedFile(path) as file:
        file.readinto(bytearray(20 * PIECE))
        assert len(readers()) == 2
    assert readers() == []


@pytest.mark.parametrize(("threads", "size"), [(1, 20 * PIECE), (3, 2 * PIECE - 1)])
def test_one_processor_or_a_small_read_takes_no_thread(
    path: str, monkeypatch: pytest.MonkeyPatch, threads: int, size: int
) -> None:
    monkeypatch.setattr(threaded_file, "usable_threads", lambda: threads)
    replace_preadv(monkeypatch, lambda real: lambda *args: pytest.fail("shared"))
    with ThreadedFile(path) as file:
        assert file.readinto(bytearray(size)) == size


@pytest.mark.parametrize("by_main", [True, False])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "disk"), KeyboardInterrupt()])
def test_whoever_fails_nothing_is_written_into_the_buffer_afterwards(
    path: str, monkeypatch: pytest.MonkeyPatch, by_main: bool, error: BaseException
) -> None:
    inside, failed = threading.Event(), threading.Event()
    finished: list[bool] = []

    def make(real: Preadv) -> Preadv:
        def one_fails(fd: int, buffers: Any, offset: int) -> int:
            if (threading.current_thread() is threading.main_thread()) is by_main and not failed.is_set():
                assert inside.wait(WAIT_SECS)
                failed.set()
                raise error
            inside.set()
            assert failed.wait(WAIT_SECS)
            finished.append(bool(real(fd, buffers, offset)))
            return len(buffers[0])

        return one_fails

    replace_preadv(monkeypatch, make)
    file = ThreadedFile(path)
    with pytest.raises(type(error)):
        file.readinto(bytearray(20 * PIECE))
    finished_at_once = len(finished)
    file.close()
    assert 1 <= len(finished) == finished_at_once <= 2  # and the pieces that were left were not read


def test_interrupted_while_it_waits_it_goes_on_waiting(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, interrupts = ThreadPoolExecutor.shutdown, [KeyboardInterrupt(), KeyboardInterrupt()]

    def interrupted(self: ThreadPoolExecutor, **how: Any) -> None:
        if interrupts:
            raise interrupts.pop()
        real(self, **how)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", interrupted)
    file = ThreadedFile(path)
    file.readinto(bytearray(20 * PIECE))
    assert readers()
    with pytest.raises(KeyboardInterrupt):
        file.close()
    assert readers() == []


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_loads_through_it_what_it_loads_without(tmp_path: Path, zipped: bool) -> None:
    base = torch.randn(3, 5000)
    torch.save(
        {"a": base, "tied": base[1], "b": torch.arange(9000), "few": torch.ones(3), "none": torch.empty(0)},
        tmp_path / "a.pt",
        _use_new_zipfile_serialization=zipped,
    )
    with Storage().open_read(str(tmp_path / "a.pt")) as file:
        loaded = torch.load(file, weights_only=True)
        assert bool(readers()) is zipped  # the old format is read by torch itself
    plain = torch.load(tmp_path / "a.pt", weights_only=True)
    assert all(torch.equal(loaded[key], plain[key]) for key in plain)
    assert loaded["a"].untyped_storage().data_ptr() == loaded["tied"].untyped_storage().data_ptr()


RESTART = """
import os, re, sys
import torch
from lightning_ft._restart import choose as _choose
from lightning_ft.plugin import FaultTolerantCheckpointIO

def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def bytes_read():
    return int(re.search(r"rchar: (\\d+)", open("/proc/self/io").read())[1])

torch.load(sys.argv[1] + "/warm-up.pt")
plugin = FaultTolerantCheckpointIO()
before, read = status("VmRSS"), bytes_read()
path, ours = _choose.choose(sys.argv[1], "full", None)
assert ours
chosen = bytes_read()
plugin.mark_verified(path)
checkpoint = plugin.load_checkpoint(path)
loaded = bytes_read()
mapped = open("/proc/self/maps").read().count(".ckpt")
print(status("VmHWM") - before, chosen - read, loaded - chosen, mapped)
del checkpoint
plugin.load_checkpoint(path)
print(bytes_read() - loaded)
"""


def test_a_restart_reads_the_file_twice_holds_it_once_and_maps_nothing(tmp_path: Path) -> None:
    from lightning_ft.plugin import FaultTolerantCheckpointIO

    plugin = FaultTolerantCheckpointIO(async_save=False)
    ours = {"run_id": "r", "generation": "g" * 32, "start": 1, "step": 1, "batch": 1, "boundary": "step"}
    weights = {f"w{number}": torch.zeros(MIB) for number in range(48)}  # 4 MiB each
    path = tmp_path / "step=00000001.ckpt"
    plugin.save_checkpoint({"state_dict": weights, "global_step": 1, "lightning_ft": ours}, path)
    plugin.teardown()
    torch.save(torch.ones(1), tmp_path / "warm-up.pt")  # what torch imports at the first load is not measured
    size_bytes = path.stat().st_size
    run = subprocess.run([sys.executable, "-c", RESTART, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    memory, by_choose, by_load, mapped, by_other_ranks = (int(word) for word in run.stdout.split())
    assert memory <= 1.1 * size_bytes + 64 * MIB
    assert size_bytes <= by_choose <= size_bytes + MIB
    assert 0.99 * size_bytes <= by_load <= size_bytes + MIB
    assert mapped == 0
    assert by_other_ranks <= 2 * size_bytes + MIB
