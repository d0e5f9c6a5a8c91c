"""One run of the script that is drilled: where it is killed, what it is told, and what it leaves in its directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_ft._proof.assignment import Assignment, killed_file
from lightning_ft._proof.kill_point import KillPoint, check_kill_point
from lightning_ft._proof.traces import Record, read
from lightning_ft.drill.command import Ended, run
from lightning_ft.errors import NoUsableCheckpointError

Say = Callable[[str, int], None]
"""Is told what is going on, and how many batches were trained so far."""


@dataclass(frozen=True)
class Drill:
    """What to drill, and how.

    Args:
        command: Program and arguments, as for a shell.
        scratch: A directory for everything the runs write.
        kill_at: Where to kill, at a batch as soon as a checkpoint is durable; None: after a batch in the second epoch,
            or else in the middle, as soon as a checkpoint of that epoch is durable.
        sweep: Kill at every event of the save protocol that the uninterrupted run shows, one trial each.
        steps: End training after so many optimizer steps; None: where the script ends.
        atol: How far numbers may be apart; None: not at all.
        timeout_secs: Of each run.
        keep: Leave the checkpoints of every run. Otherwise those of one are gone before the next one begins.
        save_every_n_steps: Save after so many steps too; None: when the script says. One that leaves it to the clock
            and has not saved by its end is told a number.

    Raises:
        ValueError: An argument has a value it cannot have.
    """

    command: tuple[str, ...]
    scratch: Path
    kill_at: KillPoint | None = None
    sweep: bool = False
    steps: int | None = None
    atol: float | None = None
    timeout_secs: float = 3600.0
    keep: bool = False
    save_every_n_steps: int | None = None

    def __post_init__(self) -> None:
        if self.kill_at is not None:
            check_kill_point(self.kill_at)
        if self.kill_at is not None and self.sweep:
            raise ValueError(f"kill_at={self.kill_at!r} and sweep: give one of them")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps={self.steps}: at least 1 is needed")
        if self.atol is not None and not self.atol >= 0:
            raise ValueError(f"atol={self.atol}: at least 0 is needed")
        if not self.timeout_secs > 0:
            raise ValueError(f"timeout={self.timeout_secs}: a time in seconds is needed")


@dataclass(frozen=True)
class Point:
    """Where a trial is killed."""

    at: KillPoint
    once_durable: bool = False
    """`at` is a batch, and it is killed after that as soon as a checkpoint is durable."""
    durable_from: int = 0
    """... of at least so many optimizer steps, if one becomes durable in time."""


@dataclass(frozen=True)
class Run:
    """One run of the script, in one or several starts, and what it left."""

    directory: Path

    def traces(self) -> dict[int, list[Record]]:
        """Of each rank."""
        ranks = {int(p.name.split(".rank")[1].partition(".")[0]) for p in self.directory.glob("*.rank*.jsonl")}
        return {rank: read(self.directory, rank) for rank in sorted(ranks)}

    def lines(self, start: int) -> list[dict[str, Any]]:
        """The events of a start."""
        path = self.directory / f"{start}.events"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]

    def facts(self, start: int) -> dict[str, Any]:
        """What a start has said about itself."""
        return next((line["fact"] for line in self.lines(start) if "fact" in line), {})

    def durable_batch(self) -> int | None:
        """Where the newest checkpoint of ours stood that was durable when the run was killed."""
        from lightning_ft.discovery import last_good

        batches = []
        for dirpath in self._directories():
            try:
                newest = last_good(str(dirpath))
            except NoUsableCheckpointError:  # the restart will say so
                continue
            if newest is not None and newest.manifest is not None:
                batches.append(newest.manifest.batch)
        return max(batches, default=None)

    def _directories(self) -> Iterable[Path]:
        for base in (self.directory / "checkpoints", self.directory / "root"):
            if base.is_dir():
                yield from (path for path in base.iterdir() if path.is_dir())

    def resumed_batch(self, *, ended: bool) -> int | None:
        """How many batches were trained where the restart went on; None if it began again, or never went on.

        Args:
            ended: Whether it has come to its end.
        """
        steps = [record for record in read(self.directory, 0) if record["kind"] == "step"]
        first = next((int(record["key"][0]) for record in steps if record["start"] == 1), None)
        if first is None:  # the run was over, and a checkpoint of that was durable
            return max((int(record["key"][0]) for record in steps), default=None) if ended else None
        return first - 1 if any(line.get("event") == "Resumed" for line in self.lines(1)) else None


@dataclass
class _Counter:
    """How many steps a growing trace has; what was read once is not read again."""

    path: Path
    steps: int = 0
    _read_bytes: int = field(default=0, init=False)

    def count(self) -> int:
        """Up to now."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._read_bytes)
                whole = file.read().rpartition(b"\n")[0]
            self.steps += sum(line.startswith(b'{"kind": "step"') for line in whole.splitlines())
            self._read_bytes += len(whole) + 1 if whole else 0
        return self.steps


def start(plan: Drill, of: Run, number: int, point: Point | None, say: Say, title: str) -> Ended:
    """The script has run once more, to its end or until it was killed. Blocks on: that.

    Args:
        plan: What is drilled.
        of: The run that this is a start of.
        number: Which one; 0 is the first.
        point: Where it is killed; None: nowhere.
        say: Is told meanwhile how far it is.
        title: What this is, for `say`.

    Raises:
        CannotStartError: The command cannot be started.
    """
    of.directory.mkdir(parents=True, exist_ok=True)
    assignment = Assignment(
        str(of.directory), number, plan.steps, plan.save_every_n_steps, summaries=plan.atol is not None,
        kill_at=None if point is None else point.at, once_durable=point is not None and point.once_durable,
        durable_from=0 if point is None else point.durable_from,
    )  # fmt: skip
    counter = _Counter(of.directory / f"{number}.rank0.jsonl")

    def watch() -> None:
        say(title, counter.count())

    watch()
    return run(
        plan.command, assignment.environment(), of.directory / f"{number}.output", killed_file(assignment),
        plan.timeout_secs, watch,
    )  # fmt: skip


def tidy(plan: Drill, of: Run) -> None:
    """Traces and outputs of the run are there; its checkpoints, which may be large, are not."""
    if not plan.keep:
        for name in ("checkpoints", "root"):
            shutil.rmtree(of.directory / name, ignore_errors=True)
