"""How often a run was started from a checkpoint in vain: the counts, their file, and what is passed over for them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from _archives import info, save
from hypothesis import given
from hypothesis import strategies as st

from lightning_ft import exit_codes
from lightning_ft._inspection.pruning import plan_pruning
from lightning_ft._inspection.survey import survey
from lightning_ft._names import STARTS_NAME, checkpoint_name, parse_leftover
from lightning_ft._restart import starts as _starts
from lightning_ft._restart.starts import Count, StartCounter, Starts, is_no_fault
from lightning_ft.discovery import last_good, list_checkpoints, select, start_of
from lightning_ft.errors import ConfigurationError, DirectoryInUseError, RankFailure, RestoreError, SaveError
from lightning_ft.retention import Retention, plan
from lightning_ft.storage import Storage


def ours(dirpath: Path, step: int, **fields: Any) -> str:
    """A checkpoint whose generation is ``g<step>``; returns its name."""
    name = checkpoint_name(step)
    save(str(dirpath / name), **{"step": step, "batch": step, "generation": f"g{step}", **fields})
    return name


def count(dirpath: Path, limit: int = 3, **starts: int) -> None:
    """The file says so many starts of each of these generations."""
    counts = {key: Count(checkpoint_name(int(key[1:])), starts) for key, starts in starts.items()}
    Storage().replace(str(dirpath / STARTS_NAME), Starts(limit, counts).to_bytes())


def counter(dirpath: Path, limit: int | None = 3) -> StartCounter:
    """As a fit opens it."""
    found = StartCounter({str(dirpath): Storage()}, limit)
    found.open(start_of(str(dirpath))[0])
    return found


def counted(dirpath: Path) -> dict[str, int]:
    """What the file says, by generation."""
    return {key: of.starts for key, of in _starts.read(Storage(), str(dirpath)).counts.items()}


def chosen(dirpath: Path, **kwargs: Any) -> tuple[str | None, int]:
    selection = select(str(dirpath), **kwargs)
    return selection.chosen.name if selection.chosen else None, selection.futile_starts


# -- the file ----------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 9),
    st.dictionaries(st.text("abcdef0123456789", min_size=1), st.tuples(st.text(min_size=1), st.integers(1, 99))),
    st.dictionaries(st.text("abcdef0123456789", min_size=1), st.text(min_size=1)),
)
def test_the_file_is_what_was_written(limit: int, counts: dict[str, tuple[str, int]], damaged: dict[str, str]) -> None:
    starts = Starts(limit, {key: Count(*of) for key, of in counts.items()}, damaged)
    assert Starts.parse(starts.to_bytes()) == starts


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b'{"format": 2}', b'{"format": 1}', b'{"format": 1, "limit": 1, "starts": {"a": 1}}',
        b'{"format": 1, "limit": 1e999, "starts": {}}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_file_counts_nothing_and_that_is_said(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    name = ours(tmp_path, 1)
    (tmp_path / STARTS_NAME).write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert chosen(tmp_path) == (name, 0)
    assert "cannot be read, so no start was counted" in caplog.text


def test_a_file_that_the_system_does_not_read_keeps_no_run_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another user, on a failing disk; here a directory, which root cannot read either."""
    name = ours(tmp_path, 1)
    (tmp_path / STARTS_NAME).mkdir()
    with caplog.at_level(logging.WARNING):
        assert chosen(tmp_path) == (name, 0)
    assert "cannot be read, so no start was counted: IsADirectoryError" in caplog.text


