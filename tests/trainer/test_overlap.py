"""``staging="overlap"``: whatever the training does, every file is the state at the moment of the save, bit for bit.

Copies are made at the last moment that the plugin allows, so what changes before is in the file and is found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

import lightning_ft as ft
from lightning_ft import events
from lightning_ft._copying import staging
from lightning_ft._copying.copy_plan import Late
from lightning_ft._copying.staging import Staged, Stager
from lightning_ft._state.digest import digest
from lightning_ft.plugin import FaultTolerantCheckpointIO
from lightning_ft.testing import assert_resume_exact
from tests.trainer import runs
from tests.trainer import scenarios as s
from tests.trainer.runs import fit, trainer
from tests.unit._late import LastMoment

WIDTH = 64
"""Layers of 64 x 64 float32 are 16 KiB, their biases 256 bytes: both are copied late."""


class Wide(L.LightningModule):
    """Weights, moments and BatchNorm buffers; what a subclass does not say is Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(s.FEATURES, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.relu(self.second(self.first(x)))))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return self(batch[1]).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Was(Callback):
    """What the checkpoint was when Lightning had made it, by step; `late` are the steps whose copies were not done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.was: dict[tuple[int, str], Any] = {}
        self.late: list[int] = []
        self.at_once: list[int] = []
        save, stage = FaultTolerantCheckpointIO.save_checkpoint, Stager.stage

        def save_checkpoint(plugin: Any, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self.was[checkpoint["global_step"], Path(path).name] = deepcopy(checkpoint)
            save(plugin, checkpoint, path, storage_options)

        def stage_(stager: Any, checkpoint: Any, late: Any = None) -> Staged:
            stager.lanes._threads = LastMoment()
            staged = stage(stager, checkpoint, late)
            (self.at_once if staged.settled else self.late).append(checkpoint["global_step"])
            return staged

        monkeypatch.setattr(FaultTolerantCheckpointIO, "save_checkpoint", save_checkpoint)
        monkeypatch.setattr(Stager, "stage", stage_)

    def compare(self, dirpath: Any, weights_only: bool = True) -> int:
        """Every good file in `dirpath` is what was to be saved; how many there are."""
        names = sorted(runs.good(dirpath))
        assert names == runs.names(dirpath), "a broken file"
        for name in names:
            (was,) = [was for (_, of), was in self.was.items() if of == name]
            saved = torch.load(Path(dirpath) / name, weights_only=weights_only)
            assert saved.keys() == was.keys()
            for key in was:
                assert digest(saved[key]) == digest(was[key]), f"{name}: {key}"
        return len(names)


@pytest.fixture
def was(monkeypatch: pytest.MonkeyPatch) -> Was:
    return Was(monkeypatch)


def ours(dirpath: Any, **kwargs: Any) -> ft.FaultTolerantCheckpoint:
    return ft.FaultTolerantCheckpoint(dirpath, **{"every_n_train_steps": 1, "keep_last": -1, **kwargs})


# -- kinds of training -------------------------------------------------------------------------------------------


class Gan(Wide):
    """Two optimizers that are stepped by hand: Lightning's wrappers, or those of torch themselves."""

    wrapped = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers(use_pl_optimizer=self.wrapped)
        for optimizer, sign in ((first, 1), (second, -1)):
            optimizer.zero_grad()
            self.manual_backward(sign * self(batch[1]).pow(2).mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.second.parameters(), lr=1e-3),
            torch.optim.SGD([*self.first.parameters(), *self.head.parameters()], lr=1e-2, momentum=0.9),
        ]


class RawGan(Gan):
    wrapped = False


