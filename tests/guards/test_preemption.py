"""Preemption in one process: a signal at every kind of moment, and what is true when the process would end."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor

import lightning_ft as ft
from lightning_ft import exit_codes
from lightning_ft._fit import loops
from lightning_ft._fit.watch import Request
from lightning_ft._preemption import signals as _signals
from lightning_ft._preemption import slurm as _slurm
from lightning_ft._preemption.watch import Preemption
from lightning_ft._ranks.dist import Ranks
from lightning_ft.guards import Verdict
from lightning_ft.manifest import Manifest
from lightning_ft.state import Progress
from lightning_ft.storage import Storage
from tests.guards import diverging as d
from tests.trainer import runs as r
from tests.trainer import scenarios as s

HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


@pytest.fixture(autouse=True)
def _handlers_are_given_back() -> Iterator[None]:
    before = [signal.getsignal(number) for number in HANDLED]
    yield
    gc.collect()  # guards that were made and not used
    assert [signal.getsignal(number) for number in HANDLED] == before


def me(number: int = signal.SIGTERM) -> None:
    """A real signal to this process, handled when this returns."""
    os.kill(os.getpid(), number)


class At(Callback):
    """Calls `what` once, in the hook `hook`, the n-th time it is called."""

    def __init__(self, hook: str, what: Callable[[], Any] = me, n: int = 1) -> None:
        self.left = n
        self.what = what
        setattr(self, hook, self._call)

    def _call(self, *args: Any, **kwargs: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self.what()


def callback(dirpath: Path, guard: ft.PreemptionGuard | None = None, **kwargs: Any) -> ft.FaultTolerantCheckpoint:
    return ft.FaultTolerantCheckpoint(
        dirpath, **{"every_n_train_steps": 100, "guards": [guard or ft.PreemptionGuard()], **kwargs}
    )


def stopped(dirpath: Path, *callbacks: Callback, make: Any = r.Line, code: int = 75, **kwargs: Any) -> Any:
    """The module of a fit that has left with `code`."""
    fit_args = {name: kwargs.pop(name) for name in ("val", "data", "ckpt_path") if name in kwargs}
    guard = kwargs.pop("guard", None)
    ft_args = kwargs.pop("ft_args", {})
    trainer = r.trainer(*callbacks, callback(dirpath, guard, **ft_args), **{"max_epochs": 2, **kwargs})
    model = make()  # seeded by the trainer
    with pytest.raises(SystemExit) as left:
        r.fit(trainer, model, **fit_args)
    assert left.value.code == code
    del left  # caught, and nobody has it any more: tracebacks of other errors may keep this frame
    assert trainer.interrupted
    return model


def resumed(dirpath: Path, **kwargs: Any) -> Any:
    fit_args = {name: kwargs.pop(name) for name in ("val", "data") if name in kwargs}
    ft_args = kwargs.pop("ft_args", {})
    callbacks = [*kwargs.pop("callbacks", ()), callback(dirpath, **ft_args)]
    return r.fit(r.trainer(*callbacks, **{"max_epochs": 2, **kwargs}), ckpt_path="last", **fit_args)


def uninterrupted(tmp_path: Path, **kwargs: Any) -> Any:
    fit_args = {name: kwargs.pop(name) for name in ("val", "data") if name in kwargs}
    callbacks = [*kwargs.pop("callbacks", ()), callback(tmp_path / "uninterrupted")]
    return r.fit(r.trainer(*callbacks, **{"max_epochs": 2, **kwargs}), **fit_args)


def manifest(dirpath: Path) -> Manifest:
    """Of the one checkpoint there is."""
    (name,) = r.good(dirpath)
    found, _ = Storage().read_manifest(str(dirpath / name))
    assert found is not None
    return found


def last_line(caplog: pytest.LogCaptureFixture) -> str:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING][-1]


# -- when ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_it_saves_after_the_step_and_leaves(tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture) -> None:
    model = stopped(tmp_path, At("on_train_batch_start", lambda: me(number), n=3))
    assert len(model.steps) == 3
    assert (manifest(tmp_path).step, manifest(tmp_path).reason) == (3, "stop")
    assert f"{signal.Signals(number).name} on rank 0: saving and stopping after step 3 (" in caplog.text
    saved = tmp_path / "step=00000003.ckpt"
    assert last_line(caplog) == f"saved {saved}. Exit code 75: start the same command again to go on"
    rest = resumed(tmp_path)
    assert model.steps + rest.steps == uninterrupted(tmp_path).steps


def test_i2_a_signal_within_backward_saves_the_state_of_the_step_boundary(tmp_path: Path) -> None:
    class Interrupted(r.Line):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            if len(self.steps) == 3:
                half = threading.Event()
                self.layer.weight.register_hook(lambda grad: half.set())
                thread = threading.Thread(target=lambda: half.wait(60) and me())
                thread.start()
                super().backward(loss, *args, **kwargs)
                thread.join()
            else:
                super().backward(loss, *args, **kwargs)

    model = stopped(tmp_path, make=Interrupted)
    rest = resumed(tmp_path)
    whole = uninterrupted(tmp_path)
    assert model.steps + rest.steps == whole.steps
    assert torch.equal(rest.layer.weight, whole.layer.weight)


def test_the_end_of_the_epoch_is_left_to_the_restart(tmp_path: Path) -> None:
    ended: list[int] = []

    class Ends(Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
            ended.append(trainer.global_step)

    stopped(tmp_path, Ends(), At("on_train_batch_start", n=3))
    assert ended == []
    assert {epoch for epoch, *_ in resumed(tmp_path).steps} == {0, 1}


def test_the_end_of_the_epoch_is_not_left_to_a_restart_that_has_nothing_to_train(tmp_path: Path) -> None:
    """A signal in the last step of a run whose last epoch is cut short by `max_steps`."""
    ended: list[int] = []

    class Ends(Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
            ended.append(trainer.global_step)

    stopped(tmp_path, Ends(), At("on_train_batch_start", n=3), max_steps=3)
    assert (manifest(tmp_path).step, ended) == (3, [3])
    assert resumed(tmp_path, max_steps=3).steps == []


def test_a_signal_after_the_ballot_of_its_batch_counts_for_the_next(tmp_path: Path) -> None:
    assert len(stopped(tmp_path, At("on_before_zero_grad", n=3)).steps) == 4


def test_a_signal_in_the_last_batch_of_an_epoch_is_saved_at_its_end(tmp_path: Path) -> None:
    model = stopped(tmp_path, At("on_train_batch_start", n=8))
    assert len(model.steps) == 8
    assert manifest(tmp_path).epoch == 1
    rest = resumed(tmp_path)
    assert model.steps + rest.steps == uninterrupted(tmp_path).steps


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_within_an_accumulation_it_waits_for_its_end(tmp_path: Path, n: int) -> None:
    model = stopped(tmp_path, At("on_train_batch_start", n=n), accumulate_grad_batches=3)
    assert len(model.steps) in (3, 6, 8)
    rest = resumed(tmp_path, accumulate_grad_batches=3)
    whole = uninterrupted(tmp_path, accumulate_grad_batches=3)
    assert model.steps + rest.steps == whole.steps
    assert torch.equal(rest.layer.weight, whole.layer.weight)


@pytest.mark.parametrize("limit", [{"min_steps": 14}, {"min_epochs": 2}])
def test_no_minimum_holds_it_up(tmp_path: Path, limit: dict[str, int]) -> None:
    assert len(stopped(tmp_path, At("on_train_batch_start", n=3), **limit).steps) == 3


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_sanity_check_start", "on_train_start"])
def test_before_the_first_batch_nothing_is_trained_and_nothing_saved(tmp_path: Path, hook: str) -> None:
    # Ours is the last callback, so all of these come before its `on_train_start`.
    model = stopped(tmp_path, At(hook), val=s.val_loader())
    assert (model.steps, r.names(tmp_path)) == ([], [])


def test_before_the_first_batch_of_a_restart_nothing_new_is_saved(tmp_path: Path) -> None:
    first = stopped(tmp_path, At("on_train_batch_start", n=3))
    names = r.names(tmp_path)
    trainer = r.trainer(At("on_fit_start"), callback(tmp_path), max_epochs=2)
    with pytest.raises(SystemExit, match="75"):
        r.fit(trainer, ckpt_path="last")
    assert r.names(tmp_path) == names
    assert first.steps + resumed(tmp_path).steps == uninterrupted(tmp_path).steps


def test_before_the_fit_is_early_enough(tmp_path: Path) -> None:
    guard = ft.PreemptionGuard()
    me()
    assert stopped(tmp_path, guard=guard).steps == []


@pytest.mark.parametrize("every", [8, 3])
def test_a_run_that_has_stopped_early_is_over_whatever_else_stops_it_there(tmp_path: Path, every: int) -> None:
    """In the step in which `EarlyStopping` decides, at the end of an epoch and within one: a restart trains nothing."""
    kwargs: dict[str, Any] = {"max_epochs": 4, "val": s.val_loader(), "val_check_interval": every}

    def early() -> EarlyStopping:
        return EarlyStopping("val", patience=1, min_delta=1e9)

    class Adds(Callback):  # so that the validation is not left
        def on_save_checkpoint(self, *args: Any) -> None: ...

    whole = uninterrupted(tmp_path, callbacks=[early()], **kwargs)
    model = stopped(tmp_path, At("on_train_batch_start", n=2 * every), Adds(), early(), **kwargs)
    assert len(model.steps) == len(whole.steps) == 2 * every
    assert model.steps + resumed(tmp_path, callbacks=[early()], **kwargs).steps == whole.steps


def test_within_a_validation(tmp_path: Path) -> None:
    val = s.val_loader()
    model = stopped(
        tmp_path, At("on_validation_batch_start", n=3), val=val, val_check_interval=4, num_sanity_val_steps=0
    )
    rest = resumed(tmp_path, val=val, val_check_interval=4, num_sanity_val_steps=0)
    whole = uninterrupted(tmp_path, val=val, val_check_interval=4, num_sanity_val_steps=0)
    assert model.steps + rest.steps == whole.steps


def test_while_training_ends(tmp_path: Path) -> None:
    stopped(tmp_path, At("on_train_end"), max_steps=4)
    assert manifest(tmp_path).step == 4
    assert resumed(tmp_path, max_steps=4).steps == []


def test_while_training_ends_without_a_save_of_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was trained since the last checkpoint is trained again, and the launcher is told so."""
    stopped(
        tmp_path, At("on_train_end"), max_steps=4, code=exit_codes.PREEMPTED_UNSAVED,
        ft_args={"save_on_train_end": False, "every_n_train_steps": 3},
    )  # fmt: skip
    assert "training is over at step 4, and that state is not saved; the last checkpoint is kept" in caplog.text
    assert manifest(tmp_path).step == 3
    kept = tmp_path / "step=00000003.ckpt"
    assert last_line(caplog).startswith(f"nothing newer than {kept} is saved. Exit code 76: start the same")
    assert len(resumed(tmp_path, max_steps=4, ft_args={"save_on_train_end": False}).steps) == 1