def test_the_file_is_replaced_in_one_step_and_what_a_kill_leaves_is_cleared_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours(tmp_path, 1)
    count(tmp_path, g1=1)
    before = (tmp_path / STARTS_NAME).read_bytes()

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            count(tmp_path, g1=2)
    assert (tmp_path / STARTS_NAME).read_bytes() == before
    left = [path.name for path in tmp_path.iterdir() if parse_leftover(path.name)]
    assert len(left) == 1
    Storage().remove_leftovers(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [STARTS_NAME, checkpoint_name(1)]


def test_the_file_is_no_checkpoint_and_no_leftover(tmp_path: Path) -> None:
    ours(tmp_path, 1)
    count(tmp_path, g1=1)
    assert [found.name for found in list_checkpoints(str(tmp_path))] == [checkpoint_name(1)]
    assert [row.name for row in survey(str(tmp_path)).rows] == [checkpoint_name(1)]
    assert Storage().remove_leftovers(str(tmp_path)) == []


# -- counting ----------------------------------------------------------------------------------------------------


def test_a_start_counts_until_a_newer_checkpoint_is_durable(tmp_path: Path) -> None:
    name = ours(tmp_path, 1)
    for starts in (1, 2):
        counter(tmp_path).begin("g1", name)  # and crashes
        assert counted(tmp_path) == {"g1": starts}
    last = counter(tmp_path)
    last.begin("g1", name)
    assert counted(tmp_path) == {"g1": 3}
    last.progress()
    assert not (tmp_path / STARTS_NAME).exists()
    last.take_back()
    assert not (tmp_path / STARTS_NAME).exists()


def test_an_end_that_was_asked_for_takes_the_start_back(tmp_path: Path) -> None:
    name = ours(tmp_path, 1)
    counter(tmp_path).begin("g1", name)
    asked = counter(tmp_path)
    asked.begin("g1", name)
    asked.take_back()
    asked.take_back()
    assert counted(tmp_path) == {"g1": 1}


def test_progress_from_the_one_before_leaves_the_other_given_up(tmp_path: Path) -> None:
    first, second = ours(tmp_path, 1), ours(tmp_path, 2)
    count(tmp_path, g2=3)
    again = counter(tmp_path)
    again.begin("g1", first)
    assert counted(tmp_path) == {"g1": 1, "g2": 3}
    again.progress()
    assert counted(tmp_path) == {"g2": 3}
    assert again.given_up == {"g2"}
    again.forget([second])
    assert not (tmp_path / STARTS_NAME).exists()


def test_counts_of_checkpoints_that_are_gone_are_forgotten_at_the_next_start(tmp_path: Path) -> None:
    name = ours(tmp_path, 1)
    count(tmp_path, g1=1, g2=2)
    counter(tmp_path).begin("g1", name)
    assert counted(tmp_path) == {"g1": 2}


def test_without_a_limit_nothing_is_counted_and_what_was_is_forgotten(tmp_path: Path) -> None:
    name = ours(tmp_path, 1)
    count(tmp_path, g1=3)
    unlimited = counter(tmp_path, None)
    unlimited.begin("g1", name)
    unlimited.progress()
    assert not (tmp_path / STARTS_NAME).exists()
    assert unlimited.given_up == frozenset()


def test_a_file_that_cannot_be_written_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours(tmp_path, 1)

    class Full(Storage):
        def replace(self, path: str, data: bytes) -> None:
            raise OSError(28, "No space left on device")

    with caplog.at_level(logging.WARNING):
        StartCounter({str(tmp_path): Full()}, 3).begin("g1", "a")
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize(
    ("error", "no_fault"),
    [
        (KeyboardInterrupt(), True),
        (SystemExit(), True),
        (SystemExit(0), True),
        (SystemExit(exit_codes.PREEMPTED), True),
        (SystemExit(exit_codes.PREEMPTED_UNSAVED), True),
        (SystemExit(exit_codes.INTERRUPTED), True),
        (SystemExit(exit_codes.DIVERGED), False),
        (SystemExit(exit_codes.HUNG), False),
        (SystemExit(1), False),
        (RestoreError("another batch size"), True),
        (ConfigurationError("no"), True),
        (DirectoryInUseError("no"), True),
        (RankFailure(1, "no"), False),
        (SaveError("no"), False),
        (ValueError("no"), False),
        (MemoryError(), False),
    ],
)
def test_which_ends_tell_nothing_of_the_checkpoint(error: BaseException, no_fault: bool) -> None:
    assert is_no_fault(error) is no_fault


# -- damage ------------------------------------------------------------------------------------------------------


def test_a_damaged_copy_says_nothing_of_the_other(tmp_path: Path) -> None:
    """They are of one generation. Neither is the one damaged for the other's sake, nor that one good."""
    local, remote = tmp_path / "local", tmp_path / "remote"
    for dirpath in (local, remote):
        ours(dirpath, 1)
    storages = {str(remote): Storage(), str(local): Storage()}
    found = StartCounter(storages, 3)
    found.note_damaged(list_checkpoints(str(local)))
    assert (found.damaged_in(str(local)), found.damaged_in(str(remote))) == ({"g1"}, frozenset())
    found.begin("g1", str(remote / checkpoint_name(1)))
    found.forget([checkpoint_name(1)])  # of the good one: a damaged one is never deleted

    again = StartCounter(storages, 3)
    again.open([checkpoint_name(1), STARTS_NAME])
    assert (again.damaged_in(str(local)), again.damaged_in(str(remote))) == ({"g1"}, frozenset())
    again.begin("g1", str(local / checkpoint_name(1)))  # it was repaired
    assert again.damaged_in(str(local)) == frozenset()


# -- choosing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("starts", "limit", "expected"),
    [
        ({}, 3, (3, 0)),
        ({"g3": 2}, 3, (3, 0)),
        ({"g3": 3}, 3, (2, 0)),
        ({"g3": 3}, None, (3, 0)),
        ({"g3": 3}, 4, (3, 0)),
        ({"g3": 1}, 1, (2, 0)),
        ({"g3": 3, "g2": 3}, 3, (1, 0)),
        ({"g3": 3, "g2": 2}, 3, (2, 0)),
        ({"g2": 3}, 3, (3, 0)),
        ({"g3": 4, "g2": 3, "g1": 3}, 3, (3, 4)),
    ],
)
def test_d14_the_one_before_is_taken_after_so_many_starts(
    tmp_path: Path, starts: dict[str, int], limit: int | None, expected: tuple[int, int]
) -> None:
    for step in (1, 2, 3):
        ours(tmp_path, step)
    count(tmp_path, **starts)
    step, futile = expected
    assert chosen(tmp_path, give_up_after=limit) == (checkpoint_name(step), futile)


