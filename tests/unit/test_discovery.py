from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _archives import archive, info, save

from lightning_ft import events
from lightning_ft._names import attempt_name, checkpoint_name
from lightning_ft.discovery import last_good, list_checkpoints, next_start, select, verify
from lightning_ft.errors import ConfigurationError, NoUsableCheckpointError
from lightning_ft.storage import Storage


@pytest.fixture
def passed_over() -> Iterator[list[str]]:
    seen: list[str] = []

    def look(event: events.Event) -> None:
        if isinstance(event, events.PassedOver):
            seen.append(os.path.basename(event.path))

    stop = events.observe(look)
    yield seen
    stop()


def ours(dirpath: Path, step: int, **fields: Any) -> Path:
    path = dirpath / checkpoint_name(step)
    save(str(path), **{"step": step, "batch": step, **fields})
    return path


def plain(path: Path) -> Path:
    path.write_bytes(archive())
    return path


def cut(path: Path, length: int = -1) -> None:
    path.write_bytes(path.read_bytes()[:length])


def flip(path: Path) -> None:
    """A tensor byte changes: only the digest of everything shows it."""
    data = bytearray(path.read_bytes())
    data[45] ^= 1
    path.write_bytes(data)


def chosen(dirpath: Path) -> str | None:
    found = last_good(str(dirpath))
    return found.name if found else None


def test_listing_is_ordered_by_manifest_and_not_by_name_or_time(tmp_path: Path) -> None:
    save(str(tmp_path / "z.ckpt"), step=1, batch=1)
    save(str(tmp_path / "a.ckpt"), step=3, batch=3)
    save(str(tmp_path / "m.ckpt"), step=2, batch=2, start=2)
    plain(tmp_path / "last.ckpt")
    ours(tmp_path, 9)
    cut(tmp_path / checkpoint_name(9))
    for age, name in enumerate(("a.ckpt", "m.ckpt", "z.ckpt")):
        os.utime(tmp_path / name, (age, age))
    (tmp_path / attempt_name("x.ckpt", "0" * 16)).write_bytes(b"x")
    (tmp_path / "notes.txt").write_bytes(b"x")
    infos = list_checkpoints(str(tmp_path))
    assert [item.name for item in infos] == ["m.ckpt", "a.ckpt", "z.ckpt", "last.ckpt", checkpoint_name(9)]
    assert [item.problem for item in infos] == [
        None,
        None,
        None,
        "no manifest: written by plain Lightning or another tool",
        "truncated or not a zip archive",
    ]
    assert infos[0].path == str(tmp_path / "m.ckpt")
    assert infos[0].size_bytes == (tmp_path / "m.ckpt").stat().st_size


def _missing(path: Path) -> None:
    path.unlink()


