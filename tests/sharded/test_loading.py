"""Whatever wrote a checkpoint: right after it is loaded, weights and optimizer state are those that were saved."""

from __future__ import annotations

import shutil
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import pytest
import torch
import torchmetrics
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import lightning_ft as ft
from lightning_ft._inspection.consolidate import consolidate
from lightning_ft.manifest import parse_directory, seal_directory
from lightning_ft.storage import Storage
from tests.ranks import Rank, values
from tests.sharded.models import Look, Net, differences, gathered, trainer

OURS = ("fsdp.full", "fsdp.sharded", "mp.full", "mp.sharded", "ddp.sharded")
PLAIN = ("plain.fsdp.sharded", "plain.mp.sharded", "plain.mp.full", "ddp")
STEPS = 3


def _trained(rank: Rank, kind: str, optimizer: str = "adamw", **arguments: Any) -> tuple[str, dict[str, Any]]:
    """A checkpoint of this strategy, and what all ranks together held then."""
    wrapper = getattr(arguments.get("wrap"), "__name__", "")
    name = f"{kind}.{optimizer}{wrapper}"
    callbacks = [] if kind.startswith("plain") else [ft.FaultTolerantCheckpoint(rank.root / name)]
    run = trainer(kind, rank.world_size, rank.root, STEPS * (2 if optimizer == "two" else 1), *callbacks)
    run.fit(Net(optimizer, **arguments))
    found = gathered(run)
    if callbacks:
        return str(rank.root / name / f"step={STEPS:08d}.ckpt"), found
    run.save_checkpoint(rank.root / f"{name}.ckpt")
    return str(rank.root / f"{name}.ckpt"), found


def _loaded(rank: Rank, kind: str, path: str, optimizer: str = "adamw", **arguments: Any) -> dict[str, Any]:
    look = Look()
    factor = 2 if optimizer == "two" else 1
    run = trainer(kind, rank.world_size, rank.root, factor * (STEPS + 1), look)
    run.fit(Net(optimizer, **arguments), ckpt_path=path)
    assert run.global_step == factor * (STEPS + 1), "nothing was trained"
    return dict(look.found)


def _all_combinations(rank: Rank) -> list[str]:
    wrong = []
    for kind in (*OURS, *PLAIN):
        path, saved = _trained(rank, kind)
        if rank.number == 0:
            torch.save(saved, f"{path}.expected")
        for other in ("fsdp.sharded", "mp.sharded"):
            wrong += [f"{kind} -> {other}: {name}" for name in differences(saved, _loaded(rank, other, path))]
    return wrong


def _others_ranks(rank: Rank, root: str) -> list[str]:
    wrong = []
    for kind in (*OURS, *PLAIN):
        name = f"{kind}.adamw.ckpt" if kind.startswith("plain") else f"{kind}.adamw/step={STEPS:08d}.ckpt"
        path = f"{root}/{name}"
        saved = torch.load(f"{path}.expected")
        for other in ("fsdp.sharded", "mp.sharded"):
            wrong += [f"{kind} -> {other}: {name}" for name in differences(saved, _loaded(rank, other, path))]
    return wrong


@pytest.mark.timeout(400)
def test_every_checkpoint_loads_into_every_strategy_on_any_number_of_ranks_H1_H2_H3_C3(tmp_path: Path) -> None:
    assert values(_all_combinations, tmp_path / "2") == [[], []]
    assert values(_others_ranks, tmp_path / "1", str(tmp_path / "2"), world_size=1) == [[]]
    assert values(_others_ranks, tmp_path / "3", str(tmp_path / "2"), world_size=3) == [[], [], []]


def _plain_readers(rank: Rank) -> list[str]:
    wrong = []
    readers = {"fsdp.sharded": ("plain.fsdp.sharded", "ddp"), "mp.sharded": ("plain.mp.sharded", "ddp")}
    readers["ddp.sharded"] = ("plain.mp.sharded", "ddp")
    readers |= {"fsdp.full": ("plain.mp.full", "ddp"), "mp.full": ("plain.mp.full", "ddp")}
    for kind, others in readers.items():
        path, saved = _trained(rank, kind)
        for other in others:
            look = Look()
            # The plugin is what a user of DDP has who has saved with another strategy; plain Lightning has none.
            plugins = [ft.FaultTolerantCheckpointIO()] if other == "ddp" and kind.endswith("sharded") else []
            run = trainer(other, rank.world_size, rank.root, STEPS + 1, look, plugins=plugins)
            run.fit(Net(), ckpt_path=path)
            wrong += [f"{kind} -> {other}: {name}" for name in differences(saved, look.found)]
    return wrong


