"""Pieces shared by the ``test_cases_*`` modules: data without random draws, streams, loaders with a state, notes.

Saves are synchronous here, so that where a restart begins is known, and `exact` can insist on it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lightning_ft as ft
from lightning_ft._proof import recorder
from lightning_ft.testing import Comparison, assert_resume_exact
from tests.trainer import scenarios as s

Item = tuple[Tensor, Tensor]


def trainer(dirpath: str, **kwargs: Any) -> L.Trainer:
    return s.trainer(dirpath, plugins=[ft.FaultTolerantCheckpointIO(async_save=False)], **kwargs)


def exact(*args: Any, replayed: int, **kwargs: Any) -> Comparison:
    """The restarts are exact, and they began where they should: so many batches were trained again."""
    compared = assert_resume_exact(*args, **kwargs)
    assert compared.replayed == replayed, f"{compared.replayed} batches were trained again, not {replayed}"
    return compared


def item(i: int) -> Item:
    """Item i of every dataset here: its number, and features that depend on nothing else."""
    return torch.tensor([float(i)]), torch.tensor([i / 10, i % 7 / 7, 1.0])


class Plain(Dataset[Item]):
    def __init__(self, length: int, log: Path | None = None) -> None:
        self.length = length
        self.log = log

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Item:
        if self.log is not None:
            note(self.log, i)
        return item(i)


def plain_loader(length: int = 20, batch_size: int = 4, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Plain(length), batch_size=batch_size, **kwargs)


def plain_data(length: int = 20, **kwargs: Any) -> Any:
    """Train and validation loaders, 5 batches of 4 by default."""
    return plain_loader(length, **kwargs), plain_loader(6, 3)


def quiet_data(length: int = 20) -> Any:
    """Loaders that draw nothing from the global generators, so that plain Lightning's loss of these shows nowhere."""
    sized = ((length, 4), (6, 3))
    return tuple(plain_loader(n, size, generator=torch.Generator()) for n, size in sized)


def stateful(length: int = 24, dataset: Any = None, **kwargs: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Plain(length) if dataset is None else dataset, batch_size=4, **kwargs)


class Stream(IterableDataset[Item]):
    """Items in order, those that are no multiple of `keep` dropped; shared out over workers; no length, no state."""

    def __init__(self, length: int = 24, keep: int = 1, log: Path | None = None) -> None:
        self.length = length
        self.keep = keep
        self.log = log
        self.read = self.start = 0

    def __iter__(self) -> Iterator[Item]:
        if self.log is not None:
            note(self.log, "iter")
        info = torch.utils.data.get_worker_info()
        first, stride = (0, 1) if info is None else (info.id, info.num_workers)
        start, self.start = self.start, 0
        for number, i in enumerate(range(first, self.length, stride)):
            if number < start:
                continue
            self.read = number + 1
            if i % self.keep == 0:
                if self.log is not None:
                    note(self.log, i)
                yield item(i)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.length


class StatefulStream(Stream):
    """Knows what it has read, which is not what it has yielded."""

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.read = self.start = state["read"]


