"""The runs of a drill: uninterrupted, killed, restarted; and, where these differ, uninterrupted once more.

Each trial has a directory of its own, with checkpoints and traces; the user's own are never written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ft import events
from lightning_ft._drilled import Assignment, killed_file
from lightning_ft._recorder import KillPoint, check_kill_point
from lightning_ft._traces import Difference, Record, differences, read, replayed
from lightning_ft.drill import diagnosis
from lightning_ft.drill.command import Ended, run
from lightning_ft.drill.verdict import Outcome, Trial, Verdict

Say = Callable[[str, int], None]
"""Is told what is going on, and how many batches were trained so far."""


@dataclass(frozen=True)
class Drill:
    """What to drill, and how.

    Args:
        command: Program and arguments, as for a shell.
        scratch: A directory for everything the runs write.
        kill_at: Where to kill; None: after a batch in the middle that comes after a durable checkpoint.
        sweep: Kill at every event of the save protocol that the uninterrupted run shows, one trial each.
        steps: End training after so many optimizer steps; None: where the script ends.
        atol: How far numbers may be apart; None: not at all.
        timeout_secs: Of each run.
    """

    command: tuple[str, ...]
    scratch: Path
    kill_at: KillPoint | None = None
    sweep: bool = False
    steps: int | None = None
    atol: float | None = None
    timeout_secs: float = 3600.0

    def __post_init__(self) -> None:
        if self.kill_at is not None:
            check_kill_point(self.kill_at)


@dataclass(frozen=True)
class _Run:
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


def drill(plan: Drill, say: Say) -> Outcome:
    """What a kill and a restart do to the script. Blocks on: its runs. On disk: everything under `scratch`."""
    reference = _Run(plan.scratch / "uninterrupted")
    ended = _start(plan, reference, 0, None, say, "uninterrupted")
    problem = _problem(ended, reference, plan)
    if problem is not None:
        return _outcome(plan, reference, [Trial("none", Verdict.HARD_FAILURE, *problem)])
    points = _points(plan, reference)
    if not points:
        cause = (
            "no checkpoint became durable in the uninterrupted run before its end: save more often, or drill more steps"
        )
        return _outcome(
            plan, reference, [Trial("none", Verdict.HARD_FAILURE, "there is nothing to restart from", cause)]
        )
    again: list[_Run] = []
    trials = []
    for number, point in enumerate(points):
        trials.append(_trial(plan, reference, _Run(plan.scratch / f"killed-{number}"), point, say, again))
    return _outcome(plan, reference, trials)


def _trial(plan: Drill, reference: _Run, killed: _Run, point: KillPoint, say: Say, again: list[_Run]) -> Trial:
    title = str(point)
    ended = _start(plan, killed, 0, point, say, f"killed at {title}")
    if not ended.killed:
        reason, cause = _problem(ended, killed, plan) or (f"it was never reached: the script ended before {title}", "")
        return Trial(title, Verdict.HARD_FAILURE, reason, cause)
    durable = _durable_batch(killed)
    ended = _start(plan, killed, 1, None, say, "restarted")
    problem = _problem(ended, killed, plan)
    resumed = _resumed_batch(killed)
    if problem is not None:
        return Trial(title, Verdict.HARD_FAILURE, f"the restart failed: {problem[0]}", problem[1], resumed, durable)
    expected, actual = reference.traces(), killed.traces()
    found = _differences(expected, actual, plan.atol)
    twice = sum(replayed(records) for records in actual.values())
    if found:
        reason, cause = _explained(plan, reference, expected, found, resumed, say, again)
        return Trial(title, Verdict.SILENT_DIVERGENCE, reason, cause, resumed, durable, twice)
    if durable is not None and (resumed or 0) < durable:
        where = "from the beginning" if resumed is None else f"after batch {resumed}"
        reason = f"the restart began {where}, though a checkpoint of batch {durable} was durable"
        cause = (
            'trainer.fit was not given ckpt_path="last"' if resumed is None else "the newest checkpoint was passed over"
        )
        return Trial(title, Verdict.LOST_WORK, reason, cause, resumed, durable, twice)
    return Trial(title, Verdict.PASS, "", "", resumed, durable, twice)


def _start(plan: Drill, of: _Run, start: int, point: KillPoint | None, say: Say, title: str) -> Ended:
    of.directory.mkdir(parents=True, exist_ok=True)
    assignment = Assignment(str(of.directory), start, plan.steps, point, summaries=plan.atol is not None)
    trace = of.directory / f"{start}.rank0.jsonl"

    def watch() -> None:
        say(title, trace.read_bytes().count(b'{"kind": "step"') if trace.exists() else 0)

    watch()
    return run(
        plan.command, assignment.environment(), of.directory / f"{start}.output", killed_file(assignment),
        plan.timeout_secs, watch,
    )  # fmt: skip


def _problem(ended: Ended, of: _Run, plan: Drill) -> tuple[str, str] | None:
    """What is wrong with a run that was to end by itself, and the likely cause; None: nothing."""
    if ended.code is None:
        cause = f"it hangs, or --timeout is too short; see the end of its output:\n{ended.tail()}"
        return f"it did not end within {plan.timeout_secs:.0f} s", cause
    if ended.code != 0:
        return f"it ended with exit code {ended.code}", f"see the end of its output:\n{ended.tail()}"
    if not of.traces():
        return (
            "it trained nothing with a FaultTolerantCheckpoint",
            "the script makes no Trainer with that callback, or makes it before the callback",
        )
    return None


def _points(plan: Drill, reference: _Run) -> list[KillPoint]:
    if plan.kill_at is not None:
        return [plan.kill_at]
    lines = reference.lines(0)
    if plan.sweep:
        seen = {line["event"] for line in lines if "event" in line}
        return [point for point in events.DIRECTORY_KILL_POINTS if point in seen]
    steps = [record["key"][0] for record in reference.traces()[0] if record["kind"] == "step"]
    saved = sorted(line["batch"] for line in lines if line.get("event") == "Committed")
    if not saved or not steps:
        return []
    # One batch after the first save, or in the middle if that comes later; never the last, after which nothing follows.
    wanted = max(saved[0] + 1, steps[len(steps) // 2])
    return [wanted] if wanted < steps[-1] else [max(saved[0] + 1, 1)] if saved[0] + 1 < steps[-1] else []


def _durable_batch(killed: _Run) -> int | None:
    """Where the newest checkpoint of ours stood that was durable when the run was killed."""
    from lightning_ft.discovery import last_good

    batches = []
    for dirpath in _directories(killed):
        newest = last_good(str(dirpath))
        if newest is not None and newest.manifest is not None:
            batches.append(newest.manifest.batch)
    return max(batches, default=None)


def _directories(of: _Run) -> Iterable[Path]:
    for base in (of.directory / "checkpoints", of.directory / "root"):
        if base.is_dir():
            yield from (path for path in base.iterdir() if path.is_dir())


def _resumed_batch(killed: _Run) -> int | None:
    """How many batches were trained where the restart went on; None if it began from the beginning."""
    first = next(
        (record for record in read(killed.directory, 0) if record["start"] == 1 and record["kind"] == "step"), None
    )
    resumed = any(line.get("event") == "Resumed" for line in killed.lines(1))
    if first is None or not resumed:
        return None
    return int(first["key"][0]) - 1


def _differences(
    expected: dict[int, list[Record]], actual: dict[int, list[Record]], atol: float | None
) -> list[Difference]:
    return [d for rank, records in expected.items() for d in differences(records, actual.get(rank, []), rank, atol)]


def _explained(
    plan: Drill,
    reference: _Run,
    expected: dict[int, list[Record]],
    found: Sequence[Difference],
    resumed: int | None,
    say: Say,
    again: list[_Run],
) -> tuple[str, str]:
    """The first difference and its likely cause; whether the script repeats itself at all is tried first, once."""
    if not again:
        second = _Run(plan.scratch / "uninterrupted-again")
        _start(plan, second, 0, None, say, "uninterrupted, once more")
        again.append(second)
    fresh = _differences(expected, again[0].traces(), plan.atol)
    if fresh:
        first = diagnosis.first(fresh, expected[fresh[0].rank])
        said = str(first).replace("uninterrupted,", "in one run,").replace("restarted", "in the other")
        return said, diagnosis.cause_in_fresh_run(fresh, first)
    rank = found[0].rank
    of_rank = [difference for difference in found if difference.rank == rank]
    first = diagnosis.first(of_rank, expected[rank])
    return str(first), diagnosis.cause_after_restart(of_rank, first, expected[rank], resumed)


def _outcome(plan: Drill, reference: _Run, trials: Sequence[Trial]) -> Outcome:
    traces = reference.traces()
    kinds = [record["kind"] for records in traces.values() for record in records]
    batches = kinds.count("step") // max(1, len(traces))
    validations = kinds.count("validation")
    return Outcome(
        plan.command, batches, max(1, len(traces)), validations, tuple(trials),
        tuple(_not_covered(plan, reference, trials, validations)),
    )  # fmt: skip


def _not_covered(plan: Drill, reference: _Run, trials: Sequence[Trial], validations: int) -> Iterable[str]:
    lines = reference.lines(0)
    if not plan.sweep:
        places = ", ".join(trial.kill_at for trial in trials)
        yield f"kills at other places than {places} (--sweep: every event of a save)"
    if plan.steps is not None:
        yield f"what happens after {plan.steps} steps"
    if not validations:
        yield "validations: none was run"
    facts: dict[str, Any] = next((line["fact"] for line in lines if "fact" in line), {})
    if facts.get("world_size", 1) == 1:
        yield "several ranks"
    if facts.get("accelerator") == "CPUAccelerator":
        yield "kernels of an accelerator"
    yield "the directory or store itself: the drill's checkpoints were on a local disk"
    yield "files that the script writes by itself, and what loggers keep"
    yield from (line["note"] for line in lines if "note" in line)


def clean(scratch: Path) -> None:
    """Nothing of the drill is left."""
    shutil.rmtree(scratch, ignore_errors=True)
