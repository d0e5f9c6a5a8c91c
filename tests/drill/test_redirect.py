"""Where the trainers of a drilled script write."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.profilers import SimpleProfiler

import lightning_ft as ft
from lightning_ft._proof.redirect import elsewhere, file_elsewhere, redirect


class Service(Logger):
    """Logs to somewhere on the net."""

    name = version = None

    def log_metrics(self, *args: object, **kwargs: object) -> None: ...

    def log_hyperparams(self, *args: object, **kwargs: object) -> None: ...


def trainer(users: Path, *loggers: Logger) -> L.Trainer:
    ours = ft.FaultTolerantCheckpoint(users / "slow", local_dirpath=users / "fast")
    callbacks = [ours, ModelCheckpoint(users / "best"), ModelCheckpoint(every_n_epochs=2), OnExceptionCheckpoint(users)]
    return L.Trainer(
        accelerator="cpu", default_root_dir=users, callbacks=callbacks, logger=list(loggers),
        profiler=SimpleProfiler(users, "profile"), enable_progress_bar=False,
    )  # fmt: skip


def test_no_path_of_a_trainer_is_outside(tmp_path: Path) -> None:
    users, base = tmp_path / "users", tmp_path / "drill"
    # Made without tensorboard, which need not be installed.
    board = TensorBoardLogger.__new__(TensorBoardLogger)
    board._root_dir = str(users)
    board._name, board._version, board._sub_dir = "name", 0, None
    it = trainer(users, CSVLogger(users / "logs"), board)
    for _ in range(2):  # a second time changes nothing
        assert redirect(it, base) == []
        ours, best, unplaced, on_exception = (c for c in it.callbacks if hasattr(c, "dirpath"))
        assert isinstance(ours, ft.FaultTolerantCheckpoint)
        assert ours.settings.local is not None
        paths = [ours.dirpath, ours._given_dirpath, ours.settings.local.dirpath, best.dirpath, on_exception.dirpath]
        paths += [it.default_root_dir, it.profiler.dirpath]
        paths += [path for logger in it.loggers for path in (logger.save_dir, logger.log_dir)]
        assert all(Path(str(path)).is_relative_to(base) for path in paths), paths
        assert len(set(paths[:5])) == 4  # those that were different still are; the first two are one
        assert unplaced.dirpath is None
    assert not users.exists()


def test_one_directory_is_always_the_same_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert elsewhere(tmp_path / "drill", "runs/1/") == elsewhere(tmp_path / "drill", str(tmp_path / "runs" / "1"))
    assert elsewhere(tmp_path / "drill", "a/1") != elsewhere(tmp_path / "drill", "b/1")
    inside = str(tmp_path / "drill" / "checkpoints" / "1-abc")
    assert elsewhere(tmp_path / "drill", inside) == inside
    file = file_elsewhere(tmp_path / "drill", "runs/1/final.ckpt")
    assert Path(file) == Path(elsewhere(tmp_path / "drill", "runs/1")) / "final.ckpt"


def test_what_goes_elsewhere_is_said(tmp_path: Path) -> None:
    it = trainer(tmp_path / "users", Service())
    it.callbacks.append(ft.FaultTolerantCheckpoint("s3://bucket/run"))
    assert sorted(redirect(it, tmp_path / "drill")) == [
        "Service logged to where it always does, from each of the runs",
        "s3://bucket/run: the checkpoints were on a local disk instead",
    ]