class RareSteps(Gan):
    """Gradients are accumulated by hand: a step at every third batch."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self(batch[1]).pow(2).mean())
        if batch_idx % 3 == 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()


class Compiled(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.second = torch.compile(self.second, backend="eager")  # type: ignore[assignment]


class Tied(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(WIDTH, WIDTH)
        self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.third(self.first(x)).mean()


class Unusual(Wide):
    """Sparse and quantised tensors among the buffers; the sparse one is made anew in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sparse", torch.eye(WIDTH).to_sparse())
        self.register_buffer("quantised", torch.quantize_per_tensor(torch.ones(2000), 0.1, 0, torch.quint8))

    def forward(self, x: Tensor) -> Tensor:
        self.sparse = (self.sparse.to_dense() * 1.01).to_sparse()
        return super().forward(x)


class Momentum(Wide):
    """A frozen layer, and a momentum encoder that the forward pass updates past every counter."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = deepcopy(self.second).requires_grad_(False)
        self.first.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for mine, source in zip(self.encoder.parameters(), self.second.parameters(), strict=True):
            mine.data = mine.data * 0.9 + source.data * 0.1
            mine.data.mul_(0.99)
        return super().training_step(batch, batch_idx) + self.encoder(self.first(batch[1])).mean()


class MaxNorm(Wide):
    """Constrains its weight in the forward pass by giving it another memory, as some layers do."""

    def forward(self, x: Tensor) -> Tensor:
        self.second.weight.data = torch.renorm(self.second.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


class Lookup(Wide):
    """torch itself renormalises the rows that are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(s.LENGTH, WIDTH, max_norm=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table(torch.arange(len(x))).mean()


class Replaced(Wide):
    """The whole layer, and what the optimizer knows of it, is exchanged every third step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 2:
            self.second = nn.Linear(WIDTH, WIDTH)
            self.trainer.optimizers = [self.configure_optimizers()]


class Hooked(Wide):
    """The user's own hook before a step changes parameters: the copy is done then."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.second.weight.mul_(0.9)


class Skipping(Wide):
    """As Lightning's manual shows: in some steps the closure is run without the optimizer."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class Before(Wide):
    """Runs the closure itself, and steps without one."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        optimizer.optimizer.step()


class Bounded(Wide):
    """Keeps a temperature within bounds in the forward pass, past every counter, when it first leaves them."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.steps > 2:
            self.temperature.data.mul_(0.9)
        return super().forward(x) * self.temperature


class WarmUp(Wide):
    """Writes into a learning rate that is a tensor: when a batch starts, and just before the step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().param_groups[0]["lr"].mul_(0.9)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.param_groups[0]["lr"].mul_(0.9)
        optimizer.step(closure=optimizer_closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=torch.tensor(1e-2))


class Scripted(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.second = torch.jit.script(self.second)


def with_optimizer(make: Callable[[Any], Any]) -> type[Wide]:
    class Own(Wide):
        def configure_optimizers(self) -> Any:
            return make(list(self.parameters()))

    return Own


MODELS: dict[str, type[Wide]] = {
    "batch-norm": Wide,
    "gan": Gan,
    "raw-gan": RawGan,
    "rare-steps": RareSteps,
    "compiled": Compiled,
    "unusual": Unusual,
    "momentum-encoder": Momentum,
    "max-norm": MaxNorm,
    "lookup": Lookup,
    "replaced": Replaced,
    "hooked": Hooked,
    "closure-before": Before,
    "bounded": Bounded,
    "warm-up": WarmUp,
    "scripted": Scripted,
    "lbfgs": with_optimizer(lambda p: torch.optim.LBFGS(p, lr=1e-3, max_iter=3, history_size=2)),
    "lbfgs-search": with_optimizer(lambda p: torch.optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe")),
    "adam-fused": with_optimizer(lambda p: torch.optim.Adam(p, fused=True)),
    "adam-foreach": with_optimizer(lambda p: torch.optim.Adam(p, foreach=True)),
    "amsgrad": with_optimizer(lambda p: torch.optim.AdamW(p, amsgrad=True)),
    "sgd": with_optimizer(lambda p: torch.optim.SGD(p, lr=1e-2)),
    "momentum": with_optimizer(lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True)),
    "adagrad": with_optimizer(lambda p: torch.optim.Adagrad(p)),
}


@pytest.mark.parametrize("check", ["", "1"])
@pytest.mark.parametrize("model", MODELS)
def test_every_file_is_the_state_of_its_moment(
    model: str, check: str, was: Was, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(staging.CHECK_VARIABLE, check)
    if check and model not in ("batch-norm", "gan", "unusual", "momentum-encoder", "lbfgs", "lookup"):
        pytest.skip("the same code is checked with other models")
    fit(trainer(ours(tmp_path)), MODELS[model]())
    assert was.compare(tmp_path) == 8
    assert len(was.late) == 7


def test_copies_made_after_the_step_would_be_noticed(was: Was, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the comparison can fail: nothing waits before the step, and nobody judges."""
    monkeypatch.setattr(FaultTolerantCheckpointIO, "before_optimizer_step", lambda self: None)
    monkeypatch.setattr(Staged, "withdraw_unless", lambda self, steps: False)
    monkeypatch.setattr(Staged, "_judge", lambda self: None)
    monkeypatch.setattr(staging, "digest", lambda data: "")
    fit(trainer(ours(tmp_path)), Wide())
    with pytest.raises(AssertionError, match=r"state_dict|optimizer_states"):
        was.compare(tmp_path)


def test_a_step_left_out_withdraws_the_copy_and_the_save_is_repeated(was: Was, tmp_path: Path) -> None:
    """Nobody can tell it from a step that was made by other means; later copies are made at once."""
    with runs.recorded() as seen:
        fit(trainer(ours(tmp_path, every_n_train_steps=3)), Skipping())
    (skipped,) = [e for e in seen if isinstance(e, events.SaveSkipped)]
    assert was.late == [skipped.step]
    infos = {info.manifest.step: info.manifest.reason for info in ft.list_checkpoints(str(tmp_path)) if info.manifest}
    assert skipped.step not in infos
    assert infos[skipped.step + 2] == "repeated"
    assert was.compare(tmp_path) == 3
    assert not [e for e in seen if isinstance(e, events.SaveFailed)]


class Keeps(WeightAveraging):
    """An average of the weights, of every step."""

    def __init__(self) -> None:
        super().__init__(avg_fn=lambda average, current, count: 0.5 * average + 0.5 * current)


class Rearranges(Callback):
    """What it adds to a checkpoint is of equal form, and never in the same places twice."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        step = trainer.global_step
        for place in range(3):
            made = [torch.full((3,), float(10 * step + place)) for _ in range(1 + (step + place) % 3)]
            checkpoint[f"part {(step + place) % 3}"] = made


KINDS: dict[str, tuple[Callable[[], list[Callback]], dict[str, Any]]] = {
    "accumulation": (list, {"accumulate_grad_batches": 3}),
    "clipping": (list, {"gradient_clip_val": 0.1}),
    "ema": (lambda: [s.Ema()], {}),
    "weight-averaging": (lambda: [Keeps()], {"val_check_interval": 3}),
    "weight-averaging-within-accumulation": (
        lambda: [Keeps()],
        {"accumulate_grad_batches": 2, "val_check_interval": 3},
    ),
    "swa": (lambda: [StochasticWeightAveraging(1e-2, 1, 1)], {"max_epochs": 3}),
    "rearranged": (lambda: [Rearranges()], {}),
    "bf16": (list, {"precision": "bf16-mixed"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_whatever_the_trainer_does(kind: str, was: Was, tmp_path: Path) -> None:
    callbacks, arguments = KINDS[kind]
    the_trainer = trainer(*callbacks(), ours(tmp_path), **arguments)
    fit(the_trainer, Wide(), val=s.val_loader())
    saved = the_trainer.global_step
    assert was.compare(tmp_path) == saved
    assert len(was.late) == saved - the_trainer.current_epoch
    assert len(was.at_once) == the_trainer.current_epoch


class Quiet(Callback):
    """No copy is under way when hooks run that may change parameters, and change them back: averages do."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.under_way = 0

    def _ask(self, hook: str, trainer: L.Trainer) -> None:
        pending = trainer.strategy.checkpoint_io.stager._pending  # type: ignore[attr-defined]
        assert pending is None or pending.settled, hook
        self.asked.append(hook)

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        pending = trainer.strategy.checkpoint_io.stager._pending  # type: ignore[attr-defined]
        self.under_way += pending is not None and not pending.settled

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._ask("batch end", trainer)

    def on_validation_start(self, trainer: L.Trainer, *args: Any) -> None:
        self._ask("validation", trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._ask("epoch end", trainer)


@pytest.mark.parametrize("model", [Wide, RareSteps, Skipping])
@pytest.mark.parametrize("window", [1, 2])
def test_no_copy_is_under_way_when_a_batch_is_over(model: Any, window: int, was: Was, tmp_path: Path) -> None:
    arguments = {} if model is RareSteps else {"accumulate_grad_batches": window}
    quiet, module = Quiet(), model()
    module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 7 else None  # the epoch ends without it
    fit(trainer(quiet, ours(tmp_path), val_check_interval=3, **arguments), module, val=s.val_loader())
    assert was.compare(tmp_path) > 2
    assert {"batch end", "validation", "epoch end"} == set(quiet.asked)
    assert quiet.under_way > (0 if model is Skipping else 2)


def test_tied_weights_are_in_the_file_once(was: Was, tmp_path: Path) -> None:
    for model in (Wide(), Tied()):
        fit(trainer(ours(tmp_path / type(model).__name__)), model)
        assert was.compare(tmp_path / type(model).__name__) == 8
        was.was.clear()
    sizes = {name: (tmp_path / name / "step=00000003.ckpt").stat().st_size for name in ("Wide", "Tied")}
    assert sizes["Tied"] - sizes["Wide"] < WIDTH * WIDTH * 4  # the bias and its moments, no second weight
    saved = torch.load(tmp_path / "Tied" / "step=00000003.ckpt")["state_dict"]
    assert saved["second.weight"].data_ptr() == saved["third.weight"].data_ptr()


# -- what is not allowed -----------------------------------------------------------------------------------------


class Bad(Wide):
    """Changes a trained parameter in the step after `at` others, by `way`."""

    def __init__(self, way: str, at: int = 2) -> None:
        super().__init__()
        self.way = way
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.steps == self.at or self.way == "data":
            if self.way == "in place":
                with torch.no_grad():
                    self.second.weight.mul_(2)
            elif self.way == "data":
                self.second.weight.data.mul_(2)
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.way != "own step" or self.steps != self.at:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            return
        optimizer_closure()
        with torch.no_grad():
            for p in self.parameters():
                p.sub_(p.grad, alpha=0.01)


WAYS = {
    # way -> step of the save that fails, and what it names
    "in place": (2, r"state_dict\['second.weight'\] was changed between the step boundary and the next optimizer step"),
    "data": (1, r"state_dict\['second.weight'\] was changed \(through `.data`"),
    "own step": (2, r"state_dict\['second.weight'\] was changed between the step boundary"),
}


@pytest.mark.parametrize("on_error", ["raise", "warn"])
@pytest.mark.parametrize("way", WAYS)
def test_a_parameter_changed_too_early_fails_that_save_by_name_and_ends_the_overlap(
    way: str, on_error: Any, was: Was, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on: the state is saved again at the next boundary, and every file is the state of its moment."""
    plugin, (step, named) = ft.FaultTolerantCheckpointIO(on_error=on_error), WAYS[way]
    with runs.recorded() as seen:
        fit(trainer(ours(tmp_path), plugins=[plugin]), Bad(way))
    (failed,) = [e for e in seen if isinstance(e, events.SaveFailed)]
    assert failed.step == step
    assert re.search(named, failed.reason)
    assert was.compare(tmp_path) == 7
    assert runs.names(tmp_path) == [f"step=0000000{n}.ckpt" for n in range(1, 9) if n != step]
    assert was.late == list(range(1, step + 1)) or was.late == list(range(1, step + 2)), "copies go on being late"
    (said,) = [r.message for r in caplog.records if "from now on saves copy at once" in r.message]
    assert re.search(named, said)


def test_the_save_that_failed_is_made_again(was: Was, tmp_path: Path) -> None:
    """Not only when the next one is due."""
    fit(trainer(ours(tmp_path, every_n_train_steps=5, save_on_train_end=False), max_epochs=2), Bad("in place", at=5))
    reasons = {info.manifest.step: info.manifest.reason for info in ft.list_checkpoints(str(tmp_path)) if info.manifest}
    assert reasons == {7: "repeated", 10: "periodic", 15: "periodic"}
    assert was.compare(tmp_path) == 3


class Perturbing(torch.optim.SGD):
    """As sharpness-aware minimisation: moves the parameters before it evaluates the closure."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(0.01)
        return super().step(closure)


def test_an_optimizer_that_moves_before_it_evaluates_is_copied_at_once(was: Was, tmp_path: Path) -> None:
    class Sam(Wide):
        def configure_optimizers(self) -> Any:
            return Perturbing(self.parameters(), lr=0.1)

    fit(trainer(ours(tmp_path)), Sam())
    assert len(was.late) == 1
    assert was.compare(tmp_path) == 7


@pytest.mark.parametrize(
    ("options", "looks"), [({}, 7), ({"staging": "blocking"}, 0), ({"async_save": False}, 0)], ids=str
)
def test_parameters_are_looked_through_only_where_copies_may_be_late(
    options: dict[str, Any], looks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, asked = Late.of, []
    monkeypatch.setattr(Late, "of", lambda *args: asked.append(1) or of(*args))
    fit(trainer(ours(tmp_path), plugins=[ft.FaultTolerantCheckpointIO(**options)]), Wide())
    assert len(asked) == looks


def test_the_next_fit_of_the_plugin_overlaps_again(was: Was, tmp_path: Path) -> None:
    """Another model, perhaps; whether its copies may be late is seen anew."""
    plugin = ft.FaultTolerantCheckpointIO(on_error="warn")
    fit(trainer(ours(tmp_path / "a"), plugins=[plugin]), Bad("in place"))
    was.late.clear()
    fit(trainer(ours(tmp_path / "b"), plugins=[plugin]), Wide())
    assert was.late == list(range(1, 8))


# -- which saves -------------------------------------------------------------------------------------------------


def test_saves_between_two_batches_of_an_epoch_are_late_and_no_others(was: Was, tmp_path: Path) -> None:
    users = ModelCheckpoint(tmp_path / "users", every_n_train_steps=4, save_top_k=-1, filename="user-{step}")
    fit(trainer(users, ours(tmp_path / "ours", every_n_train_steps=2), max_epochs=2, max_steps=15), Wide())
    assert was.late == [2, 4, 6, 10, 12, 14]
    # Epoch ends, the end of training, and all of the user's.
    assert sorted(was.at_once) == [4, 8, 8, 12, 15]
    assert was.compare(tmp_path / "ours") == 8
    assert was.compare(tmp_path / "users") == 3


@pytest.mark.parametrize("arguments", [{"staging": "blocking"}, {"async_save": False}], ids=str)
def test_none_is_late_if_the_plugin_says_so(arguments: Any, was: Was, tmp_path: Path) -> None:
    fit(trainer(ours(tmp_path), plugins=[ft.FaultTolerantCheckpointIO(**arguments)]), Wide())
    assert was.late == []
    assert was.compare(tmp_path) == 8


# -- figures -----------------------------------------------------------------------------------------------------

FIGURES = {"blocked_secs", "staging_secs", "queue_secs", "write_secs", "total_secs", "size_bytes", "bytes_per_sec"}


class Figures(DummyLogger):
    """What a logger is given of ``ft/...``, and the checkpoints that were there then."""

    def __init__(self, dirpath: Path) -> None:
        super().__init__()
        self.dirpath = dirpath
        self.logged: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        if any(name.startswith("ft/") for name in metrics):
            self.logged.append(dict(metrics))
            sizes = [info.manifest.size_bytes for info in ft.list_checkpoints(str(self.dirpath)) if info.manifest]
            assert metrics["ft/size_bytes"] in sizes, "logged before the checkpoint was there"


@pytest.mark.parametrize("arguments", [{}, {"staging": "blocking"}, {"async_save": False}], ids=str)
def test_the_figures_of_every_save(arguments: Any, was: Was, tmp_path: Path) -> None:
    logger, plugin = Figures(tmp_path), ft.FaultTolerantCheckpointIO(**arguments)
    users = ModelCheckpoint(tmp_path / "users", every_n_train_steps=4, save_top_k=-1)
    with runs.recorded() as seen:
        fit(trainer(users, ours(tmp_path), logger=logger, plugins=[plugin]), Wide())
    committed = {e.path: e for e in seen if isinstance(e, events.Committed)}
    mine = [e for path, e in committed.items() if Path(path).parent == tmp_path]
    assert len(mine) == 8
    # One set per save of ours, in the order of the commits.
    assert logger.logged == [{f"ft/{name}": value for name, value in e.metrics.items()} for e in mine]
    for path, event in committed.items():
        manifest = ft.verify(path).manifest
        assert manifest is not None
        for figures in (event.metrics, manifest.metrics):
            assert set(figures) == FIGURES
            assert all(value >= 0 for value in figures.values())
            assert figures["blocked_secs"] > 0
            assert figures["staging_secs"] > 0
            assert figures["total_secs"] >= figures["write_secs"]
            assert figures["size_bytes"] == manifest.size_bytes == event.size_bytes
            assert 0 <= Path(path).stat().st_size - figures["size_bytes"] < 2000  # the manifest itself
        assert event.secs == event.metrics["total_secs"]


# -- killed while copies are under way ---------------------------------------------------------------------------


class AtTheLastMoment(Callback):
    """The copies of the whole run are made when they are asked for, in whatever process this is."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.stage = Stager.stage

        def stage_(stager: Any, checkpoint: Any, late: Any = None) -> Staged:
            stager.lanes._threads = LastMoment()
            return self.stage(stager, checkpoint, late)

        Stager.stage = stage_  # type: ignore[method-assign]

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        Stager.stage = self.stage  # type: ignore[method-assign]


class NoteBefore(Callback):
    """What is on disk, and whether copies are under way, in the forward pass of every batch."""

    def __init__(self, dirpath: str) -> None:
        self.dirpath = dirpath

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step != 5 or "restarted" not in self.dirpath or os.path.exists(f"{self.dirpath}.killed"):
            return
        pending = trainer.strategy.checkpoint_io.stager._pending
        assert pending is not None
        assert not pending.settled
        Path(f"{self.dirpath}.killed").write_text("\n".join(os.listdir(self.dirpath)))
        events.emit(events.Resumed(self.dirpath, 5))  # an event at which the drill kills


def killed_trainer(dirpath: str) -> L.Trainer:
    return s.trainer(
        dirpath, every=1, callbacks=(AtTheLastMoment, partial(NoteBefore, dirpath)), ft_args={"keep_last": 2}
    )


def test_killed_while_late_copies_are_under_way(tmp_path: Path) -> None:
    """Nothing of that save is on disk, the ones before are good, and the restart is exact."""
    compared = assert_resume_exact(killed_trainer, Wide, s.shuffled, kill_at="Resumed", steps=12, root=tmp_path)
    names = Path(f"{compared.dirpath}.killed").read_text().split()
    assert [name for name in names if name.endswith(".ckpt")]
    assert not [name for name in names if "step=00000005" in name]
    assert compared.replayed >= 1
    assert runs.good(compared.dirpath) == ["step=00000012.ckpt", "step=00000011.ckpt"]
