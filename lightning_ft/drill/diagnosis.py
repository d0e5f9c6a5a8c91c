"""Why a restarted run is not the uninterrupted one: from the first difference to its likely cause."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_ft._traces import Difference, Record, key_of

NONDETERMINISTIC = "two uninterrupted runs are not equal either: "

_SEED = "call seed_everything before anything is made"
_OF_A_FRESH_RUN = {
    "batch": f"the order of the data, or random augmentation, is not seeded: {_SEED}",
    "random state": f"random numbers are not seeded: {_SEED}",
    "weights": f"the weights are not initialised the same: {_SEED}",
    "output": "the same batch and weights gave another result: a kernel that is not deterministic "
    "(Trainer(deterministic=True)), or random numbers drawn in a thread or from a generator of its own",
}
_AFTER_A_RESTART = {
    "batch": "the sample is made with random numbers that are not restored (drawn in a thread, from a generator of its "
    "own, from the clock), or the loader has lost its position",
    "random state": "the random state was not restored, or something draws random numbers while it is set up",
    "learning rates": "the learning rate scheduler was not restored, or is moved on by hand",
    "scheduler state": "the learning rate scheduler was not restored, or is moved on by hand",
    "optimizer state": "the state of the optimizer was dropped or changed on its way through the checkpoint",
    "requires_grad": "which parameters are frozen is decided in a hook that does not run again after a restart",
    "callbacks": "a callback has state that its state_dict leaves out, or does not take back",
    "global step": "the counters of the loops were not restored",
    "batch index": "the counters of the loops were not restored",
    "epoch": "the counters of the loops were not restored",
    "metrics": "a metric is not restored: it is kept outside of self.log and of torchmetrics in the module",
}
# What is behind a difference rather shows in these, in this order, than in the others, which follow from them.
_BY_CAUSE = (
    "batch", "epoch", "batch index", "global step", "requires_grad", "output", "random state", "learning rates"
)  # fmt: skip


def first(differences: Sequence[Difference], expected: Sequence[Record]) -> Difference:
    """The earliest of `differences` in the order of the run; of one step the quantity that comes first by cause."""
    order = {key_of(record): number for number, record in enumerate(expected)}

    def position(difference: Difference) -> tuple[int, int, int]:
        at = order.get(difference.key, len(order))
        rank = _BY_CAUSE.index(difference.name) if difference.name in _BY_CAUSE else len(_BY_CAUSE)
        return at, {"missing": 0, "extra": 0, "value": 1}[difference.kind], rank

    return min(differences, key=position)


def cause_in_fresh_run(differences: Sequence[Difference], found: Difference) -> str:
    """The likely cause, where two uninterrupted runs differ and `found` is the first difference."""
    same = {d.name for d in differences if d.key == found.key and d.rank == found.rank}
    if found.name == "output" and "random state" in same and found.key[1:] == (1,):
        return NONDETERMINISTIC + _OF_A_FRESH_RUN["random state"]
    return NONDETERMINISTIC + _OF_A_FRESH_RUN.get(found.name, f"{found.name or 'a record'} does not repeat")


def cause_after_restart(
    differences: Sequence[Difference], found: Difference, expected: Sequence[Record], resumed_batch: int | None
) -> str:
    """The likely cause, where two uninterrupted runs are equal and a restarted one is not.

    Args:
        differences: All of this rank.
        found: The first of them.
        expected: What the uninterrupted run did on this rank.
        resumed_batch: How many batches were trained when the restart went on; None: it began again.
    """
    if found.kind != "value":
        return _of_records(found)
    same = {d.name for d in differences if d.key == found.key and d.rank == found.rank and d.kind == "value"}
    if found.name == "batch":
        return _of_batch(found, expected)
    if found.name == "output":
        at_once = found.key[0] == "step" and resumed_batch is not None and found.key[1] == resumed_batch + 1
        if "random state" in same:
            return _AFTER_A_RESTART["random state"]
        if at_once:
            return (
                "weights or buffers were not restored, or the module has state outside of its state_dict: the first "
                "batch after the restart, with the same random numbers, gave another result"
            )
        return (
            "the module has state outside of its state_dict, or random numbers come from a generator that is not "
            "restored"
        )
    if found.name == "weights":
        return (
            _AFTER_A_RESTART["optimizer state"]
            if "optimizer state" in same
            else ("something beside the optimizer changes the weights, and its state was not restored")
        )
    return _AFTER_A_RESTART.get(found.name, f"{found.name} was not restored")


def _of_records(found: Difference) -> str:
    kind = found.key[0]
    if kind == "validation":
        return (
            "a validation was left out after the restart"
            if found.kind == "missing"
            else "a validation was run that the uninterrupted run had not"
        )
    if found.kind == "missing":
        return "batches were skipped, or the restarted run ended too early: the loader has lost its position"
    return (
        "batches were trained that the uninterrupted run had not: the loader has lost its position, or the end was "
        "missed"
    )


def _of_batch(found: Difference, expected: Sequence[Record]) -> str:
    if found.key[0] != "step":
        return "another batch was validated: the validation loader is shuffled, or draws random numbers of its own"
    where = {r["values"].get("batch"): r["key"][0] for r in expected if r["kind"] == "step"}
    elsewhere = where.get(found.actual)
    if elsewhere is not None and elsewhere < found.key[1]:
        return f"the loader has lost its position: batch {elsewhere} of the uninterrupted run was trained again"
    if elsewhere is not None:
        return f"the loader has lost its position: it went on with batch {elsewhere} of the uninterrupted run"
    return _AFTER_A_RESTART["batch"]
