"""What plain Lightning does with sharded checkpoints: that the tests of this directory can fail."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_ft._state.digest import digest
from lightning_ft.testing import assert_resume_exact
from tests.sharded import job, processes
from tests.trainer import cases as c

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]


KINDS = [kind if kind.endswith("sharded") else pytest.param(kind, marks=pytest.mark.slow) for kind in job.KINDS]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_not_exact(kind: str, tmp_path: Path) -> None:
    """Killed in the first step of the second epoch: data and weights are right, and the random state is lost."""
    make_trainer = partial(job.plain_trainer, kind=kind, every=4, val_check_interval=None)
    with pytest.raises(AssertionError, match=r"step 5( on rank 1)?: (output|weights) differs: .* restarted"):
        assert_resume_exact(make_trainer, job.Net, partial(c.quiet_data, 32), kill_at=5, root=tmp_path, world_size=2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_recorder_sees_equal_runs_as_equal(kind: str, tmp_path: Path) -> None:
    """Killed in the first step, before anything was saved: what remains is two runs that do the same."""
    make_trainer = partial(job.plain_trainer, kind=kind)
    compared = assert_resume_exact(make_trainer, job.Net, job.data, kill_at="1@1", root=tmp_path, world_size=2)
    assert compared.steps == 12


def rank_1_dies_in_save(number: int) -> None:
    """Before it has written its shards."""
    write_data = FileSystemWriter.write_data
    saves = []

    def write(self: Any, *args: Any) -> Any:
        saves.append(self)
        if job.rank() == 1 and len(saves) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return write_data(self, *args)

    FileSystemWriter.write_data = write  # type: ignore[method-assign]


def dies_once(dirpath: str, kind: str) -> L.Trainer:
    marker = Path(f"{dirpath}.dies")
    if job.rank() == 1 and marker.parent.name == "restarted" and not marker.exists():
        marker.touch()
        rank_1_dies_in_save(2)  # of the first step's two: under its own name, and as ``last``
    return job.plain_trainer(dirpath, kind)


@pytest.mark.parametrize("kind", ["fsdp-sharded", "fsdp2-sharded"])
def test_e6_it_is_not_atomic(kind: str, tmp_path: Path) -> None:
    """A rank that is killed during a save leaves a directory from which no run can be continued."""
    with pytest.raises(AssertionError, match="a run failed by itself"):
        assert_resume_exact(partial(dies_once, kind=kind), job.Net, job.data, kill_at=99, root=tmp_path, world_size=2)
    assert (tmp_path / "restarted" / "checkpoints" / "last.ckpt").is_dir()


class SavesBoth(Callback):
    """After steps 2 and 4, each time under its own name and then as ``last``."""

    def __init__(self, dirpath: str) -> None:
        self.dirpath = dirpath

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step in (2, 4):
            for name in (str(trainer.global_step), "last"):
                trainer.save_checkpoint(f"{self.dirpath}/{name}.ckpt")


def saved_over(dirpath: str, kind: str) -> None:
    rank_1_dies_in_save(4)
    make = partial(SavesBoth, dirpath)
    job.plain_trainer(f"{dirpath}/others", kind, callbacks=(make,), every=100).fit(job.Net(), *job.data())


def flat(path: Path) -> dict[str, Any]:
    file = path.with_suffix(".pt")
    dcp_to_torch_save(path, file)
    return dict(flatten_state_dict(torch.load(file, weights_only=True))[0])


@pytest.mark.parametrize("kind", ["fsdp-sharded", "fsdp2-sharded"])
def test_e6_it_mixes_two_steps(kind: str, tmp_path: Path) -> None:
    """A rank that is killed while an older save is replaced leaves half of each, and nothing tells."""
    ended = processes.start(2, saved_over, str(tmp_path), kind)
    assert ended[1].exit_code == -signal.SIGKILL
    states = {name: flat(tmp_path / f"{name}.ckpt") for name in ("2", "4", "last")}
    of_step = {
        name: {step for step in ("2", "4") if digest(value) == digest(states[step][name])}
        for name, value in states["last"].items()
    }
    weights = [steps for name, steps in of_step.items() if "net.0.weight" in name]
    assert set() in weights, of_step


def saved(dirpath: str, kind: str, size: int) -> None:
    trainer = job.plain_trainer(dirpath, kind, size, max_steps=2)
    trainer.fit(job.Net(), *job.data())
    trainer.save_checkpoint(f"{dirpath}/x.ckpt")


@pytest.mark.parametrize("kind", ["fsdp-sharded", "fsdp2-sharded"])
def test_e10_a_shard_of_an_older_save_stays(kind: str, tmp_path: Path) -> None:
    """Two ranks, then one: the shard of the second rank is still in the directory that one rank has written."""
    for size in (2, 1):
        processes.run(size, saved, str(tmp_path), kind, size)
    assert {p.name for p in (tmp_path / "x.ckpt").glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
