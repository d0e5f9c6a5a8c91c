"""`DivergenceGuard` in whole fits of one process; `tests/guards/diverging.py` has the models."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

import lightning_ft as ft
from lightning_ft import storage
from lightning_ft._divergence import emergency
from lightning_ft._divergence.left_out import VARIABLE
from lightning_ft._inspection.survey import survey
from lightning_ft._names import KEY
from lightning_ft._state.digest import digest
from lightning_ft.testing import assert_resume_exact
from tests.guards import diverging as d
from tests.trainer import cases as c
from tests.trainer import runs
from tests.trainer import scenarios as s

BAD = 7  # in the fifth batch of every epoch
BAD_BATCH = next(i for i, batch in enumerate(d.data().batch_sampler or [], 1) if BAD in batch)  # type: ignore[arg-type]
STOP = ft.DivergenceGuard()
BACK = ft.DivergenceGuard(action="rollback")


def is_finite(path: Any) -> bool:
    state = torch.load(path, weights_only=True)["state_dict"]
    return all(bool(torch.isfinite(value.float()).all()) for value in state.values())


def names(dirpath: Any) -> list[str]:
    return sorted(info.name for info in ft.list_checkpoints(dirpath))


def ours(path: Any) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)[KEY]
    return found


# -- stop --------------------------------------------------------------------------------------------------------


def test_j3_plain_lightning_is_left_with_nothing_finite(tmp_path: Path) -> None:
    keeps = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=3, save_last=True, monitor="step", mode="max")
    L.Trainer(**{**s.COMMON, "max_epochs": 2}, callbacks=[keeps]).fit(d.Net(BAD), d.data())
    files = list(tmp_path.glob("*.ckpt"))
    assert len(files) == 4
    assert not any(is_finite(file) for file in files)


def test_j3_the_run_stops_before_the_step_and_the_last_finite_checkpoint_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, trainer, error = d.fit(tmp_path, STOP, d.Net(BAD), ft_args={"every_n_train_steps": 1, "keep_last": 1})
    assert error is not None
    assert error.code == 77
    assert trainer.global_step == error.step == BAD_BATCH - 1
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert error.restart_from == ft.last_good(tmp_path).path  # type: ignore[union-attr]
    assert names(tmp_path) == [
        f"diverged-step={BAD_BATCH - 1:08d}.ckpt", f"step={BAD_BATCH - 2:08d}.ckpt", f"step={BAD_BATCH - 1:08d}.ckpt",
    ]  # fmt: skip
    assert is_finite(error.restart_from)
    said = next(r.getMessage() for r in caplog.records if r.levelno == logging.ERROR)
    for part in (
        "rank 0: loss nan",
        f"batch {BAD_BATCH} ",
        str(model.trained[-1]),
        error.restart_from,
        error.emergency,
    ):
        assert part in said
    assert said == str(error)


def test_the_emergency_checkpoint_says_what_happened_and_nobody_resumes_from_it(tmp_path: Path) -> None:
    model, _, error = d.fit(tmp_path, STOP, d.Net(BAD))
    info = ft.verify(error.emergency)
    assert info.problem is None
    assert info.manifest is not None
    assert (info.manifest.reason, info.manifest.boundary) == ("emergency", "none")
    (row,) = [row for row in survey(str(Path(error.emergency).parent), "size").rows if row.path == error.emergency]
    assert row.note == 'the state when the loss had gone bad, to look into; "last" does not take it'
    state = ours(error.emergency)
    about = state["emergency"]
    assert about["batch"] == BAD_BATCH
    assert about["indices"] == [[model.trained[-1]]]
    assert math.isnan(about["losses"][0][0])
    assert about["restart_from"] == error.restart_from
    assert set(state["ranks"][0]["rng"]) >= {"torch", "python", "numpy"}
    assert ft.last_good(tmp_path).path == error.restart_from  # type: ignore[union-attr]
    for strict, outcome in ((True, pytest.raises(ft.RestoreError, match="not for resuming")), (False, None)):
        made = d.trainer(tmp_path / "other", STOP, max_steps=BAD_BATCH, ft_args={"strict": strict})
        if outcome is None:
            made.fit(d.Net(), d.data(), ckpt_path=error.emergency)
        else:
            with outcome:
                made.fit(d.Net(), d.data(), ckpt_path=error.emergency)


def test_two_emergency_checkpoints_stay(tmp_path: Path) -> None:
    for _ in range(emergency.KEPT + 1):
        _, _, error = d.fit(tmp_path, STOP, d.Net(BAD))
        assert error is not None
    kept = [name for name in names(tmp_path) if name.startswith("diverged-")]
    assert len(kept) == emergency.KEPT
    assert Path(error.emergency).name in kept


def test_a_full_disk_does_not_hide_that_the_run_diverged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = storage.Storage.open_attempt

    def full(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        if "diverged-" in path:
            raise OSError(28, "No space left on device", path)
        return original(self, path, *args, **kwargs)

    monkeypatch.setattr(storage.Storage, "open_attempt", full)
    _, _, error = d.fit(tmp_path, STOP, d.Net(BAD))
    assert error is not None
    assert error.emergency == ""
    assert error.restart_from


def test_without_a_checkpoint_there_is_nothing_to_restart_from(tmp_path: Path) -> None:
    _, _, error = d.fit(tmp_path, STOP, d.Net(at=(1,)))
    assert error is not None
    assert error.restart_from == ""
    assert "no finite checkpoint" in str(error)


def test_a_finite_loss_that_makes_weights_that_are_not_finite(tmp_path: Path) -> None:
    # The step of the bad batch is taken and saved, since its loss is finite; the next one shows what it was.
    model = d.Net(at=(6,), through="gradient")
    _, _, error = d.fit(tmp_path, STOP, model, ft_args={"every_n_train_steps": 1, "keep_last": 1})
    assert error is not None
    assert error.batch == 7
    assert Path(error.restart_from).name == "step=00000005.ckpt"
    assert is_finite(error.restart_from)
    assert names(tmp_path) == ["diverged-step=00000006.ckpt", "step=00000005.ckpt"]


class Thousands(d.Net):
    """The loss is 2000."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 2000 + 0 * super().training_step(batch, batch_idx)


