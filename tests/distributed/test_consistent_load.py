"""What the ranks load is the same, or an error on all of them; and one of them may read it for all."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist

import lightning_ft as ft
from lightning_ft._names import KEY
from lightning_ft._ranks.dist import Ranks
from lightning_ft._restart import broadcast
from lightning_ft._restart.choose import choose_for_all
from lightning_ft._restart.consistent import require_same
from lightning_ft._restart.fetched import Fetched
from lightning_ft._restart.loading import Loading
from lightning_ft._restart.shared_verification import SharedVerification
from lightning_ft._state.digest import digest
from lightning_ft.storage import Storage
from lightning_ft.testing import assert_resume_exact
from tests import directories
from tests.distributed.test_failures import start
from tests.ranks import Rank, values
from tests.stores import counted
from tests.trainer import scenarios as s

pytestmark = pytest.mark.distributed

FILES = {"__0_0.distcp": b"0" * 200, "__1_0.distcp": b"1" * 150, ".metadata": b"2" * 20, "meta.pt": b"3" * 10}


# -- two processes, no trainer -----------------------------------------------------------------------------------


def outcome(call: Callable[[], Any]) -> Any:
    """A value, or an error as text."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def fails(error: Exception) -> Any:
    raise error


class FailsToBuild:
    """Cannot be unpickled by rank 1."""

    def __reduce__(self) -> Any:
        return build, ()


def build() -> Any:
    if dist.is_initialized() and dist.get_rank() == 1:
        raise MemoryError("no room for it here")
    return FailsToBuild()


def checkpoint(step: int = 1) -> dict[str, Any]:
    weight = torch.arange(4_200_000.0).reshape(-1, 10)  # a little more than blocks of 4 MiB, in which stores are read
    biases = {f"bias{i}": torch.full((i % 7,), float(i)) for i in range(2_000)}
    return {
        "global_step": step, "epoch": 0,
        "state_dict": {"w": weight, "tied": weight, "half": weight[:3].half(), **biases},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(300, 10)}}, "param_groups": []}],
        KEY: {"generation": f"generation-{step}", "run_id": "run"},
    }  # fmt: skip


def use(rank: int, directory: Path) -> dict[str, Any]:
    """What both ranks do, in the same order; each returns what it saw."""
    ranks = Ranks(timeout=timedelta(seconds=60))
    seen: dict[str, Any] = {}

    def on(failing: int, error: Exception) -> Callable[[], Any]:
        return lambda: fails(error) if rank == failing else f"done by {rank}"

    seen["together"] = outcome(lambda: ranks.together(lambda: rank))
    seen["ours"] = outcome(lambda: ranks.together(on(1, ft.RestoreError("not here"))))
    seen["foreign"] = outcome(lambda: ranks.together(on(1, KeyError("a bug"))))

    asked: list[Any] = []

    def decision(ask: Callable[[str], list[str]]) -> Any:
        return [ask("first"), outcome(lambda: ask("bad")), ask("last")]

    def help_with(question: str) -> str:
        asked.append(question)
        if question == "bad" and rank == 1:
            raise ft.StorageError("it does not answer")
        return f"{question} by {rank}"

    seen["helped"] = ranks.decide_with_help(decision, help_with)
    seen["asked"] = asked
    seen["undecided"] = outcome(
        lambda: ranks.decide_with_help(lambda ask: fails(ft.ConfigurationError("no")), help_with)
    )

    # one rank loads for both
    broadcast.BUCKET_BYTES, broadcast.PIECE_BYTES = 2_000, 1_000_000
    sent: list[int] = []
    filling = Ranks.fill_from_zero

    def fill(self: Ranks, tensor: torch.Tensor) -> None:
        sent.append(tensor.nbytes)
        filling(self, tensor)

    Ranks.fill_from_zero = fill  # type: ignore[method-assign]
    calls: list[int] = []

    def load() -> Any:
        calls.append(rank)
        return checkpoint()

    loaded = broadcast.load_on_zero(ranks, load)
    seen["calls"], seen["sent"] = calls, list(sent)
    seen["equal"] = digest(loaded) == digest(checkpoint())
    seen["shared"] = loaded["state_dict"]["w"] is loaded["state_dict"]["tied"]
    for name, error in {"corrupt": ft.CorruptCheckpointError("/a", "damaged"), "gone": FileNotFoundError("/b")}.items():
        seen[name] = outcome(partial(broadcast.load_on_zero, ranks, partial(fails, error)))
    seen["unsendable"] = outcome(lambda: broadcast.load_on_zero(ranks, lambda: {"a": lambda: None}))
    seen["not-built"] = outcome(lambda: broadcast.load_on_zero(ranks, lambda: {"a": FailsToBuild()}))

    # through the plugin, from a store
    url = f"counted://{directory}/run/a.ckpt"
    if rank == 0:
        writer = ft.FaultTolerantCheckpointIO(async_save=False)
        writer.save_checkpoint(checkpoint(), url)
        writer.teardown()
    dist.barrier()
    for who in ("each", "broadcast"):
        plugin = ft.FaultTolerantCheckpointIO(load=who)  # type: ignore[arg-type]
        os.environ["LOCAL_RANK"] = f"{who} {rank}"
        seen[f"plugin {who}"] = digest(plugin.load_checkpoint(url)) == digest(checkpoint())
        seen[f"missing {who}"] = outcome(lambda plugin=plugin: plugin.load_checkpoint(f"{url}.not"))  # type: ignore[misc]

    # a directory is verified by both
    place = directory / "directories"
    if rank == 0:
        for step in (1, 2):
            directories.save(Storage(), f"{place}/step={step:08}.ckpt", FILES, step)
    dist.barrier()
    for name in ("whole", "damaged"):
        if rank == 0 and name == "damaged":
            with open(f"{place}/step=00000002.ckpt/__1_0.distcp", "r+b") as file:
                file.write(b"other")
        dist.barrier()
        read: list[tuple[str, str]] = []
        comparing = Storage.compare

        def compare(self: Storage, path: str, manifest: Any, names: Any = None) -> None:
            read.extend((os.path.basename(path), name) for name in (manifest.files if names is None else names))  # noqa: B023
            comparing(self, path, manifest, names)  # noqa: B023

        Storage.compare = compare  # type: ignore[method-assign]
        sharing = SharedVerification(rank, 2, None)
        chosen = choose_for_all(ranks, str(place), "full", None, None, Fetched(), sharing, None)
        Storage.compare = comparing  # type: ignore[method-assign]
        seen[f"chosen {name}"] = os.path.basename(str(chosen[0])), chosen[1], sorted(read), len(sharing.took_part_in)

    # what was loaded is compared
    a, b = checkpoint(), checkpoint(2)
    bit = checkpoint()
    bit["optimizer_states"][0]["state"][0]["exp_avg"][7, 3] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    pairs = {"same": (a, checkpoint()), "none": (None, None), "one": (a, None), "other": (None, a), "step": (a, b)}
    for name, pair in {**pairs, "bit": (a, bit), "more": (a, {**a, "extra": 1})}.items():
        seen[f"compare {name}"] = outcome(partial(require_same, ranks, f"/{rank}/x.ckpt", pair[rank]))
    seen["in step"] = ranks.all_gather(rank)
    ranks.close()
    return seen


