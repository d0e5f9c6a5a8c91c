"""Where a drill kills a run, from what the uninterrupted run has shown. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_ft import events
from lightning_ft._proof.assignment import is_ours
from lightning_ft._proof.kill_point import KillPoint, parse
from lightning_ft._proof.traces import Record
from lightning_ft.drill.runs import Point


def points(
    kill_at: KillPoint | None, sweep: bool, steps: Sequence[Record], lines: Sequence[Mapping[str, Any]]
) -> list[Point]:
    """One per trial; none if nothing could be restarted from.

    Args:
        kill_at: What was asked for. A batch is one at which a checkpoint is waited for: a restart from the beginning
            shows nothing.
        sweep: Whether all events of a save were asked for.
        steps: What rank 0 has trained, in order.
        lines: Its events. Those of other callbacks' files are passed over: no restart begins with these.
    """
    if sweep:
        return list(_at_every_event(lines))
    if kill_at is not None and not parse(kill_at).is_batch_of_all:
        return [Point(kill_at)]
    # A save may be begun long after the step whose state it has: its copy, or its place in the queue, takes time.
    step_of = {_batch_of(int(line["step"]), steps): int(line["step"]) for line in _of_ours("SaveStarted", lines)}
    saves = sorted(batch for batch in step_of if batch is not None)
    if not saves or not steps:
        return []
    if kill_at is not None:
        pairs = [(saves[0], parse(kill_at).count)]
    else:
        pairs = [*_in_later_epochs(steps, saves), _in_the_middle(steps, saves)]
    for saved, kill_after in pairs:
        if saved < kill_after:
            return [Point(kill_after, once_durable=True, durable_from=step_of[saved])]
    return []


def _at_every_event(lines: Sequence[Mapping[str, Any]]) -> Iterable[Point]:
    """The second of its kind where there are two, so that there was a save before it."""
    for name in events.DIRECTORY_KILL_POINTS:
        if ours := list(_of_ours(name, lines)):
            # Whoever kills counts those of all files.
            count = 1 + [line for line in lines if line.get("event") == name].index(ours[:2][-1])
            yield Point(f"{name}:{count}" if count > 1 else name)


def _of_ours(event: str, lines: Sequence[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    return (line for line in lines if line.get("event") == event and is_ours(line["path"]))


def _batch_of(step: int, steps: Sequence[Record]) -> int | None:
    """The batch that ended with `step` optimizer steps taken; None if there was none, as before the first."""
    return next((int(record["key"][0]) for record in steps if record["steps"] == step), None)


def _in_later_epochs(steps: Sequence[Record], saves: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Saves, each with a batch after it: a restart in the first epoch shows nothing of what epochs do to each other.

    The second epoch comes first, and a save within it before one at its edge, which restores no position in it.
    """
    later = list(_epochs(steps).values())[1:]
    for first, last in later:
        if inside := [save for save in saves if first <= save < last - 1]:
            yield inside[0], max(inside[0] + 1, (first + last) // 2)
    for first, last in later:
        middle = (first + last) // 2
        if first < middle < last and (before := [save for save in saves if save < first]):
            yield before[-1], middle


def _in_the_middle(steps: Sequence[Record], saves: Sequence[int]) -> tuple[int, int]:
    """The first save, and the middle of the run if that is later; never the last batch, after which nothing follows."""
    last = int(steps[-1]["key"][0]) - 1
    return saves[0], min(max(saves[0] + 1, int(steps[len(steps) // 2]["key"][0])), last)


def _epochs(steps: Sequence[Record]) -> dict[int, tuple[int, int]]:
    """The first and the last batch of each."""
    spans: dict[int, tuple[int, int]] = {}
    for record in steps:
        epoch, batch = record["values"]["epoch"], int(record["key"][0])
        spans[epoch] = (spans.get(epoch, (batch, batch))[0], batch)
    return spans


def in_a_later_epoch(steps: Sequence[Record], resumed_batch: int | None) -> bool:
    """Whether a restart that went on after so many batches went on in another epoch than the first."""
    if resumed_batch is None:
        return False
    return any(resumed_batch + 1 >= first for first, _ in list(_epochs(steps).values())[1:])


def several_epochs(steps: Sequence[Record]) -> bool:
    """Whether more than one was begun."""
    return len(_epochs(steps)) > 1
