"""Saving in the background: what is in the file, who is told when, and what becomes of failures."""

from __future__ import annotations

import errno
import os
import threading
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import lightning_ft as ft
from lightning_ft import events
from lightning_ft._saving import engine
from lightning_ft._state.digest import digest
from lightning_ft.storage import Storage
from tests.trainer import runs
from tests.trainer import scenarios as s
from tests.trainer.runs import Line, fit, trainer


def ours(dirpath: Any, **kwargs: Any) -> ft.FaultTolerantCheckpoint:
    return ft.FaultTolerantCheckpoint(dirpath, **{"every_n_train_steps": 1, "keep_last": -1, **kwargs})


# -- F1: the file is the state of the moment ---------------------------------------------------------------------


class Living(Callback):
    """State of every kind, handed out as it is and changed in place at every batch; remembers what it was."""

    def __init__(self) -> None:
        self.state = {
            "array": np.zeros(3),
            "tensor": torch.zeros(3),
            "view": torch.zeros(6).view(2, 3).t(),
            "list": [0],
            "dict": {"n": {"deep": 0}},
        }
        self.was: dict[int, Any] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for name in ("array", "tensor", "view"):
            self.state[name] += 1  # type: ignore[operator]
        self.state["list"].append(batch_idx)  # type: ignore[attr-defined]
        self.state["dict"]["n"]["deep"] += 1  # type: ignore[index]

    def state_dict(self) -> Any:
        return self.state

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.was[trainer.global_step] = deepcopy({**checkpoint, "callbacks": self.state})


class TiedNet(s.Net):
    def __init__(self) -> None:
        super().__init__()
        self.tied = self.net[0]


