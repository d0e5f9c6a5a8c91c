"""Which saved state goes to which rank, from one number of ranks to another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_ft._data.elastic import Change, DataRank
from lightning_ft._fit import loops
from lightning_ft._restart import compare
from lightning_ft._restart.compare import RestoreReport
from lightning_ft._state import takeover
from lightning_ft.errors import RestoreError, TopologyError


def position(**values: Any) -> dict[str, Any]:
    kept = {"kind": "indexed", "passes": 1, "cycles": 0, "delivered": 3, "exhausted": False, "epoch_over": False}
    return {**kept, "deal": {"offset": 0}, "fetching": {"own": 1}, **values}


def of_rank(number: int, data_rank: tuple[int, int] | None, **values: Any) -> dict[str, Any]:
    metrics = {"of": number, "results": {}, "torchmetrics": {}, "callback_metrics": {"loss": number}}
    entry: dict[str, Any] = {
        "rng": f"state of {number}",
        "loaders": {"root_seed": 5, "train": [position()], "val": [{"state": number, "fetching": 1, "passes": 2}]},
        "metrics": metrics,
        "gradients": {},
        **values,
    }
    if data_rank is not None:
        entry["data_rank"] = dict(zip(("rank", "size"), data_rank, strict=True))
    return entry


def saved_by(*ranks: tuple[int, int] | None, within_epoch: bool = True, **of_rank_1: Any) -> dict[str, Any]:
    entries = [of_rank(i, r, **(of_rank_1 if i == 1 else {})) for i, r in enumerate(ranks)]
    return {
        "world_size": len(ranks), "ranks": entries, "within_epoch": within_epoch, "seed": "1", "batch": 7,
        "fingerprint": {"train dataloader 0 sampler": "DistributedSampler"},
    }  # fmt: skip


def taken(saved: dict[str, Any], present: DataRank) -> tuple[Any, list[int], bool]:
    state = takeover.of_this_rank(saved, present, present.rank, "a.ckpt")
    return state.rng, [m["of"] for m in state.metrics], state.change is not None


TWO = saved_by((0, 2), (1, 2))
TENSOR_PARALLEL = saved_by((0, 2), (0, 2), (1, 2), (1, 2))


@pytest.mark.parametrize(
    ("saved", "present", "expected"),
    [
        (TWO, DataRank(1, 2), ("state of 1", [1], False)),
        (saved_by(None, None), DataRank(1, 2), ("state of 1", [1], False)),  # written before data ranks were noted
        (TWO, DataRank(0, 1), ("state of 0", [0, 1], True)),
        (TWO, DataRank(1, 4), ("state of 1", [1], True)),
        (TWO, DataRank(3, 4), (None, [0], True)),  # new: the metrics are those of rank 0, emptied
        (saved_by((0, 4), (1, 4), (2, 4), (3, 4)), DataRank(0, 3), ("state of 0", [0, 3], True)),
        (TENSOR_PARALLEL, DataRank(1, 2, 0), ("state of 2", [2], False)),
        (TENSOR_PARALLEL, DataRank(1, 2, 1), ("state of 3", [3], False)),
        # another number of tensor-parallel ranks is no other number of data-parallel ones
        (TWO, DataRank(1, 2, 1), ("state of 1", [1], False)),
        (TENSOR_PARALLEL, DataRank(0, 1, 1), ("state of 1", [1, 3], True)),
    ],
)
def test_b2_who_takes_over_whom(saved: dict[str, Any], present: DataRank, expected: Any) -> None:
    assert taken(saved, present) == expected


def test_b2_seeds_of_new_ranks() -> None:
    """Distinct, the same in every restart from one point, and others from another."""

    def seed(rank: int, **changed: Any) -> int:
        return takeover.of_this_rank({**TWO, **changed}, DataRank(rank, 4), rank, "a.ckpt").seed

    seeds = [seed(2), seed(3), seed(2, batch=8), seed(2, seed="2"), seed(2, seed=None)]
    assert len(set(seeds)) == len(seeds)
    assert seed(2) == seeds[0]
    # Ranks that share their data start alike.
    tensor_parallel = [takeover.of_this_rank(TWO, DataRank(2, 4, m), 0, "a.ckpt").seed for m in (0, 1)]
    assert tensor_parallel == [seeds[0], seeds[0]]


def test_a_new_rank_gets_nothing_of_another_but_the_place() -> None:
    old = takeover.of_this_rank(TWO, DataRank(1, 3), 1, "a.ckpt").loaders
    new = takeover.of_this_rank(TWO, DataRank(2, 3), 2, "a.ckpt").loaders
    assert old["train"] == [position()]
    assert new["train"] == [{k: v for k, v in position().items() if k != "fetching"}]
    assert old["val"] == new["val"] == [{"passes": 2}]  # a state of its own is one rank's


@pytest.mark.parametrize("ranks", [None, [], [of_rank(0, (0, 2))]])
@pytest.mark.parametrize("present", [DataRank(1, 2), DataRank(0, 1)])
def test_states_that_are_missing(ranks: Any, present: DataRank) -> None:
    with pytest.raises(RestoreError, match=r"a\.ckpt holds no random state and data position of rank"):
        takeover.of_this_rank({**TWO, "ranks": ranks}, present, present.rank, "a.ckpt")


@pytest.mark.parametrize("changed", [{"delivered": 4}, {"passes": 2}, {"deal": {"offset": 4}}, {"exhausted": True}])
def test_ranks_at_different_places(changed: dict[str, Any]) -> None:
    loaders = {"root_seed": 5, "train": [position(**changed)], "val": []}
    with pytest.raises(TopologyError, match="its ranks stand at different places"):
        taken(saved_by((0, 2), (1, 2), loaders=loaders), DataRank(0, 1))
    taken(saved_by((0, 2), (1, 2), loaders=loaders), DataRank(0, 2))
    taken(saved_by((0, 2), (1, 2), loaders=loaders, within_epoch=False), DataRank(0, 1))


def test_gradients_held_in_manual_optimization() -> None:
    equal, other = ({"w": torch.tensor([value])} for value in (0.0, 1.0))
    saved = saved_by((0, 2), (1, 2), gradients=other)
    with pytest.raises(TopologyError, match="gradients of its own"):
        taken(saved, DataRank(0, 1))
    assert takeover.of_this_rank(saved, DataRank(1, 2), 1, "a.ckpt").gradients == other
    saved["ranks"][0]["gradients"] = {"w": torch.tensor([1.0])}
    assert takeover.of_this_rank(saved, DataRank(2, 3), 2, "a.ckpt").gradients == other
    assert equal != other


@pytest.mark.parametrize(("kwargs", "expected"), [(None, (0, 1)), ({"num_replicas": 4, "rank": 3}, (3, 4))])
def test_ranks_that_share_their_data(kwargs: Any, expected: tuple[int, int]) -> None:
    trainer: Any = SimpleNamespace(distributed_sampler_kwargs=kwargs)
    assert loops.data_rank(trainer) == expected


# -- what is said of it ------------------------------------------------------------------------------------------

SAVED = {
    "world size": 2, "accumulate_grad_batches": 1, "batches per epoch": 6, "precision": "32-true",
    "train dataloader 0 batch size": 4, "train dataloader 0 sampler": "DistributedSampler",
    "train dataloader 0 batches": 6, "train dataloader 0 dataset length": 48,
}  # fmt: skip
ALONE = {**SAVED, "world size": 1, "batches per epoch": 12, "train dataloader 0 batches": 12,
         "train dataloader 0 sampler": "RandomSampler"}  # fmt: skip


@pytest.mark.parametrize(
    ("present", "changed", "noted"),
    [
        (ALONE, [], "accumulate_grad_batches=2 keeps it"),
        ({**ALONE, "accumulate_grad_batches": 2}, [], None),
        ({**ALONE, "train dataloader 0 batch size": 8}, [], None),
        ({**ALONE, "train dataloader 0 batch size": 2}, ["train dataloader 0 batch size"], "=4 keeps it"),
        ({**ALONE, "accumulate_grad_batches": 4}, ["accumulate_grad_batches"], "=2 keeps it"),
        ({**ALONE, "precision": "16-mixed"}, ["precision"], "=2 keeps it"),
        ({**ALONE, "train dataloader 0 dataset length": 50}, ["train dataloader 0 dataset length"], "=2 keeps it"),
        ({**ALONE, "train dataloader 0 sampler": "Mine"}, ["train dataloader 0 sampler"], "=2 keeps it"),
        ({**ALONE, "train dataloader 0 batch size": None}, ["train dataloader 0 batch size"], "nothing tells"),
    ],
)
def test_a18_the_global_batch(present: dict[str, Any], changed: list[str], noted: str | None) -> None:
    report = RestoreReport("a.ckpt")
    compare.compare(report, SAVED, present, other_data=False, change=Change(2, 1, "a.ckpt", SAVED))
    assert [c.partition(":")[0] for c in report.changed] == changed
    assert report.noted[-1] == "world size: 2 when saved, 1 now"
    others = report.noted[:-1]
    assert len(others) == (noted is not None)
    assert noted is None or noted in others[0]


def test_a_sampler_that_lightning_wraps_is_the_same_one() -> None:
    saved = {**SAVED, "train dataloader 0 sampler": "Mine"}
    present = {**SAVED, "train dataloader 0 sampler": "DistributedSamplerWrapper"}
    report = RestoreReport("a.ckpt")
    compare.compare(report, saved, present, other_data=False, change=Change(1, 2, "a.ckpt", saved))
    assert report.changed == []


def test_only_tensor_parallel_ranks_are_others() -> None:
    report = RestoreReport("a.ckpt")
    compare.compare(report, SAVED, {**SAVED, "world size": 4}, other_data=False)
    assert (report.changed, report.noted) == ([], ["world size: 2 when saved, 4 now"])
