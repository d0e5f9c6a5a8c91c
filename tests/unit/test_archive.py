"""The zip archive, as `zipfile` and `unzip` read it, and how it is handed over. That it is torch's: test_serialise."""

from __future__ import annotations

import io
import mmap
import os
import shutil
import subprocess
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from lightning_ft._disk import archive as _archive
from lightning_ft._disk.archive import GATHER_BYTES, SLICE_BYTES, write_archive

U32_MAX = 2**32 - 1


class Pieces:
    """A sink that keeps the size of each write, and whether it was the caller's own memory."""

    def __init__(self, owner: object = None, fail_at: int | None = None) -> None:
        self.sizes: list[int] = []
        self.owned_bytes = 0
        self._owner = owner
        self._fail_at = fail_at

    def write(self, data: memoryview) -> int:
        self.sizes.append(data.nbytes)
        if len(self.sizes) == self._fail_at:
            raise OSError("injected")
        if data.obj is self._owner:
            self.owned_bytes += data.nbytes
        return data.nbytes


class Hollow(io.RawIOBase):
    """A file that forgets large pieces, which are all zeros here, and reads as if it had them."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[tuple[int, bytearray]] = []
        self.size_bytes = 0
        self._at = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if view.nbytes <= GATHER_BYTES:
            if self.runs and sum((self.runs[-1][0], len(self.runs[-1][1]))) == self.size_bytes:
                self.runs[-1][1].extend(view)
            else:
                self.runs.append((self.size_bytes, bytearray(view)))
        self.size_bytes += view.nbytes
        return view.nbytes

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size_bytes}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self.size_bytes if size < 0 else min(self.size_bytes, self._at + size)
        found = bytearray(max(0, end - self._at))
        for begins, run in self.runs:
            low, high = max(begins, self._at), min(begins + len(run), end)
            if low < high:
                found[low - self._at : high - self._at] = run[low - begins : high - begins]
        self._at += len(found)
        return bytes(found)


def zeros(size_bytes: int) -> memoryview:
    """Zeros that take no memory until somebody writes."""
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def records(*sizes: int) -> list[tuple[str, memoryview]]:
    return [(f"data/{i}", memoryview(os.urandom(size))) for i, size in enumerate(sizes)]


def written(found: list[tuple[str, memoryview]], alignment_bytes: int = 64) -> io.BytesIO:
    file = io.BytesIO()
    write_archive(file, found, alignment_bytes)
    return file


def data_offset(file: Any, entry: zipfile.ZipInfo) -> int:
    """Where the data begins by the entry's own header, which is what readers go by."""
    file.seek(entry.header_offset)
    header = file.read(30)
    return entry.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


SIZES = [
    (),
    (0,),
    (1,),
    (63, 64, 65),
    (0, 5, 0),
    (GATHER_BYTES - 1, GATHER_BYTES),
    (2 * SLICE_BYTES + 1, 3),
    (700,) * 300,
]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{len(sizes)}x{max(sizes, default=0)}")
@pytest.mark.parametrize("alignment_bytes", [64, 4096])
def test_zipfile_reads_what_was_given(sizes: tuple[int, ...], alignment_bytes: int) -> None:
    given = records(*sizes)
    file = written(given, alignment_bytes)
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [
            *(f"archive/{name}" for name, _ in given),
            "archive/version",
            "archive/.data/serialization_id",
        ]
        assert all(archive.read(f"archive/{name}") == data for name, data in given)
        assert {data_offset(file, entry) % alignment_bytes for entry in archive.infolist()} == {0}


