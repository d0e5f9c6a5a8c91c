"""Where a drilled script's trainers write: below a directory of the drill, and nothing into the user's own."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_ft import _names
from lightning_ft._fit import loops
from lightning_ft._state.digest import digest


def redirect(trainer: pl.Trainer, base: Path) -> list[str]:
    """`trainer` writes checkpoints, logs and profiles below `base`; doing it again changes only what is new.

    Returns:
        What the drill does therefore not show, and what could not be redirected: one sentence each.
    """
    from lightning_ft.callback import FaultTolerantCheckpoint  # which begins drills

    notes: list[str] = []
    root = str(base / "root")
    trainer._default_root_dir = root  # type: ignore[attr-defined]
    for callback in loops.callbacks(trainer):
        if isinstance(callback, FaultTolerantCheckpoint):
            if callback.dirpath is not None and not _names.is_local(os.fspath(callback.dirpath)):
                notes.append(f"{os.fspath(callback.dirpath)}: the checkpoints were on a local disk instead")
            callback._redirect(functools.partial(elsewhere, base))
        elif isinstance(callback, (ModelCheckpoint, OnExceptionCheckpoint)) and callback.dirpath is not None:
            callback.dirpath = elsewhere(base, os.fspath(callback.dirpath))
    for logger in trainer.loggers:
        notes += _redirect_logger(logger, root)
    profiler = trainer.profiler  # type: ignore[attr-defined]
    if profiler.dirpath is not None:
        profiler.dirpath = root
    return notes


def elsewhere(base: Path, dirpath: str) -> str:
    """The same other directory for the same one, in every start; one that is below `base` already is left."""
    given = _names.normalise(dirpath)
    if Path(given).is_relative_to(base):
        return given
    return str(base / "checkpoints" / f"{_names.split(given)[1]}-{(digest(given) or '')[:8]}")


def file_elsewhere(base: Path, path: str | os.PathLike[str]) -> str:
    """The same other place for the same file; of files in one directory, in one other directory."""
    dirpath, name = _names.split(_names.normalise(path))
    return _names.join(elsewhere(base, dirpath), name)


def _redirect_logger(logger: Any, root: str) -> Iterator[str]:
    if isinstance(logger, CSVLogger):
        logger._root_dir = logger._save_dir = root
    elif isinstance(logger, TensorBoardLogger):
        logger._root_dir = root
    else:
        yield f"{type(logger).__name__} logged to where it always does, from each of the runs"
