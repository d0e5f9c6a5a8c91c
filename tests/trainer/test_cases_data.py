"""Data order and position: every sample once, in the order of the run that was not interrupted."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

import lightning_ft as ft
from lightning_ft._names import KEY, checkpoint_name
from lightning_ft.storage import Storage
from lightning_ft.testing import assert_resume_exact
from tests.trainer import cases as c
from tests.trainer import scenarios as s

two_epochs = partial(c.trainer, max_epochs=2)
plain_two_epochs = partial(s.plain_trainer, max_epochs=2)


# -- A1 ----------------------------------------------------------------------------------------------------------


def shuffled(log: Path | None = None) -> Any:
    return DataLoader(c.Plain(20, log), batch_size=4, shuffle=True)


def test_a1_mid_epoch_restart_trains_the_rest_of_the_permutation(tmp_path: Path) -> None:
    log = tmp_path / "log"
    make_model = partial(c.Small, log)
    c.exact(partial(two_epochs, every=2), make_model, shuffled, kill_at=3, root=tmp_path, replayed=1)
    _, before, after = c.notes(log)
    first_epoch = [ids for epoch, _, ids in [*before[:2], *after] if epoch == 0]
    assert len(first_epoch) == 5
    assert sorted(itertools.chain(*first_epoch)) == list(range(20))


def test_a1_plain_lightning_trains_samples_twice(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"step 3: (output|batch) differs"):
        assert_resume_exact(partial(plain_two_epochs, every=2), c.Small, shuffled, kill_at=3, root=tmp_path)


class Unrepeatable(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(24):
            yield c.item(int.from_bytes(os.urandom(3), "big"))


def test_a1_a_loader_that_cannot_be_positioned_is_refused(tmp_path: Path) -> None:
    trainer = partial(c.trainer, str(tmp_path), every=1, max_epochs=1)
    trainer(max_steps=2).fit(c.Small(), c.stream(Unrepeatable))
    with pytest.raises(ft.RestoreError, match="does not repeat itself"):
        trainer().fit(c.Small(), c.stream(Unrepeatable), ckpt_path="last")


# -- A3 ----------------------------------------------------------------------------------------------------------


def one_cycle(module: Any) -> Any:
    """Asks for the number of steps while the run is being set up, which makes the loaders early."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    total = int(module.trainer.estimated_stepping_batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total)
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def many_loaders() -> Any:
    return {
        "at iter": c.Positioned(),
        "lazy": c.Lazy(first=10),
        "torchdata": c.stateful(24),
        "torchdata with workers": c.stateful(24, shuffle=True, num_workers=1),
        "ordinary": c.plain_loader(24, shuffle=True),
    }


def test_a3_estimated_stepping_batches(tmp_path: Path) -> None:
    make_model = partial(c.Variant, one_cycle)
    c.exact(partial(two_epochs, every=2), make_model, many_loaders, kill_at=[5, 8], root=tmp_path, replayed=1 + 2)


@pytest.mark.parametrize("loader", [c.Positioned, c.Lazy, c.stateful])
def test_a3_plain_lightning_drops_the_state(loader: Any, tmp_path: Path) -> None:
    make_model = partial(c.Variant, one_cycle)
    with pytest.raises(AssertionError, match=r"differs|has not"):
        assert_resume_exact(partial(plain_two_epochs, every=2), make_model, loader, kill_at=5, root=tmp_path)


# -- A4 (the ranks themselves: tests/distributed) ----------------------------------------------------------------


def test_a4_a_missing_state_of_a_rank_is_named(tmp_path: Path) -> None:
    make_trainer = partial(two_epochs, str(tmp_path), every=2)
    make_trainer(max_steps=4).fit(c.Small(), shuffled())
    path = tmp_path / checkpoint_name(4)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint[KEY]["ranks"] = []
    written_by_ours(tmp_path / checkpoint_name(5), checkpoint, path)
    with pytest.raises(ft.RestoreError, match="of rank 0"):
        make_trainer().fit(c.Small(), shuffled(), ckpt_path="last")


