"""Sharded saves of whole fits: votes of all ranks, other callbacks' checkpoints, and the last line of a script."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

import lightning_ft as ft
from lightning_ft import exit_codes
from lightning_ft._disk import directory
from lightning_ft.errors import ConfigurationError, SaveError
from tests.ranks import Rank, run, values


class ShardedDDP(DDPStrategy):
    """Replicated state, of which each rank writes a share."""

    saves_through_plugin = True
    saves_sharded = True

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        state = {"model": checkpoint.pop("state_dict")}
        state |= {f"optimizer_{number}": s for number, s in enumerate(checkpoint.pop("optimizer_states", []))}
        self.checkpoint_io.save_sharded(state, checkpoint, filepath, storage_options)  # type: ignore[attr-defined]


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 300)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        data = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=4)


class FailsAt(L.Callback):
    """Rank 1 cannot write its part of the save at step `step`."""

    def __init__(self, rank: int, *steps: int) -> None:
        self.rank, self.steps = rank, steps
        self.finish = directory.FileAttempt.finish

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        def broken(file: Any) -> Any:
            if any(f"step={step:08d}.ckpt" in file.path for step in self.steps):
                raise OSError(28, "No space left on device")
            return self.finish(file)

        if self.rank == trainer.global_rank == 1:
            directory.FileAttempt.finish = broken  # type: ignore[method-assign]


def trainer(rank: Rank, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    io = ft.FaultTolerantCheckpointIO(**options)
    ours = ft.FaultTolerantCheckpoint(rank.root / "ours", every_n_train_steps=1, keep_last=2)
    return L.Trainer(
        accelerator="cpu", devices=rank.world_size, strategy=ShardedDDP(process_group_backend="gloo"), max_steps=6,
        callbacks=[ours, *callbacks], plugins=[io], logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=rank.root,
    )  # fmt: skip


def names(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if name.endswith(".ckpt"))


def fit(rank: Rank) -> Any:
    best = ModelCheckpoint(rank.root / "theirs", every_n_train_steps=2, save_top_k=1)
    run = trainer(rank, best)
    model = Net()
    run.fit(model)
    found = [names(rank.root / "ours"), names(rank.root / "theirs"), best.best_model_path]
    run.save_checkpoint(rank.root / "final.ckpt")
    found.append("final.ckpt" in names(rank.root))
    expected = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for path in (found[2], str(rank.root / "final.ckpt"), str(rank.root / "ours" / found[0][-1])):
        loaded = _load_distributed_checkpoint(Path(path))
        assert loaded["global_step"] == 6
        assert all(torch.equal(loaded["model"][name], value) for name, value in expected.items())
        state = run.optimizers[0].state_dict()["state"][0]["exp_avg"]
        assert torch.equal(loaded["optimizer_0"]["state"]["0"]["exp_avg"], state)
    return found


def test_a_fit_with_another_callback_and_a_last_line(tmp_path: Path) -> None:
    first, second = values(fit, tmp_path)
    assert first == second
    ours, theirs, _, final = first
    assert ours == ["step=00000005.ckpt", "step=00000006.ckpt"]
    assert theirs == ["epoch=0-step=6.ckpt"]
    assert final


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "was not saved" in record.getMessage():
            self.texts.append(record.getMessage())


def warned(rank: Rank) -> Any:
    heard = Heard()
    logging.getLogger("lightning_ft").addHandler(heard)
    run = trainer(rank, FailsAt(rank.number, 3, 4), on_error="warn", retries=0)
    run.fit(Net())
    plugin = run.strategy.checkpoint_io
    return heard.texts, names(rank.root / "ours"), plugin.failed  # type: ignore[attr-defined]


def test_failures_of_rank_1_are_lived_with_on_all(tmp_path: Path) -> None:
    first, second = values(warned, tmp_path)
    # Each is told once, or the two as one ("2 in a row"), if the second has failed before the first was told.
    assert 1 <= len(set(first[0])) == len(first[0]) <= 2
    assert second[0] == []  # by rank 0
    assert all("rank 1 failed: OSError: [Errno 28]" in text for text in first[0])
    assert first[1] == second[1] == ["step=00000005.ckpt", "step=00000006.ckpt"]
    assert not first[2]
    assert not second[2]


def raises(rank: Rank) -> Any:
    run = trainer(rank, FailsAt(rank.number, 3), retries=0)
    with pytest.raises(SaveError) as error:
        run.fit(Net())
    return str(error.value), names(rank.root / "ours")


def test_a_failure_of_rank_1_ends_the_run_on_all_with_one_error(tmp_path: Path) -> None:
    first, second = values(raises, tmp_path)
    assert first[0] == second[0]
    assert "step=00000003.ckpt (step 3) was not saved: RankFailure: rank 1 failed: OSError" in first[0]
    assert "step=00000003.ckpt" not in first[1]


class Raises(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step == 3 and self.global_rank == 1:
            raise ZeroDivisionError("on rank 1")
        return super().training_step(batch, batch_idx)


def one_raises(rank: Rank) -> Any:
    trainer(rank).fit(Raises())


def test_one_rank_raises_and_both_end(tmp_path: Path) -> None:
    outcomes = run(one_raises, tmp_path)
    assert [outcome.exit_code for outcome in outcomes] == [exit_codes.PEER_LOST, 1]
    assert "ZeroDivisionError: on rank 1" in outcomes[1].error
    assert names(tmp_path / "ours")[-1] == "step=00000003.ckpt"


def skips(rank: Rank) -> Any:
    run = trainer(rank, when_busy="skip")
    run.fit(Net())
    return names(rank.root / "ours")


def test_a_save_is_left_out_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    first, second = values(skips, tmp_path)
    assert first == second
    assert first[-1] == "step=00000006.ckpt"


def test_a_local_directory_cannot_hold_the_parts_of_all_ranks(tmp_path: Path) -> None:
    callback = ft.FaultTolerantCheckpoint(tmp_path / "a", local_dirpath=tmp_path / "b")
    run = L.Trainer(
        accelerator="cpu", devices=1, strategy=ShardedDDP(process_group_backend="gloo"), callbacks=[callback],
        logger=False, enable_progress_bar=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match=r"local_dirpath.*ShardedDDP writes sharded"):
        callback.setup(run, Net(), "fit")