def main(rank: Rank) -> dict[str, Any]:
    dist.init_process_group("gloo", rank=rank.number, world_size=rank.world_size, timeout=timedelta(seconds=60))
    seen = use(rank.number, rank.root)
    dist.destroy_process_group()
    return seen


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def seen(directory: Path) -> list[dict[str, Any]]:
    return values(main, directory)


def test_what_one_rank_cannot_do_fails_on_all(seen: list[dict[str, Any]]) -> None:
    assert [x["together"] for x in seen] == [0, 1]
    assert [x["ours"] for x in seen] == ["RestoreError: not here"] * 2
    assert [x["foreign"] for x in seen] == ["RankFailure: rank 1 failed: KeyError: 'a bug'", "KeyError: 'a bug'"]


def test_a_decision_with_help(seen: list[dict[str, Any]]) -> None:
    expected = [["first by 0", "first by 1"], "StorageError: it does not answer", ["last by 0", "last by 1"]]
    assert [x["helped"] for x in seen] == [expected] * 2
    assert [x["asked"] for x in seen] == [["first", "bad", "last"]] * 2
    assert [x["undecided"] for x in seen] == ["ConfigurationError: no"] * 2


def test_one_rank_loads_for_both(seen: list[dict[str, Any]]) -> None:
    assert [x["calls"] for x in seen] == [[0], []]
    assert all(x["equal"] and x["shared"] for x in seen)
    for x in seen:
        # The data once, in pieces of bounded size, and 2000 small tensors in a few of them.
        assert sum(x["sent"]) == sum(_data_bytes(checkpoint()).values())
        assert max(x["sent"]) == 1_000_000
        assert len(x["sent"]) < 50


def _data_bytes(value: Any) -> dict[int, int]:
    found: dict[int, int] = {}
    if isinstance(value, torch.Tensor):
        found[id(value)] = value.untyped_storage().nbytes()
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        found.update(_data_bytes(item))
    return found


def test_errors_of_the_rank_that_loads_are_raised_on_all(seen: list[dict[str, Any]]) -> None:
    assert [x["corrupt"] for x in seen] == ["CorruptCheckpointError: /a: damaged"] * 2
    assert [x["gone"] for x in seen] == ["FileNotFoundError: /b", "RankFailure: rank 0 failed: FileNotFoundError: /b"]
    assert all("RestoreError: the checkpoint cannot be sent" in x["unsendable"] for x in seen)
    why = "MemoryError: no room for it here"
    assert [x["not-built"] for x in seen] == [f"RankFailure: rank 1 failed: {why}", why]