class StopAtFour:
    """A guard of somebody's own, which stops the fit and not the process."""

    def poll(self, step: int) -> Verdict | None:
        return Verdict("asked to") if step == 3 else None


def test_while_training_ends_because_a_guard_has_stopped_it(tmp_path: Path) -> None:
    stopped(tmp_path, At("on_train_end"), ft_args={"guards": [StopAtFour(), ft.PreemptionGuard()]})
    assert manifest(tmp_path).step == 4


def test_the_minima_that_did_not_hold_it_up_are_there_for_the_next_fit(tmp_path: Path) -> None:
    trainer = r.trainer(callback(tmp_path, guards=[StopAtFour()]), max_epochs=5, min_epochs=3, min_steps=20)
    r.fit(trainer)
    assert (trainer.global_step, trainer.min_epochs, trainer.min_steps) == (4, 3, 20)


def test_a_signal_that_comes_after_the_last_agreement_means_what_it_always_meant(tmp_path: Path) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        r.fit(r.trainer(At("on_fit_end"), callback(tmp_path), max_steps=4))
        assert seen == [signal.SIGTERM] * 2, "passed on when it came, and again when nobody had acted on it"
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_after_the_fit_signals_are_what_they_were(tmp_path: Path) -> None:
    guard = ft.PreemptionGuard()
    r.fit(r.trainer(callback(tmp_path, guard), max_steps=2))
    assert [signal.getsignal(n) for n in HANDLED] == [signal.SIG_DFL] * 3 + [signal.default_int_handler]


