"""The arithmetic of another number of ranks, as tables."""

from __future__ import annotations

import pytest
from torch.utils.data import DistributedSampler

from lightning_ft._data import elastic
from lightning_ft._data.elastic import Change, DataRank, GlobalBatch
from lightning_ft.errors import TopologyError


@pytest.mark.parametrize(
    ("ranks", "own", "expected"),
    [
        ([(0, 1)], 0, DataRank(0, 1, 0)),
        ([(0, 2), (1, 2)], 1, DataRank(1, 2, 0)),
        # two tensor-parallel ranks in each of two groups, beside and across each other
        ([(0, 2), (0, 2), (1, 2), (1, 2)], 3, DataRank(1, 2, 1)),
        ([(0, 2), (1, 2), (0, 2), (1, 2)], 2, DataRank(0, 2, 1)),
    ],
)
def test_data_rank(ranks: list[tuple[int, int]], own: int, expected: DataRank) -> None:
    assert DataRank.among(ranks, own) == expected


@pytest.mark.parametrize(
    ("saved", "present", "expected"),
    [
        ([0, 1], DataRank(1, 2), [1]),
        ([0, 1], DataRank(0, 1), [0, 1]),
        ([0, 1, 2, 3], DataRank(0, 3), [0, 3]),
        ([0, 1, 2, 3], DataRank(2, 3), [2]),
        ([0, 1], DataRank(2, 4), []),
        ([0, 0, 1, 1], DataRank(1, 2, 1), [3]),  # unchanged, with tensor-parallel ranks: each its own
        ([0, 1, 0, 1], DataRank(1, 2, 1), [3]),
        ([0, 1], DataRank(1, 2, 1), [1]),  # more tensor-parallel ranks: those of the same data
        ([0, 0, 1, 1], DataRank(1, 2, 0), [2]),  # fewer
        ([0, 0, 1, 1], DataRank(0, 1, 1), [1, 3]),
    ],
)
def test_sources(saved: list[int], present: DataRank, expected: list[int]) -> None:
    assert elastic.sources(saved, present) == expected


def test_every_saved_rank_is_taken_over_once() -> None:
    for saved in range(1, 9):
        for size in range(1, 9):
            taken = [s for r in range(size) for s in elastic.sources(range(saved), DataRank(r, size))]
            assert sorted(taken) == list(range(saved))


@pytest.mark.parametrize(
    ("length", "offset", "ranks", "batch_size", "delivered", "expected"),
    [(24, 0, 2, 2, 3, 12), (24, 12, 4, 1, 2, 20), (10, 0, 2, 4, 2, 10), (24, 8, 3, 2, 0, 8)],
)
def test_trained(length: int, offset: int, ranks: int, batch_size: int, delivered: int, expected: int) -> None:
    assert elastic.trained(length, offset, ranks, batch_size, delivered) == expected


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [1, 5, 6, 7, 24])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_whole_order_is_dealt_out_as_torch_does(length: int, ranks: int, drop_last: bool) -> None:
    for rank in range(ranks):
        sampler = DistributedSampler(range(length), ranks, rank, shuffle=False, drop_last=drop_last)  # type: ignore[arg-type, var-annotated]
        share = elastic.share(range(length), 0, rank, ranks, drop_last)
        if length >= ranks:  # torch keeps one sample for each rank then
            assert share == list(sampler)
            assert len(share) == len(sampler)
        assert len(share) == elastic.share_length(length, ranks, drop_last)


@pytest.mark.parametrize(
    ("offset", "ranks", "drop_last", "expected"),
    [
        (4, 2, False, [[4, 6, 8], [5, 7, 9]]),
        (5, 2, False, [[5, 7, 9], [6, 8, 0]]),  # filled up with the first of the order
        (5, 2, True, [[5, 7], [6, 8]]),
        (9, 4, False, [[9], [0], [1], [2]]),
        (9, 4, True, [[], [], [], []]),
        (3, 1, False, [[3, 4, 5, 6, 7, 8, 9]]),
    ],
)
def test_what_is_left_is_dealt_out(offset: int, ranks: int, drop_last: bool, expected: list[list[int]]) -> None:
    order = list(range(10))
    assert [elastic.share(order, offset, r, ranks, drop_last) for r in range(ranks)] == expected


def test_more_is_filled_up_than_there_is() -> None:
    assert [elastic.share([7], 0, r, 3, False) for r in range(3)] == [[7], [7], [7]]


@pytest.mark.parametrize(
    ("samples", "size", "drop_last", "expected"), [(7, 2, False, 4), (7, 2, True, 3), (0, 2, False, 0)]
)
def test_batches(samples: int, size: int, drop_last: bool, expected: int) -> None:
    assert elastic.batches(samples, size, drop_last) == expected


@pytest.mark.parametrize(
    ("mode", "counts", "cycled", "expected"),
    [
        ("max_size_cycle", [5], [False], 5),
        ("max_size_cycle", [2, 7], [False, True], 2),  # the longest is through: the other one decides
        ("max_size_cycle", [2, 7], [False, False], 7),
        ("max_size", [2, 7], [False, False], 7),
        ("min_size", [2, 7], [False, False], 2),
    ],
)
def test_batches_of_an_epoch(mode: str, counts: list[int], cycled: list[bool], expected: int) -> None:
    assert elastic.epoch_batches(mode, counts, cycled) == expected


@pytest.mark.parametrize(
    ("saved", "present", "advice"),
    [
        (GlobalBatch(2, 4, 1), GlobalBatch(1, 4, 1), "accumulate_grad_batches=2 keeps it"),
        (GlobalBatch(4, 4, 2), GlobalBatch(2, 8, 1), "accumulate_grad_batches=2 keeps it"),
        (GlobalBatch(2, 4, 1), GlobalBatch(4, 4, 1), "a batch size of 2 keeps it"),
        (GlobalBatch(2, 4, 1), GlobalBatch(3, 4, 1), "nothing keeps it on this number of ranks"),
    ],
)
def test_what_keeps_the_global_batch(saved: GlobalBatch, present: GlobalBatch, advice: str) -> None:
    assert present.keeping(saved) == advice
    assert str(GlobalBatch(1, 4, 2)) == "8 samples per step (1 rank x batch size 4 x 2 accumulated)"


def test_a_refusal_names_both_topologies() -> None:
    facts = {"train dataloader 0 sampler": "DistributedSampler", "train dataloader 0 batch size": 4, "world size": 2}
    change = Change(2, 3, "/runs/a.ckpt", facts)
    error = change.refusal("train dataloader 0", {"sampler": "Own", "batch size": 8}, "for a reason")
    assert isinstance(error, TopologyError)
    assert (error.saved, error.present) == (2, 3)
    for part in (
        "/runs/a.ckpt",
        "for a reason",
        "2 ranks, batch size 4, sampler DistributedSampler",
        "3 ranks, batch size 8, sampler Own",
    ):
        assert part in str(error)
