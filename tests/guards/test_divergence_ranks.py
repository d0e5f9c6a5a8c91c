"""Two ranks, one bad loss: all act together, before the step, and nothing that is finite is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_ft as ft
from tests.guards import diverging as d
from tests.ranks import Rank, values

pytestmark = pytest.mark.distributed

DDP: dict[str, Any] = {"strategy": "ddp", "devices": 2}
BATCHES = d.BATCHES // 2  # of each rank, in an epoch
BAD = 6


def finite(path: Any) -> bool:
    state = torch.load(path, weights_only=True)["state_dict"]
    return all(bool(torch.isfinite(value).all()) for value in state.values())


def stopped(rank: Rank, bad: int) -> dict[str, Any]:
    model, trainer, error = d.fit(rank.root / f"bad{bad}", ft.DivergenceGuard(), d.Net(at=(BAD,), rank=bad), **DDP)
    weights = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    return {**vars(error), "code": error.code, "reached": trainer.global_step, "finite": weights}


def train(rank: Rank) -> dict[str, Any]:
    """Everything that two ranks are needed for, in one life of their processes."""
    found: dict[str, Any] = {f"bad{bad}": stopped(rank, bad) for bad in (0, 1)}
    for name, guard in (("skip", ft.DivergenceGuard(action="rollback")), ("warn", ft.DivergenceGuard(action="warn"))):
        model, trainer, error = d.fit(rank.root / name, guard, d.Net(at=(BAD,), rank=1), **DDP)
        assert error is None
        found[name] = {**d.end_of(model, trainer), "trained": model.trained}
    return found


def test_j3_one_of_two_ranks_diverges(tmp_path: Path) -> None:
    found = values(train, tmp_path)
    for bad in (0, 1):  # all stop together, before the step
        ends = [of_rank[f"bad{bad}"] for of_rank in found]
        assert str(ends[0]) == str(ends[1])
        assert ends[0]["code"] == 77
        assert ends[0]["batch"] == BAD
        assert ends[0]["step"] == ends[0]["reached"] == BAD - 1
        assert ends[0]["finite"]
        assert [len(losses) for losses in ends[0]["losses"]] == [int(rank == bad) for rank in (0, 1)]
        assert len(ends[0]["indices"][bad][0]) == 4
        good = ft.last_good(tmp_path / f"bad{bad}")
        assert good is not None
        assert good.path == ends[0]["restart_from"]
        assert good.manifest is not None
        assert good.manifest.batch == BAD - 2
        assert finite(good.path)
        assert Path(ends[0]["emergency"]).name == f"diverged-step={BAD - 1:08d}.ckpt"
        assert ft.verify(ends[0]["emergency"]).problem is None
    back = [of_rank["skip"] for of_rank in found]
    assert back[0]["steps"] == back[1]["steps"] == 2 * BATCHES - 1
    assert back[0]["weights"]["net.0.weight"].equal(back[1]["weights"]["net.0.weight"])
    assert all(bool(torch.isfinite(w).all()) for w in back[0]["weights"].values())
    assert all(len(of_rank["trained"]) == 2 * BATCHES + 1 for of_rank in back)  # one batch twice, one for nothing
    # Whatever is trained on, what is not finite takes no place in the rotation.
    assert not all(bool(torch.isfinite(w).all()) for w in found[0]["warn"]["weights"].values())
    assert [info.name for info in ft.list_checkpoints(tmp_path / "warn")] == [
        "step=00000004.ckpt",
        "step=00000002.ckpt",
    ]
    assert all(finite(info.path) for info in ft.list_checkpoints(tmp_path / "warn"))
