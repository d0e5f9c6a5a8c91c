"""Whole runs whose checkpoints are in a store: killed with SIGKILL, they go on as if nothing had happened."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest

import lightning_ft as ft
from lightning_ft.discovery import list_checkpoints, verify
from lightning_ft.storage import Storage
from lightning_ft.testing import assert_resume_exact
from tests.stores.chaos import Rule
from tests.stores.checkpoints import uploads
from tests.stores.fixtures import Place
from tests.trainer import runs
from tests.trainer import scenarios as s

pytestmark = pytest.mark.needs("s3fs", "weed")


def s3_trainer(url: str, options: dict[str, Any], dirpath: str, **kwargs: Any) -> L.Trainer:
    """As `scenarios.trainer`, but the checkpoints go below `url`, under the name of the run."""
    plugin = ft.FaultTolerantCheckpointIO(storage_options=options)
    return s.trainer(f"{url}/{Path(dirpath).parent.name}", plugins=[plugin], **kwargs)


def test_g6_killed_and_restarted_it_is_exact(chaos: Place, tmp_path: Path) -> None:
    """In the middle of an epoch, before the object is published, and just after; and the store is busy all the time."""
    chaos.rules += [
        Rule("status", method="PUT", every=3),
        Rule("drop_response", method="PUT", path="step=", every=4),
        Rule("reset", method="GET", path="step=", every=3),
        Rule("status", method="GET", query="list-type", every=2, status=500, code="InternalError"),
    ]
    kills = [5, "DataWritten:2", "DataSynced"]
    make_trainer = partial(s3_trainer, chaos.url, chaos.options)
    compared = assert_resume_exact(make_trainer, s.Net, partial(s.shuffled, 0), kill_at=kills, root=tmp_path)
    assert compared.replayed > 0
    assert all(rule.hits > 1 for rule in chaos.rules)
    assert not (tmp_path / "restarted" / "checkpoints").exists()
    infos = list_checkpoints(f"{chaos.url}/restarted", chaos.direct())
    assert infos
    assert all(info.problem is None for info in infos)
    assert uploads(Storage(chaos.direct()), f"{chaos.url}/restarted") == []


def test_d8_the_whole_life_of_a_run(s3: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D3, D8, G6: "last" on an empty store, rotation, "last" again; no file of the store's name on the disk."""
    monkeypatch.chdir(tmp_path)

    def fit(max_steps: int) -> list[int]:
        ours = ft.FaultTolerantCheckpoint(s3.url, every_n_train_steps=1, keep_last=2)
        plugin = ft.FaultTolerantCheckpointIO(storage_options=s3.options)
        model = runs.fit(runs.trainer(ours, plugins=[plugin], max_steps=max_steps), ckpt_path="last")
        return [step[1] for step in model.steps]

    assert fit(3) == [0, 1, 2]
    assert Storage(s3.options).listdir(s3.url) == ["ft_events", "step=00000002.ckpt", "step=00000003.ckpt"]
    assert fit(5) == [3, 4]
    # What it was resumed from is kept until there are two newer ones.
    assert Storage(s3.options).listdir(s3.url) == ["ft_events", "step=00000004.ckpt", "step=00000005.ckpt"]
    assert fit(5) == []
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("s3")]


AT_THE_END = """
import json, sys
import torch
import lightning_ft as ft

url, options = sys.argv[1], json.loads(sys.argv[2])
plugin = ft.FaultTolerantCheckpointIO(storage_options=options)
plugin.save_checkpoint({"weight": torch.zeros(10 << 20), "global_step": 1}, url)
"""


def test_a_save_in_flight_when_the_script_ends_is_made(s3: Place) -> None:
    """By then the client of the store cannot look up the name of a host any more, unless that is done in time."""
    options = {**s3.options, "endpoint_url": s3.options["endpoint_url"].replace("127.0.0.1", "localhost")}
    path = f"{s3.url}/end.ckpt"
    subprocess.run([sys.executable, "-c", AT_THE_END, path, json.dumps(options)], check=True, timeout=120)
    assert verify(path, storage_options=s3.options).problem is None