# -- how it ends ---------------------------------------------------------------------------------------------------


class Journal(DummyLogger):
    """How often it was told how the fit has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[str] = []

    def finalize(self, status: str) -> None:
        self.ended.append(status)


def test_the_fit_is_torn_down_as_one_that_ended_by_itself(tmp_path: Path) -> None:
    journal, seen = Journal(), []

    class Hooks(Callback):
        def on_train_end(self, *args: Any) -> None:
            seen.append("train end")

        def on_fit_end(self, *args: Any) -> None:
            seen.append("fit end")

        def teardown(self, *args: Any, **kwargs: Any) -> None:
            seen.append("teardown")

        def on_exception(self, *args: Any) -> None:
            seen.append("exception")

    stopped(tmp_path, Hooks(), At("on_train_batch_start", n=2), logger=journal)
    assert seen == ["train end", "fit end", "teardown"]
    assert journal.ended == ["success"]


def test_an_error_while_it_is_torn_down_goes_its_way(tmp_path: Path) -> None:
    class Breaks(Callback):
        def on_fit_end(self, *args: Any) -> None:
            raise RuntimeError("broken")

    trainer = r.trainer(Breaks(), At("on_train_batch_start", n=2), callback(tmp_path), max_epochs=1)
    with pytest.raises(RuntimeError, match="broken"):
        r.fit(trainer)
    assert len(r.good(tmp_path)) == 1
    other = r.trainer(callback(tmp_path / "other"), max_steps=2)
    r.fit(other)
    assert not other.interrupted


def test_a_fit_after_one_that_has_left_is_an_ordinary_one(tmp_path: Path) -> None:
    trainer = r.trainer(At("on_train_batch_start", n=2), callback(tmp_path), max_epochs=1)
    with pytest.raises(SystemExit):
        r.fit(trainer)
    trainer.should_stop = False
    r.fit(trainer, trainer.lightning_module)
    assert trainer.state.finished


def test_a_failed_last_save_has_a_code_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: ft.events.Event) -> None:
        if isinstance(event, ft.events.DataWritten):
            raise OSError(28, "No space left on device")

    with r.observing(fail):
        stopped(tmp_path, At("on_train_batch_start", n=3), code=exit_codes.PREEMPTED_UNSAVED)
    assert "No space left on device" in caplog.text
    assert r.good(tmp_path) == []


def test_with_on_error_warn_too(tmp_path: Path) -> None:
    def fail(event: ft.events.Event) -> None:
        if isinstance(event, ft.events.DataWritten):
            raise OSError(28, "No space left on device")

    plugin = ft.FaultTolerantCheckpointIO(on_error="warn", retries=0)
    with r.observing(fail):
        stopped(tmp_path, At("on_train_batch_start", n=3), code=exit_codes.PREEMPTED_UNSAVED, plugins=[plugin])


def test_save_on_train_end_false_saves_all_the_same(tmp_path: Path) -> None:
    stopped(tmp_path, At("on_train_batch_start", n=3), ft_args={"save_on_train_end": False})
    assert manifest(tmp_path).step == 3


def test_other_checkpoints_are_no_part_of_it(tmp_path: Path) -> None:
    """Their save at the end of a validation, with the partial metrics of an epoch, would be no best model."""
    best = ModelCheckpoint(tmp_path / "best", monitor="loss")
    stopped(tmp_path / "ours", best, At("on_train_batch_start", n=3))
    assert not list((tmp_path / "best").glob("*"))


# -- Lightning's handlers, and those of others ---------------------------------------------------------------------


def test_lightnings_handlers_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(*args: Any) -> None:
        raise AssertionError("Lightning's handler ran")

    connector = "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector"
    monkeypatch.setattr(f"{connector}._sigterm_notifier_fn", ran)
    monkeypatch.setattr(f"{connector}._sigterm_handler_fn", ran)
    monkeypatch.setattr(f"{connector}._slurm_sigusr_handler_fn", ran)
    for place, hook in (("a", "on_sanity_check_start"), ("b", "on_train_batch_start"), ("c", "on_train_end")):
        stopped(tmp_path / place, At(hook), val=s.val_loader(), max_steps=8)


def test_a_users_handler_is_called_and_given_back(tmp_path: Path) -> None:
    seen: list[str] = []

    def theirs(number: int, frame: Any) -> None:
        seen.append(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, theirs)
    try:
        stopped(tmp_path, At("on_train_batch_start", n=2))
        assert seen == ["SIGTERM"]
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_handler_installed_after_ours_is_called_and_given_back(tmp_path: Path) -> None:
    seen: list[str] = []
    guard = ft.PreemptionGuard()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("the user's own exit"))
    theirs = signal.getsignal(signal.SIGTERM)
    try:
        stopped(tmp_path, At("on_train_batch_start", n=2), guard=guard)
        assert signal.getsignal(signal.SIGTERM) is theirs
        assert seen == []
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_two_guards_of_two_runs_one_after_the_other(tmp_path: Path) -> None:
    first, second = ft.PreemptionGuard(), ft.PreemptionGuard()
    stopped(tmp_path / "1", At("on_train_batch_start", n=2), guard=first)
    assert len(r.fit(r.trainer(callback(tmp_path / "2", second), max_steps=4)).steps) == 4
    stopped(tmp_path / "3", At("on_train_batch_start", n=2), guard=first)


def test_two_guards_of_one_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ft.ConfigurationError, match="one PreemptionGuard"):
        ft.FaultTolerantCheckpoint(tmp_path, guards=[ft.PreemptionGuard(), ft.PreemptionGuard()])


def test_a_validation_or_test_of_its_own_is_ended_as_ever(tmp_path: Path) -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        trainer = r.trainer(At("on_validation_batch_start"), callback(tmp_path))
        trainer.validate(r.Line(), s.val_loader(), verbose=False)
        assert seen == [signal.SIGTERM]
        assert not any(noted.arrival for noted in _signals._noted.values())
        assert len(r.fit(r.trainer(callback(tmp_path / "fit"), max_steps=2)).steps) == 2
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# -- SLURM ---------------------------------------------------------------------------------------------------------


class Slurm:
    """A job of one task, whose `scontrol` writes down what it is asked for."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._place = place
        (place / "bin").mkdir()
        program = place / "bin" / "scontrol"
        program.write_text(f'#!/bin/sh\n[ "$1" = show ] || echo "$@" >> {place}/called\n')
        program.chmod(0o755)
        variables = {
            "PATH": f"{program.parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "SLURM_JOB_NAME": "train",
            "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
        }  # fmt: skip
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        words = _slurm._LastWords()
        monkeypatch.setattr(words, "prepare", lambda: None)  # pytest's own end is not the end of the job
        monkeypatch.setattr(_slurm, "last_words", words)

    @property
    def asked(self) -> list[str]:
        called = self._place / "called"
        return called.read_text().splitlines() if called.exists() else []


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(tmp_path_factory.mktemp("slurm"), monkeypatch)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_i3_both_signals_save_and_queue_the_job_again(tmp_path: Path, slurm: Slurm, number: int) -> None:
    stopped(tmp_path, At("on_train_batch_start", lambda: me(number), n=3), default_root_dir=tmp_path)
    assert slurm.asked == ["requeue 17"]
    assert manifest(tmp_path).step == 3
    assert not list(tmp_path.glob("hpc_ckpt*"))


