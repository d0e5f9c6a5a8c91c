"""Whatever wrote a checkpoint: right after it is loaded, weights and optimizer state are those that were saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import lightning_ft as ft
from tests.sharded.models import Look, Net, differences, gathered, trainer
from tests.sharded.ranks import Rank, values

OURS = ("fsdp.full", "fsdp.sharded", "mp.full", "mp.sharded")
PLAIN = ("plain.fsdp.sharded", "plain.mp.sharded", "plain.mp.full", "ddp")
STEPS = 3


def _trained(rank: Rank, kind: str, optimizer: str = "adamw", **arguments: Any) -> tuple[str, dict[str, Any]]:
    """A checkpoint of this strategy, and what all ranks together held then."""
    wrapper = getattr(arguments.get("wrap"), "__name__", "")
    name = f"{kind}.{optimizer}{wrapper}"
    callbacks = [] if kind.startswith("plain") else [ft.FaultTolerantCheckpoint(rank.root / name)]
    run = trainer(kind, rank.world_size, rank.root, STEPS * (2 if optimizer == "two" else 1), *callbacks)
    run.fit(Net(optimizer, **arguments))
    found = gathered(run)
    if callbacks:
        return str(rank.root / name / f"step={STEPS:08d}.ckpt"), found
    run.save_checkpoint(rank.root / f"{name}.ckpt")
    return str(rank.root / f"{name}.ckpt"), found


def _loaded(rank: Rank, kind: str, path: str, optimizer: str = "adamw", **arguments: Any) -> dict[str, Any]:
    look = Look()
    factor = 2 if optimizer == "two" else 1
    run = trainer(kind, rank.world_size, rank.root, factor * (STEPS + 1), look)
    run.fit(Net(optimizer, **arguments), ckpt_path=path)
    assert run.global_step == factor * (STEPS + 1), "nothing was trained"
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


def _plain_readers(rank: Rank) -> list[str]:
    wrong = []
    readers = {"fsdp.sharded": ("plain.fsdp.sharded", "ddp"), "mp.sharded": ("plain.mp.sharded", "ddp")}
    readers |= {"fsdp.full": ("plain.mp.full", "ddp"), "mp.full": ("plain.mp.full", "ddp")}
    for kind, others in readers.items():
        path, saved = _trained(rank, kind)
        for other in others:
            look = Look()
            # The plugin is what a user of DDP has who has saved with another strategy; plain Lightning has none.
            plugins = [ft.FaultTolerantCheckpointIO()] if other == "ddp" and kind.endswith("sharded") else []
            run = trainer(other, rank.world_size, rank.root, STEPS + 1, look, plugins=plugins)
            run.fit(Net(), ckpt_path=path)
            wrong += [f"{kind} -> {other}: {name}" for name in differences(saved, look.found)]
    return wrong


@pytest.mark.timeout(200)
def test_plain_lightning_resumes_from_what_is_saved_here_and_ddp_from_a_directory(tmp_path: Path) -> None:
    assert values(_plain_readers, tmp_path) == [[], []]


def _names_in(path: str) -> list[str]:
    """Every name of a parameter or buffer in a checkpoint, wherever it is."""
    checkpoint = ft.FaultTolerantCheckpointIO().load_checkpoint(path)
    ours = checkpoint["lightning_ft"]
    layout = [name for groups in ours["optimizers"] for group in groups for name in group["names"]]
    names = [*checkpoint["state_dict"], *ours["requires_grad"], *layout]
    assert "net.0.first.weight" in names
    return names


def _other_models(rank: Rank) -> list[str]:
    wrong = []
    routes = {
        "sgd": (("fsdp.sharded", "mp.full"), ("mp.full", "fsdp.full"), ("mp.sharded", "fsdp.sharded")),
        # By hand; within FSDP's forward there can be no backward.
        "two": (("mp.sharded", "mp.full"), ("mp.full", "mp.sharded")),
    }
    for optimizer, kinds in routes.items():
        for kind, other in kinds:
            path, saved = _trained(rank, kind, optimizer)
            loaded = _loaded(rank, other, path, optimizer)
            wrong += [f"{optimizer}, {kind} -> {other}: {name}" for name in differences(saved, loaded)]
    compiled: Any = lambda module: torch.compile(module, backend="eager")  # noqa: E731
    checkpointed: Any = checkpoint_wrapper
    for plain in ("fsdp.sharded", "mp.sharded", "mp.full", "fsdp.full"):
        for wrap in (compiled, checkpointed):
            kind = f"{plain}-compiled" if plain.startswith("fsdp") and wrap is compiled else plain
            path, saved = _trained(rank, kind, "sgd", wrap=wrap)
            assert not [name for name in _names_in(path) if "_orig_mod" in name or "_wrapped_" in name]
            for other, back in ((plain, None), ("mp.sharded", None), (kind, wrap)):
                loaded = _loaded(rank, other, path, "sgd", wrap=back)
                wrong += [f"{kind} wrapped -> {other}, {back}: {n}" for n in differences(saved, loaded)]
    for kind in ("fsdp.sharded-flat",):
        path, saved = _trained(rank, kind, "flat")
        for other, optimizer in (("mp.sharded", "sgd"), (kind, "flat")):
            wrong += [f"{kind} -> {other}: {n}" for n in differences(saved, _loaded(rank, other, path, optimizer))]
    return wrong


@pytest.mark.timeout(300)
def test_optimizers_and_wrappers_H4(tmp_path: Path) -> None:
    assert values(_other_models, tmp_path) == [[], []]
