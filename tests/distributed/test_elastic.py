"""A run goes on with another number of ranks: every sample of the epoch once, in one order, and nothing is lost."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from tests.distributed.elastic import (
    LENGTH,
    Start,
    Telling,
    Told,
    data,
    dump,
    of_torch,
    own_sampler,
    tell,
    trainer,
    two,
)
from tests.distributed.test_cases_ranks import OwnOrder, StatefulOrder
from tests.trainer import cases as c

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
    # Logged in the first batch alone, on the ranks that there were then.
    first = [told[0].of("batch", rank)[0]["ids"][0] for rank in range(len(told[0].ranks))]
    assert joined([t.of("epoch") for t in told])[0]["metrics"]["once"] == sum(first) / len(first)
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


# -- other data --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OwnOrder, StatefulOrder])
def test_a19_a_sampler_that_lightning_wraps_or_not(kind: Any, tmp_path: Path) -> None:
    """The order of the epoch that was begun goes on, and the sampler's own sequence of orders after it."""
    make_data = partial(own_sampler, kind)
    (whole,) = tell(tmp_path / "whole", [Start(1, 2, data=make_data)])
    starts = [Start(1, 2, 5, make_data), Start(2, 2, 7, make_data), Start(1, 2, data=make_data)]
    told = tell(tmp_path / "told", starts)
    assert joined([t.ids(0) for t in told]) == whole.ids(0)
    assert told[2].ids(1) == whole.ids(1)


def test_a_distributed_sampler_of_the_user(tmp_path: Path) -> None:
    told = tell(tmp_path, [Start(2, 2, 3, of_torch), Start(1, 4, data=of_torch)])
    assert joined([t.ids(0) for t in told]) == torch_order(0, seed=5)
    assert told[1].ids(1) == torch_order(1, seed=5)
    check_metrics(told)


def test_two_loaders_of_which_one_is_cycled(tmp_path: Path) -> None:
    told = tell(tmp_path, [Start(2, 2, 3, two), Start(1, 2, data=two)])
    a, b = (joined([t.ids(0, "members", name) for t in told]) for name in "ab")
    assert sorted(a) == list(range(LENGTH))
    assert [sorted(b[i : i + LENGTH // 2]) for i in (0, LENGTH // 2)] == [list(range(LENGTH // 2))] * 2
    assert [n["batch"] for n in told[1].of("batch")][:8] == list(range(4, 12))


@pytest.mark.parametrize("limit", [0.5, 3])
def test_a_part_of_the_data(limit: float, tmp_path: Path) -> None:
    limited = {"limit_train_batches": limit, "limit_val_batches": 0}
    told = tell(tmp_path, [Start(2, 2, 2, trainer=limited), Start(1, 2, trainer=limited)])
    trained = joined([t.ids(0) for t in told])
    assert trained == torch_order(0)[: 12 if limit == 0.5 else 6]  # a number of batches is one of this run's batches
    assert len(told[1].ids(1)) == 12 if limit == 0.5 else 6


def test_the_end_of_an_epoch(tmp_path: Path) -> None:
    """What comes is a pass of the new number of ranks, whatever the data."""
    told = tell(tmp_path, [Start(2, 2, 7), Start(1, 2)])  # killed in the first batch after 6
    assert told[0].ids(0) == torch_order(0)
    assert sorted(told[1].ids(1)) == list(range(LENGTH))
    assert [n["batch"] for n in told[1].of("batch")] == list(range(12))
    check_state(told)
    check_metrics(told)


# -- what is refused, and what is said ---------------------------------------------------------------------------


class Simple(Telling):
    """For batches of any kind."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("batch", ids=[])
        return self.net(batch[1]).pow(2).mean()

    def on_train_epoch_end(self) -> None:
        pass


def streamed(batch_size: int) -> Any:
    return c.stream(length=LENGTH, batch_size=batch_size), c.plain_loader(8, 1)


def torchdata(batch_size: int) -> Any:
    return c.stateful(dataset=c.Plain(LENGTH), shuffle=True), c.plain_loader(8, 1)


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (Start(2, 2, 3, torchdata), Start(1, 2, data=torchdata), "it keeps a state of its own"),
        (
            Start(1, 2, 5, streamed, {"val_check_interval": 1.0}),
            Start(2, 2, data=streamed, trainer={"val_check_interval": 1.0}),
            "it is no map-style loader",
        ),
        (
            Start(1, 2, 5),
            Start(2, 2, trainer={"use_distributed_sampler": False}),
            "its sampler RandomSampler is no DistributedSampler",
        ),
        (
            Start(2, 2, 3, trainer={"limit_train_batches": 4}),
            Start(1, 2, trainer={"limit_train_batches": 4}),
            "nothing is left of its epoch: 4 of 4 batches are done",
        ),
        (
            Start(2, 2, 3),
            Start(1, 2, trainer={"accumulate_grad_batches": 3}),
            "changed: accumulate_grad_batches: 1 when saved, 3 now",
        ),
    ],
    ids=["stateful", "stream", "not-dealt-out", "limit", "strict"],
)
def test_a18_refused_before_the_first_step(first: Start, second: Start, why: str, tmp_path: Path) -> None:
    told = partial(tell, tmp_path, make_model=Simple)
    with pytest.raises(AssertionError) as refused:
        told([first, second])
    assert why in str(refused.value)
    if "accumulate" not in why:
        assert "TopologyError" in str(refused.value)
        for ranks in (first.ranks, second.ranks):
            assert re.search(rf"\b{ranks} rank|saved by {ranks}\b", str(refused.value))
    assert (tmp_path / "0.notes").read_text().count("batch") > 0
    assert not (tmp_path / "1.notes").exists() or "batch" not in (tmp_path / "1.notes").read_text()


@pytest.mark.filterwarnings("ignore")
def test_a18_another_global_batch_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tell(tmp_path, [Start(2, 2, 3)], Simple)
    trainer(str(tmp_path / "checkpoints"), 1, max_epochs=1).fit(
        Simple(tmp_path / "1.notes"), *data(2), ckpt_path="last"
    )
    (report,) = [r.getMessage() for r in caplog.records if "restored from" in r.getMessage()]
    assert "4 samples per step (2 ranks x batch size 2 x 1 accumulated) when saved, 2 samples per step (1" in report
    assert report.count("accumulate_grad_batches=2 keeps it") == 1
    assert "changed:" not in report
