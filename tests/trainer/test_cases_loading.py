"""What a file can be loaded with, what a restart says of differences, what is said at the start, and branches."""

from __future__ import annotations

import logging
import os
import pickle
import re
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import lightning_ft as ft
from lightning_ft import events
from lightning_ft._inspection.pruning import plan_pruning
from lightning_ft._names import STARTS_NAME
from lightning_ft.retention import Retention
from tests.trainer import runs
from tests.trainer import scenarios as s
from tests.trainer.runs import Line, fit, trainer


def ours(dirpath: Any, **kwargs: Any) -> ft.FaultTolerantCheckpoint:
    return ft.FaultTolerantCheckpoint(dirpath, **{"every_n_train_steps": 2, **kwargs})


# -- L1: weights_only --------------------------------------------------------------------------------------------


class Custom:
    """Something of the user's that no restricted loader knows."""


class Keeps(Callback):
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"outer": {"inner": [1, self.state]}}


@pytest.mark.parametrize("model", [s.Net, s.Gan, Line])
def test_l1_loads_with_weights_only(model: type[L.LightningModule], tmp_path: Path) -> None:
    """With random states of python, numpy's legacy generator and torch in it."""
    fit(trainer(ours(tmp_path), s.Ema()), model())
    for info in ft.list_checkpoints(str(tmp_path)):
        loaded = torch.load(info.path, weights_only=True)
        assert {"python", "numpy", "torch"} <= set(loaded["lightning_ft"]["ranks"][0]["rng"])


NOT_PLAIN = [Custom(), np.zeros(2), np.random.get_state(legacy=True), lambda: None, np.float64(1.0)]


@pytest.mark.parametrize("state", NOT_PLAIN, ids=lambda state: type(state).__name__)
def test_l1_told_at_the_first_save_with_the_key(state: Any, tmp_path: Path) -> None:
    """And not after the crash, when nothing can be done any more."""
    model = Line()
    where = re.escape("checkpoint['callbacks']['Keeps']['outer']['inner'][1]")
    with pytest.raises(ft.SaveError, match=where) as caught:
        fit(trainer(Keeps(state), ours(tmp_path)), model)
    assert "weights_only" in str(caught.value)
    assert len(model.steps) <= 3
    assert runs.names(tmp_path) == []


def test_l1_allowed_by_the_user(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([Custom]):
        fit(trainer(Keeps(Custom()), ours(tmp_path)))
        assert len(runs.good(tmp_path)) == 3


def test_l1_not_strict_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(trainer(Keeps(Custom()), ours(tmp_path, strict=False)))
    assert len(runs.good(tmp_path)) == 3
    told = [r.message for r in caplog.records if "weights_only" in r.message]
    assert len(told) == 1
    assert "Custom" in told[0]


def test_l1_plain_lightning_tells_after_the_crash(tmp_path: Path) -> None:
    for state, loads in ((np.random.get_state(legacy=True), False), (Custom(), False), (torch.get_rng_state(), True)):
        place = tmp_path / type(state).__name__
        fit(trainer(Keeps(state), runs.every_step(place)))
        (path,) = place.iterdir()
        if loads:
            torch.load(path, weights_only=True)
            continue
        with pytest.raises(pickle.UnpicklingError):
            torch.load(path, weights_only=True)


# -- L4: the report ----------------------------------------------------------------------------------------------


class TwoOptimizers(Line):
    def __init__(self, **hparams: Any) -> None:
        super().__init__(**hparams)
        self.automatic_optimization = False
        self.other = nn.Linear(s.FEATURES, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in o if isinstance(o := self.optimizers(), list) else [o]:
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch[1]).pow(2).mean() + self.other(batch[1]).pow(2).mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.layer.parameters(), lr=1e-3)
        return [first, torch.optim.SGD(self.other.parameters(), lr=1e-3)]


class OneOptimizer(TwoOptimizers):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), lr=1e-3)


class Remembers(Callback):
    def __init__(self) -> None:
        self.restored: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.restored = state_dict


