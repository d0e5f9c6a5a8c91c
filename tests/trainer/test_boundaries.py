"""What a run is made of beside its steps: loaders made anew, samplers with state, runs that end in unusual ways."""

from __future__ import annotations

import errno
import os
import random
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, Subset, WeightedRandomSampler
from torchmetrics import MeanMetric
from torchmetrics.wrappers import MinMaxMetric, Running

import lightning_ft as ft
from lightning_ft.guards import Verdict
from lightning_ft.storage import Storage
from lightning_ft.testing import assert_resume_exact
from tests.trainer import scenarios as s


def names(dirpath: Path) -> list[str]:
    return sorted(i.name for i in ft.list_checkpoints(str(dirpath)) if i.problem is None)


class SeededAnew(s.Net):
    """A fresh generator for every epoch's loader, and a random subset of the data."""

    def train_dataloader(self) -> Any:
        chosen = torch.randperm(s.LENGTH)[:20].tolist()
        generator = torch.Generator().manual_seed(0)
        return DataLoader(Subset(s.Numbers(), chosen), batch_size=4, shuffle=True, generator=generator)

    def val_dataloader(self) -> Any:
        sampler = RandomSampler(s.Numbers(), num_samples=6, generator=torch.Generator().manual_seed(4))
        return DataLoader(s.Numbers(), batch_size=3, sampler=sampler)


class Growing(s.Net):
    """Another length in every epoch."""

    def train_dataloader(self) -> Any:
        return DataLoader(s.Numbers(16 + 4 * self.trainer.current_epoch), batch_size=4, shuffle=True)


EPOCHS = {"every_n_epochs": 1}


def nothing() -> None:
    return None


@pytest.mark.parametrize("kill", [[7], ["Committed:2"], [13]])
def test_loaders_made_anew_in_every_epoch(kill: list[Any], tmp_path: Path) -> None:
    make_trainer = partial(s.trainer, reload_dataloaders_every_n_epochs=1, every=5)
    assert_resume_exact(make_trainer, SeededAnew, nothing, kill_at=kill, root=tmp_path)


def test_a_random_subset_is_the_same_after_a_restart_with_another_seed(tmp_path: Path) -> None:
    compared = assert_resume_exact(s.trainer, SeededAnew, nothing, kill_at=[4, 12], root=tmp_path)
    assert compared.validations > 0


def test_data_that_grows_with_the_epochs(tmp_path: Path) -> None:
    make_trainer = partial(
        s.trainer,
        reload_dataloaders_every_n_epochs=1,
        val_check_interval=None,
        ft_args={"every_n_epochs": 1},
        every=None,
    )
    assert_resume_exact(make_trainer, Growing, nothing, kill_at=[6, 12], root=tmp_path)


class Rotating(Sampler[int]):
    """Keeps its order in a list, which it rearranges, and a counter in an array-like attribute."""

    def __init__(self) -> None:
        self.order = list(range(s.LENGTH))

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(list(self.order))

    def __len__(self) -> int:
        return s.LENGTH


def rotating() -> Any:
    return DataLoader(s.Numbers(), batch_size=s.BATCH, sampler=Rotating()), s.val_loader()


class Interleaved(Sampler[int]):
    """Samplers and generators in collections, weights in a queue."""

    def __init__(self) -> None:
        self.parts = [Rotating(), RandomSampler(range(s.LENGTH), generator=torch.Generator().manual_seed(8))]
        self.dice = {"a": random.Random(3)}
        self.recent: deque[int] = deque([0], maxlen=4)

    def __iter__(self) -> Iterator[int]:
        first, second = (list(p) for p in self.parts)
        for a, b in zip(first, second, strict=True):
            shift = sum(self.recent)
            self.recent.append(self.dice["a"].randrange(s.LENGTH))
            yield (a if shift % 2 else b) % s.LENGTH

    def __len__(self) -> int:
        return s.LENGTH


class Doubling(DataLoader[Any]):
    """A loader class that iterates in its own way: every batch twice."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield batch
            yield batch

    def __len__(self) -> int:
        return 2 * super().__len__()


def interleaved() -> Any:
    return DataLoader(s.Numbers(), batch_size=s.BATCH, sampler=Interleaved()), s.val_loader()


def doubling(workers: int) -> Any:
    return Doubling(s.Numbers(), batch_size=s.BATCH, shuffle=True, num_workers=workers), s.val_loader()


def stateful_validation() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return s.loader(shuffle=True), StatefulDataLoader(s.Numbers(6), batch_size=3, shuffle=True)


class Noise(IterableDataset[tuple[Tensor, Tensor]]):
    """Draws from the generators of its worker."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i in range(6):
            yield torch.tensor([float(i)]), torch.rand(s.FEATURES)


def persistent_validation() -> Any:
    return s.loader(shuffle=True), DataLoader(Noise(), batch_size=3, num_workers=1, persistent_workers=True)