def test_i3_the_signal_of_lightnings_environment_is_taken_over(tmp_path: Path, slurm: Slurm) -> None:
    before = signal.getsignal(signal.SIGHUP)
    environment = SLURMEnvironment(requeue_signal=signal.SIGHUP)
    at = At("on_train_batch_start", lambda: me(signal.SIGHUP), n=3)
    stopped(tmp_path, at, default_root_dir=tmp_path, plugins=[environment])
    assert slurm.asked == ["requeue 17"]
    assert not list(tmp_path.glob("hpc_ckpt*"))
    assert signal.getsignal(signal.SIGHUP) is before


def test_i3_a_task_of_an_array_is_queued_again_alone(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "15")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    stopped(tmp_path, At("on_train_batch_start", n=3))
    assert slurm.asked == ["requeue 15_2"]


def test_i3_nothing_was_trained_and_the_job_is_queued_again_all_the_same(tmp_path: Path, slurm: Slurm) -> None:
    stopped(tmp_path, At("on_fit_start"))
    assert slurm.asked == ["requeue 17"]


def test_i3_where_there_is_no_time_for_a_save_too(tmp_path: Path, slurm: Slurm) -> None:
    stopped(
        tmp_path, At("on_train_batch_start", n=3), guard=ft.PreemptionGuard(grace=1e-6),
        code=exit_codes.PREEMPTED_UNSAVED,
    )  # fmt: skip
    assert slurm.asked == ["requeue 17"]