@pytest.mark.skipif(shutil.which("unzip") is None, reason="needs unzip")
def test_unzip_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(written(records(0, 1, 100, SLICE_BYTES + 5)).getvalue())
    run = subprocess.run(["unzip", "-t", str(path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    damaged = bytearray(path.read_bytes())
    damaged[1000] ^= 1
    path.write_bytes(damaged)
    assert subprocess.run(["unzip", "-t", str(path)], capture_output=True, check=False).returncode != 0


def test_the_end_record_has_no_comment_and_is_last() -> None:
    assert written(records(5)).getvalue()[-22:-18] == b"PK\5\6"
    assert written(records(5)).getvalue()[-2:] == b"\0\0"


def test_the_identity_depends_on_names_and_contents() -> None:
    def identity(*given: tuple[str, bytes]) -> str:
        with zipfile.ZipFile(written([(name, memoryview(data)) for name, data in given])) as archive:
            return archive.read("archive/.data/serialization_id").decode()

    assert len(identity()) == 40
    assert identity(("a", b"1")) == identity(("a", b"1"))
    assert len({identity(("a", b"1")), identity(("a", b"2")), identity(("b", b"1")), identity()}) == 4


# -- how it is handed over ---------------------------------------------------------------------------------------


def test_small_records_go_out_together() -> None:
    sink = Pieces()
    write_archive(sink, records(*[3000] * 2000))
    assert len(sink.sizes) <= sum(sink.sizes) // (GATHER_BYTES - 5000) + 1


def test_a_large_record_goes_out_in_pieces_of_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[int] = []
    crc32 = zlib.crc32

    def counting(data: memoryview, value: int = 0) -> int:
        summed.append(data.nbytes)
        return crc32(data, value)

    monkeypatch.setattr(_archive.zlib, "crc32", counting)
    data = bytes(3 * SLICE_BYTES + 7)
    sink = Pieces(data)
    write_archive(sink, [("data/0", memoryview(data))])
    assert sink.owned_bytes == len(data)
    assert max(sink.sizes) == max(summed) == SLICE_BYTES
    assert len(sink.sizes) == 1 + 4 + 1  # what is before it, the record, what is after it


def test_of_a_large_record_only_a_piece_has_been_read_when_it_begins_to_go_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    crc32 = zlib.crc32
    monkeypatch.setattr(_archive.zlib, "crc32", lambda *args: order.append("checksum") or crc32(*args))

    class Ordered:
        def write(self, data: memoryview) -> int:
            order.append("write")
            return data.nbytes

    write_archive(Ordered(), [("data/0", zeros(3 * SLICE_BYTES))])
    assert order[:7] == ["write", *["checksum", "write"] * 3]


def test_no_copy_is_made_of_a_large_record() -> None:
    data = zeros(64 << 20)
    tracemalloc.start()
    try:
        write_archive(Pieces(), [("data/0", data)])
        assert tracemalloc.get_traced_memory()[1] < 2 * GATHER_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("fail_at", [1, 2, 4, 6])
def test_an_error_of_the_sink_ends_it(fail_at: int) -> None:
    sink = Pieces(fail_at=fail_at)
    with pytest.raises(OSError, match="injected"):
        write_archive(sink, [("data/0", zeros(4 * SLICE_BYTES))])
    assert len(sink.sizes) == fail_at


# -- what does not fit into 16 or 32 bits -------------------------------------------------------------------------


def test_more_records_than_16_bits_count() -> None:
    given = [(f"data/{i}", memoryview(b"%d" % i)) for i in range(66_000)]
    with zipfile.ZipFile(written(given)) as archive:
        assert len(archive.infolist()) == 66_002
        assert archive.read("archive/data/65999") == b"65999"


@pytest.mark.parametrize("size_bytes", [U32_MAX - 1, U32_MAX, U32_MAX + 70])
def test_sizes_and_places_beyond_4_gib(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    monkeypatch.setattr(_archive.zlib, "crc32", lambda *args: 7)  # seconds, for nothing that is asked here
    file = Hollow()
    write_archive(file, [("data/0", memoryview(b"abc")), ("data/1", zeros(size_bytes)), ("data/2", memoryview(b"xyz"))])
    with zipfile.ZipFile(file) as archive:  # type: ignore[arg-type]
        first, large, last, *_ = archive.infolist()
        assert [first.file_size, large.file_size, last.file_size] == [3, size_bytes, 3]
        assert last.header_offset >= U32_MAX
        assert last.header_offset == data_offset(file, large) + size_bytes + (24 if size_bytes >= U32_MAX else 16)
        assert {data_offset(file, entry) % 64 for entry in archive.infolist()} == {0}
        file.seek(data_offset(file, last))
        assert file.read(3) == b"xyz"
