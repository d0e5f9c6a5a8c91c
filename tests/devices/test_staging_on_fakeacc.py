"""Snapshots of tensors on a device whose copies are made as late as anything allows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lightning_ft._copying.copies import is_streamed, launch
from lightning_ft._copying.staging import SnapshotError, Stager
from tests.devices import breakages, fakeacc
from tests.devices import scenarios as s
from tests.devices.fakeacc import on_fakeacc


def lazily() -> s.Device:
    return s.Device(torch.device("fakeacc", 0), lambda stager: fakeacc.controls.set_lazy(True))


def slowly() -> s.Device:
    return s.Device(torch.device("fakeacc", 0), lambda stager: fakeacc.controls.set_delay_ms(8))


@contextmanager
def counted(**expected: int) -> Iterator[None]:
    """The block makes the device count so much."""
    before = fakeacc.controls.counts()
    yield
    after = fakeacc.controls.counts()
    counts = {name: after[name] - before[name] for name in expected}
    assert counts == expected, counts


# -- the device itself -------------------------------------------------------------------------------------------


@on_fakeacc
def test_a_copy_is_not_there_before_it_is_waited_for() -> None:
    fakeacc.controls.set_lazy(True)
    source = torch.arange(4.0).to("fakeacc")
    with counted(async_copies=1, sync_copies=0, waits=0, pinned_allocations=1):
        target = torch.empty(4, pin_memory=True)
        target.copy_(source, non_blocking=True)
        event = torch.Event("fakeacc")
        event.record()
    assert target.isnan().all()
    assert not event.query()
    with counted(waits=1):
        event.synchronize()
    assert event.query()
    assert target.tolist() == [0, 1, 2, 3]


@on_fakeacc
def test_kernels_run_in_the_order_of_their_stream() -> None:
    fakeacc.controls.set_lazy(True)
    weight, other = torch.zeros(4).to("fakeacc"), torch.zeros(4).to("fakeacc")
    stream, targets = torch.Stream(device="fakeacc"), torch.empty(3, 4, pin_memory=True)
    with stream:
        targets[0].copy_(weight, non_blocking=True)
        first = stream.record_event()
        targets[1].copy_(other, non_blocking=True)
        targets[2].copy_(weight, non_blocking=True)
    torch.accelerator.current_stream().wait_event(first)
    assert targets.isnan().all()
    weight.fill_(1)  # after the copies up to that event, and not after those behind it
    assert (targets[0] == 0).all()
    assert targets[1:].isnan().all()
    stream.synchronize()
    assert (targets[1].unique().tolist(), targets[2].unique().tolist()) == ([0], [1])


@on_fakeacc
def test_freed_memory_is_used_again_at_once() -> None:
    tensor = torch.zeros(1000).to("fakeacc")
    address = tensor.data_ptr()
    del tensor
    again = torch.empty(1000, device="fakeacc")
    assert again.data_ptr() == address
    assert again.cpu().isnan().all()


# -- snapshots ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [lazily, slowly])
@pytest.mark.parametrize("scenario", s.SCENARIOS)
@on_fakeacc
def test_scenario(scenario: str, how: Any) -> None:
    assert is_streamed(torch.device("fakeacc", 0))
    s.SCENARIOS[scenario](how())


@pytest.mark.parametrize(
    ("breakage", "scenario"), [(b, sc) for b, scenarios in breakages.BREAKAGES.items() for sc in scenarios]
)
@on_fakeacc
def test_the_scenarios_can_fail(breakage: Any, scenario: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        breakage(patch)
        try:
            scenario(lazily())
        except (AssertionError, SnapshotError, pytest.fail.Exception):
            return
    raise AssertionError(f"{scenario.__name__} does not see it")


@on_fakeacc
def test_training_goes_on_on_its_own_stream() -> None:
    training, own = s.Training(torch.device("fakeacc", 0)), torch.Stream(device="fakeacc")
    default = torch.accelerator.current_stream()
    torch.accelerator.set_stream(own)
    try:
        s.optimizer_steps_wait_for_the_copies(lazily())
        with s.a_stager(lazily(), training) as stager:
            stager.stage(training.checkpoint(), training.late()).release()
            assert torch.accelerator.current_stream() == own
    finally:
        torch.accelerator.set_stream(default)


@on_fakeacc
def test_after_a_launch_that_failed_nothing_is_written_any_more() -> None:
    fakeacc.controls.set_lazy(True)
    device, stream = torch.device("fakeacc", 0), torch.Stream(device="fakeacc")
    source, default = torch.ones(8).to(device), torch.accelerator.current_stream()
    target, too_small = torch.empty(8, pin_memory=True), torch.empty(4, pin_memory=True)
    with pytest.raises(RuntimeError, match="size"):
        launch(stream, device, [target, too_small], [source, source])
    assert torch.accelerator.current_stream() == default
    target.fill_(5)
    stream.synchronize()
    assert (target == 5).all()


@on_fakeacc
def test_the_host_is_not_held_up() -> None:
    training, on = s.Training(torch.device("fakeacc", 0)), lazily()
    with s.a_stager(on, training) as stager:
        checkpoint, late = training.checkpoint(), training.late()
        storages = {t.data_ptr() for t in s.tensors(checkpoint) if t.device.type == "fakeacc"}
        with counted(waits=0, kernels=0, sync_copies=0, async_copies=len(storages), pinned_allocations=0):
            staged = stager.stage(checkpoint, late)
            stager.finish()
        weight = staged._checkpoint["state_dict"]["head.weight"]
        assert weight.isnan().all(), "copied before anybody waited for it"
        staged.wait()
        assert not weight.isnan().any()
        staged.release()


@on_fakeacc
def test_the_forward_pass_does_not_wait_for_late_copies() -> None:
    training = s.Training(torch.device("fakeacc", 0))
    with s.a_stager(lazily(), training) as stager:
        staged = stager.stage(training.checkpoint(), training.late())
        snapshot = staged._checkpoint["state_dict"]
        assert snapshot["body.1.running_mean"].isnan().all()
        training.body.eval()(torch.ones(4, s.WIDTH, device="fakeacc"))
        assert not snapshot["body.1.running_mean"].isnan().any(), "a kernel might have overwritten it before its copy"
        assert snapshot["head.weight"].isnan().all(), "the forward pass has waited for the copy of a parameter"
        stager.finish()
        staged.wait()
        staged.release()


@on_fakeacc
def test_pinned_memory_is_allocated_once_per_snapshot_in_flight() -> None:
    training = s.Training(torch.device("fakeacc", 0))
    with s.a_stager(lazily(), training) as stager:
        with counted(pinned_allocations=0):
            for _ in range(4):
                training.train()
                staged = stager.stage(training.checkpoint(), training.late())
                stager.finish()
                staged.wait()
                staged.release()
        with counted(pinned_allocations=1):
            one, two = (stager.stage(training.checkpoint(), training.late()) for _ in range(2))
        one.release()
        two.release()
        with counted(pinned_allocations=0):
            for staged in [stager.stage(training.checkpoint(), training.late()) for _ in range(2)]:
                staged.release()
        assert stager.plans.made == 2


@on_fakeacc
def test_memory_is_pinned_only_for_tensors_of_a_device() -> None:
    training = s.Training(torch.device("cpu"))
    expected = s.saved(training.checkpoint())
    stager = Stager(overlap=True)
    with counted(pinned_allocations=0, async_copies=0, waits=0):
        staged = stager.stage(training.checkpoint(), training.late())
        stager.finish()
        s.assert_same(staged.wait(), expected)
    staged.release()
    with counted(pinned_allocations=1):
        stager.stage(s.Training(torch.device("fakeacc", 0)).checkpoint()).release()
    stager.close()


@on_fakeacc
def test_pinned_memory_that_grows_stays_within_what_torch_rounds_up_to() -> None:
    """Torch rounds pinned memory up to a power of two: room to spare on top of one would double it."""
    block_bytes = 32 << 10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_ft._copying.copy_plan.PINNED_BLOCK_BYTES", block_bytes)
        patch.setattr("lightning_ft._copying.buffers.PINNED_BLOCK_BYTES", block_bytes)
        stager = Stager(overlap=False)
        for count in (1, 4, 9, 10):  # each of half a block
            made = [torch.rand(block_bytes // 8, device="cpu").to("fakeacc") for _ in range(count)]
            staged = stager.stage({"made": made})
            s.assert_same(staged.wait(), s.saved({"made": made}))
            sizes = staged._plan.buffers._sizes
            staged.release()
        assert len(sizes) == 5
        assert max(sizes) <= block_bytes
        stager.close()
