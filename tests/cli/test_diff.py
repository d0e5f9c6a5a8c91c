"""`lightning-ft diff`: equal is equal to the bit; what differs is named and measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ft._inspection import difference as _difference
from tests.cli.conftest import Answer, data_offset, flip, step
from tests.trainer import runs

Ft = Callable[..., Answer]


@pytest.fixture
def pair(tmp_path: Path) -> Callable[[Any, Any], tuple[Path, Path]]:
    def save(a: Any, b: Any) -> tuple[Path, Path]:
        torch.save(a, tmp_path / "a.ckpt")
        torch.save(b, tmp_path / "b.ckpt")
        return tmp_path / "a.ckpt", tmp_path / "b.ckpt"

    return save


Pair = Callable[[Any, Any], tuple[Path, Path]]


def test_equal(ft: Ft, run_dir: Path) -> None:
    copy = run_dir / "copy.ckpt"
    copy.write_bytes(step(run_dir, 4).read_bytes())
    answer = ft("diff", step(run_dir, 4), copy, "--json")
    assert answer.code == 0
    assert answer.json["equal"]
    assert answer.json["differences"] == []
    assert answer.json["compared"] > 100
    assert "Equal:" in ft("diff", step(run_dir, 4), copy).out


def test_two_steps_of_a_run(ft: Ft, run_dir: Path) -> None:
    answer = ft("diff", step(run_dir, 4), step(run_dir, 6), "--json")
    assert answer.code == 1
    found = {d["name"]: d for d in answer.json["differences"]}
    assert found["global_step"]["a"] == 4
    assert found["global_step"]["b"] == 6
    weight = found["state_dict.layer.weight"]
    old, new = (torch.load(step(run_dir, n), weights_only=True)["state_dict"]["layer.weight"] for n in (4, 6))
    assert weight["kind"] == "elements"
    assert weight["differing"] == int((old != new).sum())
    assert weight["numel"] == old.numel()
    assert weight["max_abs"] == float((old.double() - new.double()).abs().max())
    assert "lightning_ft.generation" in answer.json["left_out"]
    assert "lightning_ft.generation" not in found
    text = ft("diff", step(run_dir, 4), step(run_dir, 6)).out
    assert "state_dict.layer.weight" in text
    assert "keys differ." in text


def test_only_and_ignore(ft: Ft, run_dir: Path) -> None:
    a, b = step(run_dir, 4), step(run_dir, 6)
    names = [d["name"] for d in ft("diff", a, b, "--only", "state_dict", "--json").json["differences"]]
    assert names
    assert all(name.startswith("state_dict.") for name in names)
    everything = ["state_dict", "loops", "global_step", "optimizer_states", "lightning_ft", "callbacks", "lr_*"]
    ignored = [word for pattern in everything for word in ("--ignore", pattern)]
    assert ft("diff", a, b, *ignored).code == 0
    assert ft("diff", a, b, "--only", "nonsense").code == 2


def measured(ft: Ft, pair: Pair, a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
    answer = ft("diff", *pair({"w": a}, {"w": b}), "--json")
    assert answer.code == 1
    [difference] = answer.json["differences"]
    return dict(difference)


def test_how_much(ft: Ft, pair: Pair) -> None:
    found = measured(ft, pair, torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.5, 3.0]))
    assert (found["differing"], found["numel"], found["max_abs"], found["max_rel"]) == (2, 3, 1.0, 0.25)
    found = measured(ft, pair, torch.tensor([1.0, math.nan, math.inf]), torch.tensor([math.nan, math.nan, -math.inf]))
    assert (found["differing"], found["max_abs"], found["not_finite"]) == (2, None, 2)
    found = measured(ft, pair, torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (found["differing"], found["max_abs"], found["max_rel"]) == (1, 0.0, 0.0)
    found = measured(ft, pair, torch.tensor([1, 2**62]), torch.tensor([1, 2**62 - 1024]))
    assert (found["differing"], found["max_abs"]) == (1, 1024.0)
    found = measured(ft, pair, torch.tensor([True, False]), torch.tensor([True, True]))
    assert found["differing"] == 1
    found = measured(ft, pair, torch.tensor([1 + 1j]), torch.tensor([1 + 2j]))
    assert found["max_abs"] == 1.0
    found = measured(ft, pair, torch.ones(2).to(torch.float8_e4m3fn), torch.zeros(2).to(torch.float8_e4m3fn))
    assert (found["differing"], found["max_abs"]) == (2, 1.0)


def test_large_tensors_piece_by_piece(ft: Ft, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_difference, "_CHUNK_ELEMENTS", 10)
    a = torch.arange(95.0)
    b = a.clone()
    b[[0, 9, 10, 94]] += torch.tensor([1.0, 2.0, 3.0, 0.5])
    found = measured(ft, pair, a, b)
    assert (found["differing"], found["max_abs"]) == (4, 3.0)


def test_kinds(ft: Ft, pair: Pair) -> None:
    a = {"shape": torch.ones(2), "dtype": torch.ones(2), "gone": 1, "value": 1, "kind": 1, "nan": math.nan, "t": 1}
    b = {"shape": torch.ones(3), "dtype": torch.ones(2).half(), "new": 1, "value": 2, "kind": 1.0, "nan": math.nan}
    b["t"] = torch.ones(1)
    answer = ft("diff", *pair(a, b), "--json")
    assert {d["name"]: d["kind"] for d in answer.json["differences"]} == {
        "shape": "shape", "dtype": "dtype", "gone": "only_in_a", "new": "only_in_b", "value": "value",
        "kind": "value", "t": "value",
    }  # fmt: skip
    text = ft("diff", *pair(a, b)).out
    assert "(not there)" in text
    assert "float32 [2]" in text


def test_damage_is_no_difference(ft: Ft, run_dir: Path) -> None:
    flip(step(run_dir, 4), data_offset(step(run_dir, 4), "data/0"))
    answer = ft("diff", step(run_dir, 4), step(run_dir, 6))
    assert answer.code == 1
    assert "data/0 is damaged" in answer.err
    assert answer.out == ""


def test_bad_arguments(ft: Ft, run_dir: Path, tmp_path: Path) -> None:
    answer = ft("diff", step(run_dir, 4), tmp_path / "x.ckpt")
    assert (answer.code, answer.err) == (3, f"lightning-ft diff: B: there is no file {tmp_path / 'x.ckpt'}\n")
    assert ft("diff", run_dir, step(run_dir, 4)).code == 2
    assert ft("diff", step(run_dir, 4)).code == 2


def test_memory_url(ft: Ft, run_dir: Path) -> None:
    import fsspec

    with runs.memory() as url:
        fsspec.filesystem("memory").pipe_file(f"{url}/x.ckpt", step(run_dir, 4).read_bytes())
        assert ft("diff", step(run_dir, 4), f"{url}/x.ckpt").code == 0
