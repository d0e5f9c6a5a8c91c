"""What a `Recorder` wrote down, read again and compared: whether two runs did the same, and where not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Record = dict[str, Any]
Key = tuple[Any, ...]
"""What a record is about: its kind and its numbers."""


@dataclass(frozen=True)
class Difference:
    """One thing in which a restarted run is not the uninterrupted one."""

    kind: Literal["value", "extra", "missing"]
    """``"extra"``: only the restarted run has this record; ``"missing"``: only the uninterrupted one."""
    key: Key
    rank: int
    start: int = 0
    """Which start of the run wrote the record, or has left it out: 0 is the first. Of what no start has: 0."""
    name: str = ""
    """Of a value, which."""
    expected: Any = None
    actual: Any = None

    def __str__(self) -> str:
        where = f" on rank {self.rank}" if self.rank else ""
        if self.kind == "extra":
            return f"the restarted run has {words(self.key)}{where}, the uninterrupted run has not"
        if self.kind == "missing":
            return f"the uninterrupted run has {words(self.key)}{where}, the restarted run has not"
        return f"{words(self.key)}{where}: {self.name} differs: {self.expected} uninterrupted, {self.actual} restarted"


def read(directory: Path, rank: int) -> list[Record]:
    """What rank `rank` wrote down in every start of a run, in order; each record has the number of its `start`.

    Files are called ``<start>.rank<rank>.jsonl``.
    """
    records = []
    for path in sorted(directory.glob(f"*.rank{rank}.jsonl"), key=_start_of):
        # A line cut short by the kill belongs to a batch whose end the run never reached.
        whole = path.read_text().rpartition("\n")[0]
        records += [{**json.loads(line), "start": _start_of(path)} for line in whole.splitlines()]
    return records


def _start_of(path: Path) -> int:
    return int(path.name.partition(".")[0])


def key_of(record: Record) -> Key:
    """What `record` is about."""
    return (record["kind"], *record["key"])


def differences(
    expected: Sequence[Record], actual: Sequence[Record], rank: int, atol: float | None = None
) -> Iterator[Difference]:
    """What of `actual` is not as in `expected`, in the order of the uninterrupted run; extra records come first.

    Args:
        expected: Of the uninterrupted run.
        actual: Of all starts of the other one. What was done twice must be right both times, and what comes after the
            first step of a restart must be done by it, whatever was done before the kill.
        rank: Whose records these are.
        atol: How far numbers may be apart; None: not at all.
    """
    wanted = {key_of(r): r["values"] for r in expected}
    order = {key: i for i, key in enumerate(wanted)}
    seen = set()
    for record in sorted(actual, key=lambda r: order.get(key_of(r), -1)):
        key = key_of(record)
        seen.add(key)
        if key not in wanted:
            yield Difference("extra", key, rank, record["start"])
            continue
        for name, value in wanted[key].items():
            found = record["values"].get(name)
            if not _equal(value, found, atol):
                yield Difference("value", key, rank, record["start"], name, value, found)
    over = _found_over(actual)
    for key in wanted:
        if key not in seen and not (over and key == ("end", 0)):
            yield Difference("missing", key, rank)
    for start, keys in _left_out(order, actual):
        yield from (Difference("missing", key, rank, start) for key in keys if key in seen)


def _found_over(actual: Sequence[Record]) -> bool:
    """Whether the last restart had nothing to train: then the end of training was not its to come to."""
    last = max((record["start"] for record in actual), default=0)
    done = {key_of(record)[:2] for record in actual if record["start"] == last}
    return last > 0 and ("end", 1) in done and not any(kind == "step" for kind, _ in done)


def _left_out(order: Mapping[Key, int], actual: Sequence[Record]) -> Iterator[tuple[int, list[Key]]]:
    """What each restart has not done, of all that there is from its first step to its last record, or to the end."""
    starts = {record["start"] for record in actual}
    for start in sorted(starts - {0}):
        done = {key_of(record) for record in actual if record["start"] == start}
        steps = [order[key] for key in done if key[0] == "step" and key in order]
        # One that was asked to stop has come to an end that is none.
        last = [order[key] for key in done if key[0] != "end" and key in order]
        until = len(order) if start == max(starts) else max(last, default=-1)
        if steps:
            yield start, [key for key, place in order.items() if min(steps) < place <= until and key not in done]


def _equal(a: Any, b: Any, atol: float | None) -> bool:
    if a == b:
        return True
    if atol is None or (isinstance(a, int) and isinstance(b, int)):  # counters are not close to each other
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key], atol) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_equal(x, y, atol) for x, y in zip(a, b, strict=True))
    x, y = _number(a), _number(b)
    if x is None or y is None:
        return False
    return abs(x - y) <= atol or (math.isnan(x) and math.isnan(y))


def _number(value: Any) -> float | None:
    """A number, also one that is written as its exact hexadecimal text."""
    if isinstance(value, str):
        try:
            return float.fromhex(value) if "0x" in value else None
        except ValueError:
            return None
    return float(value) if isinstance(value, (int, float)) else None


def replayed(actual: Sequence[Record]) -> int:
    """How many steps were trained more than once."""
    steps = [key_of(r) for r in actual if r["kind"] == "step"]
    return len(steps) - len(set(steps))


def words(key: Key) -> str:
    """What a key means."""
    kind, *numbers = key
    if kind == "step":
        return f"step {numbers[0]}"
    if kind == "validation":
        return f"validation at step {numbers[0]}, loader {numbers[1]}, batch {numbers[2]}"
    if kind == "validated":
        return f"the end of the validation at step {numbers[0]}"
    if kind == "epoch":
        return f"the end of epoch {numbers[0]}"
    return "the end of the fit" if numbers[0] else "the end of training"
