"""What a restart began with that was not as it had been: weights, optimizer state, attributes of the script's own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_ft._proof.traces import Record

# Of a list of attributes that differ; counters often come in numbers.
_MOST_NAMES = 3
_DIGEST = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{24}\b")
_FRACTION = re.compile(r"(?<![\w.])-?\d+\.\d{7,}(?:e[+-]?\d+)?(?![\w.])")


def same_weights_at_first(expected: Mapping[int, Sequence[Record]], actual: Mapping[int, Sequence[Record]]) -> bool:
    """Whether two runs have begun their first batch with the same weights."""
    return all(
        bool(records) and bool(actual.get(rank)) and _begun(records[0]) == _begun(actual[rank][0]) != {}
        for rank, records in expected.items()
    )


def restored(
    expected: Mapping[int, Sequence[Record]], actual: Mapping[int, Sequence[Record]], resumed_batch: int | None
) -> bool:
    """Whether the restart has begun with the weights and the optimizer state that the uninterrupted run had there."""
    if resumed_batch is None:
        return False
    return all(
        (there := _step(records, resumed_batch)) is not None
        and (begun := _step(actual.get(rank, ()), resumed_batch + 1, start=1)) is not None
        and all(there["values"].get(name) == value for name, value in _begun(begun).items())
        and _begun(begun) != {}
        for rank, records in expected.items()
    )


def attributes(
    expected: Sequence[Record], actual: Sequence[Record], resumed_batch: int | None
) -> dict[str, tuple[str, str]]:
    """Attributes that the restart has begun with other values than the uninterrupted run, each with both.

    Those that are not the same in two uninterrupted runs, such as times, are not among them.

    Args:
        expected: Of the uninterrupted run; one rank.
        actual: Of the one that was killed and restarted; the same rank.
        resumed_batch: How many batches were trained when the restart went on; None: it began again.
    """
    if resumed_batch is None:
        return {}
    there = _attributes(_step(expected, resumed_batch + 1))
    begun = _attributes(_step(actual, resumed_batch + 1, start=1))
    if not there or not begun:
        return {}
    first_start = [record for record in actual if record["kind"] == "step" and record["start"] == 0]
    newest = first_start[-1] if first_start else None
    once, again = _attributes(newest), _attributes(newest and _step(expected, newest["key"][0]))
    return {
        name: (value, begun.get(name, "not there"))
        for name, value in there.items()
        if begun.get(name) != value and once.get(name) == again.get(name)
    }


def outside_of_module(found: Mapping[str, tuple[str, str]], records: Sequence[Record]) -> dict[str, tuple[str, str]]:
    """Those of `found` that belong to callbacks, data modules, loaders and data sets."""
    modules = {record["module"] for record in records if "module" in record}
    return {name: values for name, values in found.items() if name.partition(".")[0] not in modules}


def said(found: Mapping[str, tuple[str, str]]) -> str:
    """The attributes in words, and what to do; empty if there are none."""
    if not found:
        return ""
    named = [
        f"`{name}` was {before} and is {after} after the restart"
        for name, (before, after) in ((name, _short(*values)) for name, values in list(found.items())[:_MOST_NAMES])
    ]
    more = f", and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
    return f"{', '.join(named)}{more}: put it into state_dict, register_buffer or on_save_checkpoint"


def _short(*values: str) -> tuple[str, ...]:
    """Digests and numbers in few digits, if these are enough to tell the values apart."""
    short = tuple(_DIGEST.sub(r"\1", _FRACTION.sub(lambda number: f"{float(number[0]):.6g}", v)) for v in values)
    return short if len(set(short)) == len(set(values)) else values


def _step(records: Sequence[Record], batch: int, start: int | None = None) -> Record | None:
    for record in records:
        if record["kind"] == "step" and record["key"] == [batch] and start in (None, record["start"]):
            return record
    return None


def _begun(record: Record) -> dict[str, Any]:
    return dict(record.get("begun", {}))


def _attributes(record: Record | None) -> dict[str, str]:
    return dict((record or {}).get("attributes", {}))
