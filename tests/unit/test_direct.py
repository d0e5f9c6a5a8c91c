"""What reaches a local file past the page cache, in which pieces, and what happens when that is refused or fails."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from _archives import archive, maker
from hypothesis import given
from hypothesis import strategies as st

from lightning_ft._disk import direct as _direct
from lightning_ft._disk import sink
from lightning_ft._disk.direct import ALIGN_BYTES, DiskBuffers, DiskStream
from lightning_ft.discovery import verify
from lightning_ft.storage import Storage

SMALL_BYTES = 2 * ALIGN_BYTES
NAME = "step=00000010.ckpt"
TAILS = [0, 1, ALIGN_BYTES - 1, ALIGN_BYTES, ALIGN_BYTES + 1, SMALL_BYTES - 1, SMALL_BYTES, SMALL_BYTES + 1]
Calls = list[tuple[int, int, bool]]


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> DiskBuffers:
    buffers = DiskBuffers(SMALL_BYTES, 3)
    monkeypatch.setattr(_direct, "BUFFERS", buffers)
    monkeypatch.setattr(sink, "BUFFER_BYTES", 1000)
    return buffers


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def content(fd: int) -> bytes:
    return Path(f"/proc/self/fd/{fd}").read_bytes()  # opened again, since `fd` may read whole blocks only


def streamed(fd: int, data: bytes, sizes: Any = (), expected_bytes: int | None = None) -> bytes:
    """What is in the file after `data` was written to it in pieces of `sizes` and the rest."""
    stream = DiskStream(fd, "file", expected_bytes)
    try:
        left = memoryview(data)
        for size in sizes:
            stream.write(left[:size])
            left = left[size:]
        stream.write(left)
        stream.finish()
    finally:
        stream.close()
    return content(fd)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Offset, length and whether direct, of every write."""
    seen: Calls = []
    pwrite = os.pwrite

    def record(fd: int, data: memoryview, offset: int) -> int:
        seen.append((offset, len(data), direct(fd)))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", record)
    return seen


