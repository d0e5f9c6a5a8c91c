"""Everything in one call: what is in it, what takes its place, and that it restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import LearningRateMonitor

import lightning_ft as ft
from lightning_ft.guards import Verdict
from tests.trainer import scenarios as s


def made(**kwargs: Any) -> tuple[ft.FaultTolerantCheckpoint, list[Any]]:
    arguments = ft.fault_tolerance("runs/1", **kwargs)
    found = [c for c in arguments["callbacks"] if isinstance(c, ft.FaultTolerantCheckpoint)]
    assert len(found) == 1
    return found[0], arguments["plugins"]


def kinds(checkpoint: ft.FaultTolerantCheckpoint) -> list[type]:
    return [type(guard) for guard in checkpoint.settings.guards]


def test_everything_is_in_it() -> None:
    checkpoint, plugins = made()
    assert kinds(checkpoint) == [ft.PreemptionGuard, ft.DivergenceGuard, ft.HangGuard]
    assert checkpoint.settings.trigger.auto
    assert [type(plugin) for plugin in plugins] == [ft.FaultTolerantCheckpointIO]
    assert plugins[0].verify_after_write == "size"


class Own:
    def poll(self, step: int) -> Verdict | None:
        return None


def test_guards_that_are_given_are_all_there_are_as_in_the_callback(tmp_path: Path) -> None:
    for guards in ([], [ft.DivergenceGuard("rollback"), Own()], [ft.HangGuard()]):
        checkpoint, _ = made(guards=guards)
        itself = ft.FaultTolerantCheckpoint(tmp_path, guards=guards)
        assert checkpoint.settings.guards == itself.settings.guards == tuple(guards)


@pytest.mark.parametrize("plugin", [TorchCheckpointIO(), ft.FaultTolerantCheckpointIO(layout="sharded")])
def test_a_plugin_for_checkpoints_takes_the_place_of_ours(plugin: CheckpointIO) -> None:
    _, plugins = made(plugins=[plugin], every_n_train_steps=10)
    assert plugins == [plugin]
    with pytest.raises(ft.ConfigurationError, match="storage_options="):
        made(plugins=[plugin], storage_options={"deadline_secs": 5})


def test_one_callback_or_plugin_needs_no_list() -> None:
    monitor, plugin = LearningRateMonitor(), ft.FaultTolerantCheckpointIO()
    arguments = ft.fault_tolerance("runs/1", callbacks=monitor, plugins=plugin)
    assert arguments["callbacks"][0] is monitor
    assert arguments["plugins"] == [plugin]
    made(callbacks=None, plugins=None)


@pytest.mark.parametrize(
    "arguments", [{"callbacks": "EarlyStopping"}, {"guards": ft.DivergenceGuard()}, {"guards": "all"}]
)
def test_what_is_no_list_of_these_is_named(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(ft.ConfigurationError, match=f"^{name}=.*: must be a "):
        made(**arguments)


def test_two_of_the_callback_are_refused() -> None:
    with pytest.raises(ft.ConfigurationError, match="which fault_tolerance"):
        made(callbacks=[ft.FaultTolerantCheckpoint("runs/2")])


def train(dirpath: Path, epochs: int) -> torch.Tensor:
    L.seed_everything(1)
    arguments = ft.fault_tolerance(dirpath, every_n_train_steps=3, callbacks=[LearningRateMonitor()])
    model = s.Net()
    trainer = L.Trainer(
        **arguments, max_epochs=epochs, accelerator="cpu", default_root_dir=dirpath, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, *s.shuffled(), ckpt_path="last")
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_a_restart_is_exact(tmp_path: Path) -> None:
    train(tmp_path / "a", 1)
    assert torch.equal(train(tmp_path / "a", 2), train(tmp_path / "b", 2))