def test_a_limit_is_one_of_the_loss_of_a_batch_however_many_are_accumulated(tmp_path: Path) -> None:
    for accumulated in (1, 4):
        for limit, badly in ((1900, True), (2100, False)):
            guard = ft.DivergenceGuard(max_loss=limit)
            root = tmp_path / f"{accumulated}-{limit}"
            error = d.fit(root, guard, Thousands(), max_epochs=1, accumulate_grad_batches=accumulated)[2]
            assert (error is not None) is badly


@pytest.mark.parametrize("limit", [{"max_epochs": 2}, {"max_epochs": -1, "max_steps": 2 * d.BATCHES - 3}])
def test_what_the_last_step_makes_of_the_weights_is_looked_at(tmp_path: Path, limit: dict[str, int]) -> None:
    """A gradient that is not finite in the last batch: no further loss would show it."""
    last = limit.get("max_steps", 2 * d.BATCHES)
    one = {"every_n_train_steps": 1, "keep_last": 1}
    args = {**limit, "ft_args": one}

    def model() -> d.Net:
        return d.Net(at=(last,), through="gradient")

    _, _, error = d.fit(tmp_path / "stop", STOP, model(), **args)
    assert error is not None
    assert f"weights are not finite after the last step of the run (batch {last})" in str(error)
    assert error.batch == last
    assert error.restart_from == str(tmp_path / "stop" / f"step={last - 1:08d}.ckpt")
    assert names(tmp_path / "stop") == [f"diverged-step={last:08d}.ckpt", f"step={last - 1:08d}.ckpt"]

    assert d.fit(tmp_path / "warn", ft.DivergenceGuard(action="warn"), model(), **args)[2] is None

    ran = d.fit(tmp_path / "back", BACK, model(), **args)
    assert ran[2] is None
    assert ran[1].global_step == (last if "max_steps" in limit else last - 1)
    assert all(is_finite(tmp_path / "back" / name) for name in names(tmp_path / "back"))


