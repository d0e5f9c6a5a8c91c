"""The program on checkpoints that are directories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_ft.storage import Storage
from tests import directories
from tests.cli.conftest import Answer, flip, step

Ft = Callable[..., Answer]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Four sharded checkpoints of one run."""
    for number in (2, 4, 6, 8):
        directories.save(Storage(), str(step(tmp_path / "run", number)), step=number)
    return tmp_path / "run"


def test_list_takes_the_newest(ft: Ft, run_dir: Path) -> None:
    answer = ft("list", run_dir, "--json")
    assert answer.code == 0
    assert [entry["name"] for entry in answer.json["checkpoints"]] == [step(run_dir, n).name for n in (8, 6, 4, 2)]
    assert answer.json["last"]["path"] == str(step(run_dir, 8))


@pytest.mark.parametrize("name", [*directories.FILES, "manifest.json"])
def test_verify_names_the_file(ft: Ft, run_dir: Path, name: str) -> None:
    assert ft("verify", run_dir, "--json").json["counts"] == {"good": 4}
    flip(step(run_dir, 8) / name, 3)
    answer = ft("verify", step(run_dir, 8), "--json")
    assert answer.code == 1
    [damage] = answer.json["files"][0]["damages"]
    assert damage["part"] == ("manifest" if name == "manifest.json" else name)


def test_verify_sees_a_missing_shard_without_reading(ft: Ft, run_dir: Path) -> None:
    (step(run_dir, 8) / "__1_0.distcp").unlink()
    answer = ft("verify", run_dir, "--depth", "size", "--json")
    assert answer.code == 1
    assert answer.json["counts"] == {"broken": 1, "unverified": 3}


def test_show_has_the_files(ft: Ft, run_dir: Path) -> None:
    answer = ft("show", step(run_dir, 8), "--json")
    assert answer.code == 0
    sizes = {entry["name"]: entry["size_bytes"] for entry in answer.json["files"]}
    assert sizes == {p.name: p.stat().st_size for p in step(run_dir, 8).iterdir()}
    assert answer.json["step"] == 8
    text = ft("show", step(run_dir, 8)).out
    assert "__1_0.distcp" in text
    assert "consolidate" in text
    assert ft("show", step(run_dir, 8), "--values").code == 2


def test_prune_judges_and_deletes(ft: Ft, run_dir: Path) -> None:
    flip(step(run_dir, 6) / "__0_0.distcp", 3)
    answer = ft("prune", run_dir, "--keep-last", "2", "--yes", "--json")
    assert answer.code == 0
    assert sorted(run_dir.glob("*.ckpt")) == [step(run_dir, n) for n in (4, 6, 8)]


def test_diff_says_that_it_takes_files(ft: Ft, run_dir: Path) -> None:
    answer = ft("diff", step(run_dir, 6), step(run_dir, 8))
    assert answer.code == 2
    assert "is a directory" in answer.err
    assert "consolidate" in answer.err
