"""SIGKILL at every event of a sharded save, on each rank: nothing is lost or half there, a restart is exact."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest

import lightning_ft as ft
from lightning_ft import events
from lightning_ft.testing import assert_resume_exact
from tests.crash import harness
from tests.sharded import job
from tests.stores.fixtures import Place

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]

# Those of its files come on the rank that writes them, all others on rank 0.
POINTS = [f"{event}@0" for event in events.DIRECTORY_KILL_POINTS] + ["FileWritten@1", "FileSynced@1"]


def checked_trainer(dirpath: str, kind: str) -> L.Trainer:
    """Called in every fresh process, so rank 0 sees what the kill before left; an error fails the whole proof."""
    if job.rank() == 0:
        harness.check(dirpath, f"{dirpath}.events", 1)
        harness.log_events(f"{dirpath}.events")
    return job.trainer(
        dirpath,
        kind,
        max_epochs=5,
        callbacks=(partial(harness.NothingLeft, dirpath),),
        ft_args={"keep_last": 1, "guards": ()},
    )


@pytest.mark.parametrize(
    "kind", ["fsdp2-sharded", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("fsdp-sharded", "ddp-sharded"))]
)
def test_killed_at_every_point_of_a_save(kind: str, tmp_path: Path) -> None:
    """One run, killed at each of them in turn."""
    make_trainer = partial(checked_trainer, kind=kind)
    compared = assert_resume_exact(make_trainer, job.Net, job.data, kill_at=POINTS, root=tmp_path, world_size=2)
    assert harness.check(compared.dirpath, f"{compared.dirpath}.events", 1) == []
    assert len([name for name in os.listdir(compared.dirpath) if name.endswith(".ckpt")]) == 1


def s3_trainer(url: str, options: dict[str, Any], dirpath: str) -> L.Trainer:
    plugin = ft.FaultTolerantCheckpointIO(storage_options=options)
    return job.trainer(f"{url}/{Path(dirpath).parent.name}", "fsdp2-sharded", plugins=[plugin], max_epochs=2)


@pytest.mark.needs("s3fs", "weed")
def test_g1_killed_and_restarted_from_a_store(s3: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within an epoch, before a shard and before the manifest are published, on each rank; no file on the disk."""
    monkeypatch.chdir(tmp_path)
    kills = [3, "FileWritten:2@1", "DataWritten@0", 7]
    make_trainer = partial(s3_trainer, s3.url, s3.options)
    assert_resume_exact(make_trainer, job.Net, job.data, kill_at=kills, root=tmp_path, world_size=2)
    infos = ft.list_checkpoints(f"{s3.url}/restarted", s3.options)
    assert infos
    assert all(info.problem is None for info in infos)
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith("s3") or path.name.endswith(".distcp")]
