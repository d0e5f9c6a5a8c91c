"""Our files without our package, and plain Lightning's files with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_ft as ft
from tests.trainer import plain_job, runs
from tests.trainer.plain_job import Model, loaders

SCRIPT = Path(plain_job.__file__)


def ours(dirpath: Any, **kwargs: Any) -> ft.FaultTolerantCheckpoint:
    return ft.FaultTolerantCheckpoint(dirpath, **{"every_n_train_steps": 1, "keep_last": -1, **kwargs})


def fit(*callbacks: Any, ckpt_path: Any = None, **kwargs: Any) -> Model:
    L.seed_everything(1, verbose=False)
    model = Model()
    trainer = L.Trainer(**plain_job.QUIET, callbacks=list(callbacks), **kwargs)
    trainer.fit(model, *loaders(), ckpt_path=ckpt_path)
    return model


# -- our files, read by others -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of 8 steps, saved after every step, and the user's own files beside them."""
    place = tmp_path_factory.mktemp("written")
    users = [
        ModelCheckpoint(place / "users", filename="step-{step}", every_n_train_steps=3, save_top_k=-1),
        ModelCheckpoint(place / "best", filename="{epoch}", monitor="val", save_top_k=-1),
    ]
    fit(*users, ours(place / "ours"), max_epochs=2)
    fit(ours(place / "accumulated"), max_epochs=2, accumulate_grad_batches=2)
    return place


def at(place: Path, step: int) -> Path:
    return place / f"step={step:08d}.ckpt"


def test_torch_and_zipfile_read_them(written: Path) -> None:
    for path in (at(written / "ours", 3), at(written / "ours", 8), at(written / "ours", 16)):
        for mmap in (True, False):
            assert {"state_dict", "loops", "lightning_ft"} <= set(torch.load(path, weights_only=True, mmap=mmap))
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            assert json.loads(archive.comment)["lightning_ft"] == "checkpoint"


@pytest.mark.needs("unzip")
def test_unzip_reads_them(written: Path) -> None:
    done = subprocess.run(["unzip", "-t", at(written / "ours", 8)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No errors detected" in done.stdout


def test_load_from_checkpoint(written: Path) -> None:
    weights = torch.load(at(written / "ours", 3), weights_only=True)["state_dict"]
    model = Model.load_from_checkpoint(at(written / "ours", 3))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


# Step of the file (0: of the user's callbacks), steps per epoch of what is left.
FILES = {
    "first step": ("ours", 1, {0: 7, 1: 8}),
    "within epoch 0": ("ours", 3, {0: 5, 1: 8}),
    "last but one": ("ours", 7, {0: 1, 1: 8}),
    "end of epoch 0": ("ours", 8, {1: 8}),
    "within epoch 1": ("ours", 11, {1: 5}),
    "the end": ("ours", 16, {}),
    "accumulated, within": ("accumulated", 3, {0: 2, 1: 8}),
    "accumulated, end of epoch 0": ("accumulated", 4, {1: 8}),
}


def test_plain_lightning_continues_from_them(written: Path) -> None:
    """In a process that has no lightning_ft: every epoch has its batches, none is empty, no step is lost."""
    jobs, expected = [], []
    for place, step, left in FILES.values():
        window = 2 if place == "accumulated" else 1
        for limit in ({"max_epochs": 2}, {"max_epochs": 3}, {"max_steps": 16 // window}, {"max_steps": 20 // window}):
            batches = dict(left)
            if limit in ({"max_epochs": 3}, {"max_steps": 20 // window}):
                batches[2] = 8 if "max_epochs" in limit else 4
            jobs.append((str(at(written / place, step)), {**limit, "accumulate_grad_batches": window}))
            expected.append((batches, (16 + batches.get(2, 0)) // window))
    done = subprocess.run(
        [sys.executable, SCRIPT, json.dumps(jobs)], capture_output=True, text=True, check=False, cwd=SCRIPT.parent
    )
    assert done.returncode == 0, done.stderr
    reports = json.loads(done.stdout.rpartition("REPORT ")[2])
    for (path, limit), (batches, global_step), report in zip(jobs, expected, reports, strict=True):
        where = f"{path} with {limit}"
        assert report["ours"] == [], where
        assert Counter(report["epochs"]) == batches, where
        assert report["global_step"] == global_step, where
        assert report["rates"] == [1e-2 * 0.5**epoch for epoch in report["epochs"]], where


@pytest.mark.parametrize("name", ["users", "best"])
def test_plain_lightning_continues_from_the_users_files(name: str, written: Path) -> None:
    for path in (written / name).iterdir():
        assert ft.verify(str(path)).problem is None
        step = torch.load(path, weights_only=True)["global_step"]
        model = fit(max_epochs=2, ckpt_path=path, enable_checkpointing=False)
        assert len(model.steps) == 16 - step


# -- plain Lightning's files, read by us -------------------------------------------------------------------------


def plain_run(dirpath: Path, **kwargs: Any) -> None:
    fit(ModelCheckpoint(dirpath, every_n_train_steps=1, save_last=True), **kwargs)


@pytest.mark.parametrize("steps", [3, 8, 11])
def test_a_run_of_plain_lightning_is_continued(steps: int, tmp_path: Path) -> None:
    plain_run(tmp_path, max_steps=steps)
    before = set(os.listdir(tmp_path))
    model = fit(ours(tmp_path), max_epochs=2, ckpt_path="last")
    assert model.steps == list(range(steps, 16))
    assert before <= set(os.listdir(tmp_path)), "files of somebody else were deleted"
    # From now on it is ours, and exact.
    good = ft.last_good(str(tmp_path))
    assert good is not None
    assert good.name == "step=00000016.ckpt"
    assert fit(ours(tmp_path), max_epochs=2, ckpt_path="last").steps == []


def test_the_newest_version_of_last_is_taken(tmp_path: Path) -> None:
    plain_run(tmp_path, max_steps=5)
    plain_run(tmp_path, max_steps=3)
    assert (tmp_path / "last-v1.ckpt").exists()
    assert fit(ours(tmp_path), max_epochs=1, ckpt_path="last").steps == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("left", [0.0, 0.5, 0.99])
def test_a_truncated_last_is_an_error_with_the_reason(left: float, tmp_path: Path) -> None:
    plain_run(tmp_path, max_steps=3)
    runs.damage(tmp_path / "last.ckpt", left)
    with pytest.raises(ft.NoUsableCheckpointError, match=r"last\.ckpt: \w+") as caught:
        fit(ours(tmp_path), max_epochs=1, ckpt_path="last")
    assert [Path(path).name for path, _ in caught.value.reasons] == ["last.ckpt"]
    assert not [name for name in os.listdir(tmp_path) if name.startswith("step=")]


def test_ours_are_preferred_to_a_last_of_plain_lightning(tmp_path: Path) -> None:
    fit(ours(tmp_path), max_steps=5)
    plain_run(tmp_path, max_steps=3)
    assert fit(ours(tmp_path), max_epochs=1, ckpt_path="last").steps == [5, 6, 7]


def test_the_users_last_beside_ours(tmp_path: Path) -> None:
    """Both write; plain Lightning would take whichever file is younger."""

    def start(steps: int) -> Model:
        users = ModelCheckpoint(tmp_path / "users", every_n_train_steps=1, save_last=True)
        return fit(users, ours(tmp_path / "ours"), max_steps=steps, ckpt_path="last")

    start(5)
    os.utime(tmp_path / "users/last.ckpt", (2**32, 2**32))
    assert start(8).steps == [5, 6, 7]
