"""Snapshots of tensors on a device, for whatever device: what training does to them, and what has to be in the copy.

Each scenario holds the copies up first (`Device.hold`), so that they are made as late as anything allows, and fails
if the snapshot is not the state at the boundary. ``breakages.py`` takes away what protects it, one thing at a time.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ft._copying import staging
from lightning_ft._copying.copy_plan import Late
from lightning_ft._copying.module_tree import ModuleTree
from lightning_ft._copying.staging import SnapshotError, SnapshotWithdrawnError, Stager

WIDTH = 64  # a weight is 16 KiB: enough to be copied late; a bias and a running mean are not


@dataclass(frozen=True)
class Device:
    """A device and how its copies are held up: until somebody waits for them, or for long."""

    device: torch.device
    hold: Callable[[Stager], None]


class Training:
    """A model on a device that has been trained a little, and its optimizer."""

    def __init__(self, device: torch.device, head: torch.device | None = None, tied: bool = False) -> None:
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).to(device)
        self.body.register_buffer("large", torch.rand(WIDTH, WIDTH, device="cpu").to(device))
        self.body.register_parameter("frozen", nn.Parameter(torch.rand(WIDTH, WIDTH).to(device), requires_grad=False))
        self.head = nn.Linear(WIDTH, WIDTH).to(head or device)
        if tied:
            self.head.weight = self.body[0].weight
        self.model = nn.ModuleDict({"body": self.body, "head": self.head})
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, foreach=False, fused=False)
        self.steps = 0
        self.filled_with = 6
        self.device = device
        self.train()

    def forward_and_backward(self) -> None:
        batch = torch.full((4, WIDTH), 1.0 + self.steps, device="cpu") * torch.linspace(-1, 1, 4, device="cpu")[:, None]
        self.optimizer.zero_grad()
        hidden = self.body(batch.to(self.device)) + self.body.get_buffer("large").sum()
        self.head(hidden.to(self.head.weight.device)).pow(2).mean().backward()

    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.forward_and_backward()
            self.step()

    def checkpoint(self) -> dict[str, Any]:
        return {"state_dict": self.model.state_dict(), "optimizer_states": [self.optimizer.state_dict()]}

    def late(self) -> Late:
        return Late.of(ModuleTree(self.model), [self.optimizer], self.steps)

    def overwrite(self) -> None:
        """Everything that was in the checkpoint is something else, on the device's current stream."""
        with torch.no_grad():
            self.filled_with += 1
            for tensor in tensors(self.checkpoint()):
                tensor.fill_(self.filled_with)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in inner for tensor in tensors(item)]


def saved(checkpoint: Any) -> Any:
    """What `torch.save` would keep of it now."""
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=False)


def difference(actual: Any, expected: Any, path: str = "") -> str:
    """Where two values differ by a bit, empty if nowhere."""
    if isinstance(expected, Tensor):
        a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (actual, expected))
        alike = (actual.device.type, actual.dtype, actual.shape) == ("cpu", expected.dtype, expected.shape)
        return "" if alike and torch.equal(a, b) else path
    if isinstance(expected, dict):
        if list(actual) != list(expected):
            return f"{path} (keys)"
        return next((d for k in expected if (d := difference(actual[k], expected[k], f"{path}[{k!r}]"))), "")
    if isinstance(expected, (list, tuple)):
        if len(actual) != len(expected):
            return f"{path} (length)"
        pairs = enumerate(zip(actual, expected, strict=True))
        return next((d for i, (a, b) in pairs if (d := difference(a, b, f"{path}[{i}]"))), "")
    return "" if actual == expected else path


def assert_same(actual: Any, expected: Any) -> None:
    where = difference(actual, expected)
    assert not where, f"the snapshot is torn: {where}"


def hold(on: Device, stager: Stager) -> None:
    """Copies are held up from now on, and nothing of an earlier snapshot can pass for one."""
    for plan in stager.plans._free:
        for place in plan.places:
            place.fill_(0xFF)  # NaN
    on.hold(stager)


@contextmanager
def a_stager(on: Device, training: Training | None = None) -> Iterator[Stager]:
    """A stager that has made its first snapshot, of `training`, so that nothing is compared by digest any more."""
    stager = Stager(overlap=True)
    try:
        if training is not None:
            first = stager.stage(training.checkpoint(), training.late())
            stager.finish()
            torch.accelerator.synchronize()
            first.wait()
            first.release()
        hold(on, stager)
        yield stager
    finally:
        stager.close()


# -- scenarios ---------------------------------------------------------------------------------------------------


def optimizer_steps_wait_for_the_copies(on: Device) -> None:
    training = Training(on.device)
    with a_stager(on, training) as stager:
        for _ in range(3):
            hold(on, stager)
            expected = saved(training.checkpoint())
            staged = stager.stage(training.checkpoint(), training.late())
            training.forward_and_backward()
            stager.finish()
            training.step()
            training.overwrite()
            assert_same(staged.wait(), expected)
            staged.release()
        assert stager.overlaps


