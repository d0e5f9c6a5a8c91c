"""Who is late, as far as their watchers can tell."""

from __future__ import annotations

import re
import socket
from dataclasses import replace

import pytest

from lightning_ft._watcher import peers
from lightning_ft._watcher.page import Phase
from lightning_ft._watcher.report import Status, arranged, late, verdict, where

ZERO = Status(0, "a", 10, Phase.STEP, 5, 11, "sleeping in futex_do_wait", 30.0)
ONE = replace(ZERO, rank=1, host="b", pid=20)


@pytest.mark.parametrize(
    ("statuses", "world_size", "names"),
    [
        ([ZERO, ONE], 2, []),
        ([ZERO, replace(ONE, position=10)], 2, [1]),
        ([replace(ZERO, position=9), ONE, replace(ONE, rank=2, position=9)], 3, [0, 2]),
        ([ZERO, replace(ONE, state="stopped in do_signal_stop")], 2, [1]),
        ([replace(ZERO, position=9), replace(ONE, state="stopped")], 2, [1]),
        ([ZERO, replace(ONE, state="in a wait that the kernel does not interrupt in nfs_wait")], 2, [1]),
        ([ZERO, replace(ONE, ended=True, state="")], 2, [1]),
        ([ZERO], 2, [1]),
        ([ZERO, replace(ONE, position=1)], 3, [2]),
        ([replace(ZERO, ended=True)], 2, [0]),
    ],
)
def test_who_is_late(statuses: list[Status], world_size: int, names: list[int]) -> None:
    assert late(statuses, world_size) == names


def test_what_is_said() -> None:
    text = verdict("hang: no step", [replace(ONE, position=10, state="stopped"), ZERO], 3)
    assert text.splitlines() == [
        "hang: no step",
        "late: rank 2",
        "rank 0 (a, pid 10): 5 steps completed, behind the loss of batch 6, not gone on for 30.0 s; sleeping in "
        "futex_do_wait",
        "rank 1 (b, pid 20): 5 steps completed, before the loss of batch 6, not gone on for 30.0 s; stopped",
        "rank 2: its watcher does not answer",
    ]


STACKS = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/site/lib/python3.11/site-packages/lightning_ft/_engine.py", line 12 in _run
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007f02 [bar] (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f03 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/queue.py", line 171 in get
  File "/home/me/train.py", line 7 in training_step
  File "/site/lib/python3.11/site-packages/lightning_ft/_left_out.py", line 66 in advance_or_leave_out
  File "/home/me/train.py", line 40 in <module>
"""


def test_the_main_thread_comes_first_and_ours_last() -> None:
    order = re.findall("0x[0-9a-f]+", arranged(STACKS))
    assert order == ["0x00007f03", "0x00007f02", "0x00007f01"]
    assert sorted(arranged(STACKS).splitlines()) == sorted(line for line in STACKS.splitlines() if line)


def test_where_the_main_thread_is() -> None:
    assert where(STACKS) == "/home/me/train.py:7 in training_step"
    only = 'Thread 0x01 (most recent call first):\n  File "/usr/lib/python3.11/queue.py", line 171 in get\n'
    assert where(only) == "/usr/lib/python3.11/queue.py:171 in get"
    assert where("") == where(STACKS.partition("Current")[0]) == ""
    text = verdict("hang", [replace(ZERO, where="a.py:1 in f"), replace(ONE, position=10, where="b.py:2 in g")], 2)
    assert text.splitlines()[0] == "hang; rank 1 is at b.py:2 in g"
    assert "behind the loss of batch 6, at a.py:1 in f, not gone on" in text
    assert verdict("hang", [replace(ZERO, where="a.py:1 in f")], 1).startswith("hang; rank 0 is at a.py:1 in f\n")


def test_one_rank_alone_is_not_late() -> None:
    assert "late" not in verdict("hang", [ZERO], 1)


@pytest.mark.parametrize(
    ("absent", "world_size", "lines"),
    [
        ([2], 3, ["late: rank 2: not come to the process group", "rank 1: its watcher does not answer"]),
        ([2, 1], 3, ["late: ranks 1, 2: not come to the process group"]),
        ([3], 1, ["late: rank 3: not come to the process group"]),  # before anything else is known
    ],
)
def test_who_has_not_come_is_late(absent: list[int], world_size: int, lines: list[str]) -> None:
    text = verdict("hang", [ZERO], world_size, absent)
    assert [line for line in text.splitlines()[1:] if not line.startswith("rank 0 (")] == lines


def test_a_status_travels() -> None:
    assert Status.from_message(ONE.to_message()) == ONE


def test_where_rank_zeros_watcher_listens() -> None:
    """By the text of the name: one's own name is often an address of the loopback, where no other machine gets to."""
    for host, everywhere in (("localhost", False), ("127.0.0.1", False), (socket.gethostname(), True)):
        with peers.listen(host) as listener:
            assert (listener.getsockname()[0] in ("::", "0.0.0.0")) is everywhere  # noqa: S104
            port = listener.getsockname()[1]
            there = peers.connect("127.0.0.1", port, {"rank": 1, "token": "secret"})
            assert there is not None
            accepted, _ = listener.accept()
            here = peers.Connection(accepted)
            assert here.receive() == [{"kind": "hello", "rank": 1, "token": "secret"}]
            there.close()
            assert here.receive() == []
            assert not here.open
            here.close()


def test_whoever_talks_something_else_is_not_listened_to() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        connection = peers.Connection.__new__(peers.Connection)
        connection.socket, connection.rank, connection.open, connection._received = ours, None, True, b""
        theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert connection.receive() == []
        assert not connection.open
        connection.close()
