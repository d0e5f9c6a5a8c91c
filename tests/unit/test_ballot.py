"""The vote among processes: in the memory of one host, between several, and with a rank that does not come."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_ft._ranks.dist import Ranks
from lightning_ft._vote import ballot_box, roll_call
from lightning_ft._vote.ballot import Vote
from lightning_ft._vote.ballot_box import HIGHEST_VOTE, SharedBox
from lightning_ft.errors import PeerLostError
from tests.ranks import Rank, run, values

TOPICS = ("a", "b", "c")
WAYS = ("one host", "several hosts")


def found_each_other(way: str) -> AbstractContextManager[Any]:
    """Inside, ranks are what they are, or taken for ranks on several hosts."""
    return mock.patch.object(ballot_box, "_join", return_value=None) if way == "several hosts" else nullcontext()


@contextmanager
def grouped(rank: Rank, way: str) -> Iterator[Ranks]:
    """A process group, and the ranks in it, on one host or taken for ranks on several."""
    dist.init_process_group("gloo", rank=rank.number, world_size=rank.world_size, timeout=timedelta(seconds=60))
    with found_each_other(way):
        ranks = Ranks(timeout=timedelta(seconds=60))
        yield ranks
        ranks.close()
    dist.destroy_process_group()


# -- ranks that all come -----------------------------------------------------------------------------------------


def _many_ballots(rank: Rank, way: str) -> dict[str, Any]:
    with grouped(rank, way) as ranks:
        vote = Vote(ranks, TOPICS, timedelta(seconds=40))
        if way == "one host":
            vote._box._number = ballot_box._NUMBERS - 100
        count = 200
        wrong = []
        for number in range(count):
            # Each topic has another rank with the highest vote, and every ballot has other votes.
            mine = {topic: (number * 7 + (rank.number + place) % rank.world_size) for place, topic in enumerate(TOPICS)}
            vote.cast(mine)
            heard = vote.read()
            if heard != dict.fromkeys(TOPICS, number * 7 + rank.world_size - 1):
                wrong.append((number, heard))
        vote.cast({"b": HIGHEST_VOTE - rank.number})
        highest = vote.read()
        descriptors = _descriptors_of_memory()
        vote.close()
        return {
            "one host": vote.within_one_host, "wrong": wrong[:3], "highest": highest, "read": vote.read_count,
            "expected": count + 1, "descriptors": (descriptors, _descriptors_of_memory()),
        }  # fmt: skip


def _descriptors_of_memory() -> int:
    gc.collect()
    links = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return sum("lightning_ft_vote" in os.readlink(link) for link in links if os.path.lexists(link))


def _in_memory() -> set[str]:
    # Semaphores of `multiprocessing` come and go with whatever else is tested at the time.
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def _stays_in_memory(before: set[str]) -> set[str]:
    """What is there and was not before; other tests have files there for a while."""
    until = time.monotonic() + 10
    while (stays := _in_memory() - before) and time.monotonic() < until:
        time.sleep(0.02)
    return stays


@pytest.mark.parametrize("way", WAYS)
def test_every_rank_hears_the_maximum_of_every_ballot(way: str, tmp_path: Path) -> None:
    """Also after the numbers of the ballots have begun again, which they do every 65,536th."""
    before = _in_memory()
    for seen in values(_many_ballots, tmp_path, way, world_size=3):
        assert seen["one host"] == (way == "one host")
        assert seen["wrong"] == []
        assert seen["highest"] == {"a": 0, "b": HIGHEST_VOTE, "c": 0}
        assert seen["read"] == seen["expected"]
        # mmap holds a descriptor of its own
        assert seen["descriptors"] == ((2 if way == "one host" else 0), 0)
    assert _stays_in_memory(before) == set()


def _lagging(rank: Rank, way: str) -> tuple[int, int]:
    with grouped(rank, way) as ranks:
        vote = Vote(ranks, TOPICS, timedelta(seconds=40))
        for number in range(5):
            vote.cast({})
            dist.barrier()  # as the gradients of a step are exchanged
            vote.read() if way == "one host" else _read_when_there(vote)
            dist.barrier()
            if number == 0:
                vote.read_count = vote.waited_count = 0
        if rank.number:
            rank.wait_for("rank 0 waits")
        vote.cast({"a": 1})
        with _telling_when_it_waits(rank, vote) if not rank.number else nullcontext():
            assert vote.read()["a"] == 1
        vote.close()
        return vote.read_count, vote.waited_count


@contextmanager
def _telling_when_it_waits(rank: Rank, vote: Vote) -> Iterator[None]:
    wait = vote._wait

    def told(box: Any) -> None:
        rank.tell("rank 0 waits")
        wait(box)

    with mock.patch.object(vote, "_wait", told):
        yield


def _read_when_there(vote: Vote) -> None:
    assert vote._box is not None
    while not vote._box.ready():
        os.sched_yield()
    vote.read()


@pytest.mark.parametrize("way", WAYS)
def test_nobody_waits_unless_a_rank_is_late(way: str, tmp_path: Path) -> None:
    (read, waited), _ = values(_lagging, tmp_path, way)
    assert (read, waited) == (5, 1)


@pytest.mark.parametrize("votes", [{"a": -1}, {"a": HIGHEST_VOTE + 1}, {"nothing": 1}])
def test_what_is_no_vote_is_refused(votes: dict[str, int]) -> None:
    vote = Vote(Ranks(), TOPICS)
    with pytest.raises(ValueError, match=re.escape(repr(votes))):
        vote.cast(votes)


# -- memory that is not shared -----------------------------------------------------------------------------------


def _memory(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "memory"
    path.write_bytes(content)
    return str(path)


TOKEN = bytes(range(16))


@pytest.mark.parametrize(
    "path", ["/proc/0/fd/3", "fifo", "other size", "other token", "directory"], ids=lambda path: path.replace("/", " ")
)
def test_another_process_of_that_number_is_not_rank_zero(path: str, tmp_path: Path) -> None:
    """Numbers of processes and descriptors mean something else in every container."""
    if path == "fifo":
        os.mkfifo(path := str(tmp_path / path))
    elif path == "other size":
        path = _memory(tmp_path, TOKEN)
    elif path == "other token":
        path = _memory(tmp_path, TOKEN[::-1] + bytes(16))
    elif path == "directory":
        path = str(tmp_path)
    assert ballot_box._join(path, TOKEN, 32) is None


def test_the_memory_of_rank_zero_is_found(tmp_path: Path) -> None:
    fd = ballot_box._join(_memory(tmp_path, TOKEN + bytes(16)), TOKEN, 32)
    assert fd is not None
    os.close(fd)


def test_a_word_of_another_ballot_is_not_taken(tmp_path: Path) -> None:
    """Words are written one after the other: whoever looks in between has to wait for the rest."""
    with open(_memory(tmp_path, bytes(ballot_box._size_bytes(2, 2))), "r+b") as memory:
        mine, other = (SharedBox(os.dup(memory.fileno()), rank, 2, 2) for rank in (0, 1))
        for number in range(5):
            mine.put([number, 0])
            assert not mine.ready()
            other._number, low = mine._number - 1, (mine._number % ballot_box._NUMBERS) << 47
            other._own[mine._number & 1][1] = low | 9  # the second word alone
            assert not mine.ready()
            other.put([7, 9])
            assert mine.ready()
            assert mine.take() == [max(number, 7), 9]
        mine.close()
        other.close()


# -- a rank that does not come -----------------------------------------------------------------------------------


def _one_does_not_come(rank: Rank, way: str, how: str) -> dict[str, Any]:
    within = timedelta(seconds=4)
    dist.init_process_group("gloo", rank=rank.number, world_size=rank.world_size, timeout=timedelta(seconds=60))
    with found_each_other(way):
        ranks = Ranks(timeout=timedelta(seconds=60))
        vote = Vote(ranks, TOPICS, within, where=lambda: "vote of batch 2")
    vote.cast({})
    vote.read()
    if rank.number == 2:
        if how == "dies":
            rank.die()
        if how == "leaves":
            vote.close()
        rank.wait_for("0 is done")
        rank.wait_for("1 is done")
        os._exit(0)
    vote.cast({})
    began = time.monotonic()
    with mock.patch.object(roll_call, "_MARGIN", timedelta(0)), pytest.raises(PeerLostError) as error:
        vote.read()
    raised_after_secs = time.monotonic() - began
    rank.tell(f"{rank.number} is done")
    rank.wait_for(f"{1 - rank.number} is done")  # which asks the store that rank 0 holds
    vote.close()
    return {"ranks": error.value.ranks, "message": str(error.value), "secs": raised_after_secs}


@pytest.mark.parametrize("how", ["dies", "leaves", "is late"])
@pytest.mark.parametrize("way", WAYS)
def test_k2_who_did_not_come_is_named(way: str, how: str, tmp_path: Path) -> None:
    outcomes = run(_one_does_not_come, tmp_path, way, how, world_size=3)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, -9 if how == "dies" else 0], outcomes
    for outcome in outcomes[:2]:
        assert outcome.value["ranks"] == (2,), outcome.value
        assert outcome.value["message"].startswith("rank 2 failed: vote of batch 2: rank 2 (")
        if way == "one host":
            assert ("alive" in outcome.value["message"]) == (how == "is late")
