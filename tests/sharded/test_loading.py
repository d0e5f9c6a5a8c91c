"""Whatever wrote a checkpoint: right after it is loaded, weights and optimizer state are those that were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_ft as ft
from tests.sharded.models import Look, Net, differences, gathered, trainer
from tests.sharded.ranks import Rank, values

OURS = ("fsdp.full", "fsdp.sharded", "mp.full", "mp.sharded")
PLAIN = ("plain.fsdp.sharded", "plain.mp.sharded", "plain.mp.full", "ddp")
STEPS = 3


def _trained(rank: Rank, kind: str, optimizer: str = "adamw", **arguments: Any) -> tuple[str, dict[str, Any]]:
    """A checkpoint of this strategy, and what all ranks together held then."""
    name = f"{kind}.{optimizer}"
    callbacks = [] if kind.startswith("plain") else [ft.FaultTolerantCheckpoint(rank.root / name)]
    run = trainer(kind, rank.world_size, rank.root, STEPS, *callbacks)
    run.fit(Net(optimizer, **arguments))
    found = gathered(run)
    if callbacks:
        return str(rank.root / name / f"step={STEPS * (2 if optimizer == 'two' else 1):08d}.ckpt"), found
    run.save_checkpoint(rank.root / f"{name}.ckpt")
    return str(rank.root / f"{name}.ckpt"), found


def _loaded(rank: Rank, kind: str, path: str, optimizer: str = "adamw", **arguments: Any) -> dict[str, Any]:
    look = Look()
    run = trainer(kind, rank.world_size, rank.root, STEPS + 1, look)
    run.fit(Net(optimizer, **arguments), ckpt_path=path)
    assert run.global_step == STEPS + 1, "nothing was trained"
    return dict(look.found)


def _all_combinations(rank: Rank) -> list[str]:
    wrong = []
    for kind in (*OURS, *PLAIN):
        path, saved = _trained(rank, kind)
        if rank.number == 0:
            torch.save(saved, f"{path}.expected")
        for other in ("fsdp.sharded", "mp.sharded"):
            wrong += [f"{kind} -> {other}: {name}" for name in differences(saved, _loaded(rank, other, path))]
    return wrong


def _others_ranks(rank: Rank, root: str) -> list[str]:
    wrong = []
    for kind in (*OURS, *PLAIN):
        name = f"{kind}.adamw.ckpt" if kind.startswith("plain") else f"{kind}.adamw/step={STEPS:08d}.ckpt"
        path = f"{root}/{name}"
        saved = torch.load(f"{path}.expected")
        for other in ("fsdp.sharded", "mp.sharded"):
            wrong += [f"{kind} -> {other}: {name}" for name in differences(saved, _loaded(rank, other, path))]
    return wrong


@pytest.mark.timeout(400)
def test_every_checkpoint_loads_into_every_strategy_on_any_number_of_ranks_H1_H2_H3_C3(tmp_path: Path) -> None:
    assert values(_all_combinations, tmp_path / "2") == [[], []]
    assert values(_others_ranks, tmp_path / "1", str(tmp_path / "2"), world_size=1) == [[]]
    assert values(_others_ranks, tmp_path / "3", str(tmp_path / "2"), world_size=3) == [[], [], []]