def test_plain_lightning_resumes_from_what_is_saved_here_and_ddp_from_a_directory(tmp_path: Path) -> None:
    assert values(_plain_readers, tmp_path) == [[], []]


def _names_in(path: str) -> list[str]:
    """Every name of a parameter or buffer in a checkpoint, wherever it is."""
    checkpoint = ft.FaultTolerantCheckpointIO().load_checkpoint(path)
    ours = checkpoint["lightning_ft"]
    layout = [name for groups in ours["optimizers"] for group in groups for name in group["names"]]
    names = [*checkpoint["state_dict"], *ours["requires_grad"], *layout]
    assert "net.0.first.weight" in names
    return names


def _other_models(rank: Rank) -> list[str]:
    wrong = []
    routes = {
        "sgd": (("fsdp.sharded", "mp.full"), ("mp.full", "fsdp.full"), ("mp.sharded", "fsdp.sharded")),
        # By hand; within FSDP's forward there can be no backward.
        "two": (("mp.sharded", "mp.full"), ("mp.full", "mp.sharded")),
    }
    for optimizer, kinds in routes.items():
        for kind, other in kinds:
            path, saved = _trained(rank, kind, optimizer)
            loaded = _loaded(rank, other, path, optimizer)
            wrong += [f"{optimizer}, {kind} -> {other}: {name}" for name in differences(saved, loaded)]
    compiled: Any = lambda module: torch.compile(module, backend="eager")  # noqa: E731
    checkpointed: Any = checkpoint_wrapper
    for plain in ("fsdp.sharded", "mp.sharded", "mp.full", "fsdp.full"):
        for wrap in (compiled, checkpointed):
            kind = f"{plain}-compiled" if plain.startswith("fsdp") and wrap is compiled else plain
            path, saved = _trained(rank, kind, "sgd", wrap=wrap)
            assert not [name for name in _names_in(path) if "_orig_mod" in name or "_wrapped_" in name]
            for other, back in ((plain, None), ("mp.sharded", None), (kind, wrap)):
                loaded = _loaded(rank, other, path, "sgd", wrap=back)
                wrong += [f"{kind} wrapped -> {other}, {back}: {n}" for n in differences(saved, loaded)]
    for kind in ("fsdp.sharded-flat", "mp.sharded"):
        path, saved = _trained(rank, kind, "flat")
        for other in ("mp.sharded", "fsdp.sharded-flat"):
            different = differences(saved, _loaded(rank, other, path, "flat"))
            # Of a parameter that is never used nothing is saved; as a part of a larger one it has zeros there.
            wrong += [f"{kind} -> {other}, flat: {n}" for n in different if n != "0.frozen.momentum_buffer"]
    return wrong


def test_optimizers_and_wrappers_H4(tmp_path: Path) -> None:
    assert values(_other_models, tmp_path) == [[], []]


