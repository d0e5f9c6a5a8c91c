"""Whole runs on a device: what is in the files, though each copy is made after the next optimizer step was launched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

import lightning_ft as ft
from lightning_ft import events
from tests.devices import breakages, fakeacc, fits
from tests.devices import scenarios as s
from tests.devices.fakeacc import on_fakeacc
from tests.trainer import runs


@pytest.mark.parametrize("staging", ["overlap", "blocking"])
@on_fakeacc
def test_every_file_is_the_state_at_its_boundary(tmp_path: Path, staging: str) -> None:
    expected = fits.expected(tmp_path / "expected")
    with pytest.MonkeyPatch.context() as patch:
        fakeacc.controls.set_lazy(True)
        fits.train(tmp_path / "late", fits.StepFirst(patch), staging=staging)
    fits.assert_files(tmp_path / "late", expected)


@pytest.mark.parametrize("staging", ["overlap", "blocking"])
@on_fakeacc
def test_every_file_is_the_state_at_its_boundary_with_slow_copies(tmp_path: Path, staging: str) -> None:
    """With nothing held up: writer, streams and training run as they come."""
    expected = fits.expected(tmp_path / "expected")
    fakeacc.controls.set_delay_ms(8)  # each of 24 copies: 200 ms for a snapshot, many times a step
    fits.train(tmp_path / "late", staging=staging)
    fits.assert_files(tmp_path / "late", expected)


@pytest.mark.parametrize(
    ("breakage", "staging"),
    [(breakages.finish_orders_nothing, "overlap"), (breakages.at_once_is_not_awaited, "blocking")],
)
@on_fakeacc
def test_a_copy_that_training_overtakes_is_seen(tmp_path: Path, breakage: Any, staging: str) -> None:
    expected = fits.expected(tmp_path / "expected")
    with pytest.MonkeyPatch.context() as patch:
        breakage(patch)
        # The digests of the first save would find it, and there would be no file.
        breakages.digests_are_not_compared(patch)
        fakeacc.controls.set_lazy(True)
        fits.train(tmp_path / "late", fits.StepFirst(patch), staging=staging)
    found = fits.files(tmp_path / "late")
    assert list(found) == list(expected)
    torn = [step for step in found if s.difference(found[step]["state_dict"], expected[step]["state_dict"])]
    assert torn == [1, 2, 3, 4, 5], "all but the last, which no step follows"


@on_fakeacc
def test_a_run_continues_from_a_late_copy_as_if_nothing_had_happened(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fakeacc.controls.set_lazy(True)
        module = fits.train(tmp_path, fits.StepFirst(patch))
    path = next(info.path for info in ft.list_checkpoints(str(tmp_path)) if info.name == "step=00000003.ckpt")
    continued = fits.train(tmp_path / "continued", ckpt_path=path)
    assert list(fits.files(tmp_path / "continued")) == [4, 5, 6]
    s.assert_same(s.saved(continued.state_dict()), s.saved(module.state_dict()))


@on_fakeacc
def test_a_parameter_changed_by_the_forward_pass_fails_one_save(tmp_path: Path) -> None:
    seen: list[events.Event] = []
    with pytest.MonkeyPatch.context() as patch, runs.observing(seen.append):
        fakeacc.controls.set_lazy(True)
        fits.train(tmp_path / "late", fits.StepFirst(patch), model=fits.ChangesItself, on_error="warn")
    (failure,) = [event for event in seen if isinstance(event, events.SaveFailed)]
    assert failure.step == 3
    assert "net.3.weight" in str(failure)
    # From then on copies are made at once: every later file is there and right.
    boundaries = fits.Boundaries()
    fits.train(tmp_path / "other", boundaries, model=fits.ChangesItself, staging="blocking")
    found = fits.files(tmp_path / "late")
    assert list(found) == [1, 2, 4, 5, 6]
    for step, checkpoint in found.items():
        there = boundaries.saved[step]
        s.assert_same({key: checkpoint[key] for key in there}, there)


@on_fakeacc
def test_a_run_allocates_pinned_memory_for_two_snapshots_and_copies_no_more_than_it_must(tmp_path: Path) -> None:
    counts: list[dict[str, int]] = []

    class Count(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            counts.append(fakeacc.controls.counts())

        def on_train_batch_end(self, *args: Any) -> None:
            counts.append(fakeacc.controls.counts())

    module = fits.train(tmp_path, Count(), staging="overlap")
    before, after = counts[1::2][:-1], counts[2::2]  # each save of a step, but for that at the end of the epoch
    made = [{name: b[name] - a[name] for name in a} for a, b in zip(before, after, strict=True)]
    assert 1 <= sum(save["pinned_allocations"] for save in made) <= 2
    storages = len(module.state_dict()) + 2 * len([p for p in module.parameters() if p.requires_grad])
    assert {save["async_copies"] for save in made} == {storages}
    # The next batch; and the first save reads what it copies late once more, for the digests.
    assert {save["sync_copies"] for save in made[1:]} == {1}
