"""The process of a script that is drilled: which fit is recorded, and what it waits for before it is killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest

import lightning_ft as ft
from lightning_ft import events
from lightning_ft._proof import drilled
from lightning_ft._proof.assignment import VARIABLE, Assignment
from lightning_ft._proof.drilled import _Drilled, _Durable

Heard = Callable[[events.Event], None]


def told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, by_clock: bool = False, every: int | None = None
) -> tuple[_Durable, Heard]:
    """A fit is about to begin that is to be killed once a save of step 8 is durable; and who hears events."""
    heard: list[Heard] = []
    monkeypatch.setattr(events, "observe", heard.append)
    assignment = Assignment(str(tmp_path), 0, save_every_n_steps=every, kill_at=9, once_durable=True, durable_from=8)
    recorder = _Drilled(assignment, by_clock)
    recorder.setup(L.Trainer(accelerator="cpu", logger=False), L.LightningModule(), "fit")
    assert recorder._durable is not None
    return recorder._durable, heard[0]


def committed(name: str, step: int) -> events.Committed:
    return events.Committed(f"/runs/{name}", step, "generation", 1, 0.0)


def test_a_file_of_another_callback_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    durable, hear = told(tmp_path, monkeypatch, by_clock=True)
    hear(committed("epoch=0-step=8.ckpt", 8))
    assert (durable.any.is_set(), durable.wanted.is_set()) == (False, False)
    hear(committed("step=00000004.ckpt", 4))
    assert (durable.any.is_set(), durable.wanted.is_set()) == (True, True)


@pytest.mark.parametrize(("by_clock", "every"), [(False, None), (True, 4)])
def test_a_save_of_the_step_is_waited_for(
    by_clock: bool, every: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a script that saves by the clock, once it is told when to save."""
    durable, hear = told(tmp_path, monkeypatch, by_clock=by_clock, every=every)
    hear(committed("step=00000004.ckpt", 4))
    assert (durable.any.is_set(), durable.wanted.is_set()) == (True, False)
    hear(committed("step=00000008.ckpt", 8))
    assert durable.wanted.is_set()


def test_a_fit_that_another_library_has_put_something_around_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def patched(trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        """Without its name."""

    monkeypatch.setattr(L.Trainer, "fit", patched)
    for name in ("__init__", "validate", "test", "predict", "save_checkpoint"):
        monkeypatch.setattr(L.Trainer, name, getattr(L.Trainer, name))
    monkeypatch.setattr(L.Trainer, "_drill", None, raising=False)
    del L.Trainer._drill
    assignment = Assignment(str(tmp_path), 0)
    monkeypatch.setenv(VARIABLE, assignment.environment()[VARIABLE])
    callback = ft.FaultTolerantCheckpoint(tmp_path / "users")
    trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=[callback])
    trainer.fit(L.LightningModule())
    assert any(isinstance(each, drilled._Drilled) for each in trainer.callbacks)
