"""Whole runs that save to a local directory in front of another one: what is written where, and what if it fails."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest

import lightning_ft as ft
from lightning_ft import events
from lightning_ft._names import checkpoint_name
from lightning_ft._saving import engine
from lightning_ft._saving.uploads import Uploads
from lightning_ft.errors import SaveError
from lightning_ft.storage import Storage
from tests.trainer import runs
from tests.trainer.runs import fit, trainer
from tests.trainer.tiers import WAIT_SECS, Gate, Place

pytestmark = pytest.mark.usefixtures("naps")


# -- saving ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_save", [True, False])
def test_often_here_and_less_often_there(async_save: bool, place: Place) -> None:
    """One save for both where both are due, the same file in both, each with a rotation of its own."""
    io = ft.FaultTolerantCheckpointIO(async_save=async_save)
    with runs.recorded() as seen:
        place.run(max_steps=7, io=io)
    assert place.steps(place.local) == [6, 7]
    assert place.steps(place.remote) == [4, 7]
    assert place.same(7)
    saved = [e.step for e in seen if isinstance(e, events.SaveStarted)]
    assert saved == [1, 2, 3, 4, 5, 6, 7]
    uploaded = [(e.step, Path(e.source).parent) for e in seen if isinstance(e, events.UploadStarted)]
    assert uploaded == [(4, place.local), (7, place.local)]


def test_without_a_rule_of_its_own_nothing_is_saved_that_is_not_due_there(place: Place) -> None:
    place.run(max_steps=8, local_every_n_train_steps=None, every_n_train_steps=3)
    assert place.steps(place.local) == [6, 8]
    assert place.steps(place.remote) == [6, 8]


def test_to_an_object_store(place: Place) -> None:
    with runs.memory() as url:
        place.remote = url  # type: ignore[assignment]
        place.run()
        assert place.steps(url) == [4, 6]
        assert (
            fsspec.filesystem("memory").cat_file(f"{url}/{checkpoint_name(6)}")
            == (place.local / checkpoint_name(6)).read_bytes()
        )
        shutil.rmtree(place.local)  # another machine
        assert place.run(max_steps=8).steps[0][1] == 6


def test_the_last_state_is_in_both_though_it_was_saved_here_only(place: Place) -> None:
    """One save: what is on the local disk already is uploaded."""
    with runs.recorded() as seen:
        place.run(max_steps=8, every_n_train_steps=100)
    assert [e.step for e in seen if isinstance(e, events.SaveStarted)] == list(range(1, 9))
    assert place.steps(place.remote) == [8]
    assert place.same(8)


@pytest.mark.parametrize("save_on_train_end", [True, False])
def test_save_on_train_end_is_about_both(place: Place, save_on_train_end: bool) -> None:
    place.run(save_on_train_end=save_on_train_end, every_n_train_steps=5)
    assert place.steps(place.local) == [5, 6]
    assert place.steps(place.remote) == ([5, 6] if save_on_train_end else [5])


def test_what_waits_for_its_upload_stays(place: Place) -> None:
    """While the store is slow, saves go on, and only when the upload is over is its source removed."""
    gate = Gate()
    there: list[list[int]] = []

    def look(trainer: Any) -> None:
        if trainer.global_step == 5:
            assert gate.stands.wait(WAIT_SECS)
        if trainer.global_step == 7:
            io.writer.drain()
            there.append(place.steps(place.local))
            gate.open.set()

    io = ft.FaultTolerantCheckpointIO()
    with runs.observing(gate):
        place.run(runs.Each(look), max_steps=8, local_keep_last=1, guards=(), io=io)
    assert there == [[4, 7]]
    assert place.steps(place.local) == [8]
    assert place.steps(place.remote) == [4, 8]


def test_an_upload_that_still_waits_gives_way_to_the_next(place: Place) -> None:
    """Training never waits for the store, and the last one is not left out."""
    gate = Gate()

    def look(trainer: Any) -> None:
        if trainer.global_step == 3:
            assert gate.stands.wait(WAIT_SECS)
        if trainer.global_step == 7:
            io.writer.drain()  # the local saves alone
            gate.open.set()
            io.drain()

    io = ft.FaultTolerantCheckpointIO()
    with runs.recorded() as seen, runs.observing(gate):
        place.run(runs.Each(look), max_steps=8, every_n_train_steps=2, keep_last=-1, io=io)
    left_out = [e.step for e in seen if isinstance(e, events.SaveSkipped)]
    assert left_out == [4]
    assert place.steps(place.remote) == [2, 6, 8]
    assert place.steps(place.local) == [7, 8]


def test_what_is_due_there_gives_way_to_nothing_that_is_not(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``when_busy="newest"`` a waiting save gives way to a newer one, but not to one that is not uploaded."""
    slow = runs.Slow(monkeypatch)
    io = ft.FaultTolerantCheckpointIO(when_busy="newest")
    with runs.recorded() as seen, runs.observing(slow):
        place.run(io=io, every_n_train_steps=3)
    left_out = [e.step for e in seen if isinstance(e, events.SaveSkipped) and str(place.local) in e.path]
    assert left_out, "nothing had to wait: this shows nothing"
    assert not {3, 6} & set(left_out)