def _refused(rank: Rank, kind: str, path: str, module: Net, **plugin: Any) -> str:
    """The error of a restart; nothing has changed by then."""
    before: dict[str, Any] = {}
    strategy_is_set_up = ft.FaultTolerantCheckpointIO.load_sharded

    def load_sharded(self: Any, path: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        before.update({n: _local(p).clone() for n, p in [*model.named_parameters(), *model.named_buffers()]})
        return strategy_is_set_up(self, path, model, *args, **kwargs)

    run = trainer(kind, rank.world_size, rank.root, 50, plugins=[ft.FaultTolerantCheckpointIO(**plugin)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ft.FaultTolerantCheckpointIO, "load_sharded", load_sharded)
        with pytest.raises(ft.FaultToleranceError) as caught:
            run.fit(module, ckpt_path=path)
    assert before, "refused before the model was set up"
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        assert torch.equal(_local(tensor), before[name]), f"{name} has changed"
    assert not any(optimizer.state for optimizer in run.strategy.optimizers)
    assert isinstance(caught.value, (ft.CheckpointError, ft.RestoreError)), repr(caught.value)
    return f"{type(caught.value).__name__}: {caught.value}"


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()


class Renamed(Net):
    """Its `state_dict` is not what its parameters are called."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.nn.Parameter(torch.ones(2), requires_grad=False)


def _damaged_and_unfitting(rank: Rank) -> dict[str, str]:
    path, _ = _trained(rank, "mp.sharded")
    root = Path(path)
    copies = {name: rank.root / f"{name}.ckpt" for name in ("flipped", "short", "gone", "mixed", "plain", "rest")}
    if rank.number == 0:
        for copy in copies.values():
            shutil.copytree(root, copy)
        shard = copies["flipped"] / "__1_0.distcp"
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
        (copies["short"] / "__0_0.distcp").write_bytes((root / "__0_0.distcp").read_bytes()[:-200])
        (copies["gone"] / "__1_0.distcp").unlink()

        manifest = copies["mixed"] / "manifest.json"
        unsealed = replace(parse_directory(manifest.read_bytes(), ""), generation="0" * 32)
        manifest.write_bytes(seal_directory(unsealed))
        (copies["plain"] / "manifest.json").unlink()
        (copies["rest"] / "meta.pt").unlink()
    torch.distributed.barrier()
    found = {
        f"{name} {kind}": _refused(rank, kind, str(copies[name]), Net())
        for name in ("flipped", "short", "gone", "mixed", "rest")
        for kind in ("mp.sharded", "fsdp.sharded")
    }
    found["no manifest"] = _refused(rank, "mp.sharded", str(copies["plain"]), Net())
    found["other model"] = _refused(rank, "fsdp.sharded", path, Renamed())
    found["other optimizer"] = _refused(rank, "mp.sharded", path, Net("sgd"))
    found["two optimizers"] = _refused(rank, "mp.sharded", path, Net("two"))
    for name in ("meta.pt", "__0_0.distcp"):
        found[name] = _refused(rank, "fsdp.full", str(root / name), Net())
    return found


def test_what_is_damaged_or_does_not_fit_changes_nothing_and_is_said_on_all_ranks(tmp_path: Path) -> None:
    found, other = values(_damaged_and_unfitting, tmp_path)
    assert found == other, "the ranks say different things"
    for kind in ("mp.sharded", "fsdp.sharded"):
        assert "CorruptCheckpointError" in found[f"flipped {kind}"]
        assert "__1_0.distcp" in found[f"flipped {kind}"]
        assert "__0_0.distcp has" in found[f"short {kind}"]
        assert "__1_0.distcp is missing" in found[f"gone {kind}"]
        assert "of different saves" in found[f"mixed {kind}"]
        assert "meta.pt is missing" in found[f"rest {kind}"]
    assert "no manifest" in found["no manifest"]
    assert "1 not in the checkpoint (extra)" in found["other model"]
    assert "2 parameter groups were saved, this run has 1" in found["other optimizer"]
    assert "holds 1 optimizers, this run has 2" in found["two optimizers"]
    for name in ("meta.pt", "__0_0.distcp"):
        assert f"{name} is one file of a sharded checkpoint: give its directory" in found[name]


class Odd(Net):
    """Keeps more than parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.mean.persistent(True)
        self.notes = {"seen": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean.update(batch[0].sum())
        self.notes["seen"] += 1
        return super().training_step(batch, batch_idx)

    def get_extra_state(self) -> Any:
        return dict(self.notes)

    def set_extra_state(self, state: Any) -> None:
        self.notes = state


class Halves(Net):
    """In bfloat16, with the optimizer's state in float32, as whoever knows better keeps it (C2)."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.to(torch.bfloat16)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([batch[0].bfloat16()], batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        for state in self.trainer.strategy.optimizers[0].state.values():
            state["momentum_buffer"] = state["momentum_buffer"].float() + 1e-6

    def on_train_batch_start(self, *_: Any) -> None:
        for state in self.trainer.strategy.optimizers[0].state.values():
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16()


class Subset(Net):
    """Saves what is trained, and only that."""

    def __init__(self, strict: bool) -> None:
        super().__init__("sgd")
        self.strict_loading = strict

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state.pop("frozen", None)
        return state


class Own(Net):
    """Saves what nobody can load."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        state["mine"] = torch.ones(3)
        return state


def _save(rank: Rank, kind: str, name: str, module: Net) -> tuple[str, Any]:
    run = trainer(kind, rank.world_size, rank.root, STEPS, ft.FaultTolerantCheckpoint(rank.root / f"{name}.{kind}"))
    run.fit(module)
    return f"{rank.root}/{name}.{kind}/step={STEPS:08d}.ckpt", run


def _notes(run: L.Trainer) -> Any:
    return dict(run.lightning_module.notes)


def _odd_models(rank: Rank) -> list[str]:
    wrong = []

    def check(right: bool, what: str) -> None:
        if not right:
            wrong.append(what)

    kinds = {"fsdp.sharded": "mp.sharded", "mp.full": "fsdp.full", "mp.sharded": "fsdp.sharded"}
    for kind, other in kinds.items():
        odd = Odd()
        path, _ = _save(rank, kind, "odd", odd)
        found: list[Any] = []
        look = Look(lambda run, found=found: found.append((_notes(run), run.lightning_module.mean.mean_value.clone())))
        run = trainer(other, rank.world_size, rank.root, STEPS + 1, look)
        run.fit(Odd(), ckpt_path=path)
        check(found[0][0] == {"seen": STEPS}, f"{kind}: extra state {found}")
        check(kind == "mp.full" or found[0][1] != 0, f"{kind}: metric {found}")

        # Only the weights are loaded where nothing is trained.
        fresh = Net()
        run = trainer(other, rank.world_size, rank.root, 1, plugins=[ft.FaultTolerantCheckpointIO()])
        expected, _ = _trained(rank, kind, "sgd")
        run.validate(fresh, ckpt_path=expected)
        check(not run.strategy.optimizers, f"{kind}: validation has optimizers")
        check(int(fresh.seen[0]) == STEPS, f"{kind}: validation without the weights")

    before: list[Any] = []
    for kind in ("fsdp.sharded", "mp.sharded", "mp.full", "fsdp.full"):
        path = str(rank.root / f"{kind}.step0.ckpt")
        look = Look(lambda run, path=path: run.save_checkpoint(path))
        run = trainer(kind, rank.world_size, rank.root, 1, look, ft.FaultTolerantCheckpoint(rank.root / f"0.{kind}"))
        run.fit(Net())
        for other in ("fsdp.sharded", "mp.sharded"):
            look = Look(lambda run: before.append(dict(run.strategy.optimizers[0].state)))
            trainer(other, rank.world_size, rank.root, 1, look).fit(Net(), ckpt_path=path)
    check(before == [{}] * 8, f"saved before the first step: {before}")

    for kind, other in (("mp.sharded", "mp.sharded"), ("mp.full", "mp.sharded")):
        path, run = _save(rank, kind, "halves", Halves())
        saved = gathered(run)
        check(saved["0.net.2.scale.momentum_buffer"].dtype == torch.float32, "the test has no float32 state")
        look = Look()
        trainer(other, rank.world_size, rank.root, STEPS + 1, look).fit(Halves(), ckpt_path=path)
        wrong.extend(f"{kind}, float32 state: {name}" for name in differences(saved, look.found))

    for kind in ("mp.sharded", "mp.full"):  # FSDP itself insists on what it has flattened
        path, _ = _save(rank, kind, "subset", Subset(strict=False))
        later = Subset(strict=False)
        trainer(kind, rank.world_size, rank.root, STEPS + 1, Look()).fit(later, ckpt_path=path)
        check(int(later.seen[0]) == STEPS + 1, f"{kind}: weights that are there")
        check("1 not in the checkpoint (frozen)" in _refused(rank, kind, path, Net("sgd")), f"{kind}: strict")
        with pytest.raises(ft.ConfigurationError, match="leaves out"):
            _save(rank, kind, "strict", Subset(strict=True))
    for kind in ("fsdp.sharded", "fsdp.full", "mp.sharded", "mp.full"):
        with pytest.raises(ft.ConfigurationError, match="mine"):
            _save(rank, kind, "own", Own())
    return wrong


def test_models_with_more_or_less_than_their_parameters_C2_C3_H9(tmp_path: Path) -> None:
    assert values(_odd_models, tmp_path) == [[], []]


def _unlike(expected: Any, actual: Any, where: str) -> list[str]:
    """Where two nested states differ, in values or in kinds; the order of keys is no difference."""
    if type(expected) is not type(actual):
        return [f"{where}: {type(expected).__name__} and {type(actual).__name__}"]
    if isinstance(expected, dict):
        if expected.keys() != actual.keys():
            return [f"{where}: {expected.keys() ^ actual.keys()}"]
        return [what for key in expected for what in _unlike(expected[key], actual[key], f"{where}.{key}")]
    if isinstance(expected, (list, tuple)):
        if len(expected) != len(actual):
            return [f"{where}: {len(expected)} and {len(actual)}"]
        pairs = enumerate(zip(expected, actual, strict=True))
        return [what for i, (a, b) in pairs for what in _unlike(a, b, f"{where}.{i}")]
    if isinstance(expected, torch.Tensor):
        same = expected.dtype == actual.dtype and torch.equal(expected, actual)
    else:
        same = expected == actual
    return [] if same else [f"{where}: {expected} and {actual}"]


class SaveFull(L.Callback):
    """Saves the state of the last step in the other form, too."""

    def __init__(self, path: Path, key: str, form: Any) -> None:
        self.path, self.key, self.form = path, key, form

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == STEPS:
            sharded = getattr(trainer.strategy, self.key)
            setattr(trainer.strategy, self.key, self.form)
            trainer.save_checkpoint(self.path)
            setattr(trainer.strategy, self.key, sharded)


def _repeated(shown: list[warnings.WarningMessage]) -> list[str]:
    """Warnings that were shown at every save, those of torch about itself, and the model's own if it was not shown."""
    counted = Counter(f"{w.category.__name__}: {w.message}" for w in shown)
    wrong = [f"shown {count} times: {text}" for text, count in counted.items() if count >= STEPS]
    wrong += [text for text in counted if "ShardedTensor" in text or "_get_pg_default_device" in text]
    return wrong + ([] if "UserWarning: of the model" in counted else ["the model's warning was not shown"])


class Warns(L.Callback):
    """As a model that warns in every step."""

    def on_train_batch_end(self, *args: Any) -> None:
        warnings.warn("of the model", stacklevel=1)


def _one_file(rank: Rank) -> list[str]:
    """Both forms of the same state: a directory, consolidated, and what the full form saves."""
    from safetensors.torch import load_file

    wrong = []
    forms = (("fsdp", "_state_dict_type", "full"), ("mp", "_save_distributed_checkpoint", False))
    for name, key, full_form in forms:
        run = trainer(
            f"{name}.sharded", rank.world_size, rank.root, STEPS,
            ft.FaultTolerantCheckpoint(rank.root / name, every_n_train_steps=1), Warns(),
        )  # fmt: skip
        full = rank.root / f"{name}.full.ckpt"

        run.callbacks.append(SaveFull(full, key, full_form))  # type: ignore[attr-defined]
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("default")
            run.fit(Net())
        wrong += [f"{name}: {what}" for what in _repeated(shown)]
        if rank.number == 0:
            directory, out = str(rank.root / name / f"step={STEPS:08d}.ckpt"), str(rank.root / f"{name}.out.ckpt")
            manifest = consolidate(Storage(), directory, out, lambda _: None)
            original = Storage().read_manifest(directory)[0]
            assert manifest is not None
            assert original is not None
            expected, actual = torch.load(full), torch.load(out)
            for part in ("state_dict", "optimizer_states"):
                wrong += [f"{name}: {what}" for what in _unlike(expected[part], actual[part], part)]
            if expected.keys() != actual.keys():
                wrong.append(f"{name}: {expected.keys() ^ actual.keys()}")
            if (manifest.generation, manifest.step, manifest.run_id) != (original.generation, STEPS, original.run_id):
                wrong.append(f"{name}: manifest {manifest}")
            if ft.verify(out).problem is not None:
                wrong.append(f"{name}: {ft.verify(out).problem}")
            weights = str(rank.root / f"{name}.safetensors")
            consolidate(Storage(), directory, weights, lambda _: None)
            wrong += [f"{name}: {what}" for what in _unlike(expected["state_dict"], load_file(weights), "safetensors")]
        torch.distributed.barrier()
    return wrong


def test_consolidate_makes_what_the_full_form_saves(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    assert values(_one_file, tmp_path) == [[], []]


def _counting(original: Any, fetched: Counter[str]) -> Any:
    def counted(storage: Storage, path: str, name: str, *args: Any) -> Any:
        fetched[name] += 1
        return original(storage, path, name, *args)

    return counted


def _in_a_store(rank: Rank) -> list[str]:
    wrong = []
    for kind in ("fsdp.sharded", "mp.sharded"):
        run = trainer(kind, 1, rank.root, STEPS, ft.FaultTolerantCheckpoint(f"memory://runs/{kind}"))
        run.fit(Net())
        path = f"memory://runs/{kind}/step={STEPS:08d}.ckpt"
        fetched = Counter[str]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Storage, "open_verified_file", _counting(Storage.open_verified_file, fetched))
            wrong += [f"{kind}: {name}" for name in differences(gathered(run), _loaded(rank, kind, path))]
        if fetched != {".metadata": 1, "meta.pt": 1, "__0_0.distcp": 1}:
            wrong.append(f"{kind}: fetched {fetched}")
        shard = fsspec.filesystem("memory").store[f"/runs/{kind}/step={STEPS:08d}.ckpt/__0_0.distcp"]
        data = bytearray(shard.getvalue())
        data[len(data) // 2] ^= 1
        shard.seek(0)
        shard.write(bytes(data))
        wrong += [] if "__0_0.distcp" in _refused(rank, kind, path, Net()) else [f"{kind}: damage not named"]
    return wrong


def test_shards_are_loaded_from_a_url_G1(tmp_path: Path) -> None:
    assert values(_in_a_store, tmp_path, world_size=1) == [[]]
    assert not list(tmp_path.rglob("memory:*"))
