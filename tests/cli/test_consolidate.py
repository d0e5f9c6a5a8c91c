"""`lightning-ft consolidate`: one file, whole or not there, that says the same as what it was made of."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import lightning_ft
from lightning_ft._inspection import consolidate
from tests.cli.conftest import Answer, cut, data_offset, environment, flip, step
from tests.trainer import runs

Ft = Callable[..., Answer]

needs_safetensors = pytest.mark.skipif(
    importlib.util.find_spec("safetensors") is None and not os.environ.get("CI"), reason="needs safetensors"
)


def test_ours_is_copied_with_its_manifest(ft: Ft, run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.ckpt"
    answer = ft("consolidate", step(run_dir, 4), out, "--json")
    assert answer.code == 0
    assert out.read_bytes() == step(run_dir, 4).read_bytes()
    assert answer.json["manifest"]["step"] == 4
    assert set(answer.json) == {"command", "source", "target", "size_bytes", "manifest"}


def test_plain_lightning_gets_a_manifest(ft: Ft, plain_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.ckpt"
    assert ft("consolidate", plain_dir / "users.ckpt", out).code == 0
    info = lightning_ft.verify(str(out))
    assert info.problem is None
    assert info.manifest is not None
    assert (info.manifest.step, info.manifest.batch, info.manifest.reason) == (4, 4, "consolidated")
    assert ft("diff", plain_dir / "users.ckpt", out).code == 0
    # It is the state of no run that could be continued.
    assert lightning_ft.last_good(str(tmp_path)) is None


def test_it_needs_no_torch_for_a_copy(plain_dir: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from lightning_ft.cli import run\n"
        "code = run(sys.argv[1:]); print(code, sorted({'torch', 'lightning'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, "consolidate", plain_dir / "users.ckpt", tmp_path / "out.ckpt"],
        capture_output=True, text=True, check=True, env=environment(),
    )  # fmt: skip
    assert run.stdout.splitlines()[-1] == "0 []"


def test_nothing_is_overwritten_unasked(ft: Ft, run_dir: Path) -> None:
    before = step(run_dir, 6).read_bytes()
    answer = ft("consolidate", step(run_dir, 4), step(run_dir, 6))
    assert answer.code == 2
    assert "--force" in answer.err
    assert step(run_dir, 6).read_bytes() == before
    assert ft("consolidate", step(run_dir, 4), step(run_dir, 6), "--force").code == 0
    assert step(run_dir, 6).read_bytes() == step(run_dir, 4).read_bytes()


@pytest.mark.parametrize("suffix", ["ckpt", pytest.param("safetensors", marks=needs_safetensors)])
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damaged_input_is_refused(ft: Ft, run_dir: Path, tmp_path: Path, suffix: str, damage: str) -> None:
    path = step(run_dir, 4)
    flip(path, data_offset(path, "data/0")) if damage == "flip" else cut(path)
    place = tmp_path / "out"
    answer = ft("consolidate", path, place / f"x.{suffix}")
    assert answer.code == 1
    assert ("state_dict.layer.weight" if damage == "flip" else "truncated") in answer.err
    assert not place.exists() or list(place.iterdir()) == []


def test_bad_arguments(ft: Ft, run_dir: Path, tmp_path: Path) -> None:
    assert ft("consolidate", step(run_dir, 4), tmp_path / "x.bin").code == 2
    assert ft("consolidate", tmp_path / "nowhere.ckpt", tmp_path / "x.ckpt").code == 3
    answer = ft("consolidate", run_dir, tmp_path / "x.ckpt")
    assert answer.code == 1
    assert "neither a checkpoint file nor a sharded one" in answer.err
    assert not (tmp_path / "x.ckpt").exists()


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_a_directory_is_never_replaced(ft: Ft, run_dir: Path, tmp_path: Path, force: tuple[str, ...]) -> None:
    (tmp_path / "x.ckpt").mkdir()
    answer = ft("consolidate", step(run_dir, 4), tmp_path / "x.ckpt", *force)
    assert answer.code == 2
    assert "is a directory, which is not replaced" in answer.err
    assert not list((tmp_path / "x.ckpt").iterdir())


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """As Lightning's FSDP strategy writes it: DCP files with the tensors, and the rest in meta.pt."""
    place = tmp_path / "shards.ckpt"
    torch.manual_seed(1)
    state: dict[str, Any] = {"model": {"layer.weight": torch.randn(4, 3)}}
    state["optimizer_0"] = {
        "state": {"layer.weight": {"momentum_buffer": torch.randn(4, 3)}},
        "param_groups": [{"lr": 0.1, "params": ["layer.weight"]}],
    }
    dcp.save(state, checkpoint_id=str(place), no_dist=True)
    torch.save({"global_step": 7, "epoch": 2, "loops": {}}, place / "meta.pt")
    return place