def test_the_store_is_read_once_with_broadcast(seen: list[dict[str, Any]], directory: Path) -> None:
    assert all(x["plugin each"] and x["plugin broadcast"] for x in seen)
    assert all("checkpoint not found" in x[f"missing {who}"] for who in ("each", "broadcast") for x in seen)
    size_bytes = (directory / "run" / "a.ckpt").stat().st_size
    found = {who: n for (_, who), n in counted.read_bytes(directory, "a.ckpt").items()}
    assert set(found) == {"each 0", "each 1", "broadcast 0"}
    assert all(size_bytes <= n < 1.5 * size_bytes for n in found.values())  # and the tail, for the manifest


def test_a_directory_is_verified_by_both_ranks_each_file_once(seen: list[dict[str, Any]]) -> None:
    first, second = "step=00000001.ckpt", "step=00000002.ckpt"
    shares = [["__0_0.distcp"], [".metadata", "__1_0.distcp", "meta.pt"]]
    for x, share in zip(seen, shares, strict=True):
        assert x["chosen whole"] == (second, True, [(second, name) for name in share], 1)
        # The next one is taken on both, when one rank finds damage in its share.
        assert x["chosen damaged"] == (first, True, [(d, name) for d in (first, second) for name in share], 2)


def test_different_checkpoints_are_an_error_on_all_ranks(seen: list[dict[str, Any]]) -> None:
    assert [x["in step"] for x in seen] == [[0, 1]] * 2
    for name in ("same", "none"):
        assert [x[f"compare {name}"] for x in seen] == [None, None]
    start = "RestoreError: the ranks have loaded different checkpoints: 1 of 2 have not what rank 0 has loaded"
    expected = {
        "one": "(/0/x.ckpt): rank 1: nothing.",
        "other": "(nothing): rank 1: /1/x.ckpt.",
        "step": "rank 1: generation generation-2 instead of generation-1 (/1/x.ckpt).",
        "bit": "rank 1: other optimizer_states (/1/x.ckpt).",
        "more": "rank 1: other extra (/1/x.ckpt).",
    }
    for name, text in expected.items():
        for x in seen:
            assert x[f"compare {name}"].startswith(start), name
            assert text in x[f"compare {name}"], name


# -- whole runs --------------------------------------------------------------------------------------------------


def from_store(dirpath: str, load: Any = "broadcast", **kwargs: Any) -> L.Trainer:
    io = ft.FaultTolerantCheckpointIO(async_save=False, load=load)
    return s.ddp(f"counted://{dirpath}", every=2, max_epochs=2, plugins=[io], ft_args={"keep_last": -1}, **kwargs)


class Large(s.Net):
    """So large that what else is read of a file does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("large", torch.ones(4_200_000))


class LoadsAnother(Large):
    """Rank 1 loads an older checkpoint, or one that was changed on the way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_callbacks(self) -> Any:
        if os.environ["LOCAL_RANK"] == "1":
            loading = Loading.load

            def load(self_: Loading, path: str, *args: Any) -> Any:
                if self.how == "error":
                    raise PermissionError(13, "Permission denied", path)
                older = ft.list_checkpoints(os.path.dirname(path))[1].path
                found = loading(self_, older if self.how == "older" else path, *args)
                if self.how == "bit":
                    found["state_dict"]["net.0.bias"][0] += 1
                return found

            Loading.load = load  # type: ignore[method-assign]
        return []


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``checkpoints`` of two ranks, of a run that was killed and restarted, exactly."""
    root = tmp_path_factory.mktemp("exact")
    assert_resume_exact(from_store, Large, s.shuffled, kill_at=5, world_size=2, root=root)
    return root / "restarted"


def test_m1_a_restart_reads_the_store_once(saved: Path) -> None:
    name = "step=00000004.ckpt"
    size_bytes = (saved / "checkpoints" / name).stat().st_size
    readers = counted.read_bytes(saved, name)
    # Chosen, verified and loaded from one fetch. Of the tails, which tell what a file is, every start reads some.
    assert size_bytes <= sum(n for (_, rank), n in readers.items() if rank == "0") < 1.5 * size_bytes
    assert not [n for (_, rank), n in readers.items() if rank == "1"]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("older", "RestoreError: the ranks have loaded different checkpoints: 1 of 2 .*rank 1: generation "),
        ("bit", "RestoreError: the ranks have loaded different checkpoints: 1 of 2 .*rank 1: other state_dict"),
        ("error", "PermissionError: .*Permission denied"),
    ],
)
def test_d10_ranks_that_load_different_checkpoints(how: str, why: str, saved: Path, tmp_path: Path) -> None:
    """Nothing is trained, and both ranks say why."""
    (tmp_path / "checkpoints").symlink_to(saved / "checkpoints")
    errors = start(tmp_path, partial(LoadsAnother, how), partial(from_store, load="each"))
    for error in errors:
        assert re.search(why, error), error
    assert not list(tmp_path.glob("*.jsonl"))
