"""Parallel writes of DDP: each rank writes its share, and what is loaded is what one file would have held."""

from __future__ import annotations

import copy
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

import lightning_ft as ft
from lightning_ft import events
from lightning_ft._inspection.consolidate import consolidate, load_shards
from lightning_ft._sharded.shards import Shards
from lightning_ft.storage import Storage
from tests.ranks import Rank, values
from tests.sharded.models import differences
from tests.sharded.odd_models import CASES, REFUSED, Net

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]

STEPS = 4


class InOneFile(L.Callback):
    """What a file of the same step holds, saved by another callback than ours."""

    def __init__(self, root: Path) -> None:
        self.path = str(root / "other.ckpt")

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step >= STEPS:
            trainer.save_checkpoint(self.path)


def trainer(rank: Rank, name: str, *callbacks: L.Callback, ft_args: Any = None, **options: Any) -> L.Trainer:
    io = ft.FaultTolerantCheckpointIO(**{"layout": "sharded", **options})
    ours = ft.FaultTolerantCheckpoint(rank.root / name, every_n_train_steps=2, **(ft_args or {}))
    return L.Trainer(
        accelerator="cpu", devices=rank.world_size, strategy=DDPStrategy(process_group_backend="gloo"),
        max_steps=STEPS, callbacks=[*callbacks, ours], plugins=[io], logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=rank.root,
    )  # fmt: skip


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """With the kind of each container, and the keys in it."""
    if isinstance(value, dict):
        kind = {f"{path} keys": sorted(map(repr, value))}
        return kind | {k: v for key, item in value.items() for k, v in flat(item, f"{path}.{key}").items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        kind = {f"{path} kind": type(value).__name__}
        return kind | {k: v for key, item in enumerate(value) for k, v in flat(item, f"{path}.{key}").items()}
    return {path: value if isinstance(value, Tensor) else torch.tensor(list(repr(value).encode()))}


def lists_as_tensors(value: dict[str, Any]) -> dict[str, Tensor]:
    return {k: v if isinstance(v, Tensor) else torch.tensor(list(repr(v).encode())) for k, v in value.items()}


def unlike(file: dict[str, Any], directory: dict[str, Any]) -> list[str]:
    """Where the two forms of a state differ."""
    ours = {"lightning_ft", "loops", "callbacks"}  # of the step's boundary, and of a callback within the step
    assert file.keys() == directory.keys()
    expected, actual = ({k: v for k, v in sorted(form.items()) if k not in ours} for form in (file, directory))
    wrong = differences(lists_as_tensors(flat(expected)), lists_as_tensors(flat(actual)))
    if list(file["state_dict"]) != list(directory["state_dict"]):
        wrong.append("order of the weights")
    if getattr(file["state_dict"], "_metadata", None) != getattr(directory["state_dict"], "_metadata", None):
        wrong.append("versions of modules")
    return wrong


def newest(rank: Rank, name: str) -> str:
    return str(rank.root / name / f"step={STEPS:08d}.ckpt")


# -- a fit --------------------------------------------------------------------------------------------------------


def fit(rank: Rank) -> list[str]:
    wrong, written = [], []
    events.observe(lambda event: written.append(event) if isinstance(event, events.FileWritten) else None)
    theirs = ModelCheckpoint(rank.root / "theirs", every_n_train_steps=2, save_top_k=1, filename="best")
    run = trainer(rank, "ours", InOneFile(rank.root), theirs, ft_args={"keep_last": 1, "guards": ()})
    original = run.strategy.save_checkpoint
    model = Net()
    run.fit(model)
    path = newest(rank, "ours")
    mine = {event.name for event in written}
    if mine != ({"__0_0.distcp", ".metadata", "meta.pt"} if rank.number == 0 else {"__1_0.distcp"}):
        wrong.append(f"this rank has written {mine}")
    if "save_checkpoint" in vars(run.strategy) or run.strategy.save_checkpoint != original:
        wrong.append("the strategy is not as it was")
    run.save_checkpoint(rank.root / "final.ckpt")
    if rank.number == 0:
        for name in ("theirs/best.ckpt", "final.ckpt", "other.ckpt"):
            if not (rank.root / name).is_file():
                wrong.append(f"{name} is no file")
        found = sorted(name for name in os.listdir(rank.root / "ours") if name.endswith(".ckpt"))
        if found != [os.path.basename(path)]:
            wrong.append(f"after the rotation there are {found}")
        sizes = {name: record.size_bytes for name, record in Storage().read_manifest(path)[0].files.items()}
        tensors = [p for p in model.parameters()] * 3
        whole = sum(tensor.nbytes for tensor in tensors)
        overhead = 3 * len(tensors) * 1200  # a piece is a file of `torch.save`
        for name in ("__0_0.distcp", "__1_0.distcp"):
            if not whole / 2 <= sizes[name] <= 0.55 * whole + overhead:
                wrong.append(f"{name} has {sizes[name]} of {whole} bytes")
        loaded = load_shards(Storage(), path)
        wrong += unlike(torch.load(rank.root / "other.ckpt"), loaded)
        wrong += differences(dict(model.state_dict()), dict(loaded["state_dict"]))
        consolidate(Storage(), path, str(rank.root / "one.ckpt"), lambda _: None)
        wrong += unlike(torch.load(rank.root / "one.ckpt"), loaded)
        if ft.verify(path).problem or ft.verify(str(rank.root / "one.ckpt")).problem:
            wrong.append("not verified")
    return wrong


def test_each_rank_writes_its_share_and_nobody_else_notices(tmp_path: Path) -> None:
    assert values(fit, tmp_path) == [[], []]


def falls_back(rank: Rank) -> Any:
    """The newest is damaged, in the file of rank 1; and rank 0 reads for both."""
    first = trainer(rank, "ours", ft_args={"keep_last": 2})
    first.fit(Net())
    if rank.number == 0:
        shard = Path(newest(rank, "ours"), "__1_0.distcp")
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    torch.distributed.barrier()
    started: list[int] = []

    class Starts(L.Callback):
        def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
            started.append(trainer.global_step)

    again = trainer(rank, "ours", Starts(), load="broadcast")
    model = Net()
    again.fit(model, ckpt_path="last")
    same = differences(dict(first.lightning_module.state_dict()), dict(model.state_dict()))
    return (
        started,
        [name for name in same if "running" not in name or rank.number == 0],
        ft.verify(newest(rank, "ours")).problem,
    )


def test_a_damaged_share_is_found_and_the_one_before_is_taken(tmp_path: Path) -> None:
    for started, same, problem in values(falls_back, tmp_path):
        assert started == [2]
        assert same == []
        assert "digest" in str(problem)


# -- models and optimizers ----------------------------------------------------------------------------------------


class States(L.Callback):
    """Weights and optimizer states when training starts, and when it ends; what an optimizer spreads out, on rank 0."""

    def __init__(self) -> None:
        self.at: dict[str, dict[str, Tensor]] = {}

    def _note(self, when: str, trainer: L.Trainer) -> None:
        states = [trainer.strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers]
        self.at[when] = lists_as_tensors(copy.deepcopy(flat([dict(trainer.lightning_module.state_dict()), states])))

    def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
        self._note("start", trainer)

    def on_train_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._note("end", trainer)


def both_forms(rank: Rank) -> list[str]:
    from lightning.pytorch.callbacks import WeightAveraging

    wrong = []
    for name, make in (*CASES.items(), ("averaged", Net)):
        more = [WeightAveraging(avg_fn=lambda a, b, n: 0.9 * a + 0.1 * b)] if name == "averaged" else []
        here = Rank(rank.number, rank.world_size, rank.root / name, rank.signals)
        first, second = States(), States()
        trainer(here, "ours", first, *more, InOneFile(here.root)).fit(make())
        if rank.number == 0:
            found = load_shards(Storage(), newest(here, "ours"))
            wrong += [f"{name}: {what}" for what in unlike(torch.load(here.root / "other.ckpt"), found)]
            with closing(Shards(Storage(), newest(here, "ours"), "full")) as shards:
                names = {parameter for tree in shards.optimizers for parameter in tree["state"]}
            # The names by which torch, and so plain Lightning, looks for them.
            wrong += [f"{name}: {parameter}" for parameter in names - dict(make().named_parameters()).keys()]
        again = trainer(here, "ours", second, *more)
        again.fit_loop.epoch_loop.max_steps = STEPS + 1
        again.fit(make(), ckpt_path="last")
        wrong += [
            f"{name}, after a restart: {what}"
            for what in differences(first.at["end"], second.at["start"])
            if not (rank.number and any(own in what for own in OF_RANK_0))
        ]
    return wrong


OF_RANK_0 = ("running", "_extra_state", ".rank", "prev_loss")
"""What the ranks do not have alike: rank 0's is saved, as in a file."""


def test_whatever_is_saved_is_what_a_file_would_hold_and_comes_back(tmp_path: Path) -> None:
    assert values(both_forms, tmp_path) == [[], []]


# -- what is refused ----------------------------------------------------------------------------------------------


def refused(rank: Rank) -> dict[str, str]:
    found = {}
    for name, (make, _) in REFUSED.items():
        run = trainer(rank, name, retries=0)
        with pytest.raises(ft.SaveError) as caught:
            run.fit(make())
        found[name] = str(caught.value)
        assert run.global_step <= 3 + 2 * (name == "thaws")
        last = ft.last_good(str(rank.root / name))
        assert (last and last.name) == ("step=00000002.ckpt" if name == "thaws" else None)
    return found


def test_what_could_not_be_loaded_as_it_is_is_no_checkpoint(tmp_path: Path) -> None:
    one, other = values(refused, tmp_path)
    assert one == other
    for name, (_, text) in REFUSED.items():
        assert text in one[name], one[name]
        assert 'layout="file"' in one[name]


class InItsOwnWay(DDPStrategy):
    saves_through_plugin = True

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)


