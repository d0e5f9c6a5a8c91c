"""`lightning-ft prune`: what may go goes, and nothing else ever."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

import lightning_ft
from lightning_ft.cli import prune
from lightning_ft.manifest import EOCD_BYTES, seal
from tests.cli.conftest import Answer, cut, data_offset, flip, holding, program, step
from tests.trainer import runs
from tests.unit._archives import archive, manifest

Ft = Callable[..., Answer]


def ours(dirpath: Path) -> list[int]:
    return sorted(int(path.stem.partition("=")[2]) for path in dirpath.glob("step=*.ckpt"))


def test_dry_run_deletes_nothing(ft: Ft, run_dir: Path) -> None:
    answer = ft("prune", run_dir, "--keep-last", 2, "--dry-run", "--json")
    assert answer.code == 0
    assert ours(run_dir) == [2, 4, 6, 8]
    document = answer.json
    assert {Path(d["path"]).name: d["keep"] for d in document["decisions"]} == {
        "step=00000008.ckpt": True,
        "step=00000006.ckpt": True,
        "step=00000004.ckpt": False,
        "step=00000002.ckpt": False,
        "best.ckpt": True,
    }
    assert document["deleted"] == []
    text = ft("prune", run_dir, "--keep-last", 2, "--dry-run").out
    assert "2 checkpoints to delete" in text
    assert "a restart takes step=00000008.ckpt" in text


def test_it_deletes_what_it_said(ft: Ft, run_dir: Path) -> None:
    answer = ft("prune", run_dir, "--keep-last", 2, "--yes", "--json")
    assert answer.code == 0
    assert ours(run_dir) == [6, 8]
    # The oldest first: killed on the way, the newer ones are left.
    assert [Path(path).name for path in answer.json["deleted"]] == ["step=00000002.ckpt", "step=00000004.ckpt"]
    assert answer.json["freed_bytes"] > 0
    assert (run_dir / "best.ckpt").exists()
    again = ft("prune", run_dir, "--keep-last", 2, "--yes")
    assert again.code == 0
    assert "nothing to delete" in again.out


def test_milestones_stay(ft: Ft, run_dir: Path) -> None:
    assert ft("prune", run_dir, "--keep-last", 1, "--keep-every-n-train-steps", 4, "-y").code == 0
    assert ours(run_dir) == [4, 8]


def test_a_broken_file_takes_no_place_and_is_not_deleted(ft: Ft, run_dir: Path) -> None:
    flip(step(run_dir, 6), data_offset(step(run_dir, 6), "data/0"))
    answer = ft("prune", run_dir, "--keep-last", 2, "--yes")
    assert answer.code == 0
    assert ours(run_dir) == [4, 6, 8]  # 8 and 4 are the newest two good ones, 6 is evidence


def test_the_last_good_one_stays(ft: Ft, run_dir: Path) -> None:
    flip(step(run_dir, 8), data_offset(step(run_dir, 8), "data/0"))
    cut(step(run_dir, 6))
    flip(step(run_dir, 4), 100)
    assert ft("prune", run_dir, "--keep-last", 1, "--yes").code == 0
    assert ours(run_dir) == [2, 4, 6, 8]
    chosen = lightning_ft.last_good(str(run_dir))
    assert chosen is not None
    assert chosen.name == "step=00000002.ckpt"


def test_with_none_good_nothing_is_deleted(ft: Ft, run_dir: Path) -> None:
    for number in (2, 4, 6, 8):
        flip(step(run_dir, number), data_offset(step(run_dir, number), "data/0"))
    answer = ft("prune", run_dir, "--keep-last", 1, "--yes")
    assert answer.code == 1
    assert ours(run_dir) == [2, 4, 6, 8]


def test_other_runs_and_foreign_files_stay(ft: Ft, run_dir: Path, plain_dir: Path) -> None:
    shutil.copy(plain_dir / "users.ckpt", run_dir / "step=00000001.ckpt")
    before = set(run_dir.iterdir())
    assert ft("prune", run_dir, "--keep-last", 1, "--yes").code == 0
    assert before - set(run_dir.iterdir()) == {step(run_dir, number) for number in (2, 4, 6)}
    answer = ft("prune", plain_dir, "--keep-last", 1, "--yes")
    assert answer.code == 3
    assert len(list(plain_dir.glob("*.ckpt"))) == 2


@pytest.mark.parametrize("arguments", [["--keep-last", "0"], ["--keep-last", "-2"], ["--keep-last", "x"], []])
def test_bad_arguments(ft: Ft, run_dir: Path, arguments: list[str]) -> None:
    answer = ft("prune", run_dir, *arguments, "--yes")
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert "keep" in answer.err
    assert ours(run_dir) == [2, 4, 6, 8]


def test_a_directory_in_use_is_refused(ft: Ft, run_dir: Path) -> None:
    with holding(run_dir) as process:
        answer = ft("prune", run_dir, "--keep-last", 1, "--yes")
        assert answer.code == 4
        assert f"process {process}" in answer.err
        assert ours(run_dir) == [2, 4, 6, 8]
        assert ft("prune", run_dir, "--keep-last", 1, "--dry-run").code == 0  # only looks
    assert ft("prune", run_dir, "--keep-last", 1, "--yes").code == 0


def test_it_asks(ft: Ft, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    questions: list[str] = []

    def no(question: str) -> bool:
        questions.append(question)
        return False

    monkeypatch.setattr(prune, "_agreed", no)
    answer = ft("prune", run_dir, "--keep-last", 1)
    assert answer.code == 1
    assert "Nothing was deleted" in answer.out
    assert questions == ["\nDelete 3 checkpoints?"]
    assert ours(run_dir) == [2, 4, 6, 8]


def test_only_what_was_agreed_to_goes(ft: Ft, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    newest = step(run_dir, 8).read_bytes()
    step(run_dir, 8).unlink()

    def yes_but_meanwhile_a_run_saved(question: str) -> bool:
        step(run_dir, 8).write_bytes(newest)
        return True

    monkeypatch.setattr(prune, "_agreed", yes_but_meanwhile_a_run_saved)
    assert ft("prune", run_dir, "--keep-last", 1).code == 0
    assert ours(run_dir) == [6, 8]  # 6 was shown as kept


def test_a_name_that_was_used_again_meanwhile_stays(ft: Ft, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acquire = prune.DirectoryLock.acquire

    def after_a_run(lock: prune.DirectoryLock) -> None:
        consolidated = ft("consolidate", step(run_dir, 4), step(run_dir, 2), "--force")
        assert consolidated.code == 0
        acquire(lock)

    monkeypatch.setattr(prune.DirectoryLock, "acquire", after_a_run)
    answer = ft("prune", run_dir, "--keep-last", 1, "--yes", "--json")
    assert [Path(path).name for path in answer.json["deleted"]] == [step(run_dir, 4).name, step(run_dir, 6).name]
    assert ours(run_dir) == [2, 8]


def test_nobody_to_ask(run_dir: Path) -> None:
    answer = program("prune", run_dir, "--keep-last", 1)
    assert answer.code == 2
    assert answer.err == "lightning-ft prune: nobody can be asked here: say --yes, or --dry-run; nothing was deleted\n"
    assert ours(run_dir) == [2, 4, 6, 8]


def test_one_that_cannot_be_deleted(ft: Ft, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_ft.storage import Storage

    remove = Storage.remove

    def refusing(self: Storage, path: str) -> None:
        if path.endswith("step=00000002.ckpt"):
            raise PermissionError(13, "Permission denied", path)
        remove(self, path)

    monkeypatch.setattr(Storage, "remove", refusing)
    answer = ft("prune", run_dir, "--keep-last", 1, "--yes", "--json")
    assert answer.code == 1
    assert ours(run_dir) == [2, 8]
    assert [Path(f["path"]).name for f in answer.json["failed"]] == ["step=00000002.ckpt"]
    assert "Permission denied" in answer.err


def test_memory_url(ft: Ft, run_dir: Path) -> None:
    import fsspec

    with runs.memory() as url:
        fs = fsspec.filesystem("memory")
        for path in run_dir.glob("*.ckpt"):
            fs.pipe_file(f"{url}/run/{path.name}", path.read_bytes())
        answer = ft("prune", f"{url}/run", "--keep-last", 1, "--yes")
        assert answer.code == 0
        assert "no locks" in answer.out
        assert sorted(path.rpartition("/")[2] for path in fs.ls(f"{url}/run", detail=False)) == [
            "best.ckpt",
            "step=00000008.ckpt",
        ]


def test_whatever_is_there_as_many_good_ones_stay_as_asked_for(ft: Ft, tmp_path: Path) -> None:
    drawn, removals = random.Random(3), 0
    for case in range(100):
        place = tmp_path / str(case)
        place.mkdir()
        for number in range(drawn.randrange(3, 9)):
            run_id, name = drawn.choice(["a", *"bbbb"]), step(place, number)
            if drawn.random() < 0.15:
                name = place / f"mine-{number}.ckpt"
            fields = {"step": number, "batch": number, "start": 1 + (run_id == "b"), "run_id": run_id}
            name.write_bytes(sealed(**fields))
            if drawn.random() < 0.5:
                drawn.choice([flip_data, flip_manifest, cut])(name)
        good = {info.path for info in lightning_ft.list_checkpoints(str(place)) if is_good(info.path)}
        before, keep_last = last(place), drawn.randrange(1, 4)
        assert ft("prune", place, "--keep-last", keep_last, "--yes").code in (0, 1, 3)
        left = {str(path) for path in place.glob("*.ckpt")}
        assert last(place) == before, case
        removed = good - left
        removals += len(removed)
        if not removed:
            continue
        assert before is not None
        assert removed <= good  # what is broken was never touched
        run_id = lightning_ft.verify(before).manifest.run_id  # type: ignore[union-attr]
        of_run = [path for path in left & good if lightning_ft.verify(path).manifest.run_id == run_id]  # type: ignore[union-attr]
        assert len([path for path in of_run if Path(path).name.startswith("step=")]) >= keep_last, case
        assert not any(Path(path).name.startswith("mine") for path in removed)
    assert removals > 30


def sealed(**fields: Any) -> bytes:
    """A checkpoint, without the syncs of a real save."""
    whole = archive(b"w" * 200)
    data, record = whole[:-EOCD_BYTES], whole[-EOCD_BYTES:]
    digest = xxhash.xxh3_128_hexdigest(data)
    return data + seal(record, manifest(size_bytes=len(data), digest=digest, **fields))


def flip_data(path: Path) -> None:
    flip(path, 100)


def flip_manifest(path: Path) -> None:
    flip(path, -20)


def is_good(path: str) -> bool:
    return lightning_ft.verify(path).problem is None


def last(place: Path) -> str | None:
    try:
        chosen = lightning_ft.last_good(str(place))
    except lightning_ft.NoUsableCheckpointError:
        return None
    return None if chosen is None else chosen.path