def test_i3_after_a_failed_save_it_is_not(tmp_path: Path, slurm: Slurm, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that is full would be full again, and nobody would be told."""

    def fail(event: ft.events.Event) -> None:
        if isinstance(event, ft.events.DataWritten):
            raise OSError(28, "No space left on device")

    with r.observing(fail):
        stopped(tmp_path, At("on_train_batch_start", n=3), code=exit_codes.PREEMPTED_UNSAVED)
    assert slurm.asked == []
    assert "SLURM is not asked to queue job" in caplog.text


@pytest.mark.parametrize(
    ("guard", "plugins"),
    [(False, []), (None, [SLURMEnvironment]), (None, "interactive")],
)
def test_i3_it_is_not_where_that_is_not_wanted(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, guard: bool | None, plugins: Any
) -> None:
    if plugins == "interactive":
        monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
        plugins = []
    made = [environment(auto_requeue=False) for environment in plugins]
    stopped(tmp_path, At("on_train_batch_start", n=3), guard=ft.PreemptionGuard(requeue=guard), plugins=made)
    assert slurm.asked == []


def test_i3_nor_after_ctrl_c(tmp_path: Path, slurm: Slurm) -> None:
    stopped(tmp_path, At("on_train_batch_start", lambda: me(signal.SIGINT), n=3), code=exit_codes.INTERRUPTED)
    assert slurm.asked == []


@pytest.mark.usefixtures("slurm")
def test_i4_an_older_checkpoint_of_lightnings_own_requeue_does_not_take_over(tmp_path: Path) -> None:
    settings = {"default_root_dir": tmp_path, "max_epochs": 4}
    r.fit(r.trainer(max_steps=2, **settings)).trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    ours = tmp_path / "ours"
    assert len(r.fit(r.trainer(callback(ours), max_steps=4, **settings)).steps) == 2, "nothing of ours is there yet"
    assert len(resumed(ours, max_steps=6, **settings).steps) == 2
    with pytest.raises(ft.ConfigurationError, match=r"hpc_ckpt_1.ckpt was taken, .* give ckpt_path=\"last\""):
        r.fit(r.trainer(callback(ours), max_steps=8, **settings))


# -- Ctrl-C --------------------------------------------------------------------------------------------------------


def test_j5_the_first_ctrl_c_saves_and_stops(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = stopped(tmp_path, At("on_train_batch_start", lambda: me(signal.SIGINT), n=3), code=exit_codes.INTERRUPTED)
    assert manifest(tmp_path).step == len(model.steps) == 3
    assert "Ctrl-C: saving after this step, then stopping; once more stops at once" in capfd.readouterr().err


def test_j5_the_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    def twice() -> None:
        me(signal.SIGINT)
        me(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    trainer = r.trainer(At("on_train_batch_start", twice, n=3), callback(tmp_path), max_epochs=1)
    with pytest.raises(SystemExit, match="1"):  # Lightning's own way of leaving
        r.fit(trainer)
    signal.signal(signal.SIGINT, handler)  # which ignores Ctrl-C from then on
    assert trainer.global_step == 2
    assert r.good(tmp_path) == []


def test_j5_the_second_ctrl_c_does_not_wait_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ft._preemption.watch._AT_ONCE_SECS", 0.1)
    stands, go_on = threading.Event(), threading.Event()
    plugin, writers = ft.FaultTolerantCheckpointIO(), []

    def slow(event: ft.events.Event) -> None:
        if isinstance(event, ft.events.DataWritten):
            stands.set()
            assert go_on.wait(r.WAIT_SECS)

    def twice() -> None:
        assert stands.wait(r.WAIT_SECS)
        writers.append(plugin.writer)
        me(signal.SIGINT)
        me(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    ours = callback(tmp_path, every_n_train_steps=1)
    with r.observing(slow), pytest.raises(SystemExit, match="1"):
        r.fit(r.trainer(At("on_train_batch_start", twice, n=2), ours, max_epochs=1, plugins=[plugin]))
    signal.signal(signal.SIGINT, handler)
    go_on.set()  # a process would be gone by now
    writers[0].close()


def test_j5_at_a_prompt_the_first_ctrl_c_saves_and_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    trainer = r.trainer(At("on_train_batch_start", lambda: me(signal.SIGINT), n=3), callback(tmp_path), max_epochs=2)
    model = r.fit(trainer)
    assert manifest(tmp_path).step == len(model.steps) == 3


def test_a_users_own_ctrl_c_stays_theirs(tmp_path: Path) -> None:
    seen: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        trainer = r.trainer(At("on_train_batch_start", lambda: me(signal.SIGINT), n=3), callback(tmp_path), max_steps=6)
        assert len(r.fit(trainer).steps) == 6
        assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, handler)


# -- saves on demand -----------------------------------------------------------------------------------------------


def test_j5_sigusr2_saves_and_training_goes_on(tmp_path: Path) -> None:
    at = At("on_train_batch_start", lambda: me(signal.SIGUSR2), n=3)
    ours = callback(tmp_path, save_on_train_end=False)
    model = r.fit(r.trainer(at, ours, max_epochs=1))
    assert len(model.steps) == 8
    assert (manifest(tmp_path).step, manifest(tmp_path).reason) == (3, "on_demand")


def test_j5_save_now_saves_and_is_gone_when_that_is_durable(tmp_path: Path) -> None:
    file, durable = tmp_path / "SAVE_NOW", []

    def look(event: ft.events.Event) -> None:
        if isinstance(event, ft.events.Renamed):
            durable.append(file.exists())

    with r.observing(look):
        ours = callback(tmp_path, save_on_train_end=False)
        model = r.fit(r.trainer(At("on_train_start", file.touch), ours, max_epochs=1))
    assert len(model.steps) == 8
    assert manifest(tmp_path).reason == "on_demand"
    assert durable == [True]
    assert not file.exists()


class While(Callback):
    """Calls `what` once, in the `at`-th batch of the run, or while a checkpoint is loaded."""

    def __init__(self, what: Callable[[], Any], at: int | None) -> None:
        self.what, self.at, self.done = what, at, False

    def _once(self, now: bool) -> None:
        if now and not self.done:
            self.done = True
            self.what()

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        self._once(trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.at)

    def on_load_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._once(self.at is None)


@pytest.mark.parametrize("how", ["signal", "file"])
@pytest.mark.parametrize("at", [None, 5, 6], ids=["load", "before", "bad"])
def test_j5_a_save_asked_for_before_or_while_the_fit_goes_back_is_made_after_that(
    tmp_path: Path, how: str, at: int | None
) -> None:
    """Two batches make a step: asked in the first, bad in the second; in the bad one; while the checkpoint is read."""
    file = tmp_path / "SAVE_NOW"
    guards = (ft.PreemptionGuard(), ft.DivergenceGuard(action="rollback"))
    asking = While(file.touch if how == "file" else lambda: me(signal.SIGUSR2), at)
    model, _, error = d.fit(
        tmp_path, None, d.Net(at=(6,)), callbacks=[asking], accumulate_grad_batches=2, max_epochs=1,
        ft_args={"guards": guards, "every_n_train_steps": 2, "keep_last": -1, "save_on_train_end": False},
    )  # fmt: skip
    assert error is None
    assert asking.done
    assert len(model.trained) == 8
    made = [info.manifest for info in ft.list_checkpoints(tmp_path) if info.manifest is not None]
    # Without batches 5 and 6, the first step after the rollback is the third.
    assert [(m.step, m.reason) for m in made] == [(3, "on_demand"), (2, "periodic")]
    assert not file.exists()


def test_j5_the_save_of_another_callback_does_not_answer_save_now(tmp_path: Path) -> None:
    file, there = tmp_path / "ours" / "SAVE_NOW", []

    def look(event: ft.events.Event) -> None:
        if isinstance(event, ft.events.Committed):
            there.append((Path(event.path).parent.name, file.exists()))

    plugin = ft.FaultTolerantCheckpointIO(async_save=False)
    callbacks = At("on_train_start", file.touch), r.every_step(tmp_path / "best", save_top_k=-1)
    with r.observing(look):
        r.fit(
            r.trainer(*callbacks, callback(tmp_path / "ours"), max_steps=4, accumulate_grad_batches=2, plugins=[plugin])
        )
    at_first = [still for _, still in there[: [where for where, _ in there].index("ours") + 1]]
    assert at_first == [True, True]  # that of the other, and ours, right before the file goes
    assert not file.exists()


def test_j5_save_now_works_in_a_local_directory_in_front_of_a_store(tmp_path: Path) -> None:
    with r.memory() as url:
        ours = callback(url, save_on_train_end=False, local_dirpath=tmp_path)  # type: ignore[arg-type]
        r.fit(r.trainer(At("on_train_start", (tmp_path / "SAVE_NOW").touch), ours, max_epochs=1))
        assert len(r.names(tmp_path)) == len(r.names(url)) == 1
    assert not (tmp_path / "SAVE_NOW").exists()


# -- grace ---------------------------------------------------------------------------------------------------------


class Slowed:
    """Saves that seem to have taken long, by their figures."""

    def __init__(self, secs: float) -> None:
        self.secs = secs

    def __call__(self, event: ft.events.Event) -> None:
        if isinstance(event, ft.events.Committed):
            event.metrics.update(total_secs=self.secs, queue_secs=0.0)


def test_i6_a_save_that_does_not_fit_is_not_begun(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    guard = ft.PreemptionGuard(grace=timedelta(seconds=20))
    with r.observing(Slowed(60)):
        stopped(
            tmp_path, At("on_train_batch_start", n=5), guard=guard, ft_args={"every_n_train_steps": 2},
            code=exit_codes.PREEMPTED_UNSAVED, plugins=[ft.FaultTolerantCheckpointIO(async_save=False)],
        )  # fmt: skip
    assert r.good(tmp_path) == ["step=00000004.ckpt", "step=00000002.ckpt"]
    assert "stopping after step 5 without a new save" in caplog.text
    assert "a save takes about 60.0 s" in caplog.text


def test_i6_one_that_fits_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with r.observing(Slowed(5)):
        stopped(
            tmp_path, At("on_train_batch_start", n=5), guard=ft.PreemptionGuard(grace=200),
            ft_args={"every_n_train_steps": 2}, plugins=[ft.FaultTolerantCheckpointIO(async_save=False)],
        )  # fmt: skip
    assert r.good(tmp_path)[0] == "step=00000005.ckpt"
    assert "a save takes about 5.0 s" in caplog.text


def test_i6_what_other_callbacks_save_takes_none_of_its_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with r.observing(Slowed(5)):
        stopped(
            tmp_path / "ours", r.every_step(tmp_path / "best"), At("on_train_batch_start", n=5),
            guard=ft.PreemptionGuard(grace=200), ft_args={"every_n_train_steps": 2},
            plugins=[ft.FaultTolerantCheckpointIO(async_save=False)],
        )  # fmt: skip
    assert "a save takes about 5.0 s" in caplog.text


def test_i6_a_restart_knows_how_long_it_takes_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(tmp_path, At("on_train_batch_start", n=3))
    monkeypatch.setattr(Manifest, "metrics", {"total_secs": 90.0}, raising=False)
    asked: list[float | None] = []
    budget = "lightning_ft._preemption.grace.Budget"
    monkeypatch.setattr(f"{budget}.allows_save", property(lambda self: bool(asked.append(self.expected_secs))))
    trainer = r.trainer(At("on_train_batch_start", n=2), callback(tmp_path, ft.PreemptionGuard(grace=60)), max_epochs=2)
    with pytest.raises(SystemExit, match="76"):
        r.fit(trainer, ckpt_path="last")
    assert asked[0] is not None
    assert asked[0] >= 0


def test_i6_the_time_until_the_step_is_over_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long step leaves less for the save; by a clock that the test moves."""
    moved = 0.0
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + moved)

    class Long(r.Line):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            nonlocal moved
            if len(self.steps) == 3:
                moved += 100
            return super().training_step(batch, batch_idx)

    stopped(
        tmp_path, At("on_train_batch_start", n=4), make=Long, guard=ft.PreemptionGuard(grace=50),
        code=exit_codes.PREEMPTED_UNSAVED,
    )  # fmt: skip