class Change:
    """A run, and the same run with one thing changed."""

    def __init__(self, says: str, *, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self.says, self.before, self.after = says, before, after


def plain_run(*callbacks: Callback, model: Callable[[], Any] = Line, length: int = s.LENGTH) -> Callable[..., Any]:
    def run(our: Any, **kwargs: Any) -> Any:
        data = s.DataLoader(s.Numbers(length), batch_size=4, shuffle=True)
        made = model()
        trainer(*callbacks, our, **{"max_epochs": 2, **kwargs}).fit(made, data, ckpt_path="last")
        return made

    return run


CHANGES = {
    "callback gone": Change(
        "left over from the checkpoint: state of callback Remembers, which this run does not have",
        before=plain_run(Remembers()),
        after=plain_run(),
    ),
    "callback new": Change(
        "missing in the checkpoint: state of callback Remembers", before=plain_run(), after=plain_run(Remembers())
    ),
    "hyper-parameter": Change(
        "changed: hyper-parameter lr of Line: 0.1 when saved, 0.2 now",
        before=plain_run(model=lambda: Line(lr=0.1)),
        after=plain_run(model=lambda: Line(lr=0.2)),
    ),
    "hyper-parameter new": Change(
        "changed: hyper-parameter b of Line: '(nothing)' when saved, 3 now",
        before=plain_run(model=lambda: Line(a=1)),
        after=plain_run(model=lambda: Line(a=1, b=3)),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stops_at", [4, 8])
def test_l4_strict(change: str, stops_at: int, tmp_path: Path) -> None:
    """Nothing is trained, nothing is saved, and the message says what differs; the unchanged run still goes on."""
    case = CHANGES[change]
    case.before(ours(tmp_path), max_steps=stops_at)
    before = runs.names(tmp_path)
    with pytest.raises(ft.RestoreError, match=re.escape(case.says)) as caught:
        case.after(ours(tmp_path))
    assert "No step was trained" in str(caught.value)
    assert runs.names(tmp_path) == before
    assert len(case.before(ours(tmp_path)).steps) == 16 - stops_at


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stops_at", [4, 8])
def test_l4_not_strict(change: str, stops_at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = CHANGES[change]
    case.before(ours(tmp_path), max_steps=stops_at)
    caplog.clear()
    model = case.after(ours(tmp_path, strict=False))
    assert len(model.steps) == 16 - stops_at
    (report,) = [r for r in caplog.records if "restored from" in r.message]
    assert report.levelno == logging.WARNING
    assert case.says in report.message


@pytest.mark.parametrize("strict", [True, False])
def test_l4_extra_optimizer(strict: bool, tmp_path: Path) -> None:
    """Of two optimizers' states there is one: that cannot be mended, strict or not."""
    plain_run(model=OneOptimizer)(ours(tmp_path), max_steps=4)
    with pytest.raises(ft.RestoreError, match="1 optimizers, this run has 2"):
        plain_run(model=TwoOptimizers)(ours(tmp_path, strict=strict))


class WithAdam(Line):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


@pytest.mark.parametrize("models", [(Line, WithAdam), (WithAdam, Line)], ids=["to Adam", "from Adam"])
def test_l4_another_optimizer(models: Any, tmp_path: Path) -> None:
    first, second = models
    plain_run(model=first)(ours(tmp_path), max_steps=4)
    changed = second()
    with pytest.raises(ft.RestoreError, match=r"optimizers: \['(SGD|Adam)'\] when saved, \['(SGD|Adam)'\] now"):
        plain_run(model=lambda: changed)(ours(tmp_path))
    assert changed.steps == []


def test_l4_dataset_length(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    says = "train dataloader 0 dataset length: 30 when saved, 38 now"
    plain_run()(ours(tmp_path / "within", keep_last=1, guards=()), max_steps=4)
    plain_run()(ours(tmp_path / "between", keep_last=1, guards=()), max_steps=8)
    longer = plain_run(length=38)
    for place in ("within", "between"):
        with pytest.raises(ft.RestoreError, match=says):
            longer(ours(tmp_path / place))
    # A position within an epoch means nothing in other data.
    with pytest.raises(ft.RestoreError, match=f"saved within an epoch.*{says}"):
        longer(ours(tmp_path / "within", strict=False))
    caplog.clear()
    model = longer(ours(tmp_path / "between", strict=False))
    assert [step[0] for step in model.steps] == [1] * 10
    assert says in caplog.text


def test_l4_all_differences_at_once(tmp_path: Path) -> None:
    plain_run(Remembers(), model=lambda: Line(lr=0.1))(ours(tmp_path), max_steps=4)
    with pytest.raises(ft.RestoreError) as caught:
        plain_run(model=lambda: Line(lr=0.2), length=38)(ours(tmp_path))
    for says in (
        "Remembers",
        "hyper-parameter lr",
        "dataloader 0 dataset length",
        "batches per epoch: 8 when saved, 10 now",
    ):
        assert says in str(caught.value)


def test_l4_nothing_to_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    remembers = Remembers()
    with pytest.raises(RuntimeError, match="own crash"):
        plain_run(runs.CrashAt(5), Remembers(), model=lambda: Line(lr=0.1))(ours(tmp_path))
    caplog.clear()
    with caplog.at_level(logging.INFO, "lightning_ft"):
        plain_run(remembers, model=lambda: Line(lr=0.1))(ours(tmp_path))
    assert remembers.restored == {"n": 1}
    (report,) = [r for r in caplog.records if "restored from" in r.message]
    assert report.levelno == logging.INFO
    run_id = next(m.run_id for m in manifests(tmp_path).values())
    assert re.fullmatch(
        rf"lightning_ft: start 2 of run {run_id[:8]}: restored from {tmp_path}/step=00000004\.ckpt, saved [0-9]+ s "
        r"ago: training goes on with step 5 \(epoch 0, batch 5\); the last start had come to step 5, so 1 step is "
        r"trained again",
        report.message,
    )


def test_l4_plain_lightning_says_nothing(tmp_path: Path) -> None:
    """Another hyper-parameter and other data: trained on, without a word about either."""
    plain_run(model=lambda: Line(lr=0.1))(runs.every_step(tmp_path, save_last=True), max_steps=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain_run(model=lambda: Line(lr=0.2), length=38)(runs.every_step(tmp_path, save_last=True))
    assert caught
    # Without the directory, whose name has numbers of its own.
    said = [str(w.message).replace(str(tmp_path), "").split() for w in caught]
    assert not [words for words in said if "lr" in words or "38" in words]


# -- N1: what is said at the start -------------------------------------------------------------------------------


@pytest.mark.parametrize("save_on_train_end", [True, False])
def test_n1_interval_longer_than_the_run(
    save_on_train_end: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(trainer(ours(tmp_path, every_n_train_steps=9, save_on_train_end=save_on_train_end)))
    assert "every_n_train_steps=9, but the run has 8 steps" in caplog.text
    assert ("only when training ends" if save_on_train_end else "never") in caplog.text
    assert len(runs.names(tmp_path)) == save_on_train_end


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"every_n_epochs": 3}, "every_n_epochs=3, but the run has 2 epochs"),
        (
            {"every_n_epochs": 3, "every_n_train_steps": 17},
            "every_n_train_steps=17 and every_n_epochs=3, but the run has 16 steps and 2 epochs",
        ),
    ],
)
def test_n1_epochs_too(rules: Any, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(trainer(ours(tmp_path, **{"every_n_train_steps": None, **rules}), max_epochs=2))
    assert says in caplog.text


def test_n1_a_run_of_steps_has_whole_epochs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """7 steps of 8: no epoch comes to its end."""
    fit(trainer(ft.FaultTolerantCheckpoint(tmp_path), max_epochs=-1, max_steps=7))
    assert "every_n_epochs=1, but the run has 0 epochs" in caplog.text


def test_n1_when_the_first_save_is_due(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lightning")
    rules = {"every_n_train_steps": 3, "train_time_interval": timedelta(hours=1)}
    fit(trainer(ours(tmp_path, **rules), max_steps=4))
    assert f"checkpoints are saved to {tmp_path}: the first one after step 3 or 60.0 min from now" in caplog.text
    caplog.clear()
    fit(trainer(ours(tmp_path, **rules, every_n_epochs=2)), ckpt_path="last")
    assert "the first one after step 6 or after 2 epochs or 60.0 min from now" in caplog.text


@pytest.mark.parametrize(
    ("local_steps", "says"),
    [
        (
            2,
            "{local}: the first one after step 2 or after 1 epoch; and from there to {to}: the first one after 1 epoch",
        ),
        (None, "{local}, and from there to {to}: the first one after 1 epoch"),
    ],
)
def test_n1_when_the_first_save_is_due_in_two_directories(
    local_steps: int | None, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning")
    local, to = tmp_path / "local", tmp_path / "to"
    fit(trainer(ft.FaultTolerantCheckpoint(to, local_dirpath=local, local_every_n_train_steps=local_steps)))
    assert f"checkpoints are saved to {says.format(local=local, to=to)}" in caplog.text


@pytest.mark.parametrize(
    "rules",
    [
        {"every_n_train_steps": 8},
        {"every_n_train_steps": 9, "every_n_epochs": 1},
        {"every_n_train_steps": 9, "train_time_interval": timedelta(hours=1)},
    ],
)
def test_n1_not_said_without_reason(rules: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(trainer(ours(tmp_path, **rules)))
    assert "but the run has" not in caplog.text


def test_n1_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    """Tried at the start, before a step is trained. As root, a file in place of the directory has to do."""
    (tmp_path / "file").write_text("")
    model = Line()
    with pytest.raises(ft.ConfigurationError, match="checkpoints cannot be written to"):
        fit(trainer(ours(tmp_path / "file" / "run")), model)
    assert model.steps == []


# -- N2: warnings say what is lost, and only what is -------------------------------------------------------------


def plain_checkpoint(dirpath: Path, max_steps: int) -> str:
    fit(trainer(ModelCheckpoint(dirpath, every_n_train_steps=1, save_last=True, save_top_k=0), max_steps=max_steps))
    return str(dirpath / "last.ckpt")


@pytest.mark.parametrize(("steps", "said"), [(3, "after batch 3 of epoch 0"), (8, None)])
def test_n2_from_plain_lightning(
    steps: int, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its files hold no position: how many batches come twice, and that none does at the end of an epoch."""
    path = plain_checkpoint(tmp_path / "plain", steps)
    model = fit(trainer(ours(tmp_path / "run"), max_epochs=2), ckpt_path=path)
    assert model.steps[0][1] == steps
    report = next(r.message for r in caplog.records if "restored from" in r.message)
    assert "random state, partial metrics and the order of the data are not in it" in report
    assert ("are drawn again" in report) == (said is not None)
    if said is not None:
        assert said in report
        assert "3 batches are drawn again and as many at its end are not" in report


def test_n2_other_plan_is_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain_run()(ours(tmp_path), max_epochs=1)
    caplog.clear()
    model = plain_run()(ours(tmp_path), max_epochs=3, val_check_interval=2)
    assert len(model.steps) == 16
    assert "max_epochs was 1 and is 3: schedules" in caplog.text
    assert "val_check_interval was 1.0 and is 2: validations are not those of the run that was saved" in caplog.text
    assert "limit_val_batches was" not in caplog.text


def test_n2_passed_over_only_what_is_newer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An old damaged file costs nothing, and is still named: it is no checkpoint any more."""
    runs.first_run(tmp_path)
    runs.damage(tmp_path / "step=00000006.ckpt", 0.5)
    with runs.recorded() as seen:
        fit(trainer(ours(tmp_path)), ckpt_path="last")
    assert [Path(e.path).name for e in seen if isinstance(e, events.PassedOver)] == ["step=00000006.ckpt"]
    (resumed,) = [e for e in seen if isinstance(e, events.Resumed)]
    assert (Path(resumed.path).name, resumed.step) == ("step=00000004.ckpt", 4)


def test_n2_a_damaged_one_takes_no_place_of_a_good_one_and_stays(tmp_path: Path) -> None:
    """Neither in the process that has found it damaged nor in later ones, which do not read it again."""
    runs.first_run(tmp_path, keep_last=3, max_steps=6)
    damaged = tmp_path / "step=00000006.ckpt"
    data = bytearray(damaged.read_bytes())
    data[45] ^= 1  # nothing but reading all of it tells
    damaged.write_bytes(data)
    for steps in (8, 10, 16):
        fit(trainer(ours(tmp_path, keep_last=3), max_steps=steps, max_epochs=-1), ckpt_path="last")
        found = ft.list_checkpoints(str(tmp_path))
        good = [info.path for info in found if ft.verify(info.path).problem is None]
        assert len(good) == 3
        assert len(found) == 4
        assert damaged.exists()
    pruned = plan_pruning(str(tmp_path), Retention(1), "size", None)
    assert len(pruned.to_delete) == 2
    assert str(damaged) not in pruned.to_delete
    damaged.unlink()
    fit(trainer(ours(tmp_path, keep_last=3), max_steps=18, max_epochs=-1), ckpt_path="last")
    assert not (tmp_path / STARTS_NAME).exists()


# -- N5: branches ------------------------------------------------------------------------------------------------


def manifests(dirpath: Path) -> dict[str, Any]:
    return {info.name: info.manifest for info in ft.list_checkpoints(str(dirpath))}


def test_n5_a_branch_leaves_the_old_line_alone(tmp_path: Path) -> None:
    """Resumed by hand from an older one: an id of its own, and a rotation that counts only its own files."""
    runs.first_run(tmp_path, keep_last=-1, max_steps=6)
    old = manifests(tmp_path)
    bytes_before = {name: (tmp_path / name).read_bytes() for name in old}
    from_step_2 = tmp_path / "step=00000002.ckpt"
    model = fit(trainer(ours(tmp_path, keep_last=1, guards=())), ckpt_path=from_step_2)
    assert [step[1] for step in model.steps] == [2, 3, 4, 5, 6, 7]
    assert {name: (tmp_path / name).read_bytes() for name in old} == bytes_before
    new = {name: m for name, m in manifests(tmp_path).items() if name not in old}
    assert list(new) == ["step=00000008.ckpt"]
    (branch,) = new.values()
    assert branch.run_id not in {m.run_id for m in old.values()}
    assert branch.parent == old["step=00000002.ckpt"].generation
    assert branch.start == 2
    # From now on the branch is what is continued.
    good = ft.last_good(str(tmp_path))
    assert good is not None
    assert good.name == "step=00000008.ckpt"


def test_n5_the_branch_is_what_last_continues(tmp_path: Path) -> None:
    """Although its steps are smaller than those of the line it left."""
    runs.first_run(tmp_path, keep_last=-1, max_steps=6)
    fit(trainer(ours(tmp_path, keep_last=1, guards=()), max_steps=4), ckpt_path=tmp_path / "step=00000002.ckpt")
    model = fit(trainer(ours(tmp_path, keep_last=1, guards=())), ckpt_path="last")
    assert [step[1] for step in model.steps] == [4, 5, 6, 7]
    assert {"step=00000002.ckpt", "step=00000004.ckpt", "step=00000006.ckpt"} <= set(runs.good(tmp_path))


@pytest.mark.parametrize("how", ["last", "by hand"])
def test_n5_the_newest_is_no_branch(how: str, tmp_path: Path) -> None:
    """Continued from its newest checkpoint, a run stays the same run: its rotation counts the old files."""
    runs.first_run(tmp_path, keep_last=2, max_steps=6)
    (run_id,) = {m.run_id for m in manifests(tmp_path).values()}
    fit(trainer(ours(tmp_path, keep_last=2)), ckpt_path="last" if how == "last" else tmp_path / "step=00000006.ckpt")
    assert {name: m.run_id for name, m in manifests(tmp_path).items()} == {
        "step=00000006.ckpt": run_id,
        "step=00000008.ckpt": run_id,
    }


def test_n5_newer_ones_that_are_damaged_make_no_branch(tmp_path: Path) -> None:
    runs.first_run(tmp_path, keep_last=-1, max_steps=6)
    (run_id,) = {m.run_id for m in manifests(tmp_path).values()}
    runs.damage(tmp_path / "step=00000006.ckpt", 0.5)
    fit(trainer(ours(tmp_path, keep_last=-1)), ckpt_path="last")
    assert {m.run_id for m in manifests(tmp_path).values() if m is not None} == {run_id}


def test_n5_into_another_directory(tmp_path: Path) -> None:
    runs.first_run(tmp_path / "a", max_steps=6)
    before = os.listdir(tmp_path / "a")
    fit(trainer(ours(tmp_path / "b", keep_last=1, guards=())), ckpt_path=tmp_path / "a/step=00000004.ckpt")
    assert os.listdir(tmp_path / "a") == before
    (branch,) = manifests(tmp_path / "b").values()
    assert branch.parent == manifests(tmp_path / "a")["step=00000004.ckpt"].generation
    assert branch.run_id not in {m.run_id for m in manifests(tmp_path / "a").values()}


# -- H4: a model that is compiled, or is not any more ------------------------------------------------------------


class Wrapped(Line):
    """Its layers are compiled, checkpointed, or neither."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda module: module) -> None:
        super().__init__()
        self.layers = wrap(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out: torch.Tensor = self.layers(torch.arange(12.0).reshape(4, 3) + batch_idx)
        return out.square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass  # only what is loaded matters

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.layers.parameters(), lr=0.01)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def checkpointed(module: nn.Module) -> nn.Module:
    return checkpoint_wrapper(module)  # type: ignore[no-any-return]


WRAPS: dict[str, Any] = {"plain": lambda module: module, "compiled": compiled, "checkpointed": checkpointed}


@pytest.mark.parametrize("then", WRAPS)
@pytest.mark.parametrize("now", WRAPS)
def test_h4_wrappers_may_come_and_go(then: str, now: str, tmp_path: Path) -> None:
    saved, loaded = Wrapped(WRAPS[then]), Wrapped(WRAPS[now])
    first = trainer(ours(tmp_path), max_steps=4)
    fit(first, saved)
    second = trainer(ours(tmp_path), max_steps=5)
    found: dict[str, Any] = {}

    class AtStart(Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            found["weights"] = [p.detach().clone() for p in [*pl_module.parameters(), *pl_module.buffers()]]
            states = trainer.optimizers[0].state.values()
            found["moments"] = [state[key].clone() for state in states for key in ("step", "exp_avg", "exp_avg_sq")]

    second.callbacks.append(AtStart())  # type: ignore[attr-defined]
    fit(second, loaded, ckpt_path="last")
    weights = [*saved.parameters(), *saved.buffers()]
    moments = [state[key] for state in first.optimizers[0].state.values() for key in ("step", "exp_avg", "exp_avg_sq")]
    assert len(found["weights"]) == len(weights)
    assert all(map(torch.equal, found["weights"], weights))
    assert len(found["moments"]) == len(moments) == 3 * 6
    assert all(map(torch.equal, found["moments"], moments))
    validated = Wrapped(WRAPS[now])
    trainer(ours(tmp_path)).validate(validated, [torch.zeros(4, 3)], ckpt_path="last")
    assert all(
        map(torch.equal, [*validated.parameters(), *validated.buffers()], [*loaded.parameters(), *loaded.buffers()])
    )
