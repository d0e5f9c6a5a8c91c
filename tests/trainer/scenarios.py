"""Models, data and trainers for whole runs: everything at module level, since fresh processes import it.

The common harness: item *i* of every dataset carries the value *i*, so that a batch says which samples it holds; the
recorder writes down everything else.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

import lightning_ft as ft

LENGTH = 30
BATCH = 4  # 8 batches per epoch, the last one short
FEATURES = 3


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Item i: its number, and features augmented with all three random generators."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(FEATURES) + float(np.random.rand()) + random.random()
        return torch.tensor([float(i)]), noise


class StatefulNumbers(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream with a state of its own: its position, and the generator of its noise. Shards itself over workers."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.position = 0
        self.generator = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = torch.utils.data.get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        for i in itertools.islice(range(first, self.length, stride), self.position, None):
            self.position += 1
            yield torch.tensor([float(i)]), torch.rand(FEATURES, generator=self.generator)
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.generator.set_state(state["generator"])


class BucketBatches(Sampler[list[int]]):
    """A custom batch sampler that draws while it goes, from the global generators, with batches of unequal sizes."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(self.length))
        for _ in range(len(self)):
            size = min(len(left), 2 + int(torch.randint(3, ()).item()))
            yield [left.pop(random.randrange(len(left))) for _ in range(size)]
            if not left:
                return

    def __len__(self) -> int:
        return 7


class Net(L.LightningModule):
    """Dropout, BatchNorm, Adam, a scheduler per step, values logged per step and per epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))

    def features(self, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            return torch.cat([b[1] for b in batch.values() if b is not None])
        return batch[1]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.features(batch)
        loss = self.net(x).pow(2).mean() + 0.01 * torch.rand(())
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(x))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        value = self.net(self.features(batch)).mean()
        self.log("val", value, batch_size=len(batch[0]))
        return value

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Gan(L.LightningModule):
    """Manual optimization with two optimizers, so that `global_step` grows by two per batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, FEATURES))
        self.critic = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        opt_g, opt_c = self.optimizers()
        real = batch[1]
        fake = self.generator(torch.randn(len(real), 2))
        loss_c = self.critic(fake.detach()).mean() - self.critic(real).mean()
        opt_c.zero_grad()
        self.manual_backward(loss_c)
        opt_c.step()
        loss_g = -self.critic(fake).mean()
        opt_g.zero_grad()
        self.manual_backward(loss_g)
        opt_g.step()
        self.log("loss_g", loss_g, on_step=True, on_epoch=True)
        return loss_g.detach()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-3),
            torch.optim.SGD(self.critic.parameters(), lr=1e-2, momentum=0.9),
        ]


class Ema(Callback):
    """An average of the weights, kept by a callback, updated after every batch."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for name, p in pl_module.named_parameters():
            old = self.average.get(name, p.detach().clone())
            self.average[name] = 0.9 * old + 0.1 * p.detach()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.average)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = dict(state_dict)


def loader(workers: int = 0, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=BATCH, num_workers=workers, **kwargs)


def val_loader() -> DataLoader[Any]:
    return DataLoader(Numbers(6), batch_size=3)


def shuffled(workers: int = 0, **kwargs: Any) -> Any:
    return loader(workers, shuffle=True, **kwargs), val_loader()


def batch_sampled(workers: int = 0) -> Any:
    return DataLoader(Numbers(), batch_sampler=BucketBatches(), num_workers=workers), val_loader()


def two_loaders(workers: int = 0) -> Any:
    """Shorter `b` is cycled within an epoch of `a`."""
    short = DataLoader(Numbers(10), batch_size=4, shuffle=True, num_workers=workers)
    return {"a": loader(workers, shuffle=True), "b": short}, val_loader()


def stateful_loader(workers: int = 0) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Numbers(), batch_size=BATCH, shuffle=True, num_workers=workers), val_loader()


def stateful_iterable(workers: int = 0) -> Any:
    return DataLoader(StatefulNumbers(), batch_size=BATCH, num_workers=workers), val_loader()


def generator_sampled(workers: int = 0, persistent: bool = False) -> Any:
    """Samplers with generators of their own, shared with the loader."""
    dataset, generator = Numbers(), torch.Generator().manual_seed(3)
    batches = BatchSampler(RandomSampler(dataset, generator=generator), BATCH, drop_last=True)
    return DataLoader(
        dataset, batch_sampler=batches, num_workers=workers, generator=generator, persistent_workers=persistent
    )


COMMON: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def trainer(
    dirpath: str, *, every: int = 3, seed: int = 1, callbacks: tuple[Any, ...] = (), ft_args: Any = None, **kwargs: Any
) -> L.Trainer:
    """A trainer with our callback; `callbacks` are classes or partials, made anew in every process."""
    L.seed_everything(seed, verbose=False)
    arguments = {"every_n_train_steps": every, **(ft_args or {})}
    made = [make() for make in callbacks] + [ft.FaultTolerantCheckpoint(dirpath, **arguments)]
    return L.Trainer(**{**COMMON, "max_epochs": 3, "val_check_interval": 4, **kwargs}, callbacks=made)


def plain_trainer(
    dirpath: str, *, every: int = 3, seed: int = 1, callbacks: tuple[Any, ...] = (), **kwargs: Any
) -> Any:
    """The same with plain Lightning: a checkpoint every few steps and a ``last.ckpt``."""
    L.seed_everything(seed, verbose=False)
    checkpoint = ModelCheckpoint(dirpath, every_n_train_steps=every, save_last=True, save_top_k=1)
    made = [make() for make in callbacks] + [checkpoint]
    return L.Trainer(**{**COMMON, "max_epochs": 3, "val_check_interval": 4, **kwargs}, callbacks=made)


DATA = {
    "shuffled": shuffled,
    "batch_sampler": batch_sampled,
    "two_loaders": two_loaders,
    "stateful_loader": stateful_loader,
    "stateful_iterable": stateful_iterable,
}
ddp = partial(trainer, strategy="ddp", devices=2)
