"""A training that saves and rotates, killed at random moments, again and again in one directory."""

from __future__ import annotations

import multiprocessing
import random
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import lightning_ft as ft
from lightning_ft import events
from tests.crash.harness import check, read_log
from tests.crash.test_kill_points import checked_trainer
from tests.ranks import WITHIN_SECS
from tests.trainer import scenarios as s

KEEP = 2


def train(dirpath: str, first_commit: Connection) -> None:
    """A start of a run that never ends; what the kill before left behind is checked by it."""

    def tell(event: events.Event) -> None:
        if isinstance(event, events.Committed) and not first_commit.closed:
            first_commit.send(event.step)
            first_commit.close()

    events.observe(tell)
    trainer = checked_trainer(dirpath, KEEP)
    trainer.fit_loop.max_epochs = 10**6
    trainer.fit(s.Net(), *s.shuffled(), ckpt_path="last")


def killed_after(dirpath: str, moment: random.Random) -> bool:
    """One start is killed: on its way to its first commit, or soon after; whether it got there."""
    context = multiprocessing.get_context("forkserver")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(dirpath, send))
    process.start()
    send.close()
    got_there = receive.poll(moment.uniform(0.05, 0.6)) if moment.random() < 0.3 else receive.poll(WITHIN_SECS)
    process.join(moment.uniform(0.0, 0.1) if got_there else 0)
    process.kill()
    process.join(WITHIN_SECS)
    assert process.exitcode == -signal.SIGKILL, f"it ended by itself: {process.exitcode}"
    return got_there


@pytest.mark.parametrize("kills", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_training_killed_at_random_moments(kills: int, tmp_path: Path) -> None:
    moment = random.Random(kills)
    dirpath, log = str(tmp_path / "run"), f"{tmp_path / 'run'}.events"
    commits = 0
    for _ in range(kills):
        commits += killed_after(dirpath, moment)
        check(dirpath, log, KEEP)
    committed = [event["step"] for event in read_log(log) if event["event"] == "Committed"]
    resumed = [event["step"] for event in read_log(log) if event["event"] == "Resumed"]
    good = ft.last_good(dirpath)
    assert good is not None
    assert good.manifest is not None
    print(f"{kills} kills, {commits} after a commit, {len(committed)} commits, at step {good.manifest.step}")
    assert commits >= kills // 3
    # Every start went on from what had been committed last, or later: from a commit that was not reported any more.
    assert resumed == sorted(resumed)
    assert committed == sorted(set(committed))
