"""Stagers that are wrong, each by one thing that it leaves out, and the scenarios that have to find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_ft._copying import copies, staging
from lightning_ft._copying.staging import Staged, Stager
from tests.devices import scenarios as s


def finish_orders_nothing(patch: pytest.MonkeyPatch) -> None:
    """The device does not wait for the late copies before the optimizer steps."""
    finish = Staged.finish

    def finish_(self: Staged) -> None:
        self._barriers = []
        finish(self)

    patch.setattr(Staged, "finish", finish_)


def at_once_is_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """The device does not wait for the copies that are made at once."""
    take = Staged._take

    class Deaf:
        def wait_event(self, event: Any) -> None: ...

    def take_(self: Staged, *args: Any, **kwargs: Any) -> None:
        real = torch.accelerator.current_stream
        launches: list[bool] = []

        def launch(*of: Any) -> Any:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(torch.accelerator, "current_stream", real)
                launches.append(True)
                return copies.launch(*of)

        with pytest.MonkeyPatch.context() as outer:
            outer.setattr(torch.accelerator, "current_stream", lambda *device: Deaf())
            outer.setattr(staging, "launch", launch)
            take(self, *args, **kwargs)

    patch.setattr(Staged, "_take", take_)


def wait_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    """The writer takes the buffers as they are."""
    wait = Staged.wait

    def wait_(self: Staged) -> Any:
        events, self._events = self._events, []
        try:
            return s.saved(wait(self))
        finally:
            self._events = events

    patch.setattr(Staged, "wait", wait_)


def copies_overtake(patch: pytest.MonkeyPatch) -> None:
    """Copies begin whatever the device has still to do."""

    def launch(stream: Any, device: torch.device, targets: Any, sources: Any) -> Any:
        current = torch.accelerator.current_stream(device)
        torch.accelerator.set_stream(stream)
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        torch.accelerator.set_stream(current)
        return stream.record_event()

    patch.setattr(staging, "launch", launch)


def sources_are_let_go(patch: pytest.MonkeyPatch) -> None:
    """Nothing keeps the memory that is being copied."""
    stage = Stager.stage

    def stage_(self: Stager, *args: Any) -> Staged:
        staged = stage(self, *args)
        staged._let_go()
        return staged

    patch.setattr(Stager, "stage", stage_)


def finish_lets_sources_go(patch: pytest.MonkeyPatch) -> None:
    """What a device still copies is held only until the host has nothing more to do with it."""
    settle = Staged._settle

    def settle_(self: Staged) -> None:
        settle(self)
        self._let_go()

    patch.setattr(Staged, "_settle", settle_)


def release_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    """Memory is given back that a device is still to write to."""
    release = Staged.release

    def release_(self: Staged) -> None:
        self._events = []
        release(self)

    patch.setattr(Staged, "release", release_)


def versions_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Staged, "_judge", lambda self: None)


def digests_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(staging, "digest", lambda data: "")


BREAKAGES: dict[Callable[[pytest.MonkeyPatch], None], tuple[Callable[[s.Device], None], ...]] = {
    finish_orders_nothing: (s.optimizer_steps_wait_for_the_copies, s.a_model_on_two_devices),
    at_once_is_not_awaited: (
        s.what_is_copied_at_once_can_be_overwritten_at_once,
        s.without_late_copies_everything_can_be_overwritten_at_once,
        s.tensors_of_every_kind,
    ),
    wait_does_not_wait: (s.another_thread_gets_all_bytes,),
    copies_overtake: (s.what_was_launched_before_is_in_the_copy,),
    sources_are_let_go: (s.what_is_freed_after_the_copy_began_is_in_it,),
    finish_lets_sources_go: (s.optimizer_state_that_is_dropped_after_finish_is_in_the_copy,),
    release_does_not_wait: (s.nothing_is_written_after_release,),
    versions_are_not_looked_at: (s.a_parameter_that_the_forward_pass_changes_is_named,),
    digests_are_not_compared: (s.a_change_past_the_version_counter_is_found_in_the_first_save,),
}
"""Each, and the scenarios that have to fail with it."""