@pytest.mark.parametrize("make_model", [s.Net, TiedNet, Line])
def test_f1_the_file_is_the_state_at_the_call(make_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is so slow that every write begins when training is two saves ahead."""
    slow, living = runs.Slow(monkeypatch, events.SaveStarted), Living()
    with runs.observing(slow):
        fit(trainer(living, ours(tmp_path, strict=False)), make_model())
    assert slow.stood >= 6
    for info in ft.list_checkpoints(str(tmp_path)):
        assert info.manifest is not None
        saved, was = torch.load(info.path, weights_only=False), living.was[info.manifest.step]
        assert digest(saved["callbacks"]["Living"]) == digest(was["callbacks"])
        for part in ("state_dict", "optimizer_states", "lr_schedulers"):
            assert digest(saved[part]) == digest(was[part]), part
        assert saved["lightning_ft"]["batch"] == saved["global_step"] == info.manifest.step
    assert len(living.was) == 8


# -- F2: failures ------------------------------------------------------------------------------------------------


class Failing:
    """The disk is full for the saves of some steps. The error is raised in the writer thread."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def __call__(self, event: events.Event) -> None:
        if isinstance(event, events.SaveStarted) and event.step in self.steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def drained(plugin: ft.FaultTolerantCheckpointIO) -> runs.Each:
    """Every save has ended, well or not, when the next batch begins."""
    return runs.Each(lambda _: plugin.drain())


def test_f2_a_failure_ends_the_run_at_the_next_step(tmp_path: Path) -> None:
    plugin, model = ft.FaultTolerantCheckpointIO(), Line()
    with runs.observing(Failing(2)), pytest.raises(ft.SaveError, match=r"step=00000002.*No space left") as caught:
        fit(trainer(drained(plugin), ours(tmp_path), plugins=[plugin]), model)
    assert caught.value.step == 2
    assert isinstance(caught.value.__cause__, OSError)
    assert len(model.steps) == 3
    assert runs.good(tmp_path)[-1] == "step=00000001.ckpt"
    assert fit(trainer(ours(tmp_path)), ckpt_path="last").steps[-1][1] == 7


def test_f2_warn_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plugin = ft.FaultTolerantCheckpointIO(on_error="warn")
    with runs.observing(Failing(2, 3, 5)):
        fit(trainer(drained(plugin), ours(tmp_path), plugins=[plugin]))
    assert runs.good(tmp_path) == [f"step=0000000{step}.ckpt" for step in (8, 7, 6, 4, 1)]
    assert caplog.text.count("was not saved") == 3


def test_f2_three_in_a_row_end_the_run(tmp_path: Path) -> None:
    plugin, model = ft.FaultTolerantCheckpointIO(on_error="warn"), Line()
    with runs.observing(Failing(2, 3, 4)), pytest.raises(ft.SaveError, match="step=00000004"):
        fit(trainer(drained(plugin), ours(tmp_path), plugins=[plugin]), model)
    assert len(model.steps) == 5


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("last", [7, 8])
def test_f2_the_last_save_fails(last: int, async_save: bool, tmp_path: Path) -> None:
    """Found out although no step follows, and the exit waits for what is being written."""
    plugin = ft.FaultTolerantCheckpointIO(async_save=async_save)
    with runs.observing(Failing(last)), pytest.raises(ft.SaveError, match=f"step=0000000{last}"):
        fit(trainer(ours(tmp_path), max_steps=last, plugins=[plugin]))
    assert runs.good(tmp_path)[0] == f"step=0000000{last - 1}.ckpt"


def test_f2_a_failed_save_does_not_count_for_rotation(tmp_path: Path) -> None:
    there: list[list[str]] = []
    plugin = ft.FaultTolerantCheckpointIO(on_error="warn")
    look = runs.Each(lambda _: there.append(runs.good(tmp_path)))
    with runs.observing(Failing(3, 4)):
        fit(trainer(drained(plugin), look, ours(tmp_path, keep_last=1, guards=()), plugins=[plugin]))
    expected = [[], [1], [2], [2], [2], [5], [6], [7]]
    assert there == [[f"step=0000000{step}.ckpt" for step in steps] for steps in expected]


def test_f2_users_removals_wait_for_a_good_save(tmp_path: Path) -> None:
    """A `ModelCheckpoint` believes that its save has succeeded and asks for the one before to be removed."""
    there: list[list[str]] = []
    plugin = ft.FaultTolerantCheckpointIO(on_error="warn")
    look = runs.Each(lambda _: there.append(runs.good(tmp_path)))
    with runs.observing(Failing(3, 4)):
        fit(trainer(drained(plugin), look, runs.every_step(tmp_path), plugins=[plugin]))
    expected = [[], [1], [2], [2], [2], [5], [6], [7]]
    assert there == [[f"epoch=0-step={step}.ckpt" for step in steps] for steps in expected]
    assert runs.names(tmp_path) == ["epoch=0-step=8.ckpt"]


class StoreError(Exception):
    """Clients of object stores raise classes of their own: no OSError."""


@pytest.mark.parametrize("method", ["remove", "entries"])
@pytest.mark.parametrize("error", [OSError, StoreError])
def test_f2_a_rotation_that_fails_is_no_danger(
    method: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """One file too many for a while, and a warning; the next rotation takes it away."""
    plugin = ft.FaultTolerantCheckpointIO()
    original, failed = getattr(Storage, method), []

    def failing(self: Any, path: str) -> Any:
        if threading.current_thread().name == "lightning-ft-writer" and len(failed) < 2:
            failed.append(path)
            raise error("the store does not answer")
        return original(self, path)

    monkeypatch.setattr(Storage, method, failing)
    with runs.recorded() as seen:
        fit(trainer(drained(plugin), ours(tmp_path, keep_last=1, guards=()), plugins=[plugin]))
    assert len(failed) == 2
    assert runs.good(tmp_path) == ["step=00000008.ckpt"] == runs.names(tmp_path)
    skipped = [e.reason for e in seen if isinstance(e, events.DeleteSkipped)]
    assert skipped == [f"{error.__name__}: the store does not answer"] * 2
    assert caplog.text.count("the store does not answer") == 2


def test_f2_a_state_that_cannot_be_copied(tmp_path: Path) -> None:
    """It fails in the main thread, and is reported as any other save that failed."""

    class Locked(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"lock": threading.Lock()}

    model = Line()
    with pytest.raises(ft.SaveError, match=r"step=00000001\.ckpt.*cannot pickle '_thread.lock' object"):
        fit(trainer(Locked(), ours(tmp_path, strict=False)), model)
    assert len(model.steps) <= 2
    assert runs.names(tmp_path) == []


def test_f2_an_error_that_passes_is_tried_again(tmp_path: Path) -> None:
    tries: list[int] = []

    def busy(event: events.Event) -> None:
        if isinstance(event, events.SaveStarted) and event.step == 2:
            tries.append(event.step)
            if len(tries) < 3:
                raise TimeoutError("the store does not answer")

    with runs.observing(busy):
        fit(trainer(ours(tmp_path), max_steps=3))
    assert len(tries) == 3
    assert runs.good(tmp_path)[1] == "step=00000002.ckpt"


def test_f2_plain_lightning_tells_at_the_end(tmp_path: Path) -> None:
    """The second of eight saves fails; writes are slow, so all steps are trained before anybody hears of it."""
    all_steps = threading.Event()

    class Open(Callback):
        def on_train_end(self, *args: Any) -> None:
            all_steps.set()

    def gate(path: str) -> None:
        assert all_steps.wait(runs.WAIT_SECS)
        if path.endswith("step=2.ckpt"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model, plugin = Line(), AsyncCheckpointIO(runs.GatedTorchIO(gate))
    with pytest.raises(OSError, match="No space left"):
        fit(trainer(runs.every_step(tmp_path, save_top_k=-1), Open(), plugins=[plugin]), model)
    assert len(model.steps) == 8


# -- F4, F8: nobody is told before the commit --------------------------------------------------------------------


class Opening(DummyLogger):
    """A logger that opens what it is told of, as those that upload checkpoints do."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        path = checkpoint_callback.last_model_path or checkpoint_callback.best_model_path
        self.told.append(Path(path).name)
        assert ft.verify(path).problem is None, ft.verify(path).problem


class Told(Callback):
    """What our callback gives as the newest checkpoint, at the start of every batch."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        (callback,) = [c for c in trainer.checkpoint_callbacks if isinstance(c, ft.FaultTolerantCheckpoint)]
        path = callback.last_model_path
        assert not path or ft.verify(path).problem is None
        self.paths.append(Path(path).name)


@pytest.mark.parametrize("pace", ["each", "never"])
def test_f4_f8_told_after_the_commit(pace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, logger, told = runs.Slow(monkeypatch), Opening(), Told()
    plugin = ft.FaultTolerantCheckpointIO()
    callbacks = ([drained(plugin)] if pace == "each" else []) + [told, ours(tmp_path)]
    with runs.observing(slow):
        fit(trainer(*callbacks, logger=logger, plugins=[plugin]))
    assert logger.told[-1] == "step=00000008.ckpt"
    assert told.paths[0] == ""
    if pace == "each":
        assert logger.told == [f"step=0000000{step}.ckpt" for step in range(1, 9)]
    else:
        # The writer is two saves behind: the news are.
        assert told.paths[-1] <= "step=00000005.ckpt"


@pytest.mark.parametrize("pace", ["each", "never"])
def test_f8_users_model_checkpoint(pace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its news are passed on when what it has saved is there, at the latest when training ends."""
    slow, logger = runs.Slow(monkeypatch), Opening()
    plugin = ft.FaultTolerantCheckpointIO()
    best = ModelCheckpoint(tmp_path / "best", monitor="loss", every_n_train_steps=1, save_top_k=-1, save_last=True)
    callbacks = ([drained(plugin)] if pace == "each" else []) + [best]
    with runs.observing(slow):
        fit(trainer(*callbacks, ours(tmp_path / "ours"), logger=logger, plugins=[plugin]))
    assert logger.told.count("last.ckpt") >= 8
    assert logger.told.count("step=00000008.ckpt") == 1
    assert "after_save_checkpoint" not in vars(logger)


def test_f8_a_logger_without_our_callback_is_told_too_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the above can fail: with a background writer alone nobody holds the news back."""
    slow = runs.Slow(monkeypatch)
    with runs.observing(slow), pytest.raises(AssertionError, match="missing"):
        fit(trainer(runs.every_step(tmp_path), logger=Opening(), plugins=[ft.FaultTolerantCheckpointIO()]))


# -- F6: one running, one waiting --------------------------------------------------------------------------------


class InFlight:
    """How many saves were accepted and neither committed nor left out, at most."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.accepted = self.committed = self.left_out = self.most = 0
        enqueue = engine.Writer._enqueue

        def enqueue_(writer: Any, task: Any) -> None:
            if isinstance(task, engine.SaveTask):
                self.accepted += 1
                self.most = max(self.most, self.accepted - self.committed - self.left_out)
            enqueue(writer, task)

        monkeypatch.setattr(engine.Writer, "_enqueue", enqueue_)

    def __call__(self, event: events.Event) -> None:
        self.committed += isinstance(event, events.Committed)
        self.left_out += isinstance(event, events.SaveSkipped)


def test_f6_at_most_one_running_and_one_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, in_flight = runs.Slow(monkeypatch), InFlight(monkeypatch)
    with runs.observing(slow, in_flight):
        fit(trainer(ours(tmp_path), runs.every_step(tmp_path / "best")))
    assert in_flight.committed == 16
    assert in_flight.most == 2


def test_f6_skip_is_counted_and_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is written the next is put off. At the end of an epoch, where the data begins anew, it waits."""
    slow = runs.Slow(monkeypatch)
    plugin = ft.FaultTolerantCheckpointIO(when_busy="skip")

    def pace(trainer: Any) -> None:
        if trainer.global_step == 3:
            slow.wait_until_it_stands()  # the first is being written, not waiting any more
        elif trainer.global_step in (8, 9):
            plugin.drain()

    callbacks = [runs.Each(pace), ours(tmp_path, every_n_train_steps=2)]
    with runs.observing(slow), runs.recorded() as seen:
        fit(trainer(*callbacks, max_epochs=2, max_steps=11, plugins=[plugin]))
    skipped = [e for e in seen if isinstance(e, events.SaveSkipped)]
    assert [e.step for e in skipped] == [4, 5, 6, 7]
    assert {e.reason for e in skipped} == {"another save is being written"}
    assert [e.step for e in seen if isinstance(e, events.Committed)] == [2, 8, 10, 11]


def test_f6_the_newest_takes_the_place_of_the_one_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training never waits, one save is running and one waiting at most, and what is dropped is said."""
    slow, in_flight = runs.Slow(monkeypatch), InFlight(monkeypatch)
    plugin = ft.FaultTolerantCheckpointIO(when_busy="newest")

    def pace(trainer: Any) -> None:
        if trainer.global_step == 1:
            slow.wait_until_it_stands()  # the first is being written, not waiting any more

    with runs.observing(slow, in_flight), runs.recorded() as seen:
        fit(trainer(runs.Each(pace), ours(tmp_path, every_n_train_steps=1, keep_last=-1), plugins=[plugin]))
    skipped = [e for e in seen if isinstance(e, events.SaveSkipped)]
    assert [e.step for e in skipped] == [2, 3, 4, 5, 6, 7]
    assert {e.reason for e in skipped} == {"a newer save has taken its place"}
    assert runs.good(tmp_path) == ["step=00000008.ckpt", "step=00000001.ckpt"] == runs.names(tmp_path)[::-1]
    assert in_flight.most == 2


def test_f6_only_our_own_saves_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another callback has saved, and remembers, is never dropped for a newer one."""
    slow = runs.Slow(monkeypatch)
    plugin = ft.FaultTolerantCheckpointIO(when_busy="newest")
    users = runs.every_step(tmp_path / "best", save_top_k=-1)
    with runs.observing(slow):
        fit(trainer(ours(tmp_path / "run", every_n_train_steps=1, keep_last=-1), users, plugins=[plugin]))
    assert len(list((tmp_path / "best").iterdir())) == 8


def test_f6_plain_lightning_queues_without_limit(tmp_path: Path) -> None:
    all_steps, waiting = threading.Event(), []

    class Open(Callback):
        def on_train_end(self, *args: Any) -> None:
            waiting.append(plugin._executor._work_queue.qsize())
            all_steps.set()

    plugin = AsyncCheckpointIO(runs.GatedTorchIO(lambda _: all_steps.wait(runs.WAIT_SECS)))
    fit(trainer(runs.every_step(tmp_path, save_top_k=-1), Open(), plugins=[plugin]))
    assert waiting == [7]


# -- F10: nothing is left ----------------------------------------------------------------------------------------


def writers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("lightning-ft")]


@pytest.mark.parametrize("ends", ["well", "with an exception", "with a failed save"])
def test_f10_no_thread_after_a_fit_and_the_next_one_works(ends: str, tmp_path: Path) -> None:
    plugin = ft.FaultTolerantCheckpointIO()
    during: list[list[str]] = []
    callbacks: list[Callback] = [runs.Each(lambda _: during.append(writers())), ours(tmp_path)]
    if ends == "with an exception":
        callbacks.insert(0, runs.CrashAt(5))
    failing = Failing(*([8] if ends == "with a failed save" else []))
    the_trainer = trainer(*callbacks, plugins=[plugin])
    if ends == "well":
        fit(the_trainer)
    else:
        with runs.observing(failing), pytest.raises((RuntimeError, ft.SaveError)):
            fit(the_trainer)
    assert any("lightning-ft-writer" in threads for threads in during)
    assert writers() == []
    # The same plugin in another trainer: no error or task of the fit before is left in it.
    model = fit(trainer(ours(tmp_path / "second"), plugins=[plugin]))
    assert len(model.steps) == len(runs.good(tmp_path / "second")) == 8
    assert writers() == []


@pytest.mark.parametrize("ours_too", [False, True])
def test_f10_files_of_one_name(ours_too: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning finds a free name by looking at the files there; those being written are not there yet."""
    slow = runs.Slow(monkeypatch)
    same = ModelCheckpoint(tmp_path, filename="model", monitor="loss", every_n_train_steps=1, save_top_k=-1)
    callbacks = [same, ours(tmp_path / "ours")] if ours_too else [same]
    with runs.observing(slow):
        fit(trainer(*callbacks, max_steps=3))
    assert sorted(n for n in os.listdir(tmp_path) if n != "ours") == ["model-v1.ckpt", "model-v2.ckpt", "model.ckpt"]
