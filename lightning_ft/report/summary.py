"""The figures of a report: what the event files of a run add up to, and what follows from them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lightning_ft._history.interval import Advice, advise, failure_secs, lost_share
from lightning_ft._history.timeline import Account, Save, Start, Timeline, read
from lightning_ft._names import split
from lightning_ft.discovery import list_checkpoints
from lightning_ft.manifest import CheckpointInfo
from lightning_ft.storage import Storage


@dataclass(frozen=True)
class Writes:
    """The saves of a run that became durable."""

    count: int
    size_bytes: int
    """Of all of them together."""
    median_blocked_secs: float
    """For how long training stood still."""
    median_durable_secs: float
    """From the request until it was durable in the directory of the run; with a local one in front, of the uploads."""
    bytes_per_sec: float | None
    """Of the writing there, over all saves."""


@dataclass(frozen=True)
class Recommendation:
    """How often to save, in the units of the trainer."""

    advice: Advice
    every_n_train_steps: int | None
    """The same in steps; None if no step was timed."""
    present_interval_secs: float | None
    """Median time between two saves so far."""
    lost_share: float
    """Of the time, if the advice is followed."""
    present_lost_share: float | None
    too_short: bool
    """Whether the run has not even been useful for the time between two saves."""


@dataclass(frozen=True)
class Summary:
    """A run as a report shows it."""

    dirpath: str
    timeline: Timeline
    accounts: list[Account]
    checkpoints: list[CheckpointInfo]
    """What is in the directory now."""
    writes: Writes | None
    recommendation: Recommendation | None

    @property
    def steps_per_sec(self) -> float | None:
        """Of the useful time."""
        return _steps_per_sec(self.timeline, self.accounts)

    def document(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        timeline = self.timeline
        starts = [
            {**_plain(start), **dataclasses.asdict(account)}
            for start, account in zip(timeline.starts, self.accounts, strict=True)
        ]
        good = [info for info in self.checkpoints if info.problem is None]
        return {
            "dirpath": self.dirpath,
            "restarts": timeline.restarts,
            "failures": timeline.failures,
            "lost_steps": timeline.lost_steps,
            "lost_secs": sum(account.lost_secs for account in self.accounts),
            "stalled_secs": sum(account.stalled_secs for account in self.accounts),
            "startup_secs": sum(account.startup_secs for account in self.accounts),
            "down_secs": sum(account.down_secs for account in self.accounts),
            "useful_secs": sum(account.useful_secs for account in self.accounts),
            "elapsed_secs": timeline.elapsed_secs,
            "goodput": timeline.goodput,
            "steps_per_sec": self.steps_per_sec,
            "starts": starts,
            "saves": [dataclasses.asdict(save) for save in timeline.saves],
            "writes": None if self.writes is None else dataclasses.asdict(self.writes),
            "recommendation": None if self.recommendation is None else dataclasses.asdict(self.recommendation),
            "checkpoints": {"good": len(good), "other": len(self.checkpoints) - len(good)},
        }


def _plain(start: Start) -> dict[str, Any]:
    return {
        "events": start.path, "began_at": start.began_at, "training_at": start.training_at,
        "first_step": start.first_step, "last_step": start.last_step, "ended_at": start.ended_at,
        "how": start.how, "reason": start.reason, "world_size": start.world_size,
        "saves": len(start.saves), "troubles": [dataclasses.asdict(trouble) for trouble in start.troubles],
    }  # fmt: skip


def summarise(dirpath: str, storage: Storage) -> Summary:
    """The run in `dirpath`: its event files, and the checkpoints that are there now.

    Raises:
        OSError: They cannot be read.
    """
    timeline = read(dirpath, storage)
    accounts = timeline.accounts
    return Summary(
        dirpath, timeline, accounts, list_checkpoints(dirpath, storage.storage_options), _writes(timeline),
        recommend(timeline, accounts),
    )  # fmt: skip


def _writes(timeline: Timeline) -> Writes | None:
    saves, final = _of_two_directories(timeline.saves)
    if not saves:
        return None
    write_secs = sum(save.write_secs for save in final)
    return Writes(
        count=len(saves),
        size_bytes=sum(save.size_bytes for save in saves),
        median_blocked_secs=statistics.median(save.blocked_secs for save in saves),
        median_durable_secs=statistics.median(save.total_secs for save in final),
        bytes_per_sec=sum(save.size_bytes for save in final) / write_secs if write_secs > 0 else None,
    )


def _of_two_directories(commits: Sequence[Save]) -> tuple[list[Save], list[Save]]:
    """What training was stopped for, and what made it durable in the directory of the run.

    With a local directory in front of that one, these are its saves and the uploads of them: a name that was committed
    in another directory before. Without, or with no upload yet, they are the same.
    """
    saved_in: dict[str, str] = {}
    saves: list[Save] = []
    uploads: list[Save] = []
    for commit in commits:
        dirpath, name = split(commit.path)
        (saves if saved_in.setdefault(name, dirpath) == dirpath else uploads).append(commit)
    return saves, uploads or saves


def recommend(timeline: Timeline, accounts: list[Account]) -> Recommendation | None:
    """How often to save, from what saves cost and failures there were; None before the first save."""
    saves, final = _of_two_directories(timeline.saves)
    if not saves:
        return None
    cost_secs = statistics.median(save.blocked_secs for save in saves)
    mean_failure_secs = failure_secs(timeline.running_secs, timeline.failures)
    advice = advise(cost_secs, statistics.median(save.total_secs for save in final), mean_failure_secs)
    starting = [
        account.startup_secs
        for start, account in zip(timeline.starts, accounts, strict=True)
        if not start.found_finished
    ]
    restart_secs = statistics.median(starting) if starting else 0.0
    gaps = [
        later.at - earlier.at
        for start in timeline.starts
        for earlier, later in pairwise(_of_two_directories(start.saves)[0])
    ]
    present = statistics.median(gaps) if gaps else None
    steps_per_sec = _steps_per_sec(timeline, accounts)
    return Recommendation(
        advice=advice,
        every_n_train_steps=max(1, round(advice.interval_secs * steps_per_sec)) if steps_per_sec else None,
        present_interval_secs=present,
        lost_share=lost_share(advice.interval_secs, cost_secs, mean_failure_secs, restart_secs),
        present_lost_share=lost_share(present, cost_secs, mean_failure_secs, restart_secs) if present else None,
        too_short=sum(account.useful_secs for account in accounts) < advice.interval_secs,
    )


def _steps_per_sec(timeline: Timeline, accounts: list[Account]) -> float | None:
    useful_secs = sum(account.useful_secs for account in accounts)
    steps = sum(
        start.last_step - start.first_step - account.lost_steps + sum(back.lost_steps for back in start.went_back)
        for start, account in zip(timeline.starts, accounts, strict=True)
    )
    return steps / useful_secs if useful_secs > 0 and steps > 0 else None
