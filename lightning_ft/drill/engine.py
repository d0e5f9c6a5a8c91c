"""A drill: runs uninterrupted, killed, restarted and, where these differ, uninterrupted once more; and what they say.

Each trial has a directory of its own, with checkpoints and traces; the user's own are never written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightning_ft._proof.kill_point import parse
from lightning_ft._proof.traces import Difference, Record, differences, replayed, words
from lightning_ft.drill import diagnosis, unrestored
from lightning_ft.drill.endings import failed, problem
from lightning_ft.drill.points import in_a_later_epoch, points, several_epochs
from lightning_ft.drill.runs import Drill, Point, Run, Say, start, tidy
from lightning_ft.drill.verdict import Outcome, Trial, Verdict, place


def drill(plan: Drill, say: Say) -> Outcome:
    """What a kill and a restart do to the script. Blocks on: its runs. On disk: everything under `scratch`.

    Raises:
        CannotStartError: The command cannot be started.
    """
    reference = Run(plan.scratch / "uninterrupted")
    wrong = _uninterrupted(plan, reference, say, "uninterrupted")
    if wrong is None and not _saved(reference) and (every := _saves_in_time(reference)) is not None:
        plan = replace(plan, save_every_n_steps=every)
        reference = Run(plan.scratch / "uninterrupted-saving")
        wrong = _uninterrupted(plan, reference, say, f"uninterrupted, saved every {every} steps")
    if wrong is not None:
        return _outcome(plan, reference, [wrong])
    places = points(plan.kill_at, plan.sweep, _steps(reference), reference.lines(0))
    if not places:
        cause = "no save was begun before the last batch: save more often, or drill more steps"
        if plan.kill_at is not None:
            cause = f"no save was begun before {place(str(plan.kill_at))}: save more often, or kill later"
        nothing = failed("there is nothing to restart from", cause)
        return _outcome(plan, reference, [nothing])
    again: list[_Again] = []
    trials: list[Trial] = []
    for number, point in enumerate(places):
        killed = Run(plan.scratch / f"killed-{number}")
        prefix = f"trial {number + 1} of {len(places)}: " if len(places) > 1 else ""
        trials.append(_trial(plan, reference, killed, point, _prefixed(say, prefix), again))
        tidy(plan, killed)
        if not trials[-1].repeatable:  # then the others show nothing either
            break
    return _outcome(plan, reference, trials, places[len(trials) :])


def _uninterrupted(plan: Drill, reference: Run, say: Say, title: str) -> Trial | None:
    """The run has ended; what is wrong with it, None if nothing is."""
    ended = start(plan, reference, 0, None, say, title)
    tidy(plan, reference)
    return problem(ended, reference, plan.timeout_secs, "the uninterrupted run")


def _saved(reference: Run) -> bool:
    """Whether it has saved by itself in time for a restart, wherever it is to be killed."""
    return bool(points(None, False, _steps(reference), reference.lines(0)))


def _saves_in_time(reference: Run) -> int | None:
    """After how many steps to save a run that leaves it to the clock, which is too slow for so short a run.

    When saves are made changes nothing of what is trained. None: it does not leave it to the clock.
    """
    if not reference.facts(0).get("saves_by_clock"):
        return None
    steps = [record["values"]["global step"] for record in _steps(reference)]
    return max(1, max(steps, default=0) // 4)


def _prefixed(say: Say, prefix: str) -> Say:
    return lambda title, batches: say(prefix + title, batches)


def _trial(plan: Drill, reference: Run, killed: Run, point: Point, say: Say, again: list[_Again]) -> Trial:
    title = str(point.at)
    where = place(title)
    ended = start(plan, killed, 0, point, say, f"to be killed at {where}")
    if not ended.killed:
        if wrong := problem(ended, killed, plan.timeout_secs, "the run that was to be killed"):
            return replace(wrong, kill_at=title)
        reason = f"the script ended before {where}"
        cause = _why_not_killed(point, reference)
        return Trial(title, Verdict.HARD_FAILURE, reason=reason, cause=cause)
    durable = killed.durable_batch()
    ended = start(plan, killed, 1, None, say, "restarted")
    resumed = killed.resumed_batch(ended=ended.code == 0)
    expected, actual = reference.traces(), killed.traces()
    facts = Trial(
        title, Verdict.PASS, killed=True, resumed_batch=resumed, durable_batch=durable,
        replayed=max((replayed(records) for records in actual.values()), default=0),
    )  # fmt: skip
    if wrong := problem(ended, killed, plan.timeout_secs, "the restart"):
        reason, from_ = _beside(wrong.reason, expected, actual, plan.atol)
        return replace(
            facts, verdict=wrong.verdict, reason=reason, cause=wrong.cause, output=wrong.output, differ_from=from_
        )
    if found := _differences(expected, actual, plan.atol):
        second, wrong = _once_more(plan, say, again)
        if wrong is not None:
            return replace(facts, verdict=wrong.verdict, reason=wrong.reason, cause=wrong.cause, output=wrong.output)
        reason, cause, from_ = _explained(plan, reference, second, expected, actual, found, resumed)
        return replace(facts, verdict=Verdict.SILENT_DIVERGENCE, reason=reason, cause=cause, differ_from=from_)
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
    asked, batches = parse(point.at), _batches(reference.traces())
    if asked.event is not None:
        return "there are not so many events of that kind, or none on that rank"
    return f"it trains {batches} batches" if asked.count > batches else "no checkpoint became durable before its end"


def _steps(reference: Run) -> list[Record]:
    """What rank 0 has trained."""
    return [record for record in reference.traces().get(0, []) if record["kind"] == "step"]


def _differences(
    expected: dict[int, list[Record]], actual: dict[int, list[Record]], atol: float | None
) -> list[Difference]:
    return [d for rank, records in expected.items() for d in differences(records, actual.get(rank, []), rank, atol)]


def _beside(
    reason: str, expected: dict[int, list[Record]], actual: dict[int, list[Record]], atol: float | None
) -> tuple[str, str]:
    """`reason`, and from which step on the run differed already before it was killed, which may be behind it."""
    fresh = [d for d in _differences(expected, actual, atol) if d.kind == "value" and d.start == 0]
    if not fresh:
        return reason, ""
    first = diagnosis.first(fresh, expected)
    said = diagnosis.said_of_fresh_runs(first)
    return f"{reason}; and two uninterrupted runs are not equal either: {said}", words(first.key)


_Again = tuple[Run, Trial | None]


def _once_more(plan: Drill, say: Say, again: list[_Again]) -> _Again:
    """A second uninterrupted run, made once, and what is wrong with it: it shows whether the script repeats itself."""
    if not again:
        second = Run(plan.scratch / "uninterrupted-again")
        ended = start(plan, second, 0, None, say, "uninterrupted, once more")
        tidy(plan, second)
        again.append((second, problem(ended, second, plan.timeout_secs, "a second uninterrupted run")))
    return again[0]


def _explained(
    plan: Drill,
    reference: Run,
    second: Run,
    expected: dict[int, list[Record]],
    actual: dict[int, list[Record]],
    found: Sequence[Difference],
    resumed: int | None,
) -> tuple[str, str, str]:
    """The first difference, its likely cause, and from where two uninterrupted runs differ, if they do."""
    other = second.traces()
    fresh = _differences(expected, other, plan.atol)
    first = diagnosis.first(fresh or found, expected)
    if not fresh and first.kind == "value" and first.start == 0:  # it differs now and then only
        fresh, other = [d for d in found if d.start == 0], actual
    if fresh:
        seeded = bool(reference.facts(0).get("seeded"))
        cause = diagnosis.cause_in_fresh_run(fresh, first, seeded, unrestored.same_weights_at_first(expected, other))
        return diagnosis.said_of_fresh_runs(first), cause, words(first.key)
    cause = diagnosis.cause_after_restart(found, first, expected, actual, resumed)
    return diagnosis.said(first), cause, ""


def _outcome(plan: Drill, reference: Run, trials: Sequence[Trial], untried: Sequence[Point] = ()) -> Outcome:
    traces = reference.traces()
    validations = sum(record["kind"] == "validation" for records in traces.values() for record in records)
    return Outcome(
        plan.command, _batches(traces), max(1, len(traces)), validations, tuple(trials),
        tuple(dict.fromkeys(_not_covered(plan, reference, trials, untried, validations))),
    )  # fmt: skip


def _batches(traces: dict[int, list[Record]]) -> int:
    """Of one rank."""
    return sum(record["kind"] == "step" for record in traces[0]) if traces else 0


def _not_covered(
    plan: Drill, reference: Run, trials: Sequence[Trial], untried: Sequence[Point], validations: int
) -> Iterable[str]:
    if all(trial.resumed_batch is None for trial in trials):
        yield "restarts from a checkpoint: none began with one"
    elif not any(in_a_later_epoch(_steps(reference), trial.resumed_batch) for trial in trials):
        why = "" if several_epochs(_steps(reference)) else ": one was trained"
        yield f"restarts in a later epoch than the first{why}"
    places = ", ".join(place(trial.kill_at) for trial in trials if trial.kill_at is not None)
    if places and not plan.sweep:
        yield f"kills at other places than {places} (--sweep: every event of a save)"
    if untried:
        names = ", ".join(place(str(point.at)) for point in untried)
        yield f"kills at {names}: not tried, since two uninterrupted runs differ"
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