def test_d14_tools_go_by_the_limit_of_the_run(tmp_path: Path) -> None:
    for step in (1, 2):
        ours(tmp_path, step)
    count(tmp_path, limit=2, g2=2)
    found = last_good(str(tmp_path))
    assert found is not None
    assert found.name == checkpoint_name(1)
    rows = {row.name: row for row in survey(str(tmp_path)).rows}
    assert rows[checkpoint_name(1)].taken
    assert rows[checkpoint_name(2)].note == "the run was started from it 2 times and has not saved a newer one"


def test_d14_in_a_large_directory(tmp_path: Path) -> None:
    for step in range(1, 15):
        ours(tmp_path, step)
    count(tmp_path, g14=3)
    assert chosen(tmp_path) == (checkpoint_name(13), 0)


def test_d14_of_an_older_run_nothing_is_taken(tmp_path: Path) -> None:
    ours(tmp_path, 1, run_id="older")
    ours(tmp_path, 2, start=2)
    count(tmp_path, g2=3)
    assert chosen(tmp_path) == (checkpoint_name(2), 3)


def test_what_is_given_up_is_not_read(tmp_path: Path) -> None:
    for step in (1, 2):
        ours(tmp_path, step)
    count(tmp_path, g2=3)
    looked_at: list[str] = []

    def look(path: str, *args: Any) -> Any:
        from lightning_ft.discovery import verify

        looked_at.append(path)
        return verify(path, *args)

    select(str(tmp_path), "full", None, look)
    assert looked_at == [str(tmp_path / checkpoint_name(1))]


# -- rotation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep_last", "given_up", "deleted"),
    [
        (1, {}, [1, 2, 3]),
        (1, {3}, [1, 2, 3]),
        (2, {3}, [1]),
        (2, {2}, [1, 2]),
        (3, {3, 2}, []),
        (-1, {3}, []),
        (3, {3}, []),
    ],
)
def test_what_is_given_up_takes_no_place_in_the_rotation(
    keep_last: int, given_up: set[int], deleted: list[int]
) -> None:
    infos = [
        info(f"/run/{checkpoint_name(step)}", step=step, batch=step, generation=f"g{step}") for step in (1, 2, 3, 4)
    ]
    decisions = plan(
        infos, Retention(keep_last), "run", infos[-1].path, frozenset(), frozenset(f"g{step}" for step in given_up)
    )
    assert sorted(int(decision.path[-13:-5]) for decision in decisions if not decision.keep) == deleted


def test_pruning_keeps_the_one_that_a_restart_takes(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        ours(tmp_path, step)
    count(tmp_path, g3=3)
    pruning = plan_pruning(str(tmp_path), Retention(1), "full", None)
    assert pruning.newest is not None
    assert pruning.newest.name == checkpoint_name(2)
    assert pruning.to_delete == [str(tmp_path / checkpoint_name(1))]


def test_the_numbers_are_in_the_file_as_documented(tmp_path: Path) -> None:
    count(tmp_path, limit=3, g7=2)
    assert json.loads((tmp_path / STARTS_NAME).read_bytes()) == {
        "format": 1,
        "limit": 3,
        "starts": {"g7": {"name": "step=00000007.ckpt", "starts": 2}},
    }