def written_by_ours(path: Path, checkpoint: dict[str, Any], like: Path) -> None:
    """A checkpoint of which every byte is as it was written, with the manifest of another."""
    manifest = ft.verify(like).manifest
    assert manifest is not None
    with Storage().open_attempt(str(path)) as attempt:
        torch.save(checkpoint, attempt)
        attempt.commit(lambda size, digest: replace(manifest, size_bytes=size, digest=digest))
    assert ft.verify(path).problem is None


# -- A5 and A7 ---------------------------------------------------------------------------------------------------

SIX_BATCHES = {
    "ordinary": partial(c.plain_loader, 24, shuffle=True),
    "ordinary, 2 workers": partial(c.plain_loader, 24, shuffle=True, num_workers=2),
    "persistent workers": partial(c.plain_loader, 24, shuffle=True, num_workers=2, persistent_workers=True),
    "torchdata": partial(c.stateful, shuffle=True),
    "torchdata, 2 workers": partial(c.stateful, shuffle=True, num_workers=2),
    "torchdata, persistent workers": partial(c.stateful, shuffle=True, num_workers=2, persistent_workers=True),
    "at iter": c.Positioned,
    "lazy": c.Lazy,
    "wrapping": c.Wrapping,
    "skipping": c.skipping,
    "skipping, 2 workers": partial(c.skipping, 2),
    "stateful stream": partial(c.stream, c.StatefulStream),
    "stateful stream in torchdata": partial(c.stateful, dataset=c.StatefulStream(), num_workers=2),
}


@pytest.mark.parametrize("kind", SIX_BATCHES)
def test_a5_saved_at_first_and_last_batch(kind: str, tmp_path: Path) -> None:
    # a save at every batch: restarts after the first, the last, the first and the last of an epoch, and within it
    kills = [2, 7, 8, 10, 13]
    make_trainer = partial(c.trainer, every=1)
    compared = c.exact(make_trainer, c.Small, SIX_BATCHES[kind], kill_at=kills, root=tmp_path, replayed=len(kills))
    assert compared.steps == 18
    assert final_step(compared.dirpath) == 18


def final_step(dirpath: str) -> int:
    best = ft.last_good(dirpath)
    assert best is not None
    return int(torch.load(best.path, weights_only=True)["global_step"])


def test_a5_default_trigger_and_every_3(tmp_path: Path) -> None:
    make_data = partial(c.stateful, shuffle=True, num_workers=2)
    c.exact(partial(c.trainer, every=3), c.Small, make_data, kill_at=[7, 14], root=tmp_path / "3", replayed=1 + 2)
    at_epoch_end = partial(c.trainer, every=None)
    compared = c.exact(at_epoch_end, c.Small, make_data, kill_at=[7, 14], root=tmp_path / "end", replayed=1 + 2)
    assert final_step(compared.dirpath) == 18


def one_batch() -> Any:
    return {
        "ordinary": c.plain_loader(4, shuffle=True),
        "torchdata": c.stateful(4, shuffle=True),
        "at iter": c.Positioned(1),
        "lazy": c.Lazy(1),
    }


def test_a5_only_batch_of_an_epoch(tmp_path: Path) -> None:
    make_trainer = partial(c.sparse, every=1, max_epochs=5)
    compared = c.exact(make_trainer, c.Small, one_batch, kill_at=[2, 3], root=tmp_path, replayed=2)
    assert compared.steps == 5


def test_a5_plain_lightning_loses_an_epoch(tmp_path: Path) -> None:
    make_trainer = partial(s.plain_trainer, every=6)
    with pytest.raises(AssertionError, match="step 7: epoch differs"):
        assert_resume_exact(make_trainer, c.Small, SIX_BATCHES["torchdata"], kill_at=7, root=tmp_path)