def stream(kind: Any = Stream, workers: int = 0, batch_size: int = 4, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(kind(**kwargs), batch_size=batch_size, num_workers=workers)


class Positioned:
    """A loader of the user's own that knows its position and its epoch, whose number decides the order.

    A restored position is taken when an iterator is asked for, and used up by that.
    """

    def __init__(self, batches: int = 6, first: int = 0, log: Path | None = None) -> None:
        self.batches = batches
        self.first = first
        self.log = log
        self.epoch = -1
        self.position = 0
        self.restored = False

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        if self.restored:
            self.restored = False
        else:
            self.epoch, self.position = self.epoch + 1, 0
        return PositionedIterator(self)

    def batch(self) -> Any:
        order = torch.randperm(self.batches, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        i = self.first + order[self.position]
        self.position += 1
        return torch.utils.data.default_collate([item(2 * i), item(2 * i + 1)])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.log is not None:
            note(self.log, "load", self.first)
        self.epoch, self.position, self.restored = state["epoch"], state["position"], True


class PositionedIterator:
    def __init__(self, loader: Positioned) -> None:
        self.loader = loader

    def __iter__(self) -> PositionedIterator:
        return self

    def __next__(self) -> Any:
        if self.loader.position >= self.loader.batches:
            raise StopIteration
        return self.loader.batch()


class Lazy(Positioned):
    """The same, with a generator, which reads the position when the first batch is asked for."""

    def __iter__(self) -> Iterator[Any]:
        if self.restored:
            self.restored = False
        else:
            self.epoch, self.position = self.epoch + 1, 0
        while self.position < self.batches:
            yield self.batch()


class Wrapping(Positioned):
    """Begins anew when an iterator is asked for at the end of the data, and goes on from where it is otherwise."""

    def __iter__(self) -> Iterator[Any]:
        if self.position >= self.batches or self.epoch < 0:
            self.epoch, self.position = self.epoch + 1, 0
        while self.position < self.batches:
            yield self.batch()


class Skipping(DataLoader[Any]):
    """What users make of a `DataLoader`: it counts what it yields, and skips as much of the next pass when restored."""

    yielded = skip = 0

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        self.yielded = 0
        for batch in super().__iter__():
            self.yielded += 1
            if self.yielded > skip:
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skip = state["yielded"]


def skipping(workers: int = 0) -> Any:
    return Skipping(Plain(24), batch_size=4, shuffle=True, num_workers=workers)


class Small(L.LightningModule):
    """No random draws: a restart differs by what it trains on, or by state that was lost. Outputs name the items."""

    def __init__(self, log: Path | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(s.FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))
        self.log_file = log

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = batch if isinstance(batch, dict) else {"": batch}
        parts = {name: part for name, part in parts.items() if part is not None}
        if self.log_file is not None:
            ids = {name: part[0].flatten().int().tolist() for name, part in parts.items()}
            note(self.log_file, self.current_epoch, batch_idx, ids.get("", ids))
        x = torch.cat([part[1] for part in parts.values()])
        loss = (self.net(x) - x.sum(1, keepdim=True)).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(x))
        return {"loss": loss, **{f"items {name}": part[0] for name, part in parts.items()}}

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        value = self.net(batch[1]).mean()
        self.log("val", value, batch_size=len(batch[0]))
        return value

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Variant(Small):
    """`Small` with its optimizers configured by a function of the module."""

    def __init__(self, configure: Callable[[L.LightningModule], Any]) -> None:
        super().__init__()
        self.configure = configure

    def configure_optimizers(self) -> Any:
        return self.configure(self)


def note(path: Path, *values: Any) -> None:
    """One line in a file, at once, so that it survives the kill of the process."""
    line = json.dumps([os.getpid(), *values]) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def notes(path: Path) -> list[list[Any]]:
    """What was noted, one list per process, in the order of their first notes."""
    found: dict[int, list[Any]] = {}
    for line in path.read_text().splitlines():
        pid, *values = json.loads(line)
        found.setdefault(pid, []).append(values[0] if len(values) == 1 else values)
    return list(found.values())


class Noted(Callback):
    """Notes what the end of a run says: ``what(trainer)`` at the end of training."""

    def __init__(self, path: Path, what: Callable[[L.Trainer], Any]) -> None:
        self.path = path
        self.what = what

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        note(self.path, self.what(trainer))


def recorded(make_trainer: Any, make_model: Any, make_data: Any, path: Path, ckpt_path: Any = "last") -> dict[Any, Any]:
    """One run in this process; what the recorder wrote down, by what it is about. Nothing, if nothing was trained."""
    made = make_trainer()  # seeds, so it comes first
    made.callbacks.insert(0, recorder.Recorder(str(path)))
    data = make_data()
    train, val = data if isinstance(data, tuple) else (data, None)
    made.fit(make_model(), train, val, ckpt_path=ckpt_path)
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {(r["kind"], *r["key"]): r["values"] for r in lines}


sparse = partial(trainer, val_check_interval=1.0)