def weighted() -> Any:
    return DataLoader(s.Numbers(), batch_size=4, sampler=WeightedRandomSampler([1.0] * s.LENGTH, s.LENGTH))


class Mining(Callback):
    """Changes the weights of the sampler while it trains."""

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        sampler = trainer.train_dataloader.sampler
        sampler.weights = sampler.weights + torch.arange(s.LENGTH) * (trainer.current_epoch + 1)


@pytest.mark.parametrize(
    ("make_data", "callbacks"),
    [
        (interleaved, ()),
        (partial(doubling, 0), ()),
        (partial(doubling, 2), ()),
        (stateful_validation, ()),
        (persistent_validation, ()),
        (weighted, (Mining,)),
    ],
    ids=["interleaved", "doubling", "doubling-workers", "stateful-val", "persistent-val", "weights-changed"],
)
def test_unusual_loaders(make_data: Any, callbacks: tuple[Any, ...], tmp_path: Path) -> None:
    make_trainer = partial(s.trainer, callbacks=callbacks)
    assert_resume_exact(make_trainer, s.Net, make_data, kill_at=[5, 12], root=tmp_path)


def test_a_sampler_that_rearranges_a_list(tmp_path: Path) -> None:
    assert_resume_exact(s.trainer, s.Net, rotating, kill_at=[5, 12], root=tmp_path)


class Alternating(s.Gan):
    """The critic accumulates over four batches and steps once, the generator steps in every batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        opt_g, opt_c = self.optimizers()
        real = batch[1]
        fake = self.generator(torch.randn(len(real), 2))
        self.manual_backward(self.critic(fake.detach()).mean() - self.critic(real).mean())
        if batch_idx % 4 == 3:
            opt_c.step()
            opt_c.zero_grad()
        self.toggle_optimizer(opt_g)
        opt_g.zero_grad()
        loss = -self.critic(fake).mean()
        self.manual_backward(loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        return loss.detach()


def test_gradients_held_in_manual_optimization(tmp_path: Path) -> None:
    assert_resume_exact(s.trainer, Alternating, partial(s.loader, shuffle=True), kill_at=[5, 9], root=tmp_path)


class Measured(s.Net):
    """Metrics that count in plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.running = Running(MeanMetric(), window=3)
        self.extremes = MinMaxMetric(MeanMetric())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.running.update(loss.detach())
        self.extremes.update(loss.detach())
        self.log("running", self.running.compute())
        self.log_dict({k: v for k, v in self.extremes.compute().items()})
        return loss


@pytest.mark.filterwarnings("ignore")
def test_metrics_that_count_in_plain_attributes(tmp_path: Path) -> None:
    assert_resume_exact(s.trainer, Measured, s.shuffled, kill_at=[5, 7], root=tmp_path)


class Short(IterableDataset[tuple[Tensor, Tensor]]):
    """Says it has 20 items and has 16."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([s.Numbers()[i] for i in range(16)])


def test_an_epoch_that_ends_before_its_length_is_saved(tmp_path: Path) -> None:
    trainer = L.Trainer(**s.COMMON, max_epochs=3, callbacks=[ft.FaultTolerantCheckpoint(tmp_path, keep_last=-1)])
    trainer.fit(s.Net(), DataLoader(Short(), batch_size=4))
    assert names(tmp_path) == ["step=00000004.ckpt", "step=00000008.ckpt", "step=00000012.ckpt"]


class StopAt(Callback):
    """Ends the job, and not the run: as a preemption or a wall clock of the user's own would."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 4:
            trainer.should_stop = True


def test_a_job_stopped_by_the_users_code_goes_on(tmp_path: Path) -> None:
    make = partial(s.trainer, str(tmp_path), every=100)
    make(callbacks=(StopAt,)).fit(s.Net(), s.loader(shuffle=True), ckpt_path="last")
    trainer = make()
    trainer.fit(s.Net(), s.loader(shuffle=True), ckpt_path="last")
    assert trainer.global_step == 24