def test_shards_become_one_file(ft: Ft, shards: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.ckpt"
    answer = ft("consolidate", shards, out, "--json")
    assert answer.code == 0
    assert (answer.json["manifest"]["step"], answer.json["manifest"]["epoch"]) == (7, 2)
    assert lightning_ft.verify(str(out)).problem is None
    loaded = torch.load(out, weights_only=True)
    torch.manual_seed(1)
    assert torch.equal(loaded["state_dict"]["layer.weight"], torch.randn(4, 3))
    [optimizer_state] = loaded["optimizer_states"]
    assert torch.equal(optimizer_state["state"][0]["momentum_buffer"], torch.randn(4, 3))
    assert optimizer_state["param_groups"] == [{"lr": 0.1, "params": [0]}]
    assert loaded["global_step"] == 7


def test_damaged_shards(ft: Ft, shards: Path, tmp_path: Path) -> None:
    for part in shards.glob("*.distcp"):
        cut(part, 0.1)
    answer = ft("consolidate", shards, tmp_path / "out.ckpt")
    assert answer.code == 1
    assert "__0_0.distcp has" in answer.err
    assert not (tmp_path / "out.ckpt").exists()


@pytest.mark.parametrize("name", ["meta.pt", "__0_0.distcp", ".metadata"])
def test_one_file_of_a_directory_is_no_checkpoint(ft: Ft, shards: Path, tmp_path: Path, name: str) -> None:
    answer = ft("consolidate", shards / name, tmp_path / "x.ckpt")
    assert answer.code == 1
    assert f"is one file of a sharded checkpoint: give its directory, {shards}" in answer.err
    assert not (tmp_path / "x.ckpt").exists()


@needs_safetensors
def test_safetensors(ft: Ft, run_dir: Path, shards: Path, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    out = tmp_path / "out" / "model.safetensors"
    assert ft("consolidate", step(run_dir, 4), out).code == 0
    truth = torch.load(step(run_dir, 4), weights_only=True)["state_dict"]
    loaded = load_file(out)
    assert set(loaded) == set(truth)
    assert all(torch.equal(loaded[name], truth[name]) for name in truth)
    with safe_open(out, "pt") as file:
        assert file.metadata()["step"] == "4"
    assert [path.name for path in out.parent.iterdir()] == ["model.safetensors"]
    assert ft("consolidate", shards, out).code == 2
    assert ft("consolidate", shards, out, "--force").code == 0
    assert set(load_file(out)) == {"layer.weight"}


@needs_safetensors
def test_tied_weights_are_written_under_both_names(ft: Ft, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weight = torch.randn(3, 2)
    torch.save({"state_dict": {"a": weight, "b": weight, "c": weight.t()}}, tmp_path / "x.ckpt")
    assert ft("consolidate", tmp_path / "x.ckpt", tmp_path / "x.safetensors").code == 0
    loaded = load_file(tmp_path / "x.safetensors")
    assert torch.equal(loaded["a"], weight)
    assert torch.equal(loaded["b"], weight)
    assert torch.equal(loaded["c"], weight.t())


@needs_safetensors
def test_a_failed_write_leaves_nothing(ft: Ft, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(consolidate.os, "replace", fails)
    out = tmp_path / "out"
    answer = ft("consolidate", step(run_dir, 4), out / "x.safetensors")
    assert answer.code == 5
    assert "No space left" in answer.err
    assert list(out.iterdir()) == []


def test_without_safetensors(ft: Ft, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    answer = ft("consolidate", step(run_dir, 4), tmp_path / "x.safetensors")
    assert answer.code == 6
    assert "pip install 'lightning-ft[safetensors]'" in answer.err


@needs_safetensors
def test_memory_url(ft: Ft, run_dir: Path) -> None:
    import fsspec

    with runs.memory() as url:
        assert ft("consolidate", step(run_dir, 4), f"{url}/x.ckpt").code == 0
        assert lightning_ft.verify(f"{url}/x.ckpt").problem is None
        assert ft("consolidate", f"{url}/x.ckpt", f"{url}/x.safetensors").code == 0
        from safetensors.torch import load

        assert "layer.weight" in load(fsspec.filesystem("memory").cat_file(f"{url}/x.safetensors"))


class Hostile:
    """Whoever unpickles it runs a program."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


@pytest.mark.parametrize("name", [".metadata", "meta.pt"])
def test_nothing_in_shards_is_executed(ft: Ft, shards: Path, tmp_path: Path, name: str) -> None:
    proof = tmp_path / "executed"
    (shards / name).write_bytes(pickle.dumps(Hostile(f"touch {proof}")))
    answer = ft("consolidate", shards, tmp_path / "out.ckpt")
    assert answer.code == 1
    assert name in answer.err
    assert not proof.exists()
    assert not (tmp_path / "out.ckpt").exists()


def test_a_shard_that_is_missing_is_named(ft: Ft, shards: Path, tmp_path: Path) -> None:
    (shards / "__0_0.distcp").unlink()
    answer = ft("consolidate", shards, tmp_path / "out.ckpt")
    assert (answer.code, "__0_0.distcp is missing" in answer.err) == (1, True)
