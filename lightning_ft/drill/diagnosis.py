"""Why a restarted run is not the uninterrupted one: from the first difference to its likely cause."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from lightning_ft._proof.traces import Difference, Key, Record, key_of
from lightning_ft.drill import unrestored

NONDETERMINISTIC = "two uninterrupted runs are not equal either: "

# Of a sentence: values of a few numbers are worth reading, states of whole optimizers are not.
_READABLE = 400
_DIGEST = re.compile(r"\b([0-9a-f]{8})[0-9a-f]{24}\b")
_HEXADECIMAL = re.compile(r"'(-?0x[0-9a-f]\.[0-9a-f]+p[+-]\d+)'")
_SEED = "call seed_everything before anything is made"
_KERNEL = "a kernel is not deterministic (Trainer(deterministic=True))"
_UNSEEDED = "a generator of its own, a thread, the clock, or the order of a set"
_OF_A_FRESH_RUN = {
    "batch": f"the order of the data, or random augmentation, is not seeded: {_SEED}",
    "random state": f"random numbers are not seeded: {_SEED}",
    "output": f"the same batch gave another result: {_KERNEL}, or random numbers are drawn in a thread or from a "
    "generator of its own",
    "weights": f"the same batch and result gave other weights: {_KERNEL}",
    "optimizer state": f"the same batch and result gave another optimizer state: {_KERNEL}",
    "callbacks": "a callback has state that does not repeat, such as a time",
}
# The same, where it is known that the global generators are seeded.
_OF_A_SEEDED_RUN = {
    "batch": f"the order of the data, or random augmentation, follows what no seed reaches: {_UNSEEDED}",
    "random state": "something draws from the global generators as often as a thread, the clock or the order of a set "
    "has it",
}
_AFTER_A_RESTART = {
    "batch": "the sample is made with random numbers that are not restored (drawn in a thread, from a generator of its "
    "own, from the clock), a hook or callback without state changes the batch, or the loader has lost its position",
    "random state": "the random state was not restored, or something draws random numbers while it is set up",
    "learning rates": "the learning rate scheduler was not restored, or rates are set by hand from what is not saved",
    "scheduler state": "the learning rate scheduler was not restored, or is moved on by hand",
    "optimizer state": "the state of the optimizer was dropped or changed on its way through the checkpoint",
    "requires_grad": "which parameters are frozen is decided in a hook that does not run again after a restart",
    "callbacks": "a callback has state that its state_dict leaves out, or does not take back",
    "global step": "in manual optimization the module decides when to step by something that is not saved; or the "
    "counters of the loops were not restored",
    "batch index": "the counters of the loops were not restored",
    "epoch": "the counters of the loops were not restored",
    "weights": "something beside the optimizer changes the weights, and its state was not restored",
    "metrics": "a metric is not restored: it is kept outside of self.log and of torchmetrics in the module",
}
_MAY_FOLLOW_FROM_ATTRIBUTES = ("metrics", "global step", "weights", "callbacks", "learning rates", "requires_grad")
_MODEL_CHECKPOINT = (
    "a ModelCheckpoint has forgotten its best models: without a dirpath it writes to where the logger does, and where "
    "that is another directory at every start, Lightning restores none of its state; give it a dirpath"
)
# Two numbers have the same sum in any order, three have not.
_BUCKETS = (
    "with three ranks or more, DDP adds up gradients in another order at a process's first step "
    "(DDPStrategy(find_unused_parameters=True) keeps one order); or "
)
# What is behind a difference rather shows in these, in this order, than in the others, which follow from them.
_BY_CAUSE = (
    "batch", "epoch", "batch index", "global step", "requires_grad", "output", "random state", "learning rates",
    "scheduler state", "weights", "optimizer state",
)  # fmt: skip


def first(differences: Sequence[Difference], expected: Mapping[int, Sequence[Record]]) -> Difference:
    """The earliest of `differences`, over all ranks; of one step the quantity that comes first by cause.

    Args:
        differences: At least one.
        expected: What the uninterrupted run did, by rank.
    """
    places = {rank: _places(records) for rank, records in expected.items()}

    def position(difference: Difference) -> tuple[_Place, int, int]:
        place = places.get(difference.rank, {}).get(difference.key) or _of_what_is_extra(difference.key)
        rank = _BY_CAUSE.index(difference.name) if difference.name in _BY_CAUSE else len(_BY_CAUSE)
        return place, {"missing": 0, "extra": 0, "value": 1}[difference.kind], rank

    return min(differences, key=position)


_Place = tuple[float, float, float]
"""When something was done: the batch that was trained last, what of all that follows on a batch, and its number."""

# In the order in which they follow on a batch; between validations and the end of an epoch another batch may come.
_FOLLOWS = {"step": 0.0, "validation": 1.0, "validated": 1.0, "epoch": 3.0, "end": 4.0}
_ANOTHER_BATCH = 2.0


def _places(records: Sequence[Record]) -> dict[Key, _Place]:
    places: dict[Key, _Place] = {}
    batch = 0.0
    for number, record in enumerate(records):
        batch = float(record["key"][0]) if record["kind"] == "step" else batch
        places.setdefault(key_of(record), (batch, _FOLLOWS[record["kind"]], float(number)))
    return places


def _of_what_is_extra(key: Key) -> _Place:
    """Where the uninterrupted run would have done what it has not: what it did after that may follow from it."""
    kind, number = key[:2]
    if kind == "step":
        return float(number) - 1, _ANOTHER_BATCH, 0.0
    return (float(number), _FOLLOWS[kind], inf) if kind in ("validation", "validated") else (inf, inf, inf)


def said(difference: Difference) -> str:
    """`difference` in a sentence: of values with names, those that differ; digests short, numbers in decimals."""
    expected, actual = difference.expected, difference.actual
    if isinstance(expected, dict) and isinstance(actual, dict):
        names = [name for name in {**expected, **actual} if expected.get(name) != actual.get(name)]
        expected, actual = ({name: values.get(name) for name in names} for values in (expected, actual))
    text = str(replace(difference, expected=expected, actual=actual))
    text = _DIGEST.sub(r"\1", text)
    text = _HEXADECIMAL.sub(lambda found: repr(float.fromhex(found[1])), text)
    return text if len(text) <= _READABLE else text[:_READABLE] + " ..."


def said_of_fresh_runs(difference: Difference) -> str:
    """The same, where none of the two runs was restarted."""
    words = said(difference).replace(" uninterrupted, ", " in one run, ").replace(" restarted", " in another")
    return words.replace("the restarted run", "another run").replace("the uninterrupted run", "one run")


def cause_in_fresh_run(
    differences: Sequence[Difference], found: Difference, seeded: bool = False, same_weights: bool = False
) -> str:
    """The likely cause, where two uninterrupted runs differ and `found` is the first difference.

    Args:
        differences: All.
        found: The first of them.
        seeded: Whether seed_everything was called.
        same_weights: Whether both have begun with the same weights.
    """
    same = {d.name for d in differences if d.key == found.key and d.rank == found.rank}
    # Python's generator has another state in every process that was not seeded.
    known = "seed_everything was called: " if seeded else "the global generators are seeded: "
    reached = seeded or "random state" not in same
    if found.name == "output" and found.key == ("step", 1):
        if "random state" in same:
            found = replace(found, name="random state")
        elif not same_weights:
            late = f"before the model is made; or from {_UNSEEDED}" if reached else ""
            seed = f"seeded {late}" if late else _SEED
            return (
                f"{NONDETERMINISTIC}the weights are not initialised the same ({seed}), or {_OF_A_FRESH_RUN['output']}"
            )
    if reached and found.name in _OF_A_SEEDED_RUN:
        return NONDETERMINISTIC + known + _OF_A_SEEDED_RUN[found.name]
    return NONDETERMINISTIC + _OF_A_FRESH_RUN.get(found.name, f"{found.name or 'what it does'} does not repeat")


def cause_after_restart(
    differences: Sequence[Difference],
    found: Difference,
    expected: Mapping[int, Sequence[Record]],
    actual: Mapping[int, Sequence[Record]],
    resumed_batch: int | None,
) -> str:
    """The likely cause, where two uninterrupted runs are equal and a restarted one is not.

    Args:
        differences: All.
        found: The first of them.
        expected: What the uninterrupted run did, by rank.
        actual: What the other one did.
        resumed_batch: How many batches were trained when the restart went on; None: it began again.
    """
    if found.kind != "value":
        return _of_records(found)
    own = unrestored.attributes(expected.get(found.rank, ()), actual.get(found.rank, ()), resumed_batch)
    if found.name == "batch":
        return _of_batch(found, expected, own)
    same = {d.name for d in differences if d.key == found.key and d.rank == found.rank and d.kind == "value"}
    if found.name == "output":
        return _of_output(found, same, resumed_batch, unrestored.restored(expected, actual, resumed_batch), own)
    if found.name == "weights" and "optimizer state" in same:
        return (_BUCKETS if len(expected) > 2 else "") + _AFTER_A_RESTART["optimizer state"]
    if found.name == "callbacks" and _differing(found).startswith("ModelCheckpoint"):
        return _MODEL_CHECKPOINT
    cause = _AFTER_A_RESTART.get(found.name, f"{found.name} was not restored")
    return _with_names(cause, own) if found.name in _MAY_FOLLOW_FROM_ATTRIBUTES else cause


def _with_names(cause: str, own: Mapping[str, tuple[str, str]]) -> str:
    names = unrestored.said(own)
    return f"{cause}; {names}" if names else cause


def _differing(found: Difference) -> str:
    """The first name under which the values differ."""
    names = [name for name, value in found.expected.items() if (found.actual or {}).get(name) != value]
    return names[0] if names else ""


def _of_output(
    found: Difference, same: set[str], resumed_batch: int | None, restored: bool, own: Mapping[str, tuple[str, str]]
) -> str:
    if "random state" in same:
        return _AFTER_A_RESTART["random state"]
    if found.key[0] != "step" or resumed_batch is None or found.key[1] != resumed_batch + 1:
        cause = "the module has state outside of its state_dict, or random numbers of a generator that is not restored"
    elif restored:
        cause = (
            "the module has state outside of its state_dict: the first batch after the restart, with the same weights, "
            "optimizer state and random numbers, gave another result"
        )
    else:
        cause = (
            "weights or buffers were not restored, or the module has state outside of its state_dict: the first "
            "batch after the restart, with the same random numbers, gave another result"
        )
    return _with_names(cause, own)


def _of_records(found: Difference) -> str:
    if found.key[0] in ("validation", "validated"):
        return (
            "a validation was left out after the restart"
            if found.kind == "missing"
            else "a validation was run that the uninterrupted run had not"
        )
    if found.key[0] == "end":
        return "the fit has ended in another way: by an error that the script catches, or by an exit in the middle"
    if found.kind == "missing":
        return "batches were skipped, or the restarted run ended too early: the loader has lost its position"
    return (
        "batches were trained that the uninterrupted run had not: the loader has lost its position, or the end was "
        "missed"
    )


def _of_batch(found: Difference, expected: Mapping[int, Sequence[Record]], own: Mapping[str, tuple[str, str]]) -> str:
    if found.key[0] != "step":
        return "another batch was validated: the validation loader is shuffled, or draws random numbers of its own"
    # Unshuffled epochs have the same batches: the nearest before it is where a loader would have begun again.
    where = [
        r["key"][0] for r in expected[found.rank] if r["kind"] == "step" and r["values"].get("batch") == found.actual
    ]
    here = found.key[1]
    if before := [batch for batch in where if batch < here]:
        return f"the loader has lost its position: batch {before[-1]} of the uninterrupted run was trained again"
    if where:
        return f"the loader has lost its position: it went on with batch {where[0]} of the uninterrupted run"
    others = [rank for rank, records in expected.items() if rank != found.rank and _has_batch(records, found)]
    if others:
        return f"the ranks were dealt other parts of the data: this is the batch of rank {others[0]}"
    # The module may change it too, and mostly has nothing to do with it.
    if besides := unrestored.outside_of_module(own, expected[found.rank]):
        return f"what makes or changes the batch has state that is not restored: {unrestored.said(besides)}"
    return _with_names(_AFTER_A_RESTART["batch"], own)


def _has_batch(records: Sequence[Record], found: Difference) -> bool:
    return any(key_of(r) == found.key and r["values"].get("batch") == found.actual for r in records)