def _unreadable(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _recompressed(path: Path) -> None:
    path.unlink()
    plain(path)


DAMAGE: list[tuple[Callable[[Path], None], str, str]] = [
    (_missing, "listed", "missing"),
    (_directory, "listed", "a directory"),
    (_unreadable, "listed", "OSError: .*symbolic links"),
    (_recompressed, "listed", "no manifest"),
    (cut, "listed", "truncated"),
    (lambda path: cut(path, 0), "listed", "truncated"),
    (lambda path: cut(path, path.stat().st_size // 2), "listed", "truncated"),
    (lambda path: path.write_bytes(path.read_bytes()[1:]), "size", "bytes of data"),
    (flip, "full", "digest does not match"),
]
IDS = ["missing", "directory", "unreadable", "no-manifest", "cut", "empty", "half", "head-cut", "flipped"]


@pytest.mark.parametrize(("damage", "depth", "problem"), DAMAGE, ids=IDS)
def test_verify_names_the_problem(tmp_path: Path, damage: Callable[[Path], None], depth: Any, problem: str) -> None:
    path = ours(tmp_path, 1)
    assert verify(str(path), depth).problem is None
    damage(path)
    found = verify(str(path), depth).problem
    assert found is not None
    assert re.search(problem, found)


def test_only_full_depth_reads_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ours(tmp_path, 1)
    flip(path)
    assert verify(str(path), "size").problem is None
    assert verify(str(path), "full").problem is not None
    monkeypatch.setattr(Storage, "read_digest", lambda *args: pytest.fail("data was read"))
    assert verify(str(path), "listed").problem is None


def test_an_error_while_reading_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> str:
        raise OSError(5, "Input/output error")

    path = ours(tmp_path, 1)
    monkeypatch.setattr(Storage, "read_digest", fail)
    assert verify(str(path)).problem == "OSError: [Errno 5] Input/output error"


def test_an_unknown_depth_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="depth='deep'"):
        verify(str(tmp_path / "a.ckpt"), "deep")  # type: ignore[arg-type]


@pytest.mark.parametrize(("damage", "depth", "problem"), DAMAGE[1:], ids=IDS[1:])
def test_a_damaged_newest_is_passed_over(
    tmp_path: Path, damage: Callable[[Path], None], depth: str, problem: str, passed_over: list[str]
) -> None:
    ours(tmp_path, 1)
    ours(tmp_path, 2)
    damage(ours(tmp_path, 3))
    assert chosen(tmp_path) == checkpoint_name(2)
    assert passed_over == [checkpoint_name(3)]


@pytest.mark.parametrize(("damage", "depth", "problem"), DAMAGE[1:], ids=IDS[1:])
def test_only_unusable_ones_are_an_error_that_names_them(
    tmp_path: Path, damage: Callable[[Path], None], depth: str, problem: str
) -> None:
    for step in (1, 2):
        damage(ours(tmp_path, step))
    with pytest.raises(NoUsableCheckpointError, match=problem) as caught:
        last_good(str(tmp_path))
    assert sorted(os.path.basename(path) for path, _ in caught.value.reasons) == [
        checkpoint_name(1),
        checkpoint_name(2),
    ]
    assert not select(str(tmp_path)).empty


def _nothing(dirpath: Path) -> None: ...


def _absent(dirpath: Path) -> None:
    dirpath.rmdir()


def _foreign(dirpath: Path) -> None:
    plain(dirpath / "last.ckpt")
    plain(dirpath / "last-v1.ckpt")


def _without_run(dirpath: Path) -> None:
    save(str(dirpath / "last.ckpt"), run_id="", start=0)
    (dirpath / "broken.ckpt").write_bytes(b"half a file of somebody else")


@pytest.mark.parametrize(
    ("fill", "foreign"),
    [
        (_nothing, []),
        (_absent, []),
        (_foreign, ["last-v1.ckpt", "last.ckpt"]),
        (_without_run, ["last.ckpt", "broken.ckpt"]),
    ],
    ids=["nothing", "absent", "plain-lightning", "saved-outside-any-run"],
)
def test_a_directory_without_ours_is_empty(tmp_path: Path, fill: Callable[[Path], None], foreign: list[str]) -> None:
    dirpath = tmp_path / "run"
    dirpath.mkdir()
    fill(dirpath)
    selection = select(str(dirpath))
    assert (selection.chosen, selection.passed_over, selection.empty) == (None, (), True)
    assert [item.name for item in selection.foreign] == foreign
    assert last_good(str(dirpath)) is None


@pytest.mark.parametrize(
    ("saves", "expected"),
    [
        ([(1, {}), (2, {}), (3, {})], 3),
        ([(5, {}), (3, {"start": 2})], 3),
        ([(5, {"batch": 50}), (6, {"batch": 40})], 5),
        ([(5, {"run_id": "old"}), (3, {"start": 2})], 3),
        ([(9, {"run_id": "other"}), (3, {})], 9),
        ([(9, {"run_id": "", "start": 7}), (3, {})], 3),
    ],
    ids=["steps", "later-start", "batches", "new-run", "newest-run", "no-run"],
)
def test_the_newest_of_the_newest_run(tmp_path: Path, saves: list[tuple[int, dict[str, Any]]], expected: int) -> None:
    for step, fields in saves:
        ours(tmp_path, step, **fields)
    assert chosen(tmp_path) == checkpoint_name(expected)


def test_an_older_run_is_not_continued_in_place_of_a_broken_one(tmp_path: Path) -> None:
    ours(tmp_path, 5, run_id="old")
    flip(ours(tmp_path, 3, start=2))
    with pytest.raises(NoUsableCheckpointError, match="belongs to the older run old"):
        last_good(str(tmp_path))


def test_foreign_files_beside_ours_are_reported_and_not_chosen(tmp_path: Path, passed_over: list[str]) -> None:
    ours(tmp_path, 5)
    plain(tmp_path / "last.ckpt")
    selection = select(str(tmp_path))
    assert selection.chosen is not None
    assert selection.chosen.name == checkpoint_name(5)
    assert [item.name for item in selection.foreign] == ["last.ckpt"]
    assert passed_over == []


@pytest.mark.parametrize("copy", ["a.ckpt", "zz.ckpt", "step=00000005-v1.ckpt"])
def test_a_copy_is_as_good_and_the_choice_is_definite(tmp_path: Path, copy: str) -> None:
    path = ours(tmp_path, 5)
    (tmp_path / copy).write_bytes(path.read_bytes())
    assert chosen(tmp_path) == (copy if copy.startswith("step") else path.name)
    path.unlink()
    assert chosen(tmp_path) == copy


def test_a_moved_directory_still_verifies(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    ours(tmp_path / "run", 5)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert chosen(tmp_path / "moved") == checkpoint_name(5)


def test_a_pipe_of_that_name_is_no_checkpoint_and_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "step=00000001.ckpt")
    (info,) = list_checkpoints(str(tmp_path))
    assert "neither a file nor a directory" in (info.problem or "")
    assert "neither a file" in (verify(str(tmp_path / "step=00000001.ckpt")).problem or "")


def test_a_storage_that_is_down_is_not_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", fail)
    for ask in (list_checkpoints, select, last_good):
        with pytest.raises(PermissionError):
            ask(str(tmp_path))


def test_a_relative_path_and_a_url_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ours(tmp_path, 5)
    monkeypatch.chdir(tmp_path)
    for dirpath in (".", f"file://{tmp_path}", f"{tmp_path}/"):
        found = last_good(dirpath)
        assert found is not None
        assert found.path == str(path)


def test_the_sealed_file_stays_an_ordinary_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(ours(tmp_path, 5)) as file:
        assert file.testzip() is None


@pytest.mark.parametrize(
    ("infos", "expected"),
    [
        ([], 1),
        ([info("/a", start=1)], 2),
        ([info("/a", start=4), info("/b", start=2)], 5),
        ([info("/a", "truncated")], 1),
        ([info("/a", "truncated"), info("/b", start=2)], 3),
    ],
    ids=["none", "one", "highest", "unreadable", "mixed"],
)
def test_next_start(infos: list[Any], expected: int) -> None:
    assert next_start(infos) == expected


def test_a_file_replaced_while_it_is_verified_is_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "last.ckpt")
    save(path, batch=1)
    read_digest, replaced = Storage.read_digest, []

    def replace_first(self: Storage, path: str, size_bytes: int) -> str:
        if not replaced:
            replaced.append(path)
            save(path, b"another", batch=2)
        return read_digest(self, path, size_bytes)

    monkeypatch.setattr(Storage, "read_digest", replace_first)
    verified = verify(path)
    assert replaced
    assert verified.problem is None
    assert verified.manifest is not None
    assert verified.manifest.batch == 2
