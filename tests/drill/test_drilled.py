"""What the process of a script that is drilled waits for before it is killed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest

from lightning_ft import events
from lightning_ft._proof.assignment import Assignment
from lightning_ft._proof.drilled import _Drilled, _Durable

Heard = Callable[[events.Event], None]


def told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, by_clock: bool = False, every: int | None = None
) -> tuple[_Durable, Heard]:
    """A fit is about to begin that is to be killed once a save of step 8 is durable; and who hears events."""
    heard: list[Heard] = []
    monkeypatch.setattr(events, "observe", heard.append)
    assignment = Assignment(str(tmp_path), 0, save_every_n_steps=every, kill_at=9, once_durable=True, durable_from=8)
    drilled = _Drilled(assignment, by_clock)
    drilled.setup(L.Trainer(accelerator="cpu", logger=False), L.LightningModule(), "fit")
    assert drilled._durable is not None
    return drilled._durable, heard[0]


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
