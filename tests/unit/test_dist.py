from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_ft._ranks.dist import Ranks
from lightning_ft._vote.ballot import Vote
from lightning_ft.errors import ConfigurationError, FaultToleranceError, NoUsableCheckpointError, RankFailure
from tests.ranks import Rank, values

WORLD_SIZE = 2
TOPICS = ("save_failed", "time_due", "writer_busy", "stop")
UNSIGNED_AND_SMALL = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)


def raising(error: Exception) -> Callable[[], Any]:
    def decision() -> Any:
        raise error

    return decision


class _Local:
    """Cannot be pickled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class Unsendable(FaultToleranceError):
    """One of our tree that holds something that cannot be sent."""

    def __init__(self) -> None:
        super().__init__("cannot be sent")
        self.lock = threading.Lock()


# -- one process -------------------------------------------------------------------------------------------------


def test_one_process_is_all_ranks() -> None:
    ranks = Ranks()
    assert (ranks.rank, ranks.world_size, ranks.is_zero) == (0, 1, True)
    assert ranks.gather("mine") == ["mine"]
    assert ranks.all_gather("mine") == ["mine"]
    assert ranks.decide(lambda: "decided") == "decided"
    ranks.close()
    ranks.close()


@pytest.mark.parametrize("error", [ConfigurationError("no"), KeyError("foreign")])
def test_alone_a_decision_raises_what_it_raised(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        Ranks().decide(raising(error))
    assert raised.value is error


def test_alone_a_ballot_is_read_as_it_was_cast() -> None:
    vote = Vote(Ranks(), TOPICS)
    assert not vote.cast_open
    for cast in ({}, {"stop": 1}, {"time_due": 3, "save_failed": 2}):
        vote.cast(cast)
        assert vote.cast_open
        assert vote.read() == {**dict.fromkeys(TOPICS, 0), **cast}
        assert not vote.cast_open


def test_a_ballot_is_cast_once_and_read_once() -> None:
    vote = Vote(Ranks(), TOPICS)
    with pytest.raises(AssertionError, match="read follows cast"):
        vote.read()
    vote.cast({})
    with pytest.raises(AssertionError, match="once per step"):
        vote.cast({})


def test_a_ballot_is_on_the_cpu_whatever_the_default_device() -> None:
    vote = Vote(Ranks(), TOPICS)
    with torch.device("meta"):
        vote.cast({"stop": 1})
        assert vote.read()["stop"] == 1


# -- two processes -----------------------------------------------------------------------------------------------


def _outcome(call: Callable[[], Any]) -> Any:
    """A value, or an error with everything it says."""
    try:
        return "value", call()
    except Exception as error:
        return type(error).__name__, str(error), {k: v for k, v in vars(error).items() if k != "lock"}


def _use(rank: int) -> dict[str, Any]:
    """What both ranks do, in the same order; each returns what it saw."""
    ranks = Ranks(timeout=timedelta(seconds=60))
    seen: dict[str, Any] = {"rank": (ranks.rank, ranks.world_size, ranks.is_zero)}
    seen["gather"] = ranks.gather({"rank": rank, "tensor": torch.full((2,), rank).tolist()})
    seen["all_gather"] = ranks.all_gather(("rank", rank))
    asked: list[int] = []

    def decision() -> str:
        asked.append(rank)
        return f"decided by {rank}"

    seen["value"] = _outcome(lambda: ranks.decide(decision))
    seen["asked"] = asked
    seen["none"] = _outcome(lambda: ranks.decide(lambda: None))
    errors = {
        "ours": ConfigurationError("a bad argument"),
        "ours-with-attributes": NoUsableCheckpointError("/run", [("/run/a", "damaged")]),
        "foreign": KeyError("a bug"),
        "unsendable": Unsendable(),
    }
    for name, error in errors.items():
        seen[name] = _outcome(functools.partial(ranks.decide, raising(error)))
    tensors = [torch.arange(1, 4).to(dtype) for dtype in UNSIGNED_AND_SMALL]
    seen["dtypes"] = _outcome(lambda: [(str(t.dtype), t.tolist()) for t in ranks.decide(lambda: tensors)])
    seen["dtypes-of-all"] = _outcome(lambda: [[t.tolist() for t in of_rank] for of_rank in ranks.all_gather(tensors)])
    seen["dtypes-gathered"] = _outcome(lambda: [t.tolist() for of_rank in ranks.gather(tensors) or [] for t in of_rank])
    seen["unsendable-value"] = _outcome(lambda: ranks.decide(_Local))
    seen["after-errors"] = ranks.all_gather(rank)
    vote = Vote(ranks, TOPICS)
    votes = []
    for cast in ({"stop": rank}, {"save_failed": 1 - rank}, {"time_due": 5 * rank, "writer_busy": 2 - rank}, {}):
        vote.cast(cast)
        votes.append({k: v for k, v in vote.read().items() if v})
    seen["votes"] = votes
    vote.close()
    # Rank 0 goes, and the other can still do so; the group of the training is not touched.
    ranks.close()
    ranks.close()
    seen["after-close"] = ranks.all_gather("alone")
    dist.barrier()
    again = Ranks()
    seen["again"] = again.all_gather(rank)
    again.close()
    return seen


def _main(rank: Rank) -> dict[str, Any]:
    dist.init_process_group("gloo", rank=rank.number, world_size=rank.world_size, timeout=timedelta(seconds=60))
    seen = _use(rank.number)
    dist.destroy_process_group()
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values(_main, tmp_path_factory.mktemp("ranks"), world_size=WORLD_SIZE)


pair = pytest.mark.distributed


@pair
def test_each_rank_knows_itself(seen: list[dict[str, Any]]) -> None:
    assert [s["rank"] for s in seen] == [(0, 2, True), (1, 2, False)]


@pair
def test_rank_zero_alone_holds_what_was_gathered(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["gather"] == [{"rank": 0, "tensor": [0, 0]}, {"rank": 1, "tensor": [1, 1]}]
    assert seen[1]["gather"] is None


@pair
def test_every_rank_holds_what_was_gathered_for_all(seen: list[dict[str, Any]]) -> None:
    assert [s["all_gather"] for s in seen] == [[("rank", 0), ("rank", 1)]] * 2


@pair
def test_rank_zero_decides_for_all(seen: list[dict[str, Any]]) -> None:
    assert [s["value"] for s in seen] == [("value", "decided by 0")] * 2
    assert [s["asked"] for s in seen] == [[0], []]
    assert [s["none"] for s in seen] == [("value", None)] * 2


@pair
def test_tensors_of_every_dtype_arrive(seen: list[dict[str, Any]]) -> None:
    values = [1, 2, 3]
    assert [s["dtypes"] for s in seen] == [("value", [(str(dtype), values) for dtype in UNSIGNED_AND_SMALL])] * 2
    assert [s["dtypes-of-all"] for s in seen] == [("value", [[values] * 5] * 2)] * 2
    assert [s["dtypes-gathered"] for s in seen] == [("value", [values] * 10), ("value", [])]


@pair
@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("ours", "ConfigurationError", "a bad argument"),
        ("ours-with-attributes", "NoUsableCheckpointError", "/run/a: damaged"),
    ],
)
def test_an_error_of_ours_is_raised_on_all_ranks(seen: list[dict[str, Any]], name: str, kind: str, text: str) -> None:
    assert seen[0][name] == seen[1][name]
    assert seen[1][name][0] == kind
    assert text in seen[1][name][1]


@pair
@pytest.mark.parametrize(
    ("name", "on_zero", "elsewhere"),
    [
        ("foreign", "KeyError", "rank 0 failed: KeyError: 'a bug'"),
        ("unsendable", "Unsendable", "rank 0 failed: Unsendable: cannot be sent"),
        ("unsendable-value", "TypeError", "rank 0 failed: TypeError: cannot pickle '_thread.lock' object"),
    ],
)
def test_another_error_reaches_the_other_ranks_as_text(
    seen: list[dict[str, Any]], name: str, on_zero: str, elsewhere: str
) -> None:
    assert seen[0][name][0] == on_zero
    assert seen[1][name][:2] == (RankFailure.__name__, elsewhere)
    assert seen[1][name][2]["rank"] == 0


@pair
def test_after_errors_the_ranks_are_still_in_step(seen: list[dict[str, Any]]) -> None:
    assert [s["after-errors"] for s in seen] == [[0, 1]] * 2


@pair
def test_the_result_of_a_vote_is_the_maximum_and_the_same_everywhere(seen: list[dict[str, Any]]) -> None:
    assert seen[0]["votes"] == seen[1]["votes"]
    assert seen[0]["votes"] == [{"stop": 1}, {"save_failed": 1}, {"time_due": 5, "writer_busy": 2}, {}]


@pair
def test_closing_asks_nobody_and_leaves_the_training_its_group(seen: list[dict[str, Any]]) -> None:
    assert [s["after-close"] for s in seen] == [["alone"]] * 2
    assert [s["again"] for s in seen] == [[0, 1]] * 2