def test_room_is_made_for_the_last_upload_whenever_it_ends(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the upload is still on its way out of its thread."""
    then = engine.Writer.then

    def then_at_once(writer: engine.Writer, *args: Any) -> None:
        then(writer, *args)
        if threading.current_thread().name == Uploads.THREAD:
            assert writer.drain(WAIT_SECS)

    monkeypatch.setattr(engine.Writer, "then", then_at_once)
    gate = Gate()

    def look(trainer: Any) -> None:
        if trainer.global_step == 7:
            assert gate.stands.wait(WAIT_SECS)
            io.writer.drain()
            gate.open.set()
            io.drain()
            assert place.steps(place.local) == [7]

    io = ft.FaultTolerantCheckpointIO()
    with runs.observing(gate):
        place.run(runs.Each(look), max_steps=8, local_keep_last=1, guards=(), io=io)


def test_the_newest_is_told_though_an_older_one_was_uploaded_later(place: Place) -> None:
    gate, ours = Gate(), place.ours()
    told: list[str] = []

    def look(trainer: Any) -> None:
        if trainer.global_step == 7:
            told.append(ours.last_model_path)
        if trainer.global_step == 6:
            assert gate.stands.wait(WAIT_SECS)
            io.writer.drain()
            gate.open.set()
            io.drain()

    io = ft.FaultTolerantCheckpointIO()
    with runs.observing(gate):
        fit(trainer(runs.Each(look), ours, max_steps=8, plugins=[io]))
    assert told == [str(place.local / checkpoint_name(6))]
    assert ours.last_model_path == str(place.remote / checkpoint_name(8))


def test_loggers_hear_of_both(place: Place, tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    told: list[str] = []

    class Telling(CSVLogger):
        def after_save_checkpoint(self, callback: Any) -> None:
            assert Storage().exists(callback.last_model_path)
            told.append(Path(callback.last_model_path).parent.name)

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            logged.update(metrics)

    logged: dict[str, float] = {}
    fit(trainer(place.ours(), max_steps=6, logger=Telling(tmp_path / "logs")))
    assert told[-1] == "remote"
    assert {"ft/write_secs", "ft/upload_write_secs", "ft/upload_bytes_per_sec"} <= set(logged)


# -- failures ----------------------------------------------------------------------------------------------------


def test_a_failed_upload_ends_the_run_by_its_name(place: Place) -> None:
    gate = Gate(fails=1)
    gate.open.set()
    with runs.observing(gate), pytest.raises(SaveError) as caught:
        place.run(max_steps=8)
    assert f"checkpoint {checkpoint_name(4)} (step 4) was not uploaded to {place.remote}" in str(caught.value)
    assert "PermissionError: the store says no" in str(caught.value)
    # What is here is good, and the run goes on from it.
    assert place.run(max_steps=8).steps[0][1] >= 4
    assert place.steps(place.remote)[-1] == 8


def test_failed_uploads_are_lived_with_until_the_third_in_a_row(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Local saves that succeed in between do not count for them."""
    gate = Gate(fails=2)
    gate.open.set()
    io = ft.FaultTolerantCheckpointIO(on_error="warn")
    drained = runs.Each(lambda trainer: io.drain())
    with runs.observing(gate):
        place.run(drained, max_steps=8, every_n_train_steps=2, io=io)
    assert place.steps(place.remote) == [6, 8]
    assert "(training goes on; 1 in a row, the run stops at 3)" in caplog.text
    gate.fails = 3
    io = ft.FaultTolerantCheckpointIO(on_error="warn")
    drained = runs.Each(lambda trainer: io.drain())
    with runs.observing(gate), pytest.raises(SaveError, match="was not uploaded"):
        place.run(drained, max_steps=20, every_n_train_steps=2, io=io, ckpt_path=None)


def test_the_last_upload_is_made_again_when_training_ends(place: Place) -> None:
    """It failed and the run goes on (`on_error`): the state is on the local disk, and is uploaded from there."""
    gate = Gate(fails=1)
    gate.open.set()
    io = ft.FaultTolerantCheckpointIO(on_error="warn")
    with runs.recorded() as seen, runs.observing(gate):
        place.run(max_steps=8, every_n_train_steps=None, every_n_epochs=1, io=io)
    assert place.steps(place.remote) == [8]
    assert [e.step for e in seen if isinstance(e, events.SaveStarted)] == list(range(1, 9))
    assert [e.step for e in seen if isinstance(e, events.UploadStarted)] == [8, 8]


def test_a_failed_local_save_is_not_uploaded_and_nothing_is_removed(place: Place) -> None:
    def full(event: events.Event) -> None:
        if isinstance(event, events.AttemptOpened) and event.path.endswith(f"local/{checkpoint_name(4)}"):
            raise OSError(28, "No space left on device")

    io = ft.FaultTolerantCheckpointIO()
    with runs.observing(full), pytest.raises(SaveError, match=f"local/{checkpoint_name(4)}"):
        place.run(runs.Each(lambda trainer: io.drain()), max_steps=8, io=io)
    assert place.steps(place.remote) == []
    assert place.steps(place.local) == [2, 3]


def test_a_failed_save_keeps_what_an_upload_would_have_let_go(place: Place) -> None:
    gate = Gate()
    local = f"{place.local / checkpoint_name(6)}"

    def full(event: events.Event) -> None:
        if isinstance(event, events.AttemptOpened) and event.path == local:
            raise OSError(28, "No space left on device")

    there: list[list[int]] = []

    def look(trainer: Any) -> None:
        if trainer.global_step == 5:
            assert gate.stands.wait(WAIT_SECS)
        if trainer.global_step == 6:
            io.writer.drain()  # the sixth has failed
            gate.open.set()
            io.drain()
            there.append(place.steps(place.local))

    io = ft.FaultTolerantCheckpointIO(on_error="warn")
    with runs.observing(full, gate):
        place.run(runs.Each(look), max_steps=7, local_keep_last=1, guards=(), io=io)
    assert there == [[4, 5]]
    assert place.steps(place.local) == [7]
