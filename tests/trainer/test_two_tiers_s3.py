"""Runs that save to a local directory and upload to a real S3 server: killed with SIGKILL, they go on exactly."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import pytest

import lightning_ft as ft
from lightning_ft.discovery import list_checkpoints
from lightning_ft.storage import Storage
from lightning_ft.testing import assert_resume_exact
from tests.stores.checkpoints import uploads
from tests.stores.fixtures import Place, s3, seaweed
from tests.trainer import scenarios as s

__all__ = ["s3", "seaweed"]

pytestmark = pytest.mark.needs("s3fs", "weed")


def two_tiers(url: str, options: dict[str, Any], new_machine: bool, dirpath: str) -> L.Trainer:
    """The checkpoints go below `url`, under the name of the run; `dirpath` is the local directory."""
    if new_machine:
        shutil.rmtree(dirpath, ignore_errors=True)
    return s.trainer(
        f"{url}/{Path(dirpath).parent.name}",
        plugins=[ft.FaultTolerantCheckpointIO(async_save=False, verify_after_write="full", storage_options=options)],
        ft_args={"local_dirpath": dirpath, "local_every_n_train_steps": 1, "keep_last": 2},
    )


@pytest.mark.parametrize("new_machine", [False, True], ids=["same-machine", "new-machine"])
def test_g7_killed_before_while_and_after_an_upload(new_machine: bool, s3: Place, tmp_path: Path) -> None:
    """On the same machine, at most the step that was being saved is trained again, wherever its upload was."""
    make_trainer = partial(two_tiers, s3.url, s3.options, new_machine)
    kills = ["UploadStarted", "DataWritten:4", "DataSynced:4", "ReadBack:4"]
    compared = assert_resume_exact(make_trainer, s.Net, s.shuffled, kill_at=kills, root=tmp_path)
    assert compared.replayed > len(kills) if new_machine else compared.replayed <= len(kills)
    url = f"{s3.url}/restarted"
    infos, local = list_checkpoints(url, s3.options), list_checkpoints(compared.dirpath)
    assert len(infos) == len(local) == 2
    assert all(info.problem is None for info in (*infos, *local))
    assert infos[0].manifest == local[0].manifest
    fs = fsspec.core.url_to_fs(url, **s3.options)[0]
    assert fs.cat_file(infos[0].path) == Path(local[0].path).read_bytes()
    assert uploads(Storage(s3.options), url) == []
