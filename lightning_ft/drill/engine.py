"""The runs of a drill: uninterrupted, killed, restarted; and, where these differ, uninterrupted once more.

Each trial has a directory of its own, with checkpoints and traces; the user's own are never written.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_ft import events, exit_codes
from lightning_ft._assignment import Assignment, killed_file
from lightning_ft._kill_point import KillPoint, check_kill_point
from lightning_ft._traces import Difference, Record, differences, read, replayed
from lightning_ft.drill import diagnosis
from lightning_ft.drill.command import Ended, run
from lightning_ft.drill.verdict import Outcome, Trial, Verdict, place
from lightning_ft.errors import NoUsableCheckpointError

Say = Callable[[str, int], None]
"""Is told what is going on, and how many batches were trained so far."""


@dataclass(frozen=True)
class Drill:
    """What to drill, and how.

    Args:
        command: Program and arguments, as for a shell.
        scratch: A directory for everything the runs write.
        kill_at: Where to kill; None: after a batch in the middle, as soon as a checkpoint is durable.
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
class _Point:
    """Where a trial is killed."""

    at: KillPoint
    once_durable: bool = False


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

    def facts(self, start: int) -> dict[str, Any]:
        """What a start has said about itself."""
        return next((line["fact"] for line in self.lines(start) if "fact" in line), {})


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


def drill(plan: Drill, say: Say) -> Outcome:
    """What a kill and a restart do to the script. Blocks on: its runs. On disk: everything under `scratch`.

    Raises:
        CannotStartError: The command cannot be started.
    """
    reference = _Run(plan.scratch / "uninterrupted")
    problem = _uninterrupted(plan, reference, say, "uninterrupted")
    points = _points(plan, reference) if problem is None else []
    if problem is None and not points and (every := _saves_in_time(reference)) is not None:
        plan = replace(plan, save_every_n_steps=every)
        reference = _Run(plan.scratch / "uninterrupted-saving")
        problem = _uninterrupted(plan, reference, say, f"uninterrupted, saved every {every} steps")
        points = _points(plan, reference) if problem is None else []
    if problem is not None:
        return _outcome(plan, reference, [problem])
    if not points:
        cause = "no save was begun before the last batch: save more often, or drill more steps"
        nothing = _failed("there is nothing to restart from", cause)
        return _outcome(plan, reference, [nothing])
    again: list[_Run] = []
    trials = []
    for number, point in enumerate(points):
        killed = _Run(plan.scratch / f"killed-{number}")
        prefix = f"trial {number + 1} of {len(points)}: " if len(points) > 1 else ""
        trials.append(_trial(plan, reference, killed, point, _prefixed(say, prefix), again))
        _tidy(plan, killed)
    return _outcome(plan, reference, trials)


def _uninterrupted(plan: Drill, reference: _Run, say: Say, title: str) -> Trial | None:
    """The run has ended; what is wrong with it, None if nothing is."""
    ended = _start(plan, reference, 0, None, say, title)
    _tidy(plan, reference)
    return _problem(ended, reference, plan, "the uninterrupted run")