@pytest.mark.parametrize(
    ("strategy", "callback", "text"),
    [
        (ft.FSDPStrategy(state_dict_type="full"), {}, "FSDPStrategy was told to save full checkpoints"),
        (
            ft.ModelParallelStrategy(save_distributed_checkpoint=False),
            {},
            "ModelParallelStrategy was told to save full",
        ),
        (InItsOwnWay(), {}, "InItsOwnWay was told to save full checkpoints, and makes them in its own way"),
        (DDPStrategy(model_averaging_period=3), {}, "model_averaging_period"),
        (DDPStrategy(), {"local_dirpath": "local"}, "local_dirpath='.*local': DDPStrategy writes sharded"),
    ],
)
def test_strategies_that_have_nothing_to_share_out(strategy: Any, callback: Any, text: str, tmp_path: Path) -> None:
    if callback:
        callback = {name: tmp_path / value for name, value in callback.items()}
    ours = ft.FaultTolerantCheckpoint(tmp_path / "ours", **callback)
    io = ft.FaultTolerantCheckpointIO(layout="sharded")
    run = L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, callbacks=[ours], plugins=[io], logger=False,
        enable_progress_bar=False, default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(ft.ConfigurationError, match=text):
        ours.setup(run, Net(), "fit")


def test_a_layout_that_there_is_not() -> None:
    with pytest.raises(ft.ConfigurationError, match=r"layout='shards': must be one of 'file', 'sharded'"):
        ft.FaultTolerantCheckpointIO(layout="shards")  # type: ignore[arg-type]


def test_a_single_process_writes_the_same_layout(tmp_path: Path) -> None:
    ours = ft.FaultTolerantCheckpoint(tmp_path, every_n_train_steps=2)
    look = States()
    for steps, callbacks in ((2, [ours]), (3, [look, ft.FaultTolerantCheckpoint(tmp_path)])):
        run = L.Trainer(
            accelerator="cpu", devices=1, max_steps=steps, callbacks=callbacks, logger=False, default_root_dir=tmp_path,
            plugins=[ft.FaultTolerantCheckpointIO(layout="sharded")], enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip
        model = Net()
        run.fit(model, ckpt_path="last")
    path = tmp_path / "step=00000002.ckpt"
    assert sorted(os.listdir(path)) == [".metadata", "__0_0.distcp", "manifest.json", "meta.pt"]
    loaded = load_shards(Storage(), str(path))
    assert (
        differences(look.at["start"], lists_as_tensors(flat([dict(loaded["state_dict"]), loaded["optimizer_states"]])))
        == []
    )
