"""A drill: runs uninterrupted, killed, restarted and, where these differ, uninterrupted once more; and what they say.

Each trial has a directory of its own, with checkpoints and traces; the user's own are never written.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightning_ft import events, exit_codes
from lightning_ft._traces import Difference, Record, differences, replayed
from lightning_ft.drill import diagnosis
from lightning_ft.drill.command import Ended
from lightning_ft.drill.runs import Drill, Point, Run, Say, start, tidy
from lightning_ft.drill.verdict import Outcome, Trial, Verdict, place


def drill(plan: Drill, say: Say) -> Outcome:
    """What a kill and a restart do to the script. Blocks on: its runs. On disk: everything under `scratch`.

    Raises:
        CannotStartError: The command cannot be started.
    """
    reference = Run(plan.scratch / "uninterrupted")
    problem = _uninterrupted(plan, reference, say, "uninterrupted")
    points = _points(plan, reference) if problem is None else []
    if problem is None and not points and (every := _saves_in_time(reference)) is not None:
        plan = replace(plan, save_every_n_steps=every)
        reference = Run(plan.scratch / "uninterrupted-saving")
        problem = _uninterrupted(plan, reference, say, f"uninterrupted, saved every {every} steps")
        points = _points(plan, reference) if problem is None else []
    if problem is not None:
        return _outcome(plan, reference, [problem])
    if not points:
        cause = "no save was begun before the last batch: save more often, or drill more steps"
        nothing = _failed("there is nothing to restart from", cause)
        return _outcome(plan, reference, [nothing])
    again: list[Run] = []
    trials = []
    for number, point in enumerate(points):
        killed = Run(plan.scratch / f"killed-{number}")
        prefix = f"trial {number + 1} of {len(points)}: " if len(points) > 1 else ""
        trials.append(_trial(plan, reference, killed, point, _prefixed(say, prefix), again))
        tidy(plan, killed)
    return _outcome(plan, reference, trials)


def _uninterrupted(plan: Drill, reference: Run, say: Say, title: str) -> Trial | None:
    """The run has ended; what is wrong with it, None if nothing is."""
    ended = start(plan, reference, 0, None, say, title)
    tidy(plan, reference)
    return _problem(ended, reference, plan, "the uninterrupted run")


def _saves_in_time(reference: Run) -> int | None:
    """After how many steps to save a run that leaves it to the clock, which is too slow for so short a run.

    When saves are made changes nothing of what is trained. None: it does not leave it to the clock.
    """
    if not reference.facts(0).get("saves_by_clock"):
        return None
    steps = [record["values"]["global step"] for record in reference.traces()[0] if record["kind"] == "step"]
    return max(1, max(steps, default=0) // 4)


def _prefixed(say: Say, prefix: str) -> Say:
    return lambda title, batches: say(prefix + title, batches)


def _trial(plan: Drill, reference: Run, killed: Run, point: Point, say: Say, again: list[Run]) -> Trial:
    title = str(point.at)
    where = place(title)
    ended = start(plan, killed, 0, point, say, f"to be killed at {where}")
    if not ended.killed:
        if problem := _problem(ended, killed, plan, "the run that was to be killed"):
            return replace(problem, kill_at=title)
        reason = f"the script ended before {where}"
        cause = _why_not_killed(point, reference)
        return Trial(title, Verdict.HARD_FAILURE, reason=reason, cause=cause)
    durable = killed.durable_batch()
    ended = start(plan, killed, 1, None, say, "restarted")
    resumed = killed.resumed_batch()
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


def _why_not_killed(point: Point, reference: Run) -> str:
    if point.once_durable:
        return "no checkpoint became durable before its end"
    if str(point.at)[0].isdecimal():
        return f"it trains {_batches(reference.traces())} batches"
    return "there are not so many events of that kind, or none on that rank"


def _problem(ended: Ended, of: Run, plan: Drill, who: str) -> Trial | None:
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


_OF_AN_OUTPUT = {
    r"FileNotFoundError: .*\.ckpt": "its trainers write elsewhere in a drill: ask a callback for its files "
    "(best_model_path, dirpath), not by name",
    r"No space left on device": "there is no room for the checkpoints of a run: TMPDIR, or --keep, says where else",
}


def _why_ended(tail: str) -> str:
    """What of a drill may be behind it; empty if that is not known."""
    return next((cause for pattern, cause in _OF_AN_OUTPUT.items() if re.search(pattern, tail)), "")


def _failed(reason: str, cause: str, output: str = "") -> Trial:
    return Trial(None, Verdict.HARD_FAILURE, reason=reason, cause=cause, output=output)


def _in_words(code: int) -> str:
    if code < 0:
        return f"by {signal.Signals(-code).name}"
    names = [name for name, value in vars(exit_codes).items() if name.isupper() and value == code]
    return f"with exit code {code}" + (f" ({names[0]}, see lightning_ft.exit_codes)" if names else "")


def _points(plan: Drill, reference: Run) -> list[Point]:
    if plan.kill_at is not None:
        return [Point(plan.kill_at)]
    lines = reference.lines(0)
    if plan.sweep:
        seen = [line["event"] for line in lines if "event" in line]
        # The second of its kind, so that there was a save before it, where there are two.
        times = {name: min(seen.count(name), 2) for name in events.DIRECTORY_KILL_POINTS if name in seen}
        return [Point(f"{name}:{count}" if count > 1 else name) for name, count in times.items()]
    steps = [record["key"][0] for record in reference.traces()[0] if record["kind"] == "step"]
    begun = min((line["batch"] for line in lines if line.get("event") == "SaveStarted"), default=None)
    if begun is None or not steps:
        return []
    # After the first save, in the middle if that is later; never at the last batch, after which nothing follows.
    last = steps[-1] - 1
    return [Point(min(max(begun + 1, steps[len(steps) // 2]), last), once_durable=True)] if begun < last else []


def _differences(
    expected: dict[int, list[Record]], actual: dict[int, list[Record]], atol: float | None
) -> list[Difference]:
    return [d for rank, records in expected.items() for d in differences(records, actual.get(rank, []), rank, atol)]


def _explained(
    plan: Drill,
    reference: Run,
    expected: dict[int, list[Record]],
    found: Sequence[Difference],
    resumed: int | None,
    say: Say,
    again: list[Run],
) -> tuple[str, str]:
    """The first difference and its likely cause; whether the script repeats itself at all is tried first, once."""
    if not again:
        second = Run(plan.scratch / "uninterrupted-again")
        start(plan, second, 0, None, say, "uninterrupted, once more")
        tidy(plan, second)
        again.append(second)
    if fresh := _differences(expected, again[0].traces(), plan.atol):
        first = diagnosis.first(fresh, expected)
        return diagnosis.said_of_fresh_runs(first), diagnosis.cause_in_fresh_run(fresh, first)
    first = diagnosis.first(found, expected)
    if first.kind == "value" and first.start == 0:
        return diagnosis.said_of_fresh_runs(first), diagnosis.cause_in_fresh_run(found, first)
    return diagnosis.said(first), diagnosis.cause_after_restart(found, first, expected, resumed)


def _outcome(plan: Drill, reference: Run, trials: Sequence[Trial]) -> Outcome:
    traces = reference.traces()
    validations = sum(record["kind"] == "validation" for records in traces.values() for record in records)
    return Outcome(
        plan.command, _batches(traces), max(1, len(traces)), validations, tuple(trials),
        tuple(dict.fromkeys(_not_covered(plan, reference, trials, validations))),
    )  # fmt: skip


def _batches(traces: dict[int, list[Record]]) -> int:
    """Of one rank."""
    return sum(record["kind"] == "step" for record in traces[0]) if traces else 0


def _not_covered(plan: Drill, reference: Run, trials: Sequence[Trial], validations: int) -> Iterable[str]:
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
