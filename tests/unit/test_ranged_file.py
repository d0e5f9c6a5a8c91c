from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ft._stores import ranged_file
from lightning_ft._stores.ranged_file import BLOCKS_AHEAD, BLOCKS_KEPT, RangedFile
from lightning_ft.errors import StorageError

DATA = bytes(range(256)) * 4
BLOCK = 64


class Source:
    """Counts what is fetched, and what is given up."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data = data
        self.started: list[int] = []
        self.cancelled: list[int] = []

    def open(self) -> RangedFile:
        return RangedFile("s3://a", len(self.data), self._start, lambda coming: coming[1], self._cancel)

    def _start(self, begin: int, end: int) -> tuple[int, bytes]:
        self.started.append(begin // BLOCK)
        return begin // BLOCK, self.data[begin:end]

    def _cancel(self, coming: tuple[int, bytes]) -> None:
        self.cancelled.append(coming[0])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranged_file, "BLOCK_BYTES", BLOCK)


operations = st.lists(
    st.one_of(
        st.tuples(st.just("seek"), st.integers(0, len(DATA) + 50)),
        st.tuples(st.just("seek_end"), st.integers(-len(DATA), 0)),
        st.tuples(st.sampled_from(["read", "readinto", "next_bytes"]), st.integers(0, 5 * BLOCK)),
    ),
    max_size=30,
)


@given(operations, st.integers(0, len(DATA)))
def test_it_reads_what_a_plain_file_reads(operations: list[tuple[str, int]], size_bytes: int) -> None:
    source = Source(DATA[:size_bytes])
    plain = io.BytesIO(source.data)
    with source.open() as file:
        for name, value in operations:
            if name == "seek":
                assert file.seek(value) == plain.seek(value)
            elif name == "seek_end" and -value <= size_bytes:
                assert file.seek(value, io.SEEK_END) == plain.seek(value, io.SEEK_END)
            elif name == "read":
                assert file.read(value) == plain.read(value)
            elif name == "readinto":
                ours, theirs = bytearray(value), bytearray(value)
                assert file.readinto(ours) == plain.readinto(theirs)
                assert ours == theirs
            elif name == "next_bytes":
                piece = file.next_bytes(value)
                assert bytes(piece) == plain.read(piece.nbytes)
                assert piece.nbytes or not value or not plain.read(1)
            assert file.held_blocks <= BLOCKS_AHEAD + 1 + BLOCKS_KEPT
            assert file.tell() == plain.tell()


def test_single_bytes_are_no_requests() -> None:
    source = Source()
    with source.open() as file:
        for _ in range(BLOCK):
            file.read(1)
    assert source.started == [0]


def test_what_is_read_in_order_is_fetched_once_and_ahead() -> None:
    source = Source()
    with source.open() as file:
        file.read(BLOCK + 1)
        assert source.started == list(range(2 + BLOCKS_AHEAD))
        assert file.read() == DATA[BLOCK + 1 :]
    assert source.started == list(range(len(DATA) // BLOCK))
    assert source.cancelled == []


def test_what_nobody_will_read_is_given_up() -> None:
    source = Source()
    with source.open() as file:
        file.read(BLOCK + 1)
        file.seek(-1, io.SEEK_END)
        file.read(1)
        assert source.cancelled == list(range(2, 2 + BLOCKS_AHEAD))
        file.seek(0)
        file.read(3 * BLOCK)
    assert len(source.cancelled) > BLOCKS_AHEAD  # those ahead when it was closed


@pytest.mark.parametrize("wrong", [b"", b"x", DATA])
def test_more_or_less_than_was_asked_for_is_no_answer(wrong: bytes) -> None:
    file = RangedFile("s3://a", len(DATA), lambda begin, end: None, lambda coming: wrong, lambda coming: None)
    with file, pytest.raises(StorageError, match="bytes came of 64") as caught:
        file.read(10)
    assert caught.value.transient


def test_a_fetch_that_fails_is_made_again_by_the_next_read() -> None:
    answers: list[Any] = [OSError("reset"), DATA[:BLOCK]]

    def finish(coming: Any) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    file = RangedFile("s3://a", BLOCK, lambda begin, end: None, finish, lambda coming: None)
    with file:
        with pytest.raises(OSError, match="reset"):
            file.read(10)
        assert file.read(10) == DATA[:10]


def test_a_place_before_the_file_is_refused() -> None:
    with Source().open() as file, pytest.raises(ValueError, match="seek to -1"):
        file.seek(-1)
