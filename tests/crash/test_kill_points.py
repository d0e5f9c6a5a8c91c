"""SIGKILL at every event, at every system call and at random moments: no checkpoint is ever lost or half there."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path

import lightning as L
import pytest

import lightning_ft as ft
from lightning_ft import events
from lightning_ft._names import parse_leftover
from lightning_ft.testing import assert_resume_exact
from tests.crash import harness
from tests.crash.harness import NothingLeft, Saver, check, read_log, start
from tests.trainer import scenarios as s

LEAVE_SOMETHING = {"AttemptOpened", "DataWritten", "DataSynced", "DeleteHidden"}


# -- real trainings ----------------------------------------------------------------------------------------------


def checked_trainer(dirpath: str, keep: int) -> L.Trainer:
    """Called in every fresh process, so it sees what the kill before left; an error here fails the whole proof."""
    log = f"{dirpath}.events"
    left = check(dirpath, log, keep)
    with open(f"{dirpath}.left", "a") as file:
        file.write(f"{len(left)}\n")
    harness.log_events(log)
    return s.trainer(
        dirpath,
        every=2,
        max_epochs=3,
        callbacks=(partial(NothingLeft, dirpath),),
        ft_args={"keep_last": keep, "guards": (), "max_restarts_without_progress": None},
    )


@pytest.mark.parametrize("keep", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("event", events.KILL_POINTS)
def test_training_killed_at(event: str, keep: int, tmp_path: Path) -> None:
    """Killed at the first such event of a fresh run, and at the first and second of runs that were resumed."""
    kills = [event, f"{event}:2", event]
    make_trainer = partial(checked_trainer, keep=keep)
    compared = assert_resume_exact(make_trainer, s.Net, s.shuffled, kill_at=kills, root=tmp_path)
    check(compared.dirpath, f"{compared.dirpath}.events", keep)
    names = os.listdir(compared.dirpath)
    assert not [name for name in names if parse_leftover(name)]
    assert len([name for name in names if name.endswith(".ckpt")]) == keep
    left = Path(f"{compared.dirpath}.left").read_text().split()
    # That the kills were where they should be, and that there was something to clear away.
    assert left == ["0", *(["1"] * 3 if event in LEAVE_SOMETHING else ["0"] * 3)]


def test_training_killed_while_it_starts(tmp_path: Path) -> None:
    """While the last kill is being cleared away, and between loading and the first step."""
    kills = ["AttemptOpened:3", "LeftoverRemoved", "Resumed", "DataSynced:3", "LeftoverRemoved", "Resumed", "Resumed"]
    make_trainer = partial(checked_trainer, keep=2)
    compared = assert_resume_exact(make_trainer, s.Net, partial(s.shuffled, 2), kill_at=kills, root=tmp_path)
    check(compared.dirpath, f"{compared.dirpath}.events", keep=2)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_training_killed_again_and_again(seed: int, tmp_path: Path) -> None:
    chosen = random.Random(seed)
    kills = [f"{chosen.choice(events.KILL_POINTS)}:{chosen.randint(1, 2)}" for _ in range(5)]
    make_trainer = partial(checked_trainer, keep=chosen.choice([1, 2, 3]))
    make_data = partial(s.shuffled, chosen.choice([0, 2]))
    assert_resume_exact(make_trainer, s.Net, make_data, kill_at=kills, root=tmp_path)


# -- a saver alone -----------------------------------------------------------------------------------------------


def killed(saver: Saver, kill_after_secs: float | None = None) -> list[str]:
    """What is left to clear away after one start that is killed."""
    assert start(saver, kill_after_secs) == -9, f"{saver} was not killed"
    return check(saver.dirpath, saver.log, saver.keep)


def finishes(saver: Saver) -> None:
    """A start that nothing kills ends in a directory of exactly the checkpoints it is meant to keep."""
    assert start(Saver(saver.dirpath, saver.keep, saver.rotates)) == 0
    assert check(saver.dirpath, saver.log, saver.keep) == []
    if saver.rotates == "callback":
        assert len(ft.list_checkpoints(saver.dirpath)) == saver.keep


@pytest.mark.parametrize("rotates", ["callback", "user"])
@pytest.mark.parametrize("event", events.KILL_POINTS)
def test_e1_saver_killed_at(event: str, rotates: str, tmp_path: Path) -> None:
    for count in (1, 2):
        saver = Saver(str(tmp_path / str(count)), 1, rotates, kill_event=f"{event}:{count}")
        killed(saver)
        # Once more in what was left, and then to the end.
        killed(saver)
        finishes(saver)


def calls_of_a_whole_run(tmp_path: Path) -> int:
    """How many system calls of the threads that write a run makes: one more and it ends by itself."""
    low, high = 1, 400
    while low < high:
        middle = (low + high) // 2
        if start(Saver(str(tmp_path / f"count-{middle}"), kill_call=middle)) == -9:
            low = middle + 1
        else:
            high = middle
    return low - 1


def at_calls(points: list[tuple[int, str]], tmp_path: Path, broken: str = "") -> None:
    for call, how in points:
        for rotates in ("callback", "user"):
            place = str(tmp_path / f"{call}-{how}-{rotates}")
            saver = Saver(place, 2, rotates, kill_call=call, how=how, broken=broken)
            killed(saver)
            finishes(saver)


def every_point(tmp_path: Path) -> list[tuple[int, str]]:
    count = calls_of_a_whole_run(tmp_path)
    assert count > 60, "fewer system calls than five saves with rotation need: are they counted?"
    # A run that rotates as a user's callback does makes fewer calls than ours, which looks into the directory.
    return [(call, how) for call in range(1, count - 10) for how in ("before", "half", "after")]


def test_e1_saver_killed_at_system_calls(tmp_path: Path) -> None:
    at_calls(random.Random(1).sample(every_point(tmp_path), 24), tmp_path)


@pytest.mark.slow
def test_e1_saver_killed_at_every_system_call(tmp_path: Path) -> None:
    at_calls(every_point(tmp_path), tmp_path)


@pytest.mark.parametrize("trials", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_saver_killed_at_random_moments(trials: int, tmp_path: Path) -> None:
    """Again and again in the same directory, each time from where the last kill left it."""
    saver = Saver(str(tmp_path / "run"), steps=100_000)  # far more than it gets to make
    moments = random.Random(trials)
    for _ in range(trials):
        assert start(saver, kill_after_secs=moments.uniform(0.0, 0.012)) == -9
        check(saver.dirpath, saver.log, saver.keep)
    finishes(saver)
    steps = [e["step"] for e in read_log(saver.log) if e["event"] == "Committed"]
    assert steps == sorted(set(steps)), "a step was committed twice, or out of order"


# -- that all this can fail --------------------------------------------------------------------------------------


CAUGHT = {
    "in_place": "not whole under their final names",
    "early_rename": "not whole under their final names",
    "delete_first": "of 2 are left|none is there",
    "early_commit": "was committed, .* is the newest there|none is there",
    "stray_names": "nobody would ever remove",
}


@pytest.mark.parametrize("broken", harness.BREAKAGES)
def test_the_check_catches_a_saver_that_is_wrong(broken: str, tmp_path: Path) -> None:
    def kill_everywhere() -> None:
        # No event tells of the moments between two writes.
        at_calls([(call, "half") for call in range(2, 12)], tmp_path, broken)
        for event in events.KILL_POINTS[:6]:
            for count in (1, 3):
                place = str(tmp_path / f"{event}-{count}")
                killed(Saver(place, kill_event=f"{event}:{count}", broken=broken))

    with pytest.raises(AssertionError, match=CAUGHT[broken]):
        kill_everywhere()


def test_the_check_catches_a_lost_checkpoint(tmp_path: Path) -> None:
    saver = Saver(str(tmp_path / "run"))
    finishes(saver)
    for info in ft.list_checkpoints(saver.dirpath)[:1]:
        os.unlink(info.path)
    with pytest.raises(AssertionError, match="is the newest there"):
        check(saver.dirpath, saver.log, saver.keep)


def broken_trainer(dirpath: str) -> L.Trainer:
    harness.BREAKAGES["in_place"]()
    return checked_trainer(dirpath, keep=2)


def test_the_check_catches_a_training_that_saves_in_place(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not whole under their final names"):
        assert_resume_exact(broken_trainer, s.Net, s.shuffled, kill_at="AttemptOpened:2", root=tmp_path)
