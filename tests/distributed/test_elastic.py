"""A run goes on with another number of ranks: every sample of the epoch once, in one order, and nothing is lost."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from tests.distributed.elastic import LENGTH, Start, Told, data, dump, tell

pytestmark = pytest.mark.distributed


def torch_order(epoch: int, seed: int = 1) -> list[int]:
    sampler: Any = DistributedSampler(range(LENGTH), 1, 0, seed=seed)  # type: ignore[arg-type]
    sampler.set_epoch(epoch)
    return list(sampler)


def joined(parts: list[list[Any]]) -> list[Any]:
    return [value for part in parts for value in part]


def check_state(told: list[Told]) -> None:
    """Every start began with the weights and optimizer state that the one before had after its last saved step."""
    for before, now in pairwise(told):
        saved = before.of("stepped")[-1]
        for rank in range(len(now.ranks)):
            (start,) = now.of("start", rank)
            assert start == {**saved, "kind": "start", "rank": rank}


def check_metrics(told: list[Told], epochs: int = 2) -> None:
    last = told[-1]
    for rank in range(len(last.ranks)):
        for note in last.of("epoch", rank):
            assert note["metrics"]["ids mean"] == note["metrics"]["torchmetric"] == (LENGTH - 1) / 2
            assert (note["metrics"]["ids max"], note["metrics"]["ids min"]) == (LENGTH - 1, 0)
            assert note["seen"] == list(range(LENGTH))
    assert [n["epoch"] for t in told for n in t.of("epoch")] == list(range(epochs))


def drawn(told: list[Told]) -> list[list[float]]:
    """What each rank of each start drew, of what is saved."""
    return [[n["drawn"] for n in t.of("batch", rank)] for t in told for rank in range(len(t.ranks))]


def test_a18_two_one_two_ranks(tmp_path: Path) -> None:
    """Twice, with the same outcome in every bit."""
    starts = [Start(2, 2, 3), Start(1, 2, 7, trainer={"accumulate_grad_batches": 2}), Start(2, 2)]
    # 2 batches of 2x2, then 4 of 2 (two steps), then 2 of 2x2
    first, second = (tell(tmp_path / name, starts) for name in ("first", "second"))
    assert dump(first) == dump(second)
    ids = [t.ids(0) for t in first]
    assert [len(i) for i in ids] == [8, 8, 8]
    assert joined(ids) == torch_order(0)
    assert first[2].ids(1) == torch_order(1)
    check_state(first)
    check_metrics(first)
    # counters: on one rank the epoch has 12 batches, of which 4 count as done
    assert [n["batch"] for n in first[1].of("batch")] == [4, 5, 6, 7]
    assert [n["batch"] for n in first[2].of("batch")] == [4, 5, *range(6)]
    assert [n["last"] for n in first[2].of("batch")] == [False, True, *[False] * 5, True]
    # half-way and at the end: after 12 and 24 samples, as in a run of one number of ranks
    assert [n["step"] for n in first[1].of("validation")] == [3]
    assert [n["step"] for n in first[2].of("validation")] == [6, 9, 12]
    assert [n["step"] for n in first[2].of("end")] == [12]
    # B2: rank 0 goes on with its own sequence, rank 1 of the third start is new and draws what nobody drew
    first_0, first_1, alone, last_0, last_1 = drawn(first)
    assert first_0 == first_1  # both ranks were seeded with the same
    assert len({*first_0, *alone, *last_0, *last_1}) == len([*first_0, *alone, *last_0, *last_1])


def test_a18_one_to_two_ranks_and_back_to_one(tmp_path: Path) -> None:
    """The order of one rank is that of a RandomSampler, drawn by us, until the epoch ends."""
    workers = partial(data, num_workers=2)
    (whole,) = tell(tmp_path / "whole", [Start(1, 2)])
    told = tell(tmp_path / "told", [Start(1, 2, 5), Start(2, 2, 7, workers), Start(1, 2, data=workers)])
    ids = [t.ids(0) for t in told]
    assert [len(i) for i in ids] == [8, 8, 8]
    assert joined(ids) == whole.ids(0)
    assert told[2].ids(1) == whole.ids(1)
    check_state(told)
    check_metrics(told)
    first, second, new, third = drawn(told)
    (undisturbed,) = drawn([whole])
    of_rank_0 = [*first, *second, *third]
    assert of_rank_0 == undisturbed[: len(of_rank_0)]
    assert not set(new) & set(undisturbed)
    augmented = [v for t in told for r in range(len(t.ranks)) for n in t.of("batch", r) for v in n["augmented"]]
    assert len(set(augmented)) == len(augmented)  # no draw comes again


@pytest.mark.slow
def test_a18_two_four_three_ranks(tmp_path: Path) -> None:
    starts = [Start(2, 1, 4), Start(4, 1, 7), Start(3, 1)]
    told = tell(tmp_path, starts)
    ids = [t.ids(0) for t in told]
    assert [len(i) for i in ids] == [6, 12, 6]
    assert joined(ids) == torch_order(0)
    assert told[2].ids(1) == torch_order(1)
    check_state(told)
    check_metrics(told)
    assert [n["batch"] for n in told[1].of("batch")] == [1, 2, 3]  # of 6; 18 samples are left, in 5 batches of 4
    assert [n["batch"] for n in told[2].of("batch")] == [6, 7, *range(8)]
    _, _, *of_four, _, _, _ = drawn(told)
    assert of_four[0] == of_four[1]  # as they were seeded; ranks 2 and 3 are new
    assert len({d for of_rank in of_four[1:] for d in of_rank}) == 3 * len(of_four[1])
