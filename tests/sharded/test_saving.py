"""Sharded saves of two ranks: what is in the directory, who wrote what, and that nobody hangs when a rank fails."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import lightning_ft as ft
from lightning_ft import events
from lightning_ft._copying.copy_plan import Late
from lightning_ft._copying.module_tree import ModuleTree
from lightning_ft._copying.staging import SnapshotError
from lightning_ft._disk import directory
from lightning_ft.plugin import SaveOptions
from lightning_ft.storage import Storage
from tests.ranks import Rank, run, values

State = dict[str, Any]


class Trained:
    """A model in shards and its optimizer, after one step; odd sizes, so that shards are uneven and some are empty."""

    def __init__(self, foreach: bool = False) -> None:
        torch.manual_seed(0)
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = nn.Sequential(nn.Linear(33, 65), nn.Linear(65, 1))
        for layer in self.model:
            fully_shard(layer, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=foreach)
        self.step()

    def step(self) -> None:
        self.model(torch.randn(4, 33)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> State:
        return {
            "state_dict": get_model_state_dict(self.model),
            "optimizer_0": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def whole(self) -> State:
        options = StateDictOptions(full_state_dict=True)
        return {
            "state_dict": get_model_state_dict(self.model, options=options),
            "optimizer_0": get_optimizer_state_dict(self.model, self.optimizer, options=options),
        }

    def late(self) -> Late:
        return Late.of(ModuleTree(self.model), [self.optimizer], 1)


@contextlib.contextmanager
def group() -> Iterator[None]:
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


def saved(io: ft.FaultTolerantCheckpointIO, state: State, path: Path, **options: Any) -> None:
    io.save_sharded(state, {"global_step": 3, "epoch": 1, "rest": torch.ones(2)}, path, SaveOptions(**options))


def visible(root: Path) -> list[str]:
    """Names of checkpoints, and of what is left of them."""
    return sorted(name for name in os.listdir(root) if ".ckpt" in name)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{path}.{key}").items()}
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return {k: v for key, item in enumerate(value) for k, v in flat(item, f"{path}.{key}").items()}
    return {path: value}


def assert_equal(actual: Any, expected: Any) -> None:
    """Bit for bit; `actual` may hold more."""
    actual, expected = flat(actual), flat(expected)
    assert expected.keys() <= actual.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert actual[name].dtype == value.dtype, name
            assert torch.equal(actual[name], value), name
        else:
            assert actual[name] == value, name


def local(value: Any) -> Any:
    """Of a nested state, what this rank holds."""
    if isinstance(value, dict):
        return {key: local(item) for key, item in value.items()}
    return value.to_local() if isinstance(value, DTensor) else value


def zeroed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: zeroed(item) for key, item in value.items()}
    return torch.zeros_like(value) if isinstance(value, Tensor) else value


# -- what is in the directory ------------------------------------------------------------------------------------


def kinds(rank: Rank) -> Any:
    with group():
        trained = Trained()
        mesh = trained.mesh
        base = torch.arange(60_000.0).reshape(300, 200)
        tied = torch.randn(400, 100, generator=torch.Generator().manual_seed(1))
        others = {
            "replicated": base.clone(),
            "view": base[100:250],  # of a storage that is larger
            "transposed": base.clone().t(),
            "scalar": torch.tensor(3.5, dtype=torch.float64),
            "empty": torch.empty(0, 4),
            "tied": tied,
            "tied again": tied,
            "half": torch.randn(7, 3).bfloat16() if rank.number == 0 else None,
            "replica": distribute_tensor(base.clone(), mesh, [Replicate()]),
            "few rows": distribute_tensor(torch.ones(1, 5), mesh, [Shard(0)]),  # rank 1 has none
            "columns": distribute_tensor(torch.arange(35.0).reshape(5, 7), mesh, [Shard(1)]),
        }
        others = {name: value for name, value in others.items() if value is not None}
        state = trained.state()
        state["state_dict"] |= others
        io = ft.FaultTolerantCheckpointIO(verify_after_write="full")
        path = rank.root / "a.ckpt"
        saved(io, state, path)
        io.drain()
        assert not io.failed
        # Plain DCP, into the same shards.
        read = {key: zeroed(value) for key, value in state.items()}
        dcp.load(read, checkpoint_id=path)
        assert_equal(local(read), local(state))
        # And into others: whole tensors.
        whole = trained.whole()
        plain = zeroed(whole)
        dcp.load(plain, checkpoint_id=path)
        assert_equal(plain, whole)
        # Everything, as Lightning consolidates it, and what is not sharded.
        if rank.number == 0:
            consolidated = _load_distributed_checkpoint(path)
            expected = {name: value for name, value in others.items() if not isinstance(value, DTensor)}
            assert_equal(consolidated["state_dict"], expected | whole["state_dict"])
            assert torch.equal(consolidated["state_dict"]["replica"], base)
            assert torch.equal(consolidated["state_dict"]["few rows"], torch.ones(1, 5))
            assert torch.equal(consolidated["state_dict"]["columns"], torch.arange(35.0).reshape(5, 7))
            assert_equal(consolidated["optimizer_0"], whole["optimizer_0"])
            assert_equal(
                {k: consolidated[k] for k in ("global_step", "rest")}, {"global_step": 3, "rest": torch.ones(2)}
            )
            manifest, _ = Storage().read_manifest(str(path))
            assert manifest is not None
            assert sorted(manifest.files) == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
            for name, record in manifest.files.items():
                assert record.size_bytes == (path / name).stat().st_size
                assert record.digest == Storage().read_digest(str(path / name), record.size_bytes)
        io.teardown()
        return visible(rank.root)


def test_every_kind_of_tensor_is_read_by_plain_dcp_and_consolidated(tmp_path: Path) -> None:
    assert values(kinds, tmp_path) == [["a.ckpt"]] * 2


def fsdp1(rank: Rank) -> None:
    with group():
        torch.manual_seed(0)
        model = FullyShardedDataParallel(
            nn.Sequential(nn.Linear(33, 65), nn.Linear(65, 1)), device_id=torch.device("cpu"), use_orig_params=True
        )
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(4, 33)).sum().backward()
        optimizer.step()
        with FullyShardedDataParallel.state_dict_type(
            model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)
        ):
            state = {
                "model": model.state_dict(),
                "optimizer_0": FullyShardedDataParallel.optim_state_dict(model, optimizer),
            }
        io = ft.FaultTolerantCheckpointIO()
        saved(io, state, rank.root / "a.ckpt")
        dcp.save(state, checkpoint_id=rank.root / "plain.ckpt")
        io.drain()
        assert not io.failed
        if rank.number == 0:
            torch.save({}, rank.root / "plain.ckpt" / "meta.pt")
            ours, plain = (_load_distributed_checkpoint(rank.root / f"{name}.ckpt") for name in ("a", "plain"))
            assert_equal(ours, plain)
            assert any(value.numel() > 1 for value in flat(plain).values() if isinstance(value, Tensor))
        io.teardown()


def test_fsdp1_state_is_what_plain_dcp_saves(tmp_path: Path) -> None:
    values(fsdp1, tmp_path)


# -- who writes what ---------------------------------------------------------------------------------------------


def shares(rank: Rank) -> Any:
    with group():
        state = {"model": {f"w{i}": torch.full((1000, 64), float(i)) for i in range(5)} | {"b": torch.ones(3)}}
        state["optimizer_0"] = {"state": {"w0": {"exp_avg": torch.zeros(1000, 64)}}, "param_groups": [{"lr": 0.1}]}
        io = ft.FaultTolerantCheckpointIO()
        io.fit_begins(require_weights_only=False)
        counted: list[Counter[str]] = []
        names = ("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list", "all_reduce")

        def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                thread = "main" if threading.current_thread() is threading.main_thread() else "writer"
                counted[-1][f"{thread} {name}"] += 1
                return function(*args, **kwargs)

            return call

        for name in names:
            setattr(dist, name, counting(name, getattr(dist, name)))
        for number in range(3):
            counted.append(Counter())
            saved(io, copy.deepcopy(state), rank.root / f"{number}.ckpt")
            io.drain()
        assert not io.failed
        state["model"]["new"] = torch.ones(2)
        counted.append(Counter())
        saved(io, state, rank.root / "3.ckpt")
        io.drain()
        assert io._sharding is not None
        planned = io._sharding.planned
        buffers = io.stager.plans.made
        held = sum(sum(plan.buffers._sizes) for plan in io.stager.plans._free)
        io.teardown()
        return counted, planned, buffers, held


def test_each_rank_copies_and_writes_its_share_and_plans_once(tmp_path: Path) -> None:
    found = values(shares, tmp_path, world_size=2)
    total = 6 * 1000 * 64 * 4
    sizes = [(tmp_path / "0.ckpt" / f"__{number}_0.distcp").stat().st_size for number in range(2)]
    assert all(abs(size - total / 2) < 20_000 for size in sizes)
    for counted, planned, buffers, held in found:
        again = {"main all_gather_object": 1, "writer gather_object": 2, "writer scatter_object_list": 1}
        again["writer broadcast_object_list"] = 1
        assert dict(counted[1]) == dict(counted[2]) == again
        planning = {"main gather_object": 1, "main scatter_object_list": 1}
        assert dict(counted[0]) == dict(counted[3]) == again | planning
        assert planned == 2
        assert buffers == 1
        assert abs(held - total / 2) < 20_000 + 0.05 * total


def alone(rank: Rank) -> Any:
    state = {"model": {"w": torch.arange(6.0)}, "optimizer_0": {"state": {}, "param_groups": [{"lr": 0.1}]}}
    io = ft.FaultTolerantCheckpointIO()
    saved(io, state, rank.root / "a.ckpt")
    io.drain()
    assert not io.failed
    read = zeroed(state)
    dcp.load(read, checkpoint_id=rank.root / "a.ckpt", no_dist=True)
    assert_equal(read, state)
    io.teardown()
    io.save_sharded(state, {"global_step": 4}, rank.root / "final.ckpt")  # as the last line of a script: durable now
    return visible(rank.root)


def test_one_process_without_a_group(tmp_path: Path) -> None:
    assert values(alone, tmp_path, world_size=1) == [["a.ckpt", "final.ckpt"]]


# -- a rank fails ------------------------------------------------------------------------------------------------


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise MemoryError("no room for a copy")


def fails_at_open(rank: Rank, of: int) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    if rank.number == of:
        Storage.open_directory = refuse  # type: ignore[method-assign]


def fails_in(method: str, name: str) -> Callable[[Rank, int], None]:
    def install(rank: Rank, of: int) -> None:
        if rank.number != of:
            return
        opened = directory.DirectoryAttempt.open_file

        def open_file(self: Any, which: str, *args: Any) -> Any:
            file = opened(self, which, *args)

            def broken(*args: Any) -> Any:
                raise OSError(5, f"Input/output error in {which}")

            if which == name:
                setattr(file, method, broken)
            return file

        directory.DirectoryAttempt.open_file = open_file  # type: ignore[method-assign]

    return install


FAULTS: dict[str, tuple[Callable[[Rank, int], None] | None, int]] = {
    "open 1": (fails_at_open, 1),
    "open 0": (fails_at_open, 0),
    "write 1": (fails_in("write", "__1_0.distcp"), 1),
    "finish 1": (fails_in("finish", "__1_0.distcp"), 1),
    "write 0": (fails_in("write", "__0_0.distcp"), 0),
    "metadata": (fails_in("write", ".metadata"), 0),
    "meta": (fails_in("finish", "meta.pt"), 0),
}


def failures(rank: Rank) -> Any:
    with group():
        trained = Trained()
        io = ft.FaultTolerantCheckpointIO(retries=0)
        io.fit_begins(require_weights_only=False)
        found = {}
        kept = Storage.open_directory, directory.DirectoryAttempt.open_file
        for number, (name, (install, of)) in enumerate(FAULTS.items()):
            assert install is not None
            install(rank, of)
            saved(io, trained.state(), rank.root / f"bad{number}.ckpt")
            io.drain()
            Storage.open_directory, directory.DirectoryAttempt.open_file = kept  # type: ignore[method-assign]
            assert io.failed
            failure = io.take_failure()
            assert failure is not None
            dist.barrier()  # rank 0 has cleared up
            found[name] = (str(failure.error), failure.in_a_row, visible(rank.root))
            dist.barrier()
        for name, state in (
            ("staging 1", {"model": {"object": Uncopyable() if rank.number == 1 else 1, "only": 1}}),
            ("planning 1", {"model": {"a.b": 1, "a": {"b": 2}} if rank.number == 1 else {"a": 1}}),
            ("holes", {"model": {"w": distribute_tensor(torch.ones(4), trained.mesh, [Shard(0)])}}),
        ):
            if name == "staging 1" and rank.number == 0:
                state["model"].pop("object")  # so that it is written by rank 1
            if name == "holes" and rank.number == 1:
                state["model"] = {}
            saved(io, state, rank.root / "bad.ckpt")
            io.drain()
            failure = io.take_failure()
            assert failure is not None
            dist.barrier()  # rank 0 has cleared up
            found[name] = (str(failure.error), failure.in_a_row, visible(rank.root))
            dist.barrier()
        saved(io, trained.state(), rank.root / "good.ckpt")
        io.drain()
        assert not io.failed
        assert io.writer.failures_in_a_row == 0
        dist.barrier()
        found["good"] = ("", 0, visible(rank.root))
        io.teardown()
        return found


def test_e6_one_rank_fails_and_all_have_the_same_error_and_nothing_is_visible(tmp_path: Path) -> None:
    first, second = values(failures, tmp_path)
    assert first == second
    for number, name in enumerate([*FAULTS, "staging 1", "planning 1", "holes"], 1):
        error, in_a_row, names = first[name]
        assert in_a_row == number
        assert names == []
        assert "was not saved" in error
    assert "rank 1 failed: OSError: [Errno 28] No space left on device" in first["open 1"][0]
    assert "rank 0 failed: OSError: [Errno 28] No space left on device" in first["open 0"][0]
    assert "rank 1 failed: OSError: [Errno 5] Input/output error in __1_0.distcp" in first["finish 1"][0]
    assert "rank 0 failed: OSError: [Errno 5] Input/output error in .metadata" in first["metadata"][0]
    assert "rank 1 failed: MemoryError: no room for a copy" in first["staging 1"][0]
    assert "rank 1: ValueError: duplicated flatten key model.a.b" in first["planning 1"][0]
    assert "invalid fill tensor-volume" in first["holes"][0]
    assert first["good"][2] == ["good.ckpt"]


# -- a rank is killed --------------------------------------------------------------------------------------------


def killed(rank: Rank, point: str) -> Any:
    """Rank and point: who dies, and when; the other one says what it has seen."""
    dist.init_process_group("gloo")
    trained = Trained()
    io = ft.FaultTolerantCheckpointIO(retries=0)
    io.fit_begins(require_weights_only=False)
    saved(io, trained.state(), rank.root / "first.ckpt")
    io.drain()
    finish = directory.FileAttempt.finish
    commit = directory.DirectoryAttempt.commit

    def finish_(self: Any) -> Any:
        if point == "1 before 0 wrote" and rank.number == 1:
            rank.tell("dead")
            rank.die()
        if point == "1 before 0 wrote" and rank.number == 0:
            rank.wait_for("dead")
        if point == "1 after 0 wrote" and rank.number == 1:
            rank.wait_for("written")
            rank.die()
        record = finish(self)
        rank.tell("written" if rank.number == 0 else "other")
        return record

    def commit_(self: Any, manifest: Any) -> Any:
        if point == "1 before the commit":
            rank.tell("now")
            rank.wait_for("dying")
        if point == "0 before the commit":
            rank.die()
        made = commit(self, manifest)
        if point == "0 after the commit":
            rank.die()
        return made

    directory.FileAttempt.finish = finish_  # type: ignore[method-assign]
    directory.DirectoryAttempt.commit = commit_  # type: ignore[method-assign]
    saved(io, trained.state(), rank.root / "second.ckpt")
    if point == "1 before the commit" and rank.number == 1:
        rank.wait_for("now")
        rank.tell("dying")
        rank.die()
    io.drain()
    failure = io.take_failure()
    io.teardown()  # does not hang either
    return None if failure is None else str(failure.error)


@pytest.mark.parametrize(
    ("point", "names"),
    [
        ("1 before 0 wrote", [["first.ckpt"]]),
        ("1 after 0 wrote", [["first.ckpt"]]),
        ("1 before the commit", [["first.ckpt", "second.ckpt"]]),
        ("0 before the commit", [["first.ckpt"]]),
        ("0 after the commit", [["first.ckpt", "second.ckpt"]]),
    ],
)
def test_e6_a_rank_is_killed_and_the_save_is_complete_or_invisible(
    point: str, names: list[list[str]], tmp_path: Path
) -> None:
    outcomes = run(killed, tmp_path, point)
    dead, other = (outcomes[int(point[0])], outcomes[1 - int(point[0])])
    assert dead.exit_code == -signal.SIGKILL
    assert other.exit_code == 0, other.error or "it hangs"
    complete = [name for name in visible(tmp_path) if not name.startswith(".")]
    assert complete in names
    if point == "1 before the commit":
        assert other.value is None  # rank 0 has committed it: no failure to report
    else:
        assert "the connection to the other ranks was lost" in other.value
    for name in complete:
        assert _load_distributed_checkpoint(tmp_path / name)["rest"].tolist() == [1, 1]


# -- beside training ---------------------------------------------------------------------------------------------

ROUNDS = 200


def rounds(rank: Rank) -> Any:
    with group():
        io = ft.FaultTolerantCheckpointIO()
        io.fit_begins(require_weights_only=False)
        committed = []
        events.observe(lambda event: committed.append(event) if isinstance(event, events.Committed) else None)
        weights, total = torch.zeros(1000), 0.0
        for number in range(ROUNDS):
            summed = torch.full((8,), float(rank.number + number))
            pending = dist.all_reduce(summed, async_op=True)
            weights += 1
            saved(io, {"model": {"w": weights, "mine": torch.ones(number % 3)}}, rank.root / f"{number}.ckpt")
            pending.wait()
            dist.all_reduce(summed)
            total += summed[0].item()
            if number >= 2 and rank.number == 0:
                io.remove_checkpoint(rank.root / f"{number - 2}.ckpt")
        io.drain()
        assert not io.failed
        io.teardown()
        return len(committed), total


def test_f3_two_hundred_saves_between_all_reduces_do_not_hang(tmp_path: Path) -> None:
    first, second = values(rounds, tmp_path)
    assert first[0] == ROUNDS
    assert second[0] == 0  # only rank 0 tells
    assert first[1] == second[1]
    for number in (ROUNDS - 2, ROUNDS - 1):
        assert (_load_distributed_checkpoint(tmp_path / f"{number}.ckpt")["model"]["w"] == number + 1).all()


def late_copies(rank: Rank, foreach: bool) -> Any:
    with group():
        trained = Trained(foreach)
        io = ft.FaultTolerantCheckpointIO()
        io.fit_begins(require_weights_only=False)
        open_directory = Storage.open_directory
        go_on = threading.Event()

        def later(self: Any, *args: Any, **kwargs: Any) -> Any:
            go_on.wait()
            return open_directory(self, *args, **kwargs)

        Storage.open_directory = later  # type: ignore[method-assign]
        before = copy.deepcopy(trained.whole())
        trained.optimizer.register_step_pre_hook(lambda *args: io.before_optimizer_step())
        saved(io, trained.state(), rank.root / "a.ckpt", late=trained.late())
        watched = len(io.stager._pending._watched) if io.stager._pending is not None else 0
        for _ in range(3):
            trained.step()
        go_on.set()
        io.drain()
        assert not io.failed
        if rank.number == 0:
            assert_equal(_load_distributed_checkpoint(rank.root / "a.ckpt"), before)
        # A parameter of rank 1 is changed while its copy may still be taken.
        saved(io, trained.state(), rank.root / "b.ckpt", late=trained.late())
        if rank.number == 1:
            with torch.no_grad():
                trained.model[0].weight.mul_(2)
        io.drain()
        repeat = io.take_repeat()
        assert not io.failed
        saved(io, trained.state(), rank.root / "c.ckpt", late=trained.late())
        io.drain()
        assert not io.failed
        dist.barrier()
        io.teardown()
        return watched, repeat, visible(rank.root)


@pytest.mark.parametrize("foreach", [False, True])
def test_late_copies_are_of_the_step_and_a_wrong_one_on_one_rank_is_nobodys_checkpoint(
    foreach: bool, tmp_path: Path
) -> None:
    first, second = values(late_copies, tmp_path, foreach)
    assert first[0] > 0
    assert second[0] > 0
    assert (first[1], second[1]) == (False, True)
    assert first[2] == second[2] == ["a.ckpt", "c.ckpt"]


def test_errors_of_copies_travel_between_ranks() -> None:
    import pickle

    assert str(pickle.loads(pickle.dumps(SnapshotError("w was changed")))) == "w was changed"