def what_is_copied_at_once_can_be_overwritten_at_once(on: Device) -> None:
    """Buffers, small parameters and a frozen one: changed on the device right after `stage`, without `finish`."""
    training = Training(on.device)
    expected = saved(training.checkpoint())
    with a_stager(on) as stager:
        staged = stager.stage(training.checkpoint(), training.late())
        with torch.no_grad():
            for tensor in [*training.body.buffers(), training.body.frozen, training.head.bias]:
                tensor.fill_(7)
        stager.finish()
        assert_same(staged.wait(), expected)
        staged.release()


def without_late_copies_everything_can_be_overwritten_at_once(on: Device) -> None:
    training = Training(on.device)
    expected = saved(training.checkpoint())
    with a_stager(on) as stager:
        staged = stager.stage(training.checkpoint(), None)
        training.overwrite()
        assert_same(staged.wait(), expected)
        staged.release()


def what_was_launched_before_is_in_the_copy(on: Device) -> None:
    """The device is still at what it was given before: the copies come after that, though the host does not wait."""
    training = Training(on.device)
    new = torch.full((WIDTH, WIDTH), 3.0, device="cpu").pin_memory()
    with a_stager(on, training) as stager:
        with torch.no_grad():
            training.head.weight.copy_(new, non_blocking=True)
            training.body.get_buffer("large").copy_(new, non_blocking=True)
        staged = stager.stage(training.checkpoint(), training.late())
        stager.finish()
        snapshot = staged.wait()["state_dict"]
        assert_same([snapshot["head.weight"], snapshot["body.large"]], [new, new])
        staged.release()


def what_is_freed_after_the_copy_began_is_in_it(on: Device) -> None:
    """Memory that nothing else holds would be used again, for something else, while it is being copied."""
    source = torch.full((WIDTH, WIDTH), 3.0, device="cpu").to(on.device)
    expected = saved({"made": source})
    with a_stager(on) as stager:
        staged = stager.stage({"made": source})
        del source
        other = torch.full((WIDTH, WIDTH), 5.0, device="cpu").to(on.device)
        assert_same(staged.wait(), expected)
        staged.release()
        del other


def optimizer_state_that_is_dropped_after_finish_is_in_the_copy(on: Device) -> None:
    training = Training(on.device)
    with a_stager(on, training) as stager:
        expected = saved(training.checkpoint())
        staged = stager.stage(training.checkpoint(), training.late())
        stager.finish()
        training.optimizer.state.clear()
        assert_same(staged.wait(), expected)
        staged.release()


def nothing_is_written_after_release(on: Device) -> None:
    """A save that is given up: its memory may belong to anybody then."""
    training = Training(on.device)
    with a_stager(on, training) as stager:
        staged = stager.stage(training.checkpoint(), training.late())
        staged.release()
        (plan,) = stager.plans._free
        for place in plan.places:
            place.fill_(5)
        stager.finish()
        torch.accelerator.synchronize()
        assert {int(byte) for place in plan.places for byte in place.unique()} == {5}


def another_thread_gets_all_bytes(on: Device) -> None:
    training = Training(on.device)
    with a_stager(on, training) as stager, ThreadPoolExecutor(1) as writer:
        for _ in range(3):
            hold(on, stager)
            expected = saved(training.checkpoint())
            staged = stager.stage(training.checkpoint(), training.late())
            received = writer.submit(lambda staged=staged: saved(staged.wait()))
            training.forward_and_backward()
            stager.finish()
            assert_same(received.result(), expected)
            staged.release()


def a_model_on_two_devices(on: Device) -> None:
    """The part in host memory is copied by a thread while the device copies its own."""
    for devices in [(torch.device("cpu"), on.device), (on.device, torch.device("cpu"))]:
        training = Training(*devices)
        expected = saved(training.checkpoint())
        with a_stager(on, training) as stager:
            staged = stager.stage(training.checkpoint(), training.late())
            training.forward_and_backward()
            stager.finish()
            training.step()
            training.overwrite()
            # Of the forward pass only buffers have changed, and those were copied at once.
            assert_same(staged.wait(), expected)
            staged.release()


def tied_weights_stay_tied(on: Device) -> None:
    training = Training(on.device, tied=True)
    with a_stager(on) as stager:
        staged = stager.stage(training.checkpoint(), training.late())
        stager.finish()
        training.overwrite()
        snapshot = staged.wait()["state_dict"]
        a, b = snapshot["body.0.weight"], snapshot["head.weight"]
        assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        assert saved(snapshot)["head.weight"].untyped_storage().nbytes() == WIDTH * WIDTH * 4
        staged.release()


