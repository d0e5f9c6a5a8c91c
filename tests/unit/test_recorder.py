"""The recorder: shards have digests of their own, and kill points say where and on which rank."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_ft import events
from lightning_ft._proof import kill_point, recorder
from lightning_ft._state.digest import digest
from tests.sharded import job, processes


def digests_of_shards() -> list[str | None]:
    torch.distributed.init_process_group("gloo", rank=job.rank(), world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(10.0).reshape(5, 2)
    changed = whole.clone()
    changed[4, 1] = -9.0  # rank 1 holds it
    found = [digest(distribute_tensor(t, mesh, [Shard(0)])) for t in (whole, whole.clone(), changed)]
    torch.distributed.destroy_process_group()
    return found


def test_each_rank_has_the_digest_of_its_own_shard() -> None:
    (first, again, unchanged), (second, second_again, changed) = processes.run(2, digests_of_shards)
    assert None not in (first, second)
    assert first == again == unchanged
    assert second == second_again != changed
    assert first != second


@pytest.mark.parametrize(
    "point", [0, -1, "0", "Unheard", "Renamed:x", "Renamed@x", "Renamed@", "5:2", "x@1", "", "Renamed:0"]
)
def test_a_kill_point_that_cannot_be(point: Any) -> None:
    with pytest.raises(ValueError, match="kill point"):
        kill_point.check_kill_point(point)


@pytest.mark.parametrize(
    ("point", "rank", "emitted", "killed"),
    [
        ("Renamed", 0, 1, True),
        ("Renamed", 1, 1, True),
        ("Renamed:2", 0, 1, False),
        ("Renamed:2", 0, 2, True),
        ("Renamed:2@1", 1, 2, True),
        ("Renamed:2@1", 0, 2, False),
        ("Renamed@0", 0, 1, True),
        ("Committed", 0, 1, False),
    ],
)
def test_who_is_killed_where(
    point: str, rank: int, emitted: int, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append(number))
    switch = recorder.KillSwitch(point, rank)
    for _ in range(emitted):
        events.emit(events.Renamed("x"))
    if switch._forget is not None:
        switch._forget()
    assert signals == [signal.SIGKILL] * killed


def test_every_value_has_a_text_of_its_own() -> None:
    """Also one that is no real number, or that nothing else can be made of."""
    values = [torch.tensor(x) for x in (1.0, -0.0, 0.0, 1 + 2j, 1 - 2j, 2**53, 2**53 + 1, True, [1.0, 2.0])]
    texts = [json.dumps(recorder._exact(value)) for value in values]
    assert len(set(texts)) == len(values)
    assert texts == [json.dumps(recorder._exact(value.clone())) for value in values]
    first, same, other = ({"x": torch.tensor([x, 0.0]), "f": lambda: 0} for x in (1.0, 1.0, 2.0))
    assert recorder._digest(first) == recorder._digest(same) != recorder._digest(other)
    assert None not in (recorder._digest(first), recorder._digest(other))
