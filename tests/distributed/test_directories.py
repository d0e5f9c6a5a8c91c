"""What the ranks see of the directories: the same one, or an error before the first step that names the ranks."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest

import lightning_ft as ft
from lightning_ft import events, testing
from lightning_ft._names import parse_leftover
from lightning_ft.storage import Storage
from lightning_ft.testing import assert_resume_exact
from tests.crash import harness
from tests.crash.harness import read_log
from tests.distributed.test_failures import start
from tests.trainer import scenarios as s

pytestmark = pytest.mark.distributed

# Each rank has a working directory of its own here, so this name is another directory on every rank, as a path on
# a local disk is on every machine.
OWN = "/proc/self/cwd"


def on_a_machine_of_its_own(dirpath: str) -> None:
    machine = f"{dirpath}-machine{os.environ.get('LOCAL_RANK', '0')}"
    os.makedirs(machine, exist_ok=True)
    os.chdir(machine)


def not_shared(dirpath: str) -> L.Trainer:
    on_a_machine_of_its_own(dirpath)
    return s.ddp(f"{OWN}/run", every=1)


def shared_in_memory(dirpath: str) -> L.Trainer:
    return s.ddp("memory://run", every=1)


def no_access(dirpath: str) -> L.Trainer:
    """Rank 1 may not read what rank 0 writes."""
    if os.environ["LOCAL_RANK"] == "1":
        opened = Storage.open_read

        def refuse(self: Storage, path: str) -> Any:
            if dirpath in path:
                raise PermissionError(13, "Permission denied", path)
            return opened(self, path)

        Storage.open_read = refuse  # type: ignore[method-assign]
    return s.ddp(dirpath, every=1)


@pytest.mark.parametrize(
    ("make_trainer", "why"),
    [
        (not_shared, "rank 1: another directory of that name"),
        (shared_in_memory, "rank 1: another directory of that name"),
        (no_access, "rank 1: PermissionError: "),
    ],
    ids=["another-directory", "memory", "no-access"],
)
def test_a_directory_that_a_rank_does_not_see(make_trainer: object, why: str, tmp_path: Path) -> None:
    errors = start(tmp_path, s.Net, make_trainer)
    for expected in ("ConfigurationError: dirpath=", "1 of 2 ranks do not see what rank 0 writes", why):
        assert all(expected in error for error in errors)
    # Nothing was trained, and nothing is left, on whichever machine.
    assert not list(tmp_path.glob("*.jsonl"))
    left = [path.name for path in tmp_path.rglob("*") if path.is_file() and path.parent.name in ("run", "checkpoints")]
    assert left in ([".lightning_ft.lock"], [])


def two_tiers(dirpath: str, machines: bool) -> L.Trainer:
    if machines:
        on_a_machine_of_its_own(dirpath)
    harness.log_events(f"{dirpath}.events")
    return s.ddp(
        dirpath, every=3, max_epochs=2, plugins=[ft.FaultTolerantCheckpointIO(async_save=False)],
        ft_args={"local_dirpath": f"{OWN}/local" if machines else f"{dirpath}-local", "local_every_n_train_steps": 1},
    )  # fmt: skip


@pytest.mark.parametrize("machines", [False, True], ids=["one-machine", "two-machines"])
def test_a_local_checkpoint_that_not_every_rank_sees_is_passed_over(machines: bool, tmp_path: Path) -> None:
    """On one machine the newest is the local one; on two the restart is from the directory that they share."""
    compared = assert_resume_exact(
        partial(two_tiers, machines=machines), s.Net, s.shuffled, kill_at=5, world_size=2, root=tmp_path
    )
    resumed = [e for e in read_log(f"{compared.dirpath}.events") if e["event"] == "Resumed"]
    assert {e["step"] for e in resumed} == {3 if machines else 4}
    assert {os.path.dirname(e["path"]) == compared.dirpath for e in resumed} == {machines}
    for place in (compared.dirpath, f"{compared.dirpath}-machine0/local" if machines else f"{compared.dirpath}-local"):
        info = ft.list_checkpoints(place)[0]
        assert info.manifest is not None
        assert info.manifest.step == compared.steps
        assert not [name for name in os.listdir(place) if parse_leftover(name)]


def only_local(dirpath: str) -> L.Trainer:
    on_a_machine_of_its_own(dirpath)
    return s.ddp(
        dirpath, every=100, max_epochs=2,
        ft_args={"local_dirpath": f"{OWN}/local", "local_every_n_train_steps": 1, "save_on_train_end": False},
    )  # fmt: skip


def test_no_silent_fresh_start_if_the_only_ones_are_on_one_machine(tmp_path: Path) -> None:
    # In the fourth batch: the save of the third step has waited for that of the first to be durable.
    with pytest.raises(AssertionError, match="not seen by rank 1, and there is no other in dirpath"):
        assert_resume_exact(only_local, s.Net, s.shuffled, kill_at=4, world_size=2, root=tmp_path)


class UploadsFail(s.Net):
    """The store of rank 0 takes nothing from the fourth step on."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_rank == 0 and self.trainer.global_step == 3:

            def refuse(event: events.Event) -> None:
                if isinstance(event, events.UploadStarted):
                    raise PermissionError(13, "the store says no", event.path)

            events.observe(refuse)


def both_every_step(dirpath: str) -> L.Trainer:
    return s.ddp(dirpath, every=1, ft_args={"local_dirpath": f"{dirpath}-local"})


def test_f2_a_failed_upload_is_known_to_both_ranks_at_the_next_step(tmp_path: Path) -> None:
    errors = start(tmp_path, UploadsFail, both_every_step)
    assert all("SaveError" in error and "was not uploaded to" in error for error in errors)
    assert all("the store says no" in error for error in errors)
    steps = [len(testing._read(tmp_path, rank)) for rank in range(2)]
    assert steps[0] == steps[1]
