"""What of a script's own objects is looked at, and what is not."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_ft._proof.own_attributes import attributes


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.level = 3


class Numbers(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.generator = random.Random(1)
        self.data = torch.zeros(100_000)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1)


class Counter(L.Callback):
    count = 0  # a value of the class, until there is one of the object
    other: Any = None

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.part = Part()
        self.avg, self.array, self.names = 0.5, np.arange(3), {"b", "a"}
        self.register_buffer("level", torch.zeros(()), persistent=False)
        self.saved: torch.Tensor
        self.register_buffer("saved", torch.zeros(()))
        self.seen: list[dict[str, str]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append(attributes(self.trainer, self))
        self.avg += 1
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_plain_attributes_of_own_objects_and_nothing_of_libraries() -> None:
    model, loader = Net(), DataLoader(Numbers())
    counter = Counter()
    counter.other = counter  # which has no end
    L.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[counter],
    ).fit(model, loader)  # fmt: skip
    first, second = model.seen
    assert (first["Net.avg"], second["Net.avg"]) == ("0.5", "1.5")
    assert (first["Counter.count"], second["Counter.count"]) == ("0", "1")
    assert (first["Net.part.level"], first["Net.level"]) == ("3", "0.0")
    assert first["Numbers.generator"] == second["Numbers.generator"]
    assert {"Net.array", "Net.names"} <= set(first)
    assert not {"Net.saved", "Net.layer.weight", "Numbers.data", "Net.training", "Net._device"} & set(first)
    assert not [name for name in first if name.split(".")[0] in ("DataLoader", "Linear") or ".layer" in name]
    loader.dataset.generator.random()  # type: ignore[attr-defined]
    model.trainer.callbacks.clear()
    assert attributes(model.trainer, model)["Numbers.generator"] != first["Numbers.generator"]
