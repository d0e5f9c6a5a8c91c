"""The line between ranks: three of them, of which one fails, is stuck, or is gone."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_ft import exit_codes
from lightning_ft._ranks import peers as _peers
from lightning_ft._ranks.dist import WRITERS, Ranks
from lightning_ft._ranks.exceptions import lost_peer
from lightning_ft._ranks.peers import Peers
from lightning_ft.errors import PeerLostError
from tests import ranks
from tests.ranks import Rank

pytestmark = pytest.mark.distributed


def begin(rank: Rank, last_words: Any = lambda: None) -> Peers:
    """A gloo group of the training, one of ours, and the line."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    return Peers(Ranks(), "fit", last_words)


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == Peers.THREAD]


def reduce() -> None:
    dist.all_reduce(torch.ones(1))


def one_fails(rank: Rank) -> Any:
    """The failed one lives on, as if it had a long write to finish; the others are in a collective."""
    peers = begin(rank)
    writers = dist.new_group(backend="gloo", group_desc=WRITERS)
    reduce()
    if rank.number == 2:
        peers.tell("ValueError: broken")
        _peers.let_go()
        said = ""
    else:
        with pytest.raises(RuntimeError) as raised:
            reduce()
        said = str(peers.blame(raised.value))
    total = torch.ones(1)
    dist.all_reduce(total, group=writers)  # what the threads that write do together still works
    peers.close()
    return said, float(total), threads()


def test_one_fails_and_lives_on(tmp_path: Path) -> None:
    outcomes = ranks.values(one_fails, tmp_path, world_size=3)
    assert [said for said, _, _ in outcomes] == ["rank 2 failed: ValueError: broken"] * 2 + [""]
    assert [total for _, total, _ in outcomes] == [3.0] * 3
    assert [left for _, _, left in outcomes] == [[]] * 3


def nobody_fails(rank: Rank) -> Any:
    peers = begin(rank)
    reduce()
    peers.close()
    reduce()
    again = Peers(Ranks(), "the next fit", lambda: None)
    again.close()
    return peers.lost, threads()


def test_nobody_fails(tmp_path: Path) -> None:
    assert ranks.values(nobody_fails, tmp_path) == [(None, [])] * 2


def one_does_not_come(rank: Rank) -> Any:
    peers = begin(rank)
    if rank.number == 1:
        with pytest.raises(PeerLostError) as error:
            peers.meet(timedelta(seconds=0.1))
        rank.tell("1 is done")
        return error.value.ranks, str(error.value)
    rank.wait_for("1 is done")
    peers.meet(timedelta(seconds=30))  # the other one was there
    peers.close()
    return None


def test_one_does_not_come(tmp_path: Path) -> None:
    _, (ranks_lost, message) = ranks.values(one_does_not_come, tmp_path)
    assert ranks_lost == (0,)
    assert message.startswith("rank 0 failed: it has not been set up; others have waited")


def one_loses_the_others(rank: Rank) -> Any:
    """A collective fails on one rank though all are there: a network that was cut for a while."""
    peers = begin(rank)
    reduce()  # all are listening
    if rank.number == 1:
        _peers.let_go()
        blamed = peers.blame(RuntimeError("gloo/transport: connection reset"))
    else:
        rank.wait_for("1 is done")
        with pytest.raises(RuntimeError) as raised:
            reduce()
        blamed = peers.blame(raised.value)
    rank.tell(f"{rank.number} is done")
    for other in range(3):
        rank.wait_for(f"{other} is done")
    peers.close()
    return None if blamed is None else str(blamed)


def test_all_are_there(tmp_path: Path) -> None:
    said = ranks.values(one_loses_the_others, tmp_path, world_size=3)
    assert said[1] is None, "whoever woke the others is not to blame any of them"
    assert {said[0], said[2]} == {"rank 1 failed: it has lost its connections to other ranks, which all answer"}


def two_are_killed(rank: Rank) -> Any:
    peers = begin(rank)
    reduce()
    if rank.number in (1, 3):
        rank.die()
    for other in (1, 3):
        rank.wait_for_death_of(other)  # else one may answer yet when the other is missed
    with pytest.raises(RuntimeError) as raised:
        reduce()
    blamed = str(peers.blame(raised.value))
    rank.tell(f"{rank.number} is done")
    for other in (0, 2):
        rank.wait_for(f"{other} is done")
    peers.close()
    return blamed


def test_those_that_do_not_answer_are_named(tmp_path: Path) -> None:
    outcomes = ranks.run(two_are_killed, tmp_path, world_size=4)
    assert [outcome.exit_code for outcome in outcomes] == [0, -signal.SIGKILL, 0, -signal.SIGKILL]
    for number in (0, 2):
        assert outcomes[number].value.startswith("rank 1 failed: it is gone")
        assert outcomes[number].value.endswith("like rank 3")


def the_store_is_gone(rank: Rank) -> Any:
    peers = begin(rank)
    reduce()
    if rank.number == 0:
        rank.die()
    with pytest.raises(RuntimeError) as raised:
        reduce()
    blamed = str(peers.blame(raised.value))
    peers.close()
    return blamed


def test_rank_0_holds_the_store(tmp_path: Path) -> None:
    outcomes = ranks.run(the_store_is_gone, tmp_path)
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL, 0]
    assert outcomes[1].value.startswith("rank 0 failed: it is gone")


def busy_elsewhere(rank: Rank) -> None:
    """Rank 0 is in code of its own when the other one fails, and stays there."""
    _peers.LEAVES_SECS = 0.5
    logging.basicConfig(filename=rank.root / f"{rank.number}.log", force=True)
    sys.__stderr__ = (rank.root / f"{rank.number}.stderr").open("w")  # type: ignore[misc]
    peers = begin(rank, lambda: rank.tell("last words"))
    reduce()
    if rank.number == 1:
        peers.tell("ValueError: broken")
        rank.wait_for("last words")
        peers.close()
        return
    threading.Event().wait()


def test_a_rank_that_is_busy_elsewhere_is_ended(tmp_path: Path) -> None:
    outcomes = ranks.run(busy_elsewhere, tmp_path)
    assert [outcome.exit_code for outcome in outcomes] == [exit_codes.PEER_LOST, 0]
    log = (tmp_path / "0.log").read_text()
    assert "rank 0 has heard that rank 1 failed: ValueError: broken" in log
    assert "is still busy after 0.5 s" in log
    assert "in busy_elsewhere" in (tmp_path / "0.stderr").read_text()  # where it was


def leaves_in_order(rank: Rank) -> Any:
    """Rank 0 has heard of the failure, and leaves, with a long write to finish."""
    _peers.LEAVES_SECS = 3.0
    peers = begin(rank)
    listener = peers._thread
    assert listener is not None
    if rank.number == 1:
        peers.tell("ValueError: broken")
        rank.wait_for("the listener is done")
        peers.close()
        return None
    peers._heard.wait(ranks.WITHIN_SECS)
    assert peers.lost is not None
    said = str(lost_peer(_peers.lost(peers.lost), peers))
    listener.join(ranks.WITHIN_SECS)  # after as long as it would wait before it ends the process
    rank.tell("the listener is done")
    peers.close()
    return said


def test_a_rank_that_leaves_has_the_time_it_takes(tmp_path: Path) -> None:
    outcomes = ranks.run(leaves_in_order, tmp_path)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
    assert outcomes[0].value == "rank 1 failed: ValueError: broken"