def test_a_run_that_stopped_early_is_finished(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop = partial(EarlyStopping, monitor="loss", patience=1, min_delta=1e9, check_on_train_epoch_end=True)
    make = partial(s.trainer, str(tmp_path), callbacks=(stop,), max_epochs=50)
    first = make()
    first.fit(s.Net(), s.loader(shuffle=True), ckpt_path="last")
    assert first.global_step == 16
    before = names(tmp_path)
    again = make()
    again.fit(s.Net(), s.loader(shuffle=True), ckpt_path="last")
    assert again.global_step == first.global_step
    assert names(tmp_path) == before
    assert "ended by EarlyStopping" in caplog.text


class StopGuard:
    """A guard with one verdict."""

    def poll(self, step: int) -> Verdict | None:
        return Verdict("asked to") if step == 3 else None


def test_a_guard_saves_and_stops_whatever_the_minimum(tmp_path: Path) -> None:
    arguments = {"guards": [StopGuard()], "save_on_train_end": False}
    trainer = s.trainer(str(tmp_path), every=100, min_epochs=3, ft_args=arguments)
    trainer.fit(s.Net(), s.loader(shuffle=True))
    assert trainer.global_step == 4
    assert names(tmp_path) == ["step=00000004.ckpt"]
    trainer = s.trainer(str(tmp_path), every=100, min_epochs=3)
    trainer.fit(s.Net(), s.loader(shuffle=True), ckpt_path="last")
    assert trainer.global_step == 24


def test_a_save_after_the_fit_is_there_when_it_returns(tmp_path: Path) -> None:
    trainer = s.trainer(str(tmp_path / "run"), max_epochs=1)
    trainer.fit(s.Net(), s.loader())
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    assert ft.verify(str(tmp_path / "final.ckpt")).problem is None


def test_last_leaves_out_what_other_callbacks_save_in_the_middle_of_things(tmp_path: Path) -> None:
    other = partial(ModelCheckpoint, str(tmp_path), every_n_train_steps=1, save_top_k=-1)
    make = partial(s.trainer, str(tmp_path), every=3, callbacks=(other,), ft_args={"save_on_train_end": False})
    make(max_steps=5).fit(s.Net(), *s.shuffled())
    chosen = ft.last_good(str(tmp_path))
    assert chosen is not None
    assert chosen.name == "step=00000003.ckpt"


def test_a_second_fit_of_a_trainer_that_has_resumed(tmp_path: Path) -> None:
    s.trainer(str(tmp_path), max_steps=5).fit(s.Net(), *s.shuffled())
    trainer = s.trainer(str(tmp_path), max_steps=9)
    sanity = trainer.num_sanity_val_steps
    trainer.fit(s.Net(), *s.shuffled(), ckpt_path="last")
    assert trainer.num_sanity_val_steps == sanity
    trainer.fit_loop.epoch_loop.max_steps = 12
    trainer.fit(s.Net(), *s.shuffled(), ckpt_path="last")
    assert trainer.global_step == 12


class WithNan(s.Net):
    def __init__(self, threshold: float = float("nan")) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_not_a_number_is_the_same_hyper_parameter_twice(tmp_path: Path) -> None:
    s.trainer(str(tmp_path), max_steps=5).fit(WithNan(), *s.shuffled())
    trainer = s.trainer(str(tmp_path), max_steps=9)
    trainer.fit(WithNan(), *s.shuffled(), ckpt_path="last")
    assert trainer.global_step == 9


class WithPath(s.Net):
    def __init__(self, where: Path) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_a_hyper_parameter_that_could_not_be_loaded_is_refused_before_the_first_step(tmp_path: Path) -> None:
    model = WithPath(tmp_path)
    with pytest.raises(ft.ConfigurationError, match=r"hparams\['where'\] is a pathlib"):
        s.trainer(str(tmp_path)).fit(model, *s.shuffled())


def test_a_directory_as_ckpt_path(tmp_path: Path) -> None:
    s.trainer(str(tmp_path), max_steps=5).fit(s.Net(), *s.shuffled())
    with pytest.raises(ft.CorruptCheckpointError, match="is a directory"):
        s.trainer(str(tmp_path)).fit(s.Net(), *s.shuffled(), ckpt_path=str(tmp_path))


def unseeded(dirpath: str) -> L.Trainer:
    return s.trainer(dirpath, seed=int.from_bytes(os.urandom(3), "big"))


def test_a_training_that_does_not_repeat_itself_is_told_from_a_restart_that_is_not_exact(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"step 1: .* before anything was killed.*seed_everything"):
        assert_resume_exact(unseeded, s.Net, s.shuffled, kill_at=2, steps=4, root=tmp_path)


@pytest.mark.parametrize("point", [0, "renamed", "Renamed:x"])
def test_a_kill_point_that_cannot_be_reached_is_refused_at_once(point: Any) -> None:
    with pytest.raises(ValueError, match="kill point"):
        assert_resume_exact(unseeded, s.Net, s.shuffled, kill_at=point)


def test_validating_last_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ft.CheckpointError, match="untrained weights"):
        s.trainer(str(tmp_path)).validate(s.Net(), s.val_loader(), ckpt_path="last")


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ft.ConfigurationError, match="is a file"):
        s.trainer(str(tmp_path / "file")).fit(s.Net(), s.loader(), ckpt_path="last")


def test_a_last_state_whose_save_failed_is_saved_when_training_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_attempt = Storage.open_attempt

    def fails_once(self: Storage, path: str, expected_bytes: int | None = None) -> Any:
        if path.endswith("step=00000024.ckpt"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return open_attempt(self, path, expected_bytes)

    monkeypatch.setattr(Storage, "open_attempt", fails_once)
    trainer = s.trainer(str(tmp_path), plugins=[ft.FaultTolerantCheckpointIO(on_error="warn")])
    trainer.fit(s.Net(), s.loader(shuffle=True))
    assert names(tmp_path) == ["step=00000018.ckpt", "step=00000021.ckpt", "step=00000024-v1.ckpt"]
