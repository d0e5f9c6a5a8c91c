"""SIGKILL while a run saves to a local directory and uploads from there: restarts are exact, and nothing is lost."""

from __future__ import annotations

import os
import random
import shutil
from functools import partial
from pathlib import Path

import lightning as L
import pytest

import lightning_ft as ft
from lightning_ft import _names, events
from lightning_ft._history.event_file import DIRECTORY as EVENTS
from lightning_ft._names import parse_leftover
from lightning_ft.testing import assert_resume_exact
from tests.crash import harness
from tests.crash.harness import read_log
from tests.trainer import scenarios as s

LOCAL_KEEP, KEEP = 1, 2


def local_of(dirpath: str) -> str:
    return f"{dirpath}-local"


def check(dirpath: str) -> None:
    """After a kill at any moment both directories are in order, and nothing that had been committed is lost.

    Raises:
        AssertionError: They are not.
    """
    log = read_log(f"{dirpath}.events")
    broken, steps = {}, {}
    for place in (dirpath, local_of(dirpath)):
        names = os.listdir(place) if os.path.exists(place) else []
        files = [name for name in names if name.endswith(".ckpt") and not parse_leftover(name)]
        known = [n for n in names if parse_leftover(n) or n.startswith(".lightning_ft.") or n == EVENTS]
        strange = set(names) - set(files) - set(known)
        assert not strange, f"nobody would ever remove {strange}"
        found = {name: ft.verify(f"{place}/{name}") for name in files}
        broken |= {f"{place}/{name}": info.problem for name, info in found.items() if info.problem is not None}
        steps[place] = sorted(info.manifest.step for info in found.values() if info.manifest is not None)
        committed = {e["step"] for e in log if e["event"] == "Committed" and os.path.dirname(e["path"]) == place}
        keep = KEEP if place == dirpath else LOCAL_KEEP
        assert len(files) >= min(keep, len(committed)), f"{place}: {committed} were committed, {files} are left"
        newest = max(committed, default=0)
        assert max(steps[place], default=0) >= newest, f"{place}: step {newest} was committed, {files} are left"
    assert not broken, f"not whole under their final names: {broken}"
    both = set(steps[dirpath]) & set(steps[local_of(dirpath)])
    for step in both:
        name = _names.checkpoint_name(step)
        same = Path(dirpath, name).read_bytes() == Path(local_of(dirpath), name).read_bytes()
        assert same, f"step {step} is not the same in both directories"


def two_tiers(
    dirpath: str, *, async_save: bool = True, loses: str = "", every: int = 3, max_epochs: int = 2
) -> L.Trainer:
    """Called in every fresh process, so it sees what the kill before left; an error here fails the whole proof.

    Args:
        dirpath: The directory of the run; the local one is beside it.
        async_save: Whether saves and uploads run while training goes on.
        loses: Which directory is empty at every start: "local" is another machine, "remote" a store that lost all.
        every: How often an upload is due; a local save after every second step.
        max_epochs: Of the run.
    """
    check(dirpath)
    if loses:
        shutil.rmtree(local_of(dirpath) if loses == "local" else dirpath, ignore_errors=True)
        Path(f"{dirpath}.events").unlink(missing_ok=True)
    harness.log_events(f"{dirpath}.events")
    return s.trainer(
        dirpath, every=every, max_epochs=max_epochs, plugins=[ft.FaultTolerantCheckpointIO(async_save=async_save)],
        ft_args={
            "keep_last": KEEP, "local_dirpath": local_of(dirpath), "local_every_n_train_steps": 2,
            "local_keep_last": LOCAL_KEEP, "guards": (), "max_restarts_without_progress": None,
        },
    )  # fmt: skip


def exact(tmp_path: Path, kill_at: list[str], **kwargs: object) -> str:
    """The restarts are exact, and in the end the last state is in both directories, and nothing else is there."""
    make_trainer = partial(two_tiers, **kwargs)  # type: ignore[arg-type]
    compared = assert_resume_exact(make_trainer, s.Net, s.shuffled, kill_at=kill_at, root=tmp_path)
    dirpath = compared.dirpath
    check(dirpath)
    for place, keep in ((dirpath, KEEP), (local_of(dirpath), LOCAL_KEEP)):
        infos = ft.list_checkpoints(place)
        assert [i.problem for i in infos] == [None] * len(infos)
        assert infos[0].manifest is not None
        assert infos[0].manifest.step == compared.steps
        assert len(infos) == keep or kwargs.get("loses"), f"{place} holds {[i.name for i in infos]}"
        assert not [name for name in os.listdir(place) if parse_leftover(name)]
    return dirpath


# The first save of a fresh run is local (step 2), the second (3) is uploaded, so that an event of which both have one
# comes the third time in the upload.
@pytest.mark.parametrize(
    "points",
    [
        ["UploadStarted", "UploadStarted:2"],
        pytest.param(["AttemptOpened:3", "AttemptOpened:3"], marks=pytest.mark.slow),
        ["DataWritten:3", "DataWritten:3"],
        ["DataSynced:3", "Renamed:3"],
        ["Committed:3", "Committed:4"],
        pytest.param(["SaveStarted:2", "Renamed:2"], marks=pytest.mark.slow),
        ["DeleteStarted", "DeleteHidden:2", "Deleted:2"],
    ],
    ids=lambda points: points[0],
)
def test_training_killed_at(points: list[str], tmp_path: Path) -> None:
    """Before, while and after a checkpoint is uploaded, with what follows it."""
    exact(tmp_path, points, async_save=False)


@pytest.mark.parametrize("loses", ["local", "remote"])
def test_training_killed_and_started_where_one_directory_is_empty(loses: str, tmp_path: Path) -> None:
    exact(tmp_path, ["Committed:4", "UploadStarted:2"], async_save=False, loses=loses)


def test_g7_an_upload_cut_off_leaves_the_local_one_as_the_newest(tmp_path: Path) -> None:
    """And the restart goes on from there: one batch is trained again, not all since the last upload."""
    compared = assert_resume_exact(
        partial(two_tiers, async_save=False), s.Net, s.shuffled, kill_at=["UploadStarted:2"], root=tmp_path
    )
    resumed = [e for e in read_log(f"{compared.dirpath}.events") if e["event"] == "Resumed"]
    assert [(os.path.dirname(e["path"]), e["step"]) for e in resumed] == [(local_of(compared.dirpath), 6)]
    assert compared.replayed == 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_training_killed_again_and_again(seed: int, tmp_path: Path) -> None:
    """In the background, where uploads, saves and steps overlap as they happen to."""
    chosen = random.Random(seed)
    points = ("UploadStarted", *events.KILL_POINTS)
    kills = [f"{chosen.choice(points)}:{chosen.randint(1, 2)}" for _ in range(5)]
    # Long enough that the last kill is not behind the end, however far training gets during an upload.
    exact(tmp_path, kills, every=chosen.choice([1, 3]), max_epochs=6)
