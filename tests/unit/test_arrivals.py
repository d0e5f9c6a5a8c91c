"""Ranks that have not come to the process group, as long as it is waited for; without one."""

from __future__ import annotations

import queue
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from lightning_ft._hang.arrivals import Arrivals
from lightning_ft.testing import _free_port

WITHIN = timedelta(seconds=20)


PLACE = {"host": "here", "port": 1}


class Told(queue.Queue[tuple[list[int], Any]]):
    """What the watcher is told, one after the other."""

    def __call__(self, absent: list[int], place: Any) -> None:
        self.put((absent, place))

    def next(self) -> list[int]:
        """Without where rank 0's watcher is."""
        return self.get(timeout=20)[0]


@pytest.fixture
def store() -> TCPStore:
    """The store of the run, which rank 0 holds."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def arrivals(port: int, rank: int, told: Told, within: timedelta = WITHIN) -> Arrivals:
    return Arrivals("127.0.0.1", port, rank, 3, told, within, PLACE if rank == 0 else None)


def test_who_has_not_come_is_told_until_all_are_here(store: TCPStore) -> None:
    told = Told()
    waiting = arrivals(store.port, 0, told)
    assert [told.next(), told.next()] == [[], [1, 2]]
    store.set("lightning_ft/arrived/2", "")
    assert told.next() == [1]
    store.set("lightning_ft/arrived/1", "")
    assert told.next() == []
    waiting.close()


def test_where_the_watcher_of_rank_zero_is_is_known_with_its_coming(store: TCPStore) -> None:
    told, zeros = Told(), Told()
    waiting = arrivals(store.port, 1, told)
    assert [told.get(timeout=20), told.get(timeout=20)] == [([0], None), ([0, 2], None)]
    zero = arrivals(store.port, 0, zeros)
    assert told.get(timeout=20) == ([2], PLACE)
    waiting.close()
    zero.close()
    assert told.get(timeout=20) == ([], PLACE)


def test_the_store_is_not_asked_twice_about_a_rank_that_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Store:
        """Rank 2 has come, rank 1 comes when the store is asked about it for the third time."""

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def set(self, *args: Any) -> None: ...
        def get(self, key: str) -> str:
            return "null"

        def check(self, keys: list[str]) -> bool:
            (key,) = keys
            asked.append(key[-1])
            return key[-1] != "1" or asked.count("1") == 3

    monkeypatch.setattr("lightning_ft._hang.arrivals.TCPStore", Store)
    told = Told()
    arrivals(0, 0, told)
    assert [told.next(), told.next(), told.next()] == [[], [1], []]
    assert asked == ["1", "2", "1", "1"]


def test_nobody_is_missing_when_the_group_is_there(store: TCPStore) -> None:
    """It is there within milliseconds of the last rank, and nobody asks again."""
    told = Told()
    waiting = arrivals(store.port, 0, told)
    assert [told.next(), told.next()] == [[], [1, 2]]
    waiting.close()
    assert told.next() == []


def test_nor_when_the_store_has_not_answered_by_then() -> None:
    told = Told()
    waiting = arrivals(_free_port(), 1, told, timedelta(seconds=1))
    assert told.next() == [0]
    waiting.close()
    assert told.next() == []
