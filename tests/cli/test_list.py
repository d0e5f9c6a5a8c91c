"""`lightning-ft list`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lightning_ft
from lightning_ft._names import ORIGIN_NAME, attempt_name, deleted_name
from lightning_ft._restart import choose
from lightning_ft.errors import NoUsableCheckpointError
from lightning_ft.storage import Storage
from tests.cli.conftest import Answer, cut, data_offset, flip, holding, step
from tests.trainer import runs

Ft = Callable[..., Answer]


def states(answer: Answer) -> dict[str, str]:
    document = answer.json
    return {row["name"]: row["state"] for row in document["checkpoints"] + document["leftovers"]}


def test_what_a_run_left(ft: Ft, run_dir: Path) -> None:
    answer = ft("list", run_dir, "--json")
    assert answer.code == 0
    document = answer.json
    assert document["command"] == "list"
    names = [row["name"] for row in document["checkpoints"]]
    assert names[:2] == ["step=00000008.ckpt", "step=00000006.ckpt"]
    assert set(states(answer).values()) == {"unverified"}
    newest = document["checkpoints"][0]
    assert set(newest) == {"path", "name", "state", "note", "taken", "size_bytes", "age_secs", "manifest"}
    assert newest["taken"]
    assert newest["size_bytes"] == step(run_dir, 8).stat().st_size
    assert newest["age_secs"] >= 0
    assert newest["manifest"]["step"] == 8
    assert newest["manifest"]["run_id"]
    assert document["last"]["outcome"] == "resumes"
    assert document["last"]["path"] == str(step(run_dir, 8))
    assert [row["taken"] for row in document["checkpoints"]].count(True) == 1


def test_no_data_are_read_unasked(ft: Ft, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    open_read = Storage.open_read

    def recording(self: Storage, path: str) -> Any:
        opened.append(path)
        return open_read(self, path)

    monkeypatch.setattr(Storage, "open_read", recording)
    assert ft("list", run_dir).code == 0
    assert opened == []
    assert ft("list", run_dir, "--verify", "full").code == 0
    assert len(opened) >= 5


def test_full_verification_finds_damage_and_says_what_last_takes_instead(ft: Ft, run_dir: Path) -> None:
    flip(step(run_dir, 8), data_offset(step(run_dir, 8), "data/0"))
    assert ft("list", run_dir).code == 0  # the data are not read
    answer = ft("list", run_dir, "--verify", "full", "--json")
    assert answer.code == 1
    assert states(answer) == {
        "step=00000008.ckpt": "broken",
        "step=00000006.ckpt": "good",
        "step=00000004.ckpt": "good",
        "step=00000002.ckpt": "good",
        "best.ckpt": "good",
    }
    last = answer.json["last"]
    assert last["path"] == str(step(run_dir, 6))
    [passed] = last["passed_over"]
    assert passed["path"] == str(step(run_dir, 8))
    assert "digest" in passed["reason"]


def test_leftovers_are_shown_and_only_ours(ft: Ft, run_dir: Path) -> None:
    attempt = attempt_name("step=00000010.ckpt", "0" * 16)
    deleted = deleted_name("step=00000001.ckpt", "1" * 16)
    (run_dir / attempt).write_bytes(b"x" * 100)
    (run_dir / deleted).write_bytes(b"x")
    (run_dir / ".step=00000010.ckpt.tmp").write_bytes(b"x")
    (run_dir / "notes.txt").write_bytes(b"x")
    answer = ft("list", run_dir, "--json")
    assert answer.code == 0
    found = {row["name"]: (row["state"], row["size_bytes"]) for row in answer.json["leftovers"]}
    assert found == {attempt: ("attempt", 100), deleted: ("deleted", 1)}
    text = ft("list", run_dir).out
    assert "5 checkpoints and 2 leftovers" in text
    assert "save that was killed" in text
    assert "notes.txt" not in text


def test_a_leftover_that_cannot_be_looked_at_says_so(ft: Ft, run_dir: Path) -> None:
    attempt = run_dir / attempt_name("step=00000010.ckpt", "0" * 16)
    attempt.symlink_to(attempt)
    [row] = ft("list", run_dir, "--json").json["leftovers"]
    assert (row["name"], row["size_bytes"]) == (attempt.name, 0)
    assert "it cannot be looked at: " in row["note"]


def test_a_running_training_is_seen_and_not_disturbed(ft: Ft, run_dir: Path) -> None:
    (run_dir / attempt_name("step=00000010.ckpt", "0" * 16)).write_bytes(b"x")
    with holding(run_dir) as process:
        answer = ft("list", run_dir, "--json")
        assert answer.json["in_use_by"].startswith(f"process {process} on ")
        assert "perhaps of the training" in answer.json["leftovers"][0]["note"]
        assert f"In use: process {process} on " in ft("list", run_dir).out
        assert ft("prune", run_dir, "--keep-last", "1", "--yes").code == 4  # still held
    assert ft("list", run_dir, "--json").json["in_use_by"] is None


def test_foreign_ones_are_marked(ft: Ft, run_dir: Path, plain_dir: Path) -> None:
    shutil.copy(plain_dir / "users.ckpt", run_dir / "users.ckpt")
    answer = ft("list", run_dir, "--json")
    assert answer.code == 0
    assert states(answer)["users.ckpt"] == "foreign"
    [row] = [row for row in answer.json["checkpoints"] if row["name"] == "users.ckpt"]
    assert row["manifest"] is None
    assert row["age_secs"] is None
    [ours] = [row for row in answer.json["checkpoints"] if row["name"] == "best.ckpt"]
    assert "another callback" in ours["note"]


def test_nothing_there(ft: Ft, tmp_path: Path) -> None:
    missing = ft("list", tmp_path / "nowhere")
    assert missing.code == 3
    assert missing.err == f"lightning-ft list: URL: there is no directory {tmp_path / 'nowhere'}\n"
    empty = ft("list", tmp_path, "--json")
    assert empty.code == 3
    assert empty.json["last"]["outcome"] == "starts_fresh"
    (tmp_path / "file").write_bytes(b"")
    assert ft("list", tmp_path / "file").code == 2


def test_only_unusable_ones(ft: Ft, run_dir: Path) -> None:
    for number in (2, 4, 6, 8):
        cut(step(run_dir, number))
    answer = ft("list", run_dir, "--json")
    assert answer.code == 1
    assert answer.json["last"]["outcome"] == "fails"
    assert len(answer.json["last"]["passed_over"]) == 4
    assert 'ckpt_path="last" fails' in ft("list", run_dir).out


def test_newer_format_is_not_broken(ft: Ft, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_ft import manifest

    monkeypatch.setattr(manifest, "FORMAT_VERSION", 0)
    answer = ft("list", run_dir, "--json")
    assert answer.code == 1
    assert set(states(answer).values()) == {"newer"}
    assert "upgrade" in answer.json["checkpoints"][0]["note"]


def test_a_directory_with_the_name_of_a_checkpoint(ft: Ft, run_dir: Path) -> None:
    (run_dir / "epoch=3.ckpt").mkdir()
    answer = ft("list", run_dir, "--json", "--verify", "full")
    assert answer.code == 0
    assert states(answer)["epoch=3.ckpt"] == "foreign"
    assert "directory" in next(r["note"] for r in answer.json["checkpoints"] if r["name"] == "epoch=3.ckpt")


def test_unreadable_is_said(ft: Ft, run_dir: Path) -> None:
    step(run_dir, 8).unlink()
    step(run_dir, 8).symlink_to(step(run_dir, 8))  # nobody can open it, not even root
    for depth in ("size", "full"):
        answer = ft("list", run_dir, "--verify", depth, "--json")
        assert answer.code == 1
        assert states(answer)["step=00000008.ckpt"] == "unreadable"
        assert answer.json["last"]["path"] == str(step(run_dir, 6))


@pytest.mark.parametrize("case", ["good", "newest broken", "all broken", "plain", "plain broken", "empty"])
def test_it_says_what_a_restart_does(ft: Ft, case: str, run_dir: Path, plain_dir: Path, tmp_path: Path) -> None:
    place = run_dir
    if case == "newest broken":
        cut(step(run_dir, 8))
    elif case == "all broken":
        for number in (2, 4, 6, 8):
            flip(step(run_dir, number), 500)
    elif case.startswith("plain"):
        place = plain_dir
        if case == "plain broken":
            flip(plain_dir / "last.ckpt", data_offset(plain_dir / "last.ckpt", "data/0"))
    elif case == "empty":
        place = tmp_path / "new"
        place.mkdir()
    last = ft("list", place, "--verify", "full", "--json").json["last"]
    if last["outcome"] == "fails":
        with pytest.raises(NoUsableCheckpointError) as caught:
            choose.choose(str(place), "full", None)
        assert [(p["path"], p["reason"]) for p in last["passed_over"]] == list(caught.value.reasons)
        return
    path, _ = choose.choose(str(place), "full", None)
    assert last["outcome"] == ("starts_fresh" if path is None else "resumes")
    assert last["path"] == path


def test_memory_url(ft: Ft, run_dir: Path) -> None:
    import fsspec

    with runs.memory() as url:
        fs = fsspec.filesystem("memory")
        for path in run_dir.glob("*.ckpt"):
            fs.pipe_file(f"{url}/run/{path.name}", path.read_bytes())
        answer = ft("list", f"{url}/run", "--verify", "full", "--json")
        assert answer.code == 0
        assert set(states(answer).values()) == {"good"}
        assert answer.json["last"]["path"] == f"{url}/run/step=00000008.ckpt"
        assert ft("list", f"{url}/other").code == 3


def test_hostile_names_do_not_reach_the_terminal(ft: Ft, run_dir: Path) -> None:
    step(run_dir, 2).rename(run_dir / "\x1b[2Jevil\n.ckpt")
    text = ft("list", run_dir).out
    assert "\x1b" not in text
    assert "\\x1b[2Jevil\\n.ckpt" in text


def test_python_functions_say_the_same(ft: Ft, run_dir: Path) -> None:
    document = ft("list", run_dir, "--json").json
    infos = lightning_ft.list_checkpoints(str(run_dir))
    assert [info.path for info in infos] == [row["path"] for row in document["checkpoints"]]
    chosen = lightning_ft.last_good(str(run_dir))
    assert chosen is not None
    assert chosen.path == document["last"]["path"]
    json.dumps(document)


def test_a_local_directory_says_what_it_is_in_front_of(ft: Ft, run_dir: Path) -> None:
    """A restart looks into both, so what is said of one is half of the truth."""
    assert ft("list", run_dir, "--json").json["in_front_of"] is None
    (run_dir / ORIGIN_NAME).write_text("s3://bucket/run1\n")
    assert ft("list", run_dir, "--json").json["in_front_of"] == "s3://bucket/run1"
    assert "The local directory of s3://bucket/run1: a restart looks there, too" in ft("list", run_dir).out
