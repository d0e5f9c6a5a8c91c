"""Plain Lightning continues from our directories and we from its; a consolidated one is what a full one would be."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import lightning_ft as ft
from lightning_ft._inspection.consolidate import consolidate
from lightning_ft._state.digest import digest
from lightning_ft.storage import Storage
from tests.sharded import job, plain, processes
from tests.sharded.story import gathered
from tests.trainer import scenarios as s

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]

KINDS = ("fsdp-sharded", "fsdp2-sharded")


class States(Callback):
    """The state, gathered, after every step, and that with which training started."""

    def __init__(self) -> None:
        self.of_step: dict[int, dict[str, Any]] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.of_step[trainer.global_step] = gathered(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.of_step[trainer.global_step] = gathered(trainer)


Saved = dict[int, dict[str, Any]]


def ours(dirpath: str, kind: str, ckpt_path: str | None, *callbacks: Callback, **kwargs: Any) -> Saved:
    states = States()
    trainer = job.trainer(dirpath, kind, every=2, ft_args={"keep_last": -1}, **{"max_epochs": 1, **kwargs})
    trainer.callbacks[:0] = [states, *callbacks]
    trainer.fit(job.Net(), *job.data(), ckpt_path=ckpt_path)
    return states.of_step


def theirs(dirpath: str, kind: str, ckpt_path: str | None, ranks: int, max_epochs: int = 1) -> Saved:
    """Nothing of ours takes part: no callback, no plugin, no strategy."""
    L.seed_everything(1, verbose=False)
    states = States()
    saves = ModelCheckpoint(dirpath, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = L.Trainer(
        **s.COMMON, strategy=plain.strategy(kind, ranks, job.Block), devices=ranks, max_epochs=max_epochs,
        callbacks=[states, saves], limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(job.Net(), *job.data(), ckpt_path=ckpt_path)
    return states.of_step


@pytest.mark.parametrize("kind", KINDS)
def test_plain_lightning_continues_from_ours(kind: str, tmp_path: Path) -> None:
    saved = processes.run(2, ours, str(tmp_path / "ours"), kind, None)[0]
    path = str(tmp_path / "ours" / "step=00000002.ckpt")
    assert Storage().is_sharded(path)
    for ranks in (2, 1):
        loaded = processes.run(ranks, theirs, str(tmp_path / f"theirs{ranks}"), kind, path, ranks, 2)[0]
        assert loaded[2] == saved[2]
        assert max(loaded) > 4


@pytest.mark.parametrize("kind", KINDS)
def test_we_continue_from_plain_lightnings(kind: str, tmp_path: Path) -> None:
    saved = processes.run(2, theirs, str(tmp_path / "theirs"), kind, None, 2)[0]
    path = str(tmp_path / "theirs" / "step=2.ckpt")
    assert sorted(os.listdir(path)) == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
    loaded = processes.run(2, partial(ours, max_epochs=2), str(tmp_path / "ours"), kind, path)[0]
    assert loaded[2] == saved[2]
    assert max(loaded) > 4


def both_forms(dirpath: str, kind: str, other: str) -> None:
    """One state saved as a directory and, by a strategy of the other form, as one file."""

    class BothForms(Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
            trainer.save_checkpoint(f"{dirpath}/sharded.ckpt")
            strategy: Any = trainer.strategy
            if kind.startswith("fsdp-"):
                strategy._state_dict_type = "full"
            else:
                strategy._save_distributed_checkpoint = False
            trainer.save_checkpoint(f"{dirpath}/full.ckpt")

    ours(f"{dirpath}/others", kind, None, BothForms(), max_steps=2)


def in_order(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value)}
    return [in_order(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", KINDS)
def test_consolidated_is_what_full_would_be(kind: str, tmp_path: Path) -> None:
    processes.run(2, both_forms, str(tmp_path), kind, kind.replace("sharded", "full"))
    assert ft.verify(str(tmp_path / "sharded.ckpt")).problem is None
    consolidate(Storage(), str(tmp_path / "sharded.ckpt"), str(tmp_path / "one.ckpt"), lambda size_bytes: None)
    one, full = (torch.load(tmp_path / name, weights_only=True) for name in ("one.ckpt", "full.ckpt"))
    assert set(one) >= set(full)
    assert list(one["state_dict"]) == list(full["state_dict"])
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        assert digest(in_order(one[part])) == digest(in_order(full[part])), part
