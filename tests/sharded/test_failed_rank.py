"""E6, E7: one rank fails or is killed while all of them save: the checkpoint is complete or not there, nobody hangs."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import lightning_ft as ft
from lightning_ft import events, exit_codes
from lightning_ft._proof.recorder import KillSwitch
from tests.crash import harness
from tests.sharded import job, processes

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]


def no_space(dirpath: str, kind: str, rank: int) -> None:
    """From the second checkpoint on the disk of one rank is full when its file is to be made durable."""
    harness.log_events(f"{dirpath}.events{job.rank()}")

    def full(event: events.Event) -> None:
        if isinstance(event, events.FileWritten) and "step=00000002" not in event.path:
            raise OSError(errno.ENOSPC, "No space left on device", event.path)

    if job.rank() == rank:
        events.observe(full)
    job.trainer(dirpath, kind).fit(job.Net(), *job.data())


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["fsdp-sharded", "fsdp2-sharded", "ddp-sharded"])
def test_e6_a_rank_that_cannot_write(kind: str, rank: int, tmp_path: Path) -> None:
    dirpath = str(tmp_path / "run")
    ended = processes.start(2, no_space, dirpath, kind, rank)
    lines = [outcome.error.strip().splitlines()[-1] for outcome in ended]
    assert lines[0] == lines[1]
    assert "SaveError" in lines[0]
    assert "No space left on device" in lines[0]
    assert f"rank {rank}" in lines[0]
    assert harness.check(dirpath, f"{dirpath}.events0", keep=1) == []
    good = ft.last_good(dirpath)
    assert good is not None
    assert good.name == "step=00000002.ckpt"
    failed = [e for e in harness.read_log(f"{dirpath}.events0") if e["event"] == "SaveFailed"]
    assert failed[0]["step"] == 4  # the next one may have begun before this was known


def killed(dirpath: str, kind: str, point: str) -> None:
    if job.rank() == 0:
        harness.log_events(f"{dirpath}.events")
    KillSwitch(point, job.rank())
    job.trainer(dirpath, kind).fit(job.Net(), *job.data())


# Of the second save. Rank 0's marker is what is written last: `DataSynced`, then `Renamed`.
POINTS = ("FileWritten:2@1", "FileSynced:2@1", "DataWritten:2@0", "DataSynced:2@0", "Renamed:2@0", "Committed:2@0")


@pytest.mark.parametrize(
    ("kind", "point"),
    [
        *(("fsdp2-sharded", point) for point in POINTS),
        ("ddp-sharded", "FileWritten:2@1"),
        *(pytest.param("ddp-sharded", point, marks=pytest.mark.slow) for point in POINTS[1:]),
        *(pytest.param("fsdp-sharded", point, marks=pytest.mark.slow) for point in POINTS),
    ],
)
def test_e6_a_rank_that_is_killed(kind: str, point: str, tmp_path: Path) -> None:
    """The other one is not told by anybody, and ends by itself."""
    dirpath = str(tmp_path / "run")
    ended = processes.start(2, killed, dirpath, kind, point)
    victim = int(point[-1])
    assert ended[victim].exit_code == -9
    assert ended[1 - victim].exit_code == exit_codes.PEER_LOST, "it trained on without the other"
    left = harness.check(dirpath, f"{dirpath}.events", keep=1)
    visible = {name for name in os.listdir(dirpath) if name.endswith(".ckpt") and name not in left}
    published = point.startswith(("Renamed", "Committed"))
    assert visible == {"step=00000002.ckpt", *(["step=00000004.ckpt"] if published else [])}
