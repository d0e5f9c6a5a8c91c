"""The public API as users call it, under mypy strict: checked by `make lint`, never executed."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
from typing_extensions import assert_type

import lightning_ft as ft
from lightning_ft.guards import Guard, Verdict


class Stop:
    def poll(self, step: int) -> Verdict | None:
        return Verdict("enough") if step > 100 else None


guard: Guard = Stop()
preemption = ft.PreemptionGuard(signals=("SIGTERM", 10), save_signal=None, grace=timedelta(seconds=30), requeue=False)
callback = ft.FaultTolerantCheckpoint(
    Path("runs/1"),
    every_n_train_steps=500,
    every_n_epochs=1,
    train_time_interval=timedelta(minutes=10),
    keep_last=3,
    keep_every_n_train_steps=10_000,
    save_on_train_end=True,
    guards=(preemption, guard, ft.HangGuard(step_timeout=timedelta(minutes=5))),
    max_restarts_without_progress=3,
    seed_workers=True,
    strict=False,
)
plugin = ft.FaultTolerantCheckpointIO(
    async_save=True,
    staging="overlap",
    when_busy="newest",
    verify="full",
    on_error="warn",
    retries=3,
    storage_options={"anon": True},
)
L.Trainer(**ft.fault_tolerance("runs/1", callbacks=[L.Callback()], guards=[guard]), max_epochs=3)
ft.fault_tolerance("runs/1", every_n_train_steps="often")  # type: ignore[arg-type]
trainer = L.Trainer(callbacks=[callback, ft.FaultTolerantCheckpoint()], plugins=[plugin])
sharded = L.Trainer(strategy=ft.FSDPStrategy(state_dict_type="sharded", sharding_strategy="FULL_SHARD"))
L.Trainer(strategy=ft.ModelParallelStrategy(data_parallel_size=2, save_distributed_checkpoint=False))
ft.FSDPStrategy(state_dict_type="halved")  # type: ignore[arg-type]
ft.FaultTolerantCheckpoint("runs/1", 500)  # type: ignore[call-arg]  # everything but the directory by name
ft.FaultTolerantCheckpoint(every_n_train_steps="500")  # type: ignore[arg-type]
ft.FaultTolerantCheckpointIO(staging="later")  # type: ignore[arg-type]

assert_type(ft.list_checkpoints("runs/1"), list[ft.CheckpointInfo])
assert_type(ft.last_good("runs/1"), ft.CheckpointInfo | None)
assert_type(ft.verify(Path("runs/1/step=00000001.ckpt")).problem, str | None)
assert_type(ft.verify("runs/1/step=00000001.ckpt").manifest, ft.Manifest | None)


def observe(event: ft.events.Event) -> None:
    assert_type(event.path, str)


def make_trainer(dirpath: str) -> L.Trainer:
    return L.Trainer(callbacks=[ft.FaultTolerantCheckpoint(dirpath)])


def proof(make_model: type[L.LightningModule], make_data: type[L.LightningDataModule]) -> Any:
    ft.events.observe(observe)()
    return ft.testing.assert_resume_exact(make_trainer, make_model, make_data, kill_at=[7, "Renamed:2"], steps=20)


try:
    trainer.fit(L.LightningModule(), ckpt_path="last")
except ft.NoUsableCheckpointError as unusable:
    for path, reason in unusable.reasons:
        assert_type(path, str)
        assert_type(reason, str)
except ft.TopologyError as other:
    assert_type(other.saved, int)
except ft.FaultToleranceError:
    raise
