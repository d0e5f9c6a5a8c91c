"""The program on checkpoints that are directories."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Size
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from lightning_ft.discovery import verify
from lightning_ft.storage import Storage
from tests import directories
from tests.cli.conftest import Answer, flip, step
from tests.trainer import runs

Ft = Callable[..., Answer]


def table() -> bytes:
    """As `torch.distributed.checkpoint` writes it: a tensor in two pieces, a scalar, and a value that is no tensor."""
    chunks = [ChunkStorageMetadata(Size((row, 0)), Size((2, 3))) for row in (0, 2)]
    entries: dict[str, Any] = {
        "model.weight": TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), Size((4, 3)), chunks),
        "optimizer_0.lr": BytesStorageMetadata(),
        "optimizer_0.step": TensorStorageMetadata(
            TensorProperties(dtype=torch.float32), Size(), [ChunkStorageMetadata(Size(), Size())]
        ),
    }
    return pickle.dumps(Metadata(entries, {}, {}))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Four sharded checkpoints of one run."""
    files = {**directories.FILES, ".metadata": table()}
    for number in (2, 4, 6, 8):
        directories.save(Storage(), str(step(tmp_path / "run", number)), files, step=number)
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


def test_show_has_files_and_tensors(ft: Ft, run_dir: Path) -> None:
    answer = ft("show", step(run_dir, 8), "--json")
    assert answer.code == 0
    sizes = {entry["name"]: entry["size_bytes"] for entry in answer.json["files"]}
    assert sizes == {p.name: p.stat().st_size for p in step(run_dir, 8).iterdir()}
    assert answer.json["step"] == 8
    weight = {"name": "model.weight", "dtype": "bfloat16", "shape": [4, 3], "size_bytes": 24, "pieces": 2}
    count = {"name": "optimizer_0.step", "dtype": "float32", "shape": [], "size_bytes": 4, "pieces": 1}
    assert answer.json["tensors"] == [weight, count]
    assert ft("show", step(run_dir, 8), "--only", "model", "--json").json["tensors"] == [weight]
    text = ft("show", step(run_dir, 8)).out
    assert "__1_0.distcp" in text
    assert "4 x 3" in text
    assert "consolidate" in text
    assert ft("show", step(run_dir, 8), "--values").code == 2
    assert "at the top there are model, optimizer_0" in ft("show", step(run_dir, 8), "--only", "weight").err


HOSTILE = {
    "no table": b"what is where",
    "runs a program": b"cposix\nsystem\n(S'touch executed'\ntR.",
    "another object": pickle.dumps({"state_dict_metadata": {}}),
    "a number": pickle.dumps(1),
    "shapes of text": pickle.dumps(Metadata({"a": TensorStorageMetadata(TensorProperties(), "ab", [])}, {}, {})),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", HOSTILE)
def test_show_executes_nothing_of_a_table(ft: Ft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "last.ckpt"
    directories.save(Storage(), str(path), {**directories.FILES, ".metadata": HOSTILE[what]})
    answer = ft("show", path)
    assert answer.code == 1
    assert ".metadata cannot be read" in answer.err
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_consolidate_puts_no_file_beside_a_directory_of_its_name(ft: Ft, run_dir: Path, force: list[str]) -> None:
    with runs.memory() as url:
        directories.save(Storage(), f"{url}/last.ckpt")
        for path in (f"{url}/last.ckpt", str(step(run_dir, 8))):
            answer = ft("consolidate", step(run_dir, 6), path, *force)
            assert answer.code == 2
            assert f"{path} is a directory" in answer.err
            assert verify(path).problem is None


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