def failing_at(at: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write at offset `at` fails; the others do not."""
    pwrite = os.pwrite

    def fail(fd: int, data: memoryview, offset: int) -> int:
        if offset == at:
            raise error
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", fail)


# -- the bytes ---------------------------------------------------------------------------------------------------


@given(data=st.binary(max_size=1000), repeat=st.integers(1, 60), sizes=st.lists(st.integers(0, 3 * SMALL_BYTES)))
def test_any_cut_of_the_stream_gives_the_same_bytes(data: bytes, repeat: int, sizes: list[int]) -> None:
    with tempfile.TemporaryFile() as file:
        assert streamed(file.fileno(), data * repeat, sizes) == data * repeat


@pytest.mark.parametrize("expected", ["none", "less", "exact", "more"])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("buffers", [0, 1, 5])
def test_every_tail(buffers: int, tail: int, expected: str, fd: int) -> None:
    data = os.urandom(buffers * SMALL_BYTES + tail)
    guess = {"none": None, "less": len(data) // 2, "exact": len(data), "more": 2 * len(data) + 10**6}[expected]
    assert streamed(fd, data, expected_bytes=guess) == data
    assert os.fstat(fd).st_blocks * 512 <= len(data) + ALIGN_BYTES, "the reservation was kept"


def test_whole_blocks_go_directly_and_the_end_does_not(fd: int, calls: Calls) -> None:
    streamed(fd, b"x" * (2 * SMALL_BYTES + ALIGN_BYTES + 5))
    blocks = [(0, SMALL_BYTES), (SMALL_BYTES, SMALL_BYTES), (2 * SMALL_BYTES, ALIGN_BYTES)]
    assert calls == [*((*block, True) for block in blocks), (2 * SMALL_BYTES + ALIGN_BYTES, 5, False)]


def test_less_than_a_buffer_is_written_by_the_caller(fd: int, monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    monkeypatch.setattr(threading.Thread, "start", None)
    streamed(fd, b"x" * (SMALL_BYTES - 1))
    assert calls == [(0, SMALL_BYTES - 1, False)]


def test_bytes_are_copied_before_write_returns(fd: int) -> None:
    buffer = bytearray(os.urandom(2 * SMALL_BYTES + 10))
    before = bytes(buffer)
    stream = DiskStream(fd, "file")
    stream.write(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    stream.finish()
    assert content(fd) == before


@pytest.mark.parametrize("at_most", [1000, ALIGN_BYTES, ALIGN_BYTES + 1])
def test_short_writes_are_completed(at_most: int, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(3 * SMALL_BYTES + 10)
    pwrite = os.pwrite

    def short(fd: int, data: memoryview, offset: int) -> int:
        assert not direct(fd) or offset % ALIGN_BYTES == 0
        if not direct(fd) or at_most % ALIGN_BYTES == 0:
            return pwrite(fd, data[:at_most], offset)
        cached = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)  # the disk below would not stop within a block
        try:
            return pwrite(cached, data[:at_most], offset)
        finally:
            os.close(cached)

    monkeypatch.setattr(os, "pwrite", short)
    assert streamed(fd, data) == data


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    data = archive(os.urandom(10 * SMALL_BYTES + 100))
    with Storage().open_attempt(str(tmp_path / NAME)) as attempt:
        attempt.write(data)
        found = attempt.commit(maker())
    written = (tmp_path / NAME).read_bytes()
    assert xxhash.xxh3_128_hexdigest(written[: found.size_bytes]) == found.digest
    assert verify(str(tmp_path / NAME)).problem is None


# -- refused -----------------------------------------------------------------------------------------------------


def refuse_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    original = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> Any:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)


def refuse_write(monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.pwrite

    def refuse(fd: int, data: memoryview, offset: int) -> int:
        if direct(fd):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse)


@pytest.mark.parametrize("refuse", [refuse_flag, refuse_write])
def test_where_it_is_refused_the_file_is_the_same(
    refuse: Callable[[pytest.MonkeyPatch], None],
    fd: int,
    monkeypatch: pytest.MonkeyPatch,
    calls: Calls,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = os.urandom(3 * SMALL_BYTES + 10)
    refuse(monkeypatch)
    with caplog.at_level(logging.DEBUG, "lightning_ft"):
        assert streamed(fd, data) == data
    assert not any(was_direct for _, _, was_direct in calls)
    assert [r.levelname for r in caplog.records if "no direct I/O" in r.message] == ["DEBUG"]


def test_invalid_without_direct_io_is_an_error(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_flag(monkeypatch)
    failing_at(0, OSError(errno.EINVAL, "injected"), monkeypatch)
    with pytest.raises(OSError, match="injected"):
        streamed(fd, bytes(3 * SMALL_BYTES))


def test_without_a_new_thread_everything_is_written(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    data = os.urandom(10 * SMALL_BYTES + 10)
    assert streamed(fd, data) == data


# -- failing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "injected"), RuntimeError("injected")])
@pytest.mark.parametrize("piece", [0, 1, 4])
def test_an_error_of_the_thread_surfaces_and_leaves_nothing(
    piece: int, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_at(piece * SMALL_BYTES, error, monkeypatch)
    data = archive(os.urandom(10 * SMALL_BYTES))
    with pytest.raises(type(error), match="injected"), Storage().open_attempt(str(tmp_path / NAME)) as attempt:
        attempt.write(data)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("end", ["last buffer", "tail"])
def test_an_error_of_the_last_write_fails_the_commit(end: str, fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_at(2 * SMALL_BYTES, OSError(errno.EIO, "injected"), monkeypatch)
    stream = DiskStream(fd, "file")
    stream.write(memoryview(bytes(3 * SMALL_BYTES if end == "last buffer" else 2 * SMALL_BYTES + 5)))
    for _ in range(2):
        with pytest.raises(OSError, match="injected"):
            stream.finish()
    with pytest.raises(OSError, match="injected"):
        stream.write(memoryview(b"more"))
    stream.close()


def test_after_an_error_nothing_more_is_written(fd: int, monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    failing_at(SMALL_BYTES, OSError(errno.EIO, "injected"), monkeypatch)
    stream = DiskStream(fd, "file")
    with pytest.raises(OSError, match="injected"):
        stream.write(memoryview(bytes(10 * SMALL_BYTES)))
    stream.close()
    assert [offset for offset, _, _ in calls] == [0]


def test_an_abort_in_the_middle_of_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the write that runs, and those that wait behind it are not made."""
    pwrite, begun, go_on = os.pwrite, threading.Event(), threading.Event()
    written: list[int] = []

    def wait(fd: int, data: memoryview, offset: int) -> int:
        begun.set()
        assert go_on.wait(60)
        written.append(offset)
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", wait)
    attempt = Storage().open_attempt(str(tmp_path / NAME))
    attempt.write(bytes(3 * SMALL_BYTES))
    assert begun.wait(60)
    join = threading.Thread.join

    def joined(self: threading.Thread, timeout: float | None = None) -> None:
        go_on.set()
        join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", joined)
    attempt.abort()
    assert os.listdir(tmp_path) == []
    assert written == [0]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_without_room_is_noticed_before_anything_is_written(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Calls
) -> None:
    room = os.statvfs(tmp_path)
    too_much = room.f_blocks * room.f_frsize + 10**6 if code == errno.ENOSPC else 10**6
    if code == errno.EDQUOT:

        def refuse(*args: Any) -> bool:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(_direct, "_reserve", refuse)
    with pytest.raises(OSError, match=os.strerror(code)):
        Storage().open_attempt(str(tmp_path / NAME), expected_bytes=too_much)
    assert os.listdir(tmp_path) == []
    assert calls == []


def test_a_disk_without_room_is_not_filled_to_find_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fallocate` takes what there is before it fails, and every other process would be out of space meanwhile."""
    asked: list[str] = []
    monkeypatch.setattr(_direct.ctypes, "c_int64", lambda value: asked.append(str(value)) or value)
    room = os.statvfs(tmp_path)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        Storage().open_attempt(str(tmp_path / NAME), expected_bytes=room.f_bfree * room.f_frsize + 2**30)
    assert asked == []


# -- memory ------------------------------------------------------------------------------------------------------


def test_buffers_serve_one_save_after_the_other(tmp_path: Path, small_buffers: DiskBuffers) -> None:
    for number in range(5):
        with Storage().open_attempt(str(tmp_path / f"step={number:08d}.ckpt")) as attempt:
            attempt.write(archive(os.urandom(20 * SMALL_BYTES)))
            if number % 2:
                attempt.commit(maker())
    assert small_buffers.allocated == small_buffers.count


def test_a_small_checkpoint_takes_one_buffer(tmp_path: Path, small_buffers: DiskBuffers) -> None:
    with Storage().open_attempt(str(tmp_path / NAME)) as attempt:
        attempt.write(archive())
        attempt.commit(maker())
    assert small_buffers.allocated == 1


def test_two_streams_at_once_have_buffers_of_their_own(tmp_path: Path, small_buffers: DiskBuffers) -> None:
    both = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in "ab"]
    streams = [DiskStream(fd, "file") for fd in both]
    data = [os.urandom(9 * SMALL_BYTES + 3) for _ in both]
    for start in range(0, len(data[0]), 1000):
        for stream, whole in zip(streams, data, strict=True):
            stream.write(memoryview(whole)[start : start + 1000])
    for stream, fd, whole in zip(streams, both, data, strict=True):
        stream.finish()
        assert content(fd) == whole
        os.close(fd)
    assert 2 <= small_buffers.allocated <= 2 * small_buffers.count  # as many as the disk was behind
    assert len(small_buffers._idle) == min(small_buffers.allocated, small_buffers.count)
