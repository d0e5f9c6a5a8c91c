"""Random state: draws go on where they stood, whatever set-up, seeds and workers do in the restarted process."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ft.testing import assert_resume_exact
from tests.trainer import cases as c
from tests.trainer import scenarios as s

LIBRARIES = {
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(np.random.rand()),
    "python": random.random,
}


def draws() -> dict[str, float]:
    return {name: draw() for name, draw in LIBRARIES.items()}


# -- B1 ----------------------------------------------------------------------------------------------------------


def noisy_collate(items: Any) -> Any:
    numbers, features = torch.utils.data.default_collate(items)
    return numbers, features + sum(draws().values())


def noisy_data() -> Any:
    return DataLoader(c.Plain(20), batch_size=4, collate_fn=noisy_collate), c.plain_loader(6, 3)


class Noisy(c.Small):
    """Dropout, and draws in the training step whose values are outputs; a callback's draws are added to them."""

    def __init__(self) -> None:
        super().__init__()
        self.net.append(nn.Dropout(0.5))
        self.noise = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        outputs["loss"] = outputs["loss"] * (1 + self.noise)
        return {**outputs, **{name: torch.tensor(value) for name, value in draws().items()}}


class NoisyCallback(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.noise = sum(draws().values())

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        draws()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        draws()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        draws()


def test_b1_draws_in_step_collate_and_callbacks(tmp_path: Path) -> None:
    make_trainer = partial(c.trainer, every=1, callbacks=(NoisyCallback,))
    # restarts within an epoch, after a validation, at an epoch's end and after a first batch
    kills = [3, 5, 6, 7]
    c.exact(make_trainer, Noisy, noisy_data, kill_at=kills, root=tmp_path, replayed=len(kills))


def test_b1_plain_lightning_draws_other_numbers(tmp_path: Path) -> None:
    make_trainer = partial(s.plain_trainer, every=5)  # at the end of an epoch, where the data is in order
    with pytest.raises(AssertionError, match=r"step 6: (output|batch) differs"):
        assert_resume_exact(make_trainer, Noisy, noisy_data, kill_at=6, root=tmp_path)


# -- B3 ----------------------------------------------------------------------------------------------------------


class Drawing(Noisy):
    """Draws while it is set up, as many do."""

    def configure_model(self) -> None:
        draws()

    def on_fit_start(self) -> None:
        draws()

    def on_train_start(self) -> None:
        if self.trainer.global_step:  # in the restarted process only, so what it draws must not count
            draws()


def reseeded(dirpath: str, **kwargs: Any) -> L.Trainer:
    """A script that seeds each start with something else, and does something random first."""
    starts = len(os.listdir(dirpath)) if os.path.isdir(dirpath) else 0
    made = c.trainer(dirpath, seed=99 + starts if starts else 1, **kwargs)
    if starts:
        draws()
    return made


@pytest.mark.parametrize("workers", [0, 2])
def test_b3_restarts_with_other_seeds(workers: int, tmp_path: Path) -> None:
    make_trainer = partial(reseeded, every=1, callbacks=(NoisyCallback,), num_sanity_val_steps=2)
    kills = [3, 5, 9, 10]
    make_data = partial(s.shuffled, workers, drop_last=True)
    c.exact(make_trainer, Drawing, make_data, kill_at=kills, root=tmp_path, replayed=len(kills))


# -- B5 ----------------------------------------------------------------------------------------------------------


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([float(i)]), torch.tensor([draws()[name] for name in LIBRARIES])


class Seen(c.Small):
    """Notes which augmentation each item had in each epoch."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.file = log

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        c.note(self.file, self.current_epoch, batch[0].flatten().tolist(), batch[1].tolist())
        return super().training_step(batch, batch_idx)


def augmented(workers: int, persistent: bool = False) -> Any:
    return DataLoader(
        Augmented(), batch_size=4, shuffle=True, num_workers=workers, persistent_workers=persistent
    ), c.plain_loader(6, 3)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_b5_augmentation_differs_between_epochs_and_repeats_in_a_restart(
    workers: int, persistent: bool, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    make_trainer = partial(c.sparse, every=1)
    make_data = partial(augmented, workers, persistent)
    c.exact(make_trainer, partial(Seen, log), make_data, kill_at=[2, 4, 5], root=tmp_path, replayed=3)
    whole, *parts = c.notes(log)
    for run in (whole, [line for part in parts for line in part]):
        seen: dict[tuple[float, str], set[tuple[int, float]]] = {}
        for epoch, items, values in run:
            for i, drawn in zip(items, values, strict=True):
                for name, value in zip(LIBRARIES, drawn, strict=True):
                    seen.setdefault((value, name), set()).add((epoch, i))
        assert all(len(places) == 1 for places in seen.values())  # no draw stands at two items, or in two epochs


def test_b5_plain_lightning_repeats_the_draws_of_the_first_epoch(tmp_path: Path) -> None:
    make_trainer = partial(s.plain_trainer, every=3, val_check_interval=1.0)
    with pytest.raises(AssertionError, match=r"step 4: (output|batch) differs"):
        assert_resume_exact(make_trainer, c.Small, partial(augmented, 2), kill_at=4, root=tmp_path)