# -- the value -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"signals": "SIGTERM"}, "signals='SIGTERM': must be a list"),
        ({"signals": ["SIGTREM"]}, "signals: 'SIGTREM' is no signal of this system"),
        ({"signals": ["SIGKILL"]}, "signals: SIGKILL cannot be handled"),
        ({"signals": ["SIGINT"]}, "signals: SIGINT is Ctrl-C"),
        ({"save_signal": "SIGSTOP"}, "save_signal: SIGSTOP cannot be handled"),
        ({"save_signal": "SIGTERM"}, "save_signal='SIGTERM': is one of signals"),
        ({"grace": 0}, "grace=0: must be a positive number"),
        ({"grace": timedelta(seconds=-1)}, "must be a positive number"),
        ({"grace": True}, "grace=True: must be a positive number"),
        ({"grace": float("nan")}, "grace=nan: must be a positive number"),
        ({"grace": "30"}, "grace='30': must be a positive number"),
        ({"requeue": "yes"}, "requeue='yes': must be True, False or None"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(ft.ConfigurationError, match=reason):
        ft.PreemptionGuard(**arguments)


def test_sigusr2_may_stop_instead(tmp_path: Path) -> None:
    guard = ft.PreemptionGuard(signals=["SIGUSR2"])
    assert guard.save_signal is None
    stopped(tmp_path, At("on_train_batch_start", lambda: me(signal.SIGUSR2), n=3), guard=guard)


def test_it_is_a_value() -> None:
    guard = ft.PreemptionGuard(signals=("SIGTERM", signal.SIGHUP), grace=30)
    assert guard == ft.PreemptionGuard(signals=[15, "SIGHUP"], grace=30)
    assert pickle.loads(pickle.dumps(guard)) == guard
    with pytest.raises(AttributeError):
        guard.grace = 1  # type: ignore[misc]


def test_unpickled_in_a_spawned_process_it_notes_from_there() -> None:
    script = (
        "import pickle, sys, os, signal; guard = pickle.loads(bytes.fromhex(sys.argv[1]));"
        "os.kill(os.getpid(), signal.SIGTERM); print('alive')"
    )
    data = pickle.dumps(ft.PreemptionGuard()).hex()
    done = subprocess.run([sys.executable, "-c", script, data], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n")


def test_i_pid1_it_needs_neither_torch_nor_lightning() -> None:
    script = (
        "import lightning_ft as ft, sys; guard = ft.PreemptionGuard();"
        "print([name for name in ('torch', 'lightning', 'fsspec', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_in_another_thread_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made: list[Any] = []
    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=lambda: made.append(ft.PreemptionGuard()), name="starter")
        thread.start()
        thread.join()
    assert "PreemptionGuard was made in thread starter: only the main thread can handle signals" in caplog.text


def test_a_whole_fit_in_another_thread(tmp_path: Path) -> None:
    guard = ft.PreemptionGuard()
    codes: list[Any] = []

    def fit() -> None:
        try:
            stopped(tmp_path, At("on_train_batch_start", n=3), guard=guard)
        except BaseException as error:
            codes.append(error)

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    assert codes == []
    assert len(r.good(tmp_path)) == 1
    for number in guard.numbers:  # it cannot give them back there, but takes no notice of them any more
        assert not _signals._asked_for(number)
        signal.signal(number, signal.SIG_DFL)


def test_what_was_asked_for_before_the_fit_went_back_is_asked_for_again(tmp_path: Path) -> None:
    """A guard that returns to an older checkpoint, while an accumulation holds up the end, forgets what was asked."""
    trainer = r.trainer()
    trainer.strategy.connect(r.Line())
    heeded: list[Request | None] = [None]
    fit: Any = SimpleNamespace(
        trainer=trainer, ranks=Ranks(), dirpath=str(tmp_path), plugin=None, stop=lambda: heeded[0], local_dirpath=None
    )
    watch = Preemption(ft.PreemptionGuard(), fit)
    try:
        watch.open()
        me()
        at = Progress(step=3, batch=3, epochs=0, last_batch=False, epoch_over=False)
        heeded[0] = watch.decide(watch.ballot(), at)
        assert heeded[0] is not None
        assert watch.decide(watch.ballot(), at) is None
        heeded[0] = None
        assert watch.decide(watch.ballot(), at) is not None
        start = replace(at, batch=loops.progress(trainer).batch)
        unsaved = watch.decide(watch.ballot(), start)
        assert unsaved is not None
        assert unsaved.save is None  # nothing was trained since
        watch.phase("load")
        other = watch.decide(watch.ballot(), start)
        assert other is not None
        assert other.save == "stop"  # the same count of batches, and other ones
    finally:
        watch.close()
        watch.leave(75)
        watch.stays()  # which the process does


# -- the guards that are there by default ------------------------------------------------------------------------


def test_a_callback_that_is_never_fitted_leaves_signals_alone(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    made = ft.FaultTolerantCheckpoint(tmp_path)
    assert {number: signal.getsignal(number) for number in before} == before
    the_trainer = r.trainer(made)
    the_trainer.validate(r.Line(), s.val_loader(), verbose=False)
    assert {number: signal.getsignal(number) for number in before} == before


def test_by_default_a_fit_stops_for_a_signal(tmp_path: Path) -> None:
    def send(at: Any) -> None:
        if at.global_step == 3:
            signal.raise_signal(signal.SIGTERM)

    made = ft.FaultTolerantCheckpoint(tmp_path, every_n_train_steps=100)
    with pytest.raises(SystemExit) as left:
        r.fit(r.trainer(r.Each(send), made))
    assert left.value.code == exit_codes.PREEMPTED
    assert len(r.names(tmp_path)) == 1
    assert {type(guard) for guard in made.settings.guards} == {ft.PreemptionGuard, ft.DivergenceGuard}