def _saves_in_time(reference: _Run) -> int | None:
    """After how many steps to save a run that leaves it to the clock, which is too slow for so short a run.

    When saves are made changes nothing of what is trained. None: it does not leave it to the clock.
    """
    if not reference.facts(0).get("saves_by_clock"):
        return None
    steps = [record["values"]["global step"] for record in reference.traces()[0] if record["kind"] == "step"]
    return max(1, max(steps, default=0) // 4)


def _prefixed(say: Say, prefix: str) -> Say:
    return lambda title, batches: say(prefix + title, batches)


def _trial(plan: Drill, reference: _Run, killed: _Run, point: _Point, say: Say, again: list[_Run]) -> Trial:
    title = str(point.at)
    where = place(title)
    ended = _start(plan, killed, 0, point, say, f"to be killed at {where}")
    if not ended.killed:
        if problem := _problem(ended, killed, plan, "the run that was to be killed"):
            return replace(problem, kill_at=title)
        reason = f"the script ended before {where}"
        cause = _why_not_killed(point, reference)
        return Trial(title, Verdict.HARD_FAILURE, reason=reason, cause=cause)
    durable = _durable_batch(killed)
    ended = _start(plan, killed, 1, None, say, "restarted")
    resumed = _resumed_batch(killed)
    facts = Trial(title, Verdict.PASS, killed=True, resumed_batch=resumed, durable_batch=durable)
    if problem := _problem(ended, killed, plan, "the restart"):
        return replace(
            facts, verdict=problem.verdict, reason=problem.reason, cause=problem.cause, output=problem.output
        )
    expected, actual = reference.traces(), killed.traces()
    facts = replace(facts, replayed=sum(replayed(records) for records in actual.values()))
    if found := _differences(expected, actual, plan.atol):
        reason, cause = _explained(plan, reference, expected, found, resumed, say, again)
        return replace(facts, verdict=Verdict.SILENT_DIVERGENCE, reason=reason, cause=cause)
    if durable is not None and (resumed or 0) < durable:
        began = "from the beginning" if resumed is None else f"after batch {resumed}"
        reason = f"the restart began {began}, though a checkpoint of batch {durable} was durable"
        cause = _OF_LOST_WORK["from the beginning" if resumed is None else "from another"]
        return replace(facts, verdict=Verdict.LOST_WORK, reason=reason, cause=cause)
    if resumed is None:
        return replace(facts, reason="no checkpoint was durable yet: the restart began from the beginning")
    return facts


_OF_LOST_WORK = {
    "from the beginning": 'trainer.fit was not given ckpt_path="last" (a script that looks for checkpoints by itself '
    "does not find those of a drill, which are elsewhere)",
    "from another": "the newest checkpoint was passed over, or trainer.fit was given the path of another one",
}


def _why_not_killed(point: _Point, reference: _Run) -> str:
    if point.once_durable:
        return "no checkpoint became durable before its end"
    if str(point.at)[0].isdecimal():
        return f"it trains {_batches(reference.traces())} batches"
    return "there are not so many events of that kind, or none on that rank"


def _start(plan: Drill, of: _Run, start: int, point: _Point | None, say: Say, title: str) -> Ended:
    of.directory.mkdir(parents=True, exist_ok=True)
    assignment = Assignment(
        str(of.directory), start, plan.steps, plan.save_every_n_steps, summaries=plan.atol is not None,
        kill_at=None if point is None else point.at, once_durable=point is not None and point.once_durable,
    )  # fmt: skip
    counter = _Counter(of.directory / f"{start}.rank0.jsonl")

    def watch() -> None:
        say(title, counter.count())

    watch()
    return run(
        plan.command, assignment.environment(), of.directory / f"{start}.output", killed_file(assignment),
        plan.timeout_secs, watch,
    )  # fmt: skip


def _tidy(plan: Drill, of: _Run) -> None:
    """Traces and outputs of the run are there; its checkpoints, which may be large, are not."""
    if not plan.keep:
        for name in ("checkpoints", "root"):
            shutil.rmtree(of.directory / name, ignore_errors=True)


def _problem(ended: Ended, of: _Run, plan: Drill, who: str) -> Trial | None:
    """What is wrong with a run that was to end by itself; None: nothing."""
    if ended.code is None:
        reason = f"{who} did not end within {plan.timeout_secs:g} s"
        return _failed(reason, "it hangs, or --timeout is too short", ended.tail())
    if ended.code != 0:
        return _failed(f"{who} ended {_in_words(ended.code)}", _why_ended(ended.tail()), ended.tail())
    if not of.traces():
        reason = f"{who} trained nothing with a FaultTolerantCheckpoint"
        cause = "no Trainer of the script has that callback, or none of them fits"
        return _failed(reason, cause, ended.tail())
    return None


def _why_ended(tail: str) -> str:
    """What of a drill may be behind it; empty if that is not known."""
    found = re.search(r"FileNotFoundError: .*\.ckpt", tail)
    if found is None:
        return ""
    return (
        "its trainers write elsewhere in a drill: ask a callback for its files (best_model_path, dirpath), not by name"
    )


def _failed(reason: str, cause: str, output: str = "") -> Trial:
    return Trial(None, Verdict.HARD_FAILURE, reason=reason, cause=cause, output=output)


def _in_words(code: int) -> str:
    if code < 0:
        return f"by {signal.Signals(-code).name}"
    names = [name for name, value in vars(exit_codes).items() if name.isupper() and value == code]
    return f"with exit code {code}" + (f" ({names[0]}, see lightning_ft.exit_codes)" if names else "")


def _points(plan: Drill, reference: _Run) -> list[_Point]:
    if plan.kill_at is not None:
        return [_Point(plan.kill_at)]
    lines = reference.lines(0)
    if plan.sweep:
        seen = [line["event"] for line in lines if "event" in line]
        # The second of its kind, so that there was a save before it, where there are two.
        times = {name: min(seen.count(name), 2) for name in events.DIRECTORY_KILL_POINTS if name in seen}
        return [_Point(f"{name}:{count}" if count > 1 else name) for name, count in times.items()]
    steps = [record["key"][0] for record in reference.traces()[0] if record["kind"] == "step"]
    begun = min((line["batch"] for line in lines if line.get("event") == "SaveStarted"), default=None)
    if begun is None or not steps:
        return []
    # After the first save, in the middle if that is later; never at the last batch, after which nothing follows.
    last = steps[-1] - 1
    return [_Point(min(max(begun + 1, steps[len(steps) // 2]), last), once_durable=True)] if begun < last else []


def _durable_batch(killed: _Run) -> int | None:
    """Where the newest checkpoint of ours stood that was durable when the run was killed."""
    from lightning_ft.discovery import last_good

    batches = []
    for dirpath in _directories(killed):
        try:
            newest = last_good(str(dirpath))
        except NoUsableCheckpointError:  # the restart will say so
            continue
        if newest is not None and newest.manifest is not None:
            batches.append(newest.manifest.batch)
    return max(batches, default=None)


def _directories(of: _Run) -> Iterable[Path]:
    for base in (of.directory / "checkpoints", of.directory / "root"):
        if base.is_dir():
            yield from (path for path in base.iterdir() if path.is_dir())


def _resumed_batch(killed: _Run) -> int | None:
    """How many batches were trained where the restart went on; None if it began from the beginning."""
    steps = [record for record in read(killed.directory, 0) if record["kind"] == "step"]
    first = next((int(record["key"][0]) for record in steps if record["start"] == 1), None)
    if first is None:  # the run was over, and a checkpoint of that was durable
        return max((int(record["key"][0]) for record in steps), default=None)
    return first - 1 if any(line.get("event") == "Resumed" for line in killed.lines(1)) else None


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
        _tidy(plan, second)
        again.append(second)
    if fresh := _differences(expected, again[0].traces(), plan.atol):
        first = diagnosis.first(fresh, expected)
        return diagnosis.said_of_fresh_runs(first), diagnosis.cause_in_fresh_run(fresh, first)
    first = diagnosis.first(found, expected)
    if first.kind == "value" and first.start == 0:
        return diagnosis.said_of_fresh_runs(first), diagnosis.cause_in_fresh_run(found, first)
    return diagnosis.said(first), diagnosis.cause_after_restart(found, first, expected, resumed)


def _outcome(plan: Drill, reference: _Run, trials: Sequence[Trial]) -> Outcome:
    traces = reference.traces()
    validations = sum(record["kind"] == "validation" for records in traces.values() for record in records)
    return Outcome(
        plan.command, _batches(traces), max(1, len(traces)), validations, tuple(trials),
        tuple(dict.fromkeys(_not_covered(plan, reference, trials, validations))),
    )  # fmt: skip


def _batches(traces: dict[int, list[Record]]) -> int:
    """Of one rank."""
    return sum(record["kind"] == "step" for record in traces[0]) if traces else 0


def _not_covered(plan: Drill, reference: _Run, trials: Sequence[Trial], validations: int) -> Iterable[str]:
    if all(trial.resumed_batch is None for trial in trials):
        yield "restarts from a checkpoint: none began with one"
    places = ", ".join(place(trial.kill_at) for trial in trials if trial.kill_at is not None)
    if places and not plan.sweep:
        yield f"kills at other places than {places} (--sweep: every event of a save)"
    if plan.steps is not None:
        yield f"what happens after {plan.steps} steps"
    if (every := plan.save_every_n_steps) is not None:
        yield f"when the script saves: by the clock, and not in time, so it was saved every {every} steps"
    if plan.atol is not None:
        yield f"differences up to {plan.atol:g}; of each tensor only its mean, extremes, first and last were compared"
    if not validations:
        yield "validations: none was run"
    lines = reference.lines(0)
    facts = reference.facts(0)
    yield "several ranks" if facts.get("world_size", 1) == 1 else "several machines"
    if facts.get("accelerator") == "CPUAccelerator":
        yield "kernels of an accelerator"
    yield "the directory or store itself: the checkpoints were on a local disk"
    yield "files that the script writes by itself, or before it makes a FaultTolerantCheckpoint; what loggers keep"
    yield from (line["note"] for line in lines if "note" in line)