def tensors_of_every_kind(on: Device) -> None:
    base = torch.arange(4096.0, device="cpu").to(on.device)
    made = {
        "half": base.to(torch.bfloat16),
        "integers": base.to(torch.int64),
        "booleans": base > 7,
        "view": base[10:20],
        "whole": base,
        "matrix": base.reshape(64, 64).T,
        "strided": base[::3],
        "scalar": base.sum(),
        "empty": base[:0].clone(),
        "host": torch.arange(3, device="cpu"),
    }
    expected = saved(made)
    with a_stager(on) as stager:
        staged = stager.stage(dict(made))
        base.fill_(7)
        for tensor in made.values():
            tensor.fill_(1)
        snapshot = staged.wait()
        assert_same(snapshot, expected)
        assert [t.stride() for t in tensors(snapshot)] == [t.stride() for t in tensors(made)]
        assert snapshot["view"].untyped_storage().data_ptr() == snapshot["matrix"].untyped_storage().data_ptr()
        staged.release()


def a_parameter_that_the_forward_pass_changes_is_named(on: Device) -> None:
    training = Training(on.device)
    with a_stager(on, training) as stager, torch.no_grad():
        _a_change_is_found(on, stager, training, training.head.weight, r"state_dict\['head.weight'\] was changed")


def a_change_past_the_version_counter_is_found_in_the_first_save(on: Device) -> None:
    training = Training(on.device)
    expected = r"state_dict\['head.weight'\] was changed \(through `.data`"
    with a_stager(on) as stager:
        _a_change_is_found(on, stager, training, training.head.weight.data, expected)


def _a_change_is_found(on: Device, stager: Stager, training: Training, changed: Tensor, expected: str) -> None:
    staged = stager.stage(training.checkpoint(), training.late())
    changed.add_(1)
    stager.finish()
    with pytest.raises(SnapshotError, match=expected):
        staged.wait()
    staged.release()
    assert not stager.overlaps
    with torch.enable_grad():
        _copies_are_made_at_once(on, stager, training)


def a_change_past_the_version_counter_is_found_in_any_save_if_asked_for(on: Device) -> None:
    training = Training(on.device)
    with a_stager(on, training) as stager, pytest.MonkeyPatch.context() as patch:
        patch.setenv(staging.CHECK_VARIABLE, "1")
        staged = stager.stage(training.checkpoint(), training.late())
        training.head.weight.data.add_(1)
        stager.finish()
        with pytest.raises(SnapshotError, match=r"through `.data`"):
            staged.wait()
        staged.release()


def a_step_that_nobody_announced_withdraws_the_copy(on: Device) -> None:
    training = Training(on.device)
    with a_stager(on, training) as stager:
        staged = stager.stage(training.checkpoint(), training.late())
        for parameter in training.model.parameters():
            parameter.data.add_(1)
        stager.step_is_over(training.steps + 1)
        assert stager.to_be_repeated
        with pytest.raises(SnapshotWithdrawnError):
            staged.wait()
        staged.release()
        assert not stager.overlaps
        _copies_are_made_at_once(on, stager, training)


def a_save_that_is_given_up_leaves_the_next_one_whole(on: Device) -> None:
    training = Training(on.device)
    with a_stager(on, training) as stager:
        stager.stage(training.checkpoint(), training.late()).release()
        training.train()
        _copies_are_made_at_once(on, stager, training)
        assert stager.plans.made == 1


def _copies_are_made_at_once(on: Device, stager: Stager, training: Training) -> None:
    hold(on, stager)
    expected = saved(training.checkpoint())
    staged = stager.stage(training.checkpoint(), training.late() if stager.overlaps else None)
    stager.finish()
    training.overwrite()
    assert_same(staged.wait(), expected)
    staged.release()


SCENARIOS: dict[str, Callable[[Device], None]] = {
    scenario.__name__: scenario
    for scenario in (
        optimizer_steps_wait_for_the_copies,
        what_is_copied_at_once_can_be_overwritten_at_once,
        without_late_copies_everything_can_be_overwritten_at_once,
        what_was_launched_before_is_in_the_copy,
        what_is_freed_after_the_copy_began_is_in_it,
        optimizer_state_that_is_dropped_after_finish_is_in_the_copy,
        nothing_is_written_after_release,
        another_thread_gets_all_bytes,
        a_model_on_two_devices,
        tied_weights_stay_tied,
        tensors_of_every_kind,
        a_parameter_that_the_forward_pass_changes_is_named,
        a_change_past_the_version_counter_is_found_in_the_first_save,
        a_change_past_the_version_counter_is_found_in_any_save_if_asked_for,
        a_step_that_nobody_announced_withdraws_the_copy,
        a_save_that_is_given_up_leaves_the_next_one_whole,
    )
}