@pytest.mark.parametrize("kind", ["ordinary, 2 workers", "torchdata", "at iter"])
def test_a7_the_position_is_absolute(kind: str, tmp_path: Path) -> None:
    keep_all = partial(two_epochs, every=1, ft_args={"keep_last": -1})
    make_data = SIX_BATCHES[kind]
    compared = c.exact(keep_all, c.Small, make_data, kill_at=[3, 5, 6], root=tmp_path, replayed=3)
    files = [Path(compared.dirpath) / checkpoint_name(step) for step in range(1, 6)]
    saved = [torch.load(file, weights_only=True)[KEY]["ranks"][0]["loaders"]["train"][0] for file in files]
    assert [position["delivered"] for position in saved] == [1, 2, 3, 4, 5]


# -- A9 ----------------------------------------------------------------------------------------------------------


def random_sampled() -> Any:
    dataset = c.Plain(32)
    return DataLoader(dataset, batch_size=4, sampler=RandomSampler(dataset))


def test_a9_the_order_is_the_one_drawn_when_the_epoch_began(tmp_path: Path) -> None:
    log = tmp_path / "log"
    c.exact(c.trainer, partial(c.Small, log), random_sampled, kill_at=[5, 14], root=tmp_path, replayed=2 + 2)
    whole, *_ = c.notes(log)
    epochs = [[ids for epoch, _, ids in whole if epoch == number] for number in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


# -- A11 ---------------------------------------------------------------------------------------------------------


class Reloaded(L.LightningDataModule):
    def __init__(self, log: Path) -> None:
        super().__init__()
        self.file = log

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        c.note(self.file, self.trainer.current_epoch)
        return c.plain_loader(12, shuffle=True)

    def val_dataloader(self) -> Any:
        return c.plain_loader(3, 3)


def test_a11_reload_schedule(tmp_path: Path) -> None:
    log = tmp_path / "log"
    make_trainer = partial(c.sparse, max_epochs=7, reload_dataloaders_every_n_epochs=3)
    # 3 batches per epoch; restarts within epoch 1, after epoch 2 and within epoch 4
    kills = [5, 10, 15]
    c.exact(make_trainer, c.Small, partial(Reloaded, log), kill_at=kills, root=tmp_path, replayed=2 + 1 + 3)
    whole, *parts = c.notes(log)
    assert whole == [0, 3, 6]
    # A new process has to make its loaders once, whatever the epoch.
    assert parts == [[0], [1, 3], [3], [4, 6]]


# -- A12 ---------------------------------------------------------------------------------------------------------


def test_a12_no_item_is_fetched_to_be_thrown_away(tmp_path: Path) -> None:
    items = tmp_path / "items"
    c.exact(two_epochs, c.Small, partial(shuffled, items), kill_at=[4, 8], root=tmp_path, replayed=1 + 2)
    *_, after = c.notes(items)
    assert len(after) == (10 - 6) * 4


def logged_stream(log: Path, workers: int = 0) -> Any:
    return c.stream(c.StatefulStream, log=log)


def logged_torchdata(log: Path, workers: int = 0) -> Any:
    return c.stateful(dataset=c.StatefulStream(log=log), num_workers=workers)


@pytest.mark.parametrize("make", [logged_stream, logged_torchdata])
def test_a12_streams_are_iterated_once_per_epoch(make: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    c.exact(partial(two_epochs, every=2), c.Small, partial(make, log), kill_at=[4, 8], root=tmp_path, replayed=2 + 2)
    _, first, second, third = c.notes(log)
    assert first.count("iter") == 1
    assert second.count("iter") == 2  # the rest of epoch 0, and epoch 1
    assert third.count("iter") <= 2  # one more, to leave the pass behind at whose end it was saved
    assert [i for i in third if i != "iter"] == list(range(24))


# -- A13 ---------------------------------------------------------------------------------------------------------


class OwnLoader(c.Small):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def train_dataloader(self) -> Any:
        return self.make()


class OneModule(L.LightningDataModule):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def train_dataloader(self) -> Any:
        return self.make()


def counted(log: Path) -> Any:
    return c.Positioned(log=log)


def two_counted(log: Path) -> Any:
    return {"a": c.Positioned(log=log), "b": c.Lazy(6, 10, log)}


def nothing() -> None:
    return None


@pytest.mark.parametrize("giver", ["argument", "datamodule", "module hook", "dict of loaders"])
def test_a13_state_is_loaded_once(giver: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    make = partial(two_counted if giver == "dict of loaders" else counted, log)
    make_model: Any = partial(OwnLoader, make) if giver == "module hook" else c.Small
    make_data: Any = {"datamodule": partial(OneModule, make), "module hook": nothing}.get(giver, make)
    c.exact(two_epochs, make_model, make_data, kill_at=[5, 8], root=tmp_path, replayed=2 + 2)
    loaded = [["load", 0], ["load", 10]] if giver == "dict of loaders" else [["load", 0]]
    assert c.notes(log) == [loaded, loaded]


# -- A14 ---------------------------------------------------------------------------------------------------------


class ResumableSampler(Sampler[int]):
    """What users write: a place to start from, used up by one pass."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.start = 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.length).tolist()
        start, self.start = self.start, 0
        return iter(order[start:])

    def __len__(self) -> int:
        return self.length


class OwnHooks(L.LightningDataModule):
    """Keeps the positions of its loaders itself, as users had to."""

    def setup(self, stage: str) -> None:
        self.sampler = ResumableSampler(24)
        self.loader = c.Positioned()

    def train_dataloader(self) -> Any:
        return {"sampler": DataLoader(c.Plain(24), batch_size=4, sampler=self.sampler), "loader": self.loader}

    def state_dict(self) -> dict[str, Any]:
        assert self.trainer is not None
        return {"batches": self.trainer.global_step % 6, "loader": self.loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sampler.start = state_dict["batches"] * 4
        self.loader.load_state_dict(state_dict["loader"])


def test_a14_the_users_own_hook_does_not_count_twice(tmp_path: Path) -> None:
    c.exact(two_epochs, c.Small, OwnHooks, kill_at=[5, 8], root=tmp_path, replayed=2 + 2)


# -- A15 ---------------------------------------------------------------------------------------------------------


FILTERED = {
    "own state": partial(c.stream, c.StatefulStream, length=72, keep=3),
    "torchdata, 2 workers": partial(c.stateful, dataset=c.StatefulStream(72, keep=3), num_workers=2),
    "fetched again": partial(c.stream, c.Stream, length=72, keep=3),
    "fetched again, 2 workers": partial(c.stream, c.Stream, 2, length=72, keep=3),
}


@pytest.mark.parametrize("kind", FILTERED)
def test_a15_a_stream_that_drops_samples(kind: str, tmp_path: Path) -> None:
    c.exact(two_epochs, c.Small, FILTERED[kind], kill_at=[5, 8], root=tmp_path, replayed=2 + 2)


# -- A17 ---------------------------------------------------------------------------------------------------------


def test_a17_parts_of_two_generations_are_refused(tmp_path: Path) -> None:
    make_trainer = partial(two_epochs, str(tmp_path), every=2)
    make_trainer(max_steps=4).fit(c.Small(), shuffled())
    older, newer = (torch.load(tmp_path / checkpoint_name(step), weights_only=True) for step in (2, 4))
    mixed = tmp_path / checkpoint_name(5)
    written_by_ours(mixed, {**newer, KEY: older[KEY]}, tmp_path / checkpoint_name(4))
    with pytest.raises(ft.CorruptCheckpointError, match="different saves"):
        make_trainer().fit(c.Small(), shuffled(), ckpt_path=str(mixed))


# -- loaders of every kind ---------------------------------------------------------------------------------------


def combined(mode: str, lengthless: bool = False) -> Any:
    members = {"long": c.plain_loader(20, shuffle=True), "short": c.plain_loader(10, shuffle=True)}
    if lengthless:
        members["stream"] = c.stream(c.Stream, length=24)
        members["stateful"] = c.stream(c.StatefulStream, length=16)
    return CombinedLoader(members, mode)


@pytest.mark.parametrize("lengthless", [False, True], ids=["sized", "with lengthless members"])
@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_combined_loader(mode: str, lengthless: bool, tmp_path: Path) -> None:
    make_data = partial(combined, mode, lengthless)
    make_trainer = partial(c.sparse, every=1)
    kills = {"min_size": [2, 3, 4, 5, 6], "max_size": [4, 6, 7, 8], "max_size_cycle": [2, 4, 6, 7, 8]}[mode]
    c.exact(make_trainer, c.Small, make_data, kill_at=kills, root=tmp_path, replayed=len(kills))


STREAMS = {
    "no state": partial(c.stream, c.Stream),
    "no state, 2 workers": partial(c.stream, c.Stream, 2),
    "state": partial(c.stream, c.StatefulStream),
    "state, 2 workers": partial(c.stream, c.StatefulStream, 2),
    "length": partial(c.stream, c.SizedStream),
    "length, 2 workers": partial(c.stream, c.SizedStream, 2),
    "short last batch": partial(c.stream, c.Stream, length=22),
    "short last batch, 2 workers": partial(c.stream, c.StatefulStream, 2, length=22),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_streams(kind: str, tmp_path: Path) -> None:
    make_trainer = partial(c.trainer, every=1)
    kills = [2, 6, 7, 8, 10]
    c.exact(make_trainer, c.Small, STREAMS[kind], kill_at=kills, root=tmp_path, replayed=len(kills))


def many_batches() -> Any:
    return c.plain_data(48, shuffle=True)


@pytest.mark.parametrize(
    "limits",
    [{"limit_train_batches": 5}, {"limit_train_batches": 0.5}, {"overfit_batches": 5}],
    ids=["limit 5", "limit half", "overfit"],
)
def test_limited_epochs(limits: Any, tmp_path: Path) -> None:
    make_trainer = partial(c.trainer, every=1, **limits)
    kills = [2, 6, 7, 12]
    c.exact(make_trainer, c.Small, many_batches, kill_at=kills, root=tmp_path, replayed=len(kills))


def limited_streams() -> Any:
    """Some begin anew in the next epoch, and some go on where they are."""
    return {
        "torchdata": c.stateful(48, shuffle=True),
        "at iter": c.Positioned(12),
        "lazy": c.Lazy(12),
        "goes on": c.Wrapping(12),
        "stream": c.stream(c.StatefulStream, length=48),
        "stream goes on": s.stateful_iterable()[0],
    }


def test_limited_epochs_of_loaders_with_state(tmp_path: Path) -> None:
    make_trainer = partial(c.trainer, every=1, limit_train_batches=4)
    kills = [2, 5, 6, 9]
    c.exact(make_trainer, c.Small, limited_streams, kill_at=kills, root=tmp_path, replayed=len(kills))


class FromIterator(c.Small):
    """Fetches its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", ["ordinary", "stateful stream"])
def test_dataloader_iter(kind: str, tmp_path: Path) -> None:
    make_trainer = partial(c.trainer, every=1)
    kills = [2, 6, 7, 8, 10]
    c.exact(make_trainer, FromIterator, SIX_BATCHES[kind], kill_at=kills, root=tmp_path, replayed=len(kills))


def test_dataloader_iter_saves_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    # only the fetch that finds no more data tells that the epoch is over
    make_data = SIX_BATCHES["stateful stream"]
    c.exact(partial(c.trainer, every=None), FromIterator, make_data, kill_at=[8, 15], root=tmp_path, replayed=2 + 3)
