"""The same on a real device: copies are held up by a kernel that spins on the stream they are launched on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ft._copying.staging import SnapshotError, Stager
from tests.devices import breakages, fits
from tests.devices import scenarios as s

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

SPIN_CYCLES = 1_000_000_000
"""About half a second: far longer than what a scenario launches meanwhile."""


def cuda() -> s.Device:
    device = torch.device("cuda", 0)

    def spin(stager: Stager) -> None:
        with stager.stream(device):
            torch.cuda._sleep(SPIN_CYCLES)

    return s.Device(device, spin)


@pytest.mark.parametrize("scenario", s.SCENARIOS)
def test_scenario(scenario: str) -> None:
    s.SCENARIOS[scenario](cuda())


@pytest.mark.parametrize(
    ("breakage", "scenario"),
    [
        (breakages.finish_orders_nothing, s.optimizer_steps_wait_for_the_copies),
        (breakages.at_once_is_not_awaited, s.what_is_copied_at_once_can_be_overwritten_at_once),
        (breakages.wait_does_not_wait, s.another_thread_gets_all_bytes),
    ],
)
def test_the_scenarios_can_fail(breakage: Any, scenario: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    breakage(monkeypatch)
    with pytest.raises((AssertionError, SnapshotError)):
        scenario(cuda())


def test_the_host_is_not_held_up() -> None:
    training = s.Training(torch.device("cuda", 0))
    with s.a_stager(cuda(), training) as stager:
        checkpoint, late = training.checkpoint(), training.late()
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            staged = stager.stage(checkpoint, late)
            stager.finish()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        assert not any(event.query() for event in staged._events)
        assert staged._plan.buffers.pinned
        s.assert_same(staged.wait(), s.saved(checkpoint))
        staged.release()


def test_every_file_is_the_state_at_its_boundary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fits.expected(tmp_path / "expected")
    stage = Stager.stage

    def stage_late(stager: Stager, *args: Any) -> Any:
        cuda().hold(stager)
        return stage(stager, *args)

    monkeypatch.setattr(Stager, "stage", stage_late)
    fits.train(tmp_path / "late", fits.StepFirst(monkeypatch))
    fits.assert_files(tmp_path / "late", expected)
