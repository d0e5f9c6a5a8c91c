"""The states that are trained and saved."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.benchmarks.plan import Shape


class Layers(L.LightningModule):
    """Square layers, one after the other, trained with fused Adam."""

    def __init__(self, shape: Shape, rows: int) -> None:
        super().__init__()
        width = shape.width
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(shape.parameters))
        self.rows = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
        self.during: Callable[[], None] | None = None
        """Called once, within the next `training_step`."""
        self.callbacks_done = 0.0
        """When the callbacks' own `on_before_optimizer_step` were over."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        during, self.during = self.during, None
        rows = self.rows
        if during is not None:
            during()
            rows = rows[:1]  # the time is spent already
        for layer in self.layers:
            rows = rows + 0.1 * layer(rows)  # keeps its size, whatever the depth: no denormal numbers
        return rows.pow(2).mean()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.callbacks_done = time.perf_counter()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-6, fused=True)


def loader() -> DataLoader[int]:
    """Batches without content: the module brings its own."""
    return DataLoader(range(1_000_000), batch_size=1)  # type: ignore[arg-type]


def quiet(**kwargs: Any) -> dict[str, Any]:
    """Arguments of a `Trainer` on one CPU process that prints and logs nothing."""
    return {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": -1,
        **kwargs,
    }