def test_weights_that_are_no_numbers_from_the_start_are_nobodys_divergence(tmp_path: Path) -> None:
    class Unused(d.Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Parameter(torch.full((2,), math.nan))
            self.bytes = torch.nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn))
            self.lazy = torch.nn.LazyLinear(1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + self.lazy(batch[1]).mean()

    assert d.fit(tmp_path, STOP, Unused())[2] is None


def test_max_loss_and_spikes(tmp_path: Path) -> None:
    _, _, error = d.fit(tmp_path / "max", ft.DivergenceGuard(max_loss=1e3), d.Net(BAD, factor=1e6))
    assert error is not None
    assert error.batch == BAD_BATCH
    assert "above max_loss=1000" in str(error)
    spikes = ft.DivergenceGuard(spike_sigmas=6, spike_window=8)
    _, _, error = d.fit(tmp_path / "spike", spikes, d.Net(at=(12,), factor=1e3))
    assert error is not None
    assert error.batch == 12
    assert "6 standard deviations" in str(error)
    assert d.fit(tmp_path / "none", STOP, d.Net(at=(12,), factor=1e3))[2] is None


# -- what is no divergence ---------------------------------------------------------------------------------------


class LogsNan(d.Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("metric", float("nan"))
        return super().training_step(batch, batch_idx)


def test_a_metric_that_is_not_finite_is_no_divergence(tmp_path: Path) -> None:
    assert d.fit(tmp_path, STOP, LogsNan())[2] is None


def scaler(**kwargs: Any) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", **kwargs))


class Huge(d.Net):
    """The loss is finite; multiplied by the scale at the beginning, it is not, and its gradients are not."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 1e32 * super().training_step(batch, batch_idx).float()


def test_steps_left_out_by_a_scaler_are_no_divergence(tmp_path: Path) -> None:
    precision = scaler(init_scale=2.0**24, growth_interval=100)
    _, _, error = d.fit(tmp_path, STOP, Huge(), plugins=[precision, ft.FaultTolerantCheckpointIO()])
    assert error is None
    assert precision.scaler is not None
    assert precision.scaler.get_scale() < 2.0**24  # it did leave out some


def test_under_a_scaler_a_bad_loss_is_one(tmp_path: Path) -> None:
    plugins = [scaler(init_scale=2.0**4), ft.FaultTolerantCheckpointIO()]
    _, _, error = d.fit(tmp_path / "stop", STOP, d.Net(BAD), plugins=plugins)
    assert error is not None
    assert error.batch == BAD_BATCH
    plugins = [scaler(init_scale=2.0**4), ft.FaultTolerantCheckpointIO()]
    model, _, error = d.fit(tmp_path / "back", BACK, d.Net(BAD), plugins=plugins)
    assert error is None
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


# -- rollback ----------------------------------------------------------------------------------------------------


def ends_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in one:
        assert digest(one[name]) == digest(other[name]), (name, one[name], other[name])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("kind", [d.Net, d.Plateau])
def test_a_run_that_goes_back_equals_one_whose_data_never_had_the_batch(
    tmp_path: Path, kind: Any, every: int, workers: int
) -> None:
    model, trainer, error = d.fit(
        tmp_path / "back", BACK, kind(BAD), d.data(workers=workers), ft_args={"every_n_train_steps": every}
    )
    assert error is None
    without, other, _ = d.fit(tmp_path / "without", None, kind(), d.data(BAD, workers=workers))
    ends_alike(d.end_of(model, trainer), d.end_of(without, other))
    assert [batch for batch in without.trained if BAD in batch] == []
    assert sum(BAD in batch for batch in model.trained) == 2  # once per epoch, for the loss that was bad


def test_it_goes_back_over_the_beginning_of_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing of what the epoch had logged and counted so far is left in its means.
    epochs = {"every_n_train_steps": None, "every_n_epochs": 1}
    ran = d.fit(tmp_path / "back", BACK, d.Net(at=(12,)), ft_args=epochs)
    monkeypatch.setenv(VARIABLE, "12")
    asked = d.fit(tmp_path / "asked", None, d.Net(), ft_args=epochs)
    assert ran[2] is None
    ends_alike(d.end_of(*ran[:2]), d.end_of(*asked[:2]))


def test_what_is_trained_after_going_back_supersedes_what_was_before(tmp_path: Path) -> None:
    once = d.Net(at=(4, 5, 6))
    is_bad, seen = once.is_bad, []

    def bad_the_first_time(batch: Any) -> bool:
        number = once.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        seen.append(number)
        return is_bad(batch) and seen.count(number) == 2  # it is asked twice about a batch

    once.is_bad = bad_the_first_time  # type: ignore[method-assign]
    guard = ft.DivergenceGuard(action="rollback", offending="retry", patience=2)
    assert d.fit(tmp_path, guard, once, ft_args={"every_n_train_steps": 1, "keep_last": -1})[2] is None
    lines = {(i.manifest.start, i.manifest.batch) for i in ft.list_checkpoints(tmp_path) if i.manifest is not None}
    assert {(1, 4), (1, 5), (2, 4), (2, 5), (2, 6)} <= lines
    assert not {(2, 3), (1, 6)} & lines


class Noisy(s.Net):
    """Random draws everywhere, any loaders, validations; the loss is bad at two batches."""

    def __init__(self, *at: int) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.at = at
        self.validated: dict[int, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.trainer.fit_loop.epoch_loop.batch_progress.total.ready in self.at else loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        value = super().validation_step(batch, batch_idx)
        self.validated[self.trainer.global_step] = value.tolist()  # some are run twice, with the same outcome
        return value


DATA = {
    **s.DATA,
    "persistent": lambda workers: (s.generator_sampled(workers, persistent=bool(workers)), c.plain_loader(6, 3)),
    "stream": lambda workers: (c.stream(workers=workers, length=30), c.plain_loader(6, 3)),
}


@pytest.mark.parametrize(
    ("kind", "workers"), [*((kind, 0) for kind in DATA), ("shuffled", 2), ("persistent", 2), ("stateful_loader", 2)]
)
def test_it_equals_a_run_that_was_asked_to_leave_the_batches_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, workers: int
) -> None:
    # Augmentation and dropout draw by position, which is the same in both.
    more = {"max_epochs": 3, "val_check_interval": 3 if kind != "stream" else 1.0, "num_sanity_val_steps": 0}
    every = {"every_n_train_steps": 4}
    ran = d.fit(tmp_path / "back", BACK, Noisy(6, 12), *DATA[kind](workers), ft_args=every, **more)
    monkeypatch.setenv(VARIABLE, "6,12")
    asked = d.fit(tmp_path / "asked", None, Noisy(), *DATA[kind](workers), **more)
    assert ran[2] is None
    ends_alike(d.end_of(*ran[:2]), d.end_of(*asked[:2]))
    assert ran[0].validated == asked[0].validated != {}


@pytest.mark.parametrize("bad", [(6, 7), (6, 8), (5, 9, 11)])
def test_batches_left_out_add_up_over_rollbacks_to_one_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: tuple[int, ...]
) -> None:
    every = {"every_n_train_steps": 4}
    ran = d.fit(tmp_path / "back", BACK, d.Net(at=bad), ft_args=every)
    assert ran[2] is None
    assert all(is_finite(info.path) for info in ft.list_checkpoints(tmp_path / "back"))
    assert ours(ft.last_good(tmp_path / "back").path)["left_out"] == sorted(bad)  # type: ignore[union-attr]
    monkeypatch.setenv(VARIABLE, ",".join(map(str, bad)))
    asked = d.fit(tmp_path / "asked", None, d.Net())
    ends_alike(d.end_of(*ran[:2]), d.end_of(*asked[:2]))


def test_what_was_left_out_is_so_after_a_restart_and_a_rollback_to_what_it_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = {"every_n_train_steps": 4}
    often = ft.DivergenceGuard(action="rollback", max_rollbacks=4)  # over all starts
    d.fit(tmp_path / "back", often, d.Net(at=(3, 7)), ft_args={"every_n_train_steps": 2}, max_steps=6)
    ran = d.fit(tmp_path / "back", often, d.Net(at=(3, 7, 10, 11)), ft_args=every)  # two more before its first save
    assert ran[2] is None
    monkeypatch.setenv(VARIABLE, "3,7,10,11")
    asked = d.fit(tmp_path / "asked", None, d.Net())
    ends_alike(d.end_of(*ran[:2]), d.end_of(*asked[:2]))


def test_at_its_end_a_run_says_all_that_a_restart_has_to_leave_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = {"every_n_train_steps": 4}
    back = ft.DivergenceGuard(action="rollback", max_rollbacks=2)
    _, _, error = d.fit(tmp_path, back, d.Net(at=(2, 6, 8, 9)), ft_args=every)
    assert error is not None
    assert "no finite checkpoint" in str(error)  # of batch 2
    assert f"{VARIABLE}=2 " in str(error)
    monkeypatch.setenv(VARIABLE, "2,16")
    _, _, error = d.fit(tmp_path, back, d.Net(at=(6, 7, 9)), ft_args=every)
    assert error is not None
    assert f"{VARIABLE}=6-7,9,16 " in str(error)  # not 2: the checkpoint has it behind it
    monkeypatch.setenv(VARIABLE, "6-7,9,16")
    assert d.fit(tmp_path, back, d.Net(at=(6, 7, 9)), ft_args=every)[2] is None


class Changing(d.Net):
    """Other data in every epoch."""

    def train_dataloader(self) -> Any:
        return d.data(length=4 * (d.BATCHES + self.current_epoch))


def test_loaders_that_are_made_anew_in_every_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(name: str, guard: Any, *bad: int) -> Any:
        model = Changing(at=bad)
        every = {"every_n_train_steps": 5}
        trainer = d.trainer(tmp_path / name, guard, max_epochs=3, reload_dataloaders_every_n_epochs=1, ft_args=every)
        trainer.fit(model, ckpt_path="last")
        return d.end_of(model, trainer)

    ran = run("back", BACK, 9, 20)  # the first batch of the second epoch: back to the first one
    monkeypatch.setenv(VARIABLE, "9,20")
    ends_alike(ran, run("asked", None))


@pytest.mark.parametrize("plugin", [{}, {"load": "broadcast", "verify_after_write": "full"}, {"when_busy": "newest"}])
def test_it_goes_back_with_saves_in_the_background(tmp_path: Path, plugin: Any) -> None:
    one = {"plugins": [ft.FaultTolerantCheckpointIO(**plugin)], "ft_args": {"every_n_train_steps": 1, "keep_last": 1}}
    ran = d.fit(tmp_path / "back", BACK, d.Net(BAD), **one)
    assert ran[2] is None
    ends_alike(d.end_of(*ran[:2]), d.end_of(*d.fit(tmp_path / "without", None, d.Net(), d.data(BAD))[:2]))


def test_it_goes_back_in_a_store(tmp_path: Path) -> None:
    with runs.memory() as url:
        ran = d.fit(url, BACK, d.Net(at=(6,), through="gradient"), ft_args={"every_n_train_steps": 1, "keep_last": 1})
        assert ran[2] is None
        ran = d.fit(f"{url}/stop", STOP, d.Net(at=(6,), through="gradient"), ft_args={"every_n_train_steps": 1})
        assert ran[2].restart_from == f"{url}/stop/step=00000005.ckpt"
        assert "diverged-step=00000006.ckpt" in names(f"{url}/stop")
        assert "step=00000006.ckpt" not in names(f"{url}/stop")


def test_it_goes_back_to_a_local_checkpoint_in_front_of_a_slow_directory(tmp_path: Path) -> None:
    local = {
        "every_n_train_steps": 4, "local_dirpath": tmp_path / "local", "local_every_n_train_steps": 1,
        "local_keep_last": 1, "keep_last": 1,
    }  # fmt: skip
    ran = d.fit(tmp_path / "back", BACK, d.Net(BAD), ft_args=local)
    assert ran[2] is None
    ends_alike(d.end_of(*ran[:2]), d.end_of(*d.fit(tmp_path / "without", None, d.Net(), d.data(BAD))[:2]))
    end = ft.last_good(tmp_path / "back")
    assert end is not None
    assert end.manifest is not None
    assert end.manifest.batch == 2 * d.BATCHES


def test_it_goes_back_to_what_it_was_started_from(tmp_path: Path) -> None:
    d.fit(tmp_path / "first", None, d.Net(), max_steps=4, max_epochs=-1)
    start = ft.last_good(tmp_path / "first").path  # type: ignore[union-attr]
    made = d.trainer(tmp_path / "second", BACK)
    model = d.Net(BAD)
    made.fit(model, d.data(), ckpt_path=start)
    ends_alike(d.end_of(model, made), d.end_of(*d.fit(tmp_path / "without", None, d.Net(), d.data(BAD))[:2]))


def test_retried_batches_are_trained(tmp_path: Path) -> None:
    once = d.Net(at=(5,))
    is_bad, asked = once.is_bad, []

    def bad_the_first_time(batch: Any) -> bool:
        bad = is_bad(batch)
        asked.append(bad)
        return bad and asked.count(True) == 1

    once.is_bad = bad_the_first_time  # type: ignore[method-assign]
    guard = ft.DivergenceGuard(action="rollback", offending="retry")
    ran = d.fit(tmp_path / "retried", guard, once)
    assert ran[2] is None
    ends_alike(d.end_of(*ran[:2]), d.end_of(*d.fit(tmp_path / "never", None, d.Net())[:2]))


def test_after_so_many_rollbacks_the_run_stops(tmp_path: Path) -> None:
    guard = ft.DivergenceGuard(action="rollback", max_rollbacks=2)
    model, _, error = d.fit(tmp_path, guard, d.Net(at=(4, 6, 8)))
    assert error is not None
    assert error.batch == 8
    assert "went back 2 times already" in str(error)
    retry = ft.DivergenceGuard(action="rollback", max_rollbacks=2, offending="retry")
    model, _, error = d.fit(tmp_path / "retry", retry, d.Net(at=(4,)))
    assert error is not None
    assert len(model.trained) == 4 + 2 * 2  # from step 2 on, twice


def test_without_a_finite_checkpoint_a_rollback_is_a_stop(tmp_path: Path) -> None:
    _, _, error = d.fit(tmp_path, BACK, d.Net(at=(2,)))
    assert error is not None
    assert "no finite checkpoint to go back to" in str(error)


@pytest.mark.parametrize("every", [1, 2, 4])
def test_a_rollback_leaves_out_the_step_that_made_weights_that_are_not_finite(
    tmp_path: Path, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"every_n_train_steps": every, "keep_last": 1}
    ran = d.fit(tmp_path / "back", BACK, d.Net(at=(6,), through="gradient"), ft_args=one)
    assert ran[2] is None
    assert all(is_finite(info.path) for info in ft.list_checkpoints(tmp_path / "back"))
    monkeypatch.setenv(VARIABLE, "6")
    asked = d.fit(tmp_path / "asked", None, d.Net())
    ends_alike(d.end_of(*ran[:2]), d.end_of(*asked[:2]))


class OfBytes(d.Net):
    """Some of its numbers are of a kind that torch cannot be asked about."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.weights = torch.nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn))
        self.register_buffer("scales", torch.ones(2).to(torch.float8_e5m2))


def test_a_checkpoint_with_small_floats_is_looked_into(tmp_path: Path) -> None:
    guard = ft.DivergenceGuard(action="rollback", patience=1)
    _, trainer, error = d.fit(tmp_path, guard, OfBytes(at=(6,), through="gradient"), ft_args={"every_n_train_steps": 1})
    assert error is None
    assert trainer.global_step == 2 * d.BATCHES - 1
    assert all(is_finite(info.path) for info in ft.list_checkpoints(tmp_path))


def test_the_step_of_several_batches_is_left_out_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = d.fit(tmp_path / "stop", STOP, d.Net(at=(6,)), accumulate_grad_batches=4)
    assert stopped[1].global_step == 1
    ran = d.fit(tmp_path / "back", BACK, d.Net(at=(14,)), accumulate_grad_batches=4)
    assert ran[2] is None
    monkeypatch.setenv(VARIABLE, "13-16")
    asked = d.fit(tmp_path / "asked", None, d.Net(), accumulate_grad_batches=4)
    ends_alike(d.end_of(*ran[:2]), d.end_of(*asked[:2]))
    assert ran[1].global_step == 3


@pytest.mark.parametrize("which", ["critic", "generator"])
def test_manual_optimization(tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, error = d.fit(tmp_path / "stop", STOP, d.Gan(BAD, which))
    assert error is not None
    assert error.batch == BAD_BATCH
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert ours(error.emergency)["emergency"]["steps_of_batch"] == (0 if which == "critic" else 1)
    ran = d.fit(tmp_path / "back", BACK, d.Gan(BAD, which))
    assert ran[2] is None
    monkeypatch.setenv(VARIABLE, f"{BAD_BATCH},{BAD_BATCH + d.BATCHES}")
    asked = d.fit(tmp_path / "asked", None, d.Gan(-1, which))
    ends_alike(d.end_of(*ran[:2]), d.end_of(*asked[:2]))


back = partial(d.trainer, guard=BACK)


@pytest.mark.parametrize("kill_at", [BAD_BATCH - 1, BAD_BATCH + 1, BAD_BATCH + 5, "Renamed:3"])
def test_killed_after_a_rollback_the_restart_is_exact(tmp_path: Path, kill_at: Any) -> None:
    assert_resume_exact(back, partial(d.Net, BAD), d.data, kill_at=kill_at, root=tmp_path)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kill_at", ["5@0", "7@1"])
def test_two_ranks_killed_after_a_rollback_restart_exact(tmp_path: Path, kill_at: str) -> None:
    make_trainer = partial(d.trainer, guard=BACK, strategy="ddp", devices=2)
    make_model = partial(d.Net, at=(4,), rank=1)
    assert_resume_exact(make_trainer, make_model, d.data, kill_at=kill_at, root=tmp_path, world_size=2)


def test_what_cannot_be_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ft.ConfigurationError, match="one DivergenceGuard, with all"):
        d.fit(tmp_path, None, d.Net(), ft_args={"guards": [STOP, BACK]})
    with pytest.raises(ft.ConfigurationError, match="FaultTolerantCheckpointIO"):
        d.fit(tmp_path, BACK, d.Net(), plugins=[OtherIO()])
    with pytest.raises(ft.ConfigurationError, match="dataloader_iter"):
        d.fit(tmp_path, BACK, TakesIterator())


class OtherIO(TorchCheckpointIO):
    pass


class TakesIterator(d.Net):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


# -- patience, warn ----------------------------------------------------------------------------------------------


def test_steps_within_patience_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    guard = ft.DivergenceGuard(patience=2)
    model, trainer, error = d.fit(tmp_path / "two", guard, d.Net(at=(4, 5, 9)))
    assert error is None
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert trainer.global_step == 2 * d.BATCHES
    assert sum("the step is left out" in r.getMessage() for r in caplog.records) == 3
    adam = next(iter(trainer.optimizers[0].state.values()))
    assert adam["step"] == 2 * d.BATCHES - 3
    _, _, error = d.fit(tmp_path / "three", guard, d.Net(at=(4, 5, 6)))
    assert error is not None
    assert error.batch == 4
    assert len(error.losses[0]) == 3


class Fused(d.Net):
    """Its optimizer unscales gradients within its step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).float()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize("factor", [float("nan"), 1e4])
def test_a_step_of_a_fused_optimizer_is_left_out_under_a_scaler(tmp_path: Path, factor: float) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler), ft.FaultTolerantCheckpointIO(async_save=False)]
    guard = ft.DivergenceGuard(patience=2, max_loss=1e3)
    model, trainer, error = d.fit(tmp_path, guard, Fused(at=(4, 5), factor=factor), plugins=plugins)
    assert error is None
    assert trainer.global_step == 2 * d.BATCHES
    assert next(iter(trainer.optimizers[0].state.values()))["step"] == 2 * d.BATCHES - 2
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


class Lbfgs(d.Net):
    """Two losses per step, between which the weights move; the second of a bad batch is bad."""

    evaluation = 0

    def is_bad(self, batch: Any) -> bool:
        return super().is_bad(batch) and self.evaluation % 2 == 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.evaluation += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=1e-3, max_iter=2, tolerance_grad=0, tolerance_change=0)


@pytest.mark.parametrize(("factor", "tolerated"), [(float("nan"), False), (1e9, True)])
def test_within_a_step_that_moves_the_weights_between_its_losses_nothing_is_left_out(
    tmp_path: Path, factor: float, tolerated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    guard = ft.DivergenceGuard(patience=2, max_loss=1e6)
    _, _, error = d.fit(tmp_path, guard, Lbfgs(at=(4,), factor=factor))
    assert (error is None) is tolerated
    assert not any("left out" in r.getMessage() for r in caplog.records)
    assert any("the step was taken" in r.getMessage() for r in caplog.records) is tolerated
    if error is not None:
        assert ours(error.emergency)["emergency"]["steps_of_batch"] == 1
        assert Path(error.restart_from).name == "step=00000002.ckpt"


class PoisonsBatchNorm(d.Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = [batch[0], batch[1] * float("nan")] if self.is_bad(batch) else batch
        return super().training_step(batch, batch_idx)


def test_what_the_forward_pass_has_spoilt_is_not_tolerated(tmp_path: Path) -> None:
    _, _, error = d.fit(tmp_path / "stop", ft.DivergenceGuard(patience=5), PoisonsBatchNorm(at=(4,)))
    assert error is not None
    model, _, error = d.fit(
        tmp_path / "back", ft.DivergenceGuard(action="rollback", patience=5), PoisonsBatchNorm(at=(4,))
    )
    assert error is None
    assert all(bool(torch.isfinite(b).all()) for b in model.buffers())


def test_warned_of_it_trains_on_and_saves_nothing_that_is_not_finite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with runs.recorded() as seen:
        _, trainer, error = d.fit(tmp_path, ft.DivergenceGuard(action="warn"), d.Net(BAD))
    assert error is None
    refused = [r for r in caplog.records if "no checkpoint is saved after step" in r.getMessage()]
    assert [record.levelno for record in refused] == [logging.WARNING]
    assert trainer.global_step == 2 * d.BATCHES
    assert all(is_finite(info.path) for info in ft.list_checkpoints(tmp_path))
    assert sum("training goes on" in r.getMessage() for r in caplog.records) == 6  # of 12 bad steps
    assert any("not finite" in getattr(event, "reason", "") for event in seen)


def test_warned_of_a_high_loss_it_saves(tmp_path: Path) -> None:
    guard = ft.DivergenceGuard(action="warn", max_loss=1e-9)
    d.fit(tmp_path, guard, d.Net())
    assert ft.last_good(tmp_path).manifest.batch == 2 * d.BATCHES  # type: ignore[union-attr]


def test_the_window_of_losses_survives_a_restart(tmp_path: Path) -> None:
    guard = ft.DivergenceGuard(spike_sigmas=6, spike_window=8)
    d.fit(tmp_path, guard, d.Net(), max_steps=8, max_epochs=-1)
    saved = ours(ft.last_good(tmp_path).path)["ranks"][0]["guards"]["divergence"]  # type: ignore[union-attr]
    assert len(saved["losses"]["0"]) == 8
    _, _, error = d.fit(tmp_path, guard, d.Net(at=(9,), factor=1e3), max_steps=12, max_epochs=-1)
    assert error is not None
    assert error.batch == 9


# -- J2 ----------------------------------------------------------------------------------------------------------


class Raises(d.Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.is_bad(batch):
            self.trained.append(batch[0].flatten().int().tolist())
            raise ZeroDivisionError("a poison batch")
        return super().training_step(batch, batch_idx)


def test_j2_a_restart_begins_at_the_failing_batch_and_leaves_it_out_if_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = {"every_n_train_steps": 1}
    failed = []
    for _ in range(2):  # it is tried again first
        model = Raises(BAD)
        with pytest.raises(ZeroDivisionError):
            d.fit(tmp_path, None, model, ft_args=every)
        failed.append(model.trained[-1])
    assert failed[0] == failed[1]
    assert len(model.trained) == 1
    said = next(r.getMessage() for r in caplog.records if VARIABLE in r.getMessage())
    assert f"{VARIABLE}={BAD_BATCH}" in said
    assert str(failed[0]) in said
    monkeypatch.setenv(VARIABLE, str(BAD_BATCH))
    model = Raises(BAD)
    with pytest.raises(ZeroDivisionError):
        d.fit(tmp_path, None, model, ft_args=every)
    assert any("is left out" in r.getMessage() and str(failed[0]) in r.getMessage() for r in caplog.records)
    assert len(model.trained) == d.BATCHES  # all of the epoch that were left, and those of the next up to its own
    monkeypatch.setenv(VARIABLE, f"{BAD_BATCH + d.BATCHES}")
    asked = d.fit(tmp_path, None, Raises(BAD), ft_args=every)
    monkeypatch.delenv(VARIABLE)
    without = d.fit(tmp_path / "without", None, d.Net(), d.data(BAD))
    ends_alike(d.end_of(*asked[:2])["weights"], d.end_of(*without[:2])["weights"])


def test_what_was_left_out_on_request_is_left_out_by_later_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "3,11")
    d.fit(tmp_path, None, d.Net(), max_steps=6, max_epochs=-1)
    monkeypatch.delenv(VARIABLE)
    model, trainer, _ = d.fit(tmp_path, None, d.Net())
    assert trainer.global_step == 2 * d.BATCHES - 2
    assert len(model.trained) == 16 - 7 - 1


def test_the_variable_must_hold_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "the third")
    with pytest.raises(ft.ConfigurationError, match=VARIABLE) as caught:
        d.fit(tmp_path, None, d.Net())
    assert caught.value.__suppress_context__  # the sentence is all there is to know


def test_the_last_batch_of_an_epoch_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"{d.BATCHES}")
    ran = d.fit(tmp_path, None, EpochSchedule(), *c.plain_data(32))
    assert ran[1].global_step == 2 * d.BATCHES - 1
    assert ran[1].lr_scheduler_configs[0].scheduler.last_epoch == 2
    assert ran[0].validations == 2


class EpochSchedule(d.Net):
    validations = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validations += batch_idx == 0 and not self.trainer.sanity_checking

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}
