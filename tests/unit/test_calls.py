"""Calls with a deadline, in the event loop of fsspec, without a store."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import fsspec.asyn
import pytest

from lightning_ft._stores import calls as _calls
from lightning_ft._stores.calls import TRIES, Calls
from lightning_ft.errors import StorageError


class Fs:
    """A file system whose one call does what the test says, and counts how often and whether it has ended."""

    async_impl = True
    asynchronous = False

    def __init__(self, *outcomes: Any) -> None:
        self.loop = fsspec.asyn.get_loop()
        self.outcomes = list(outcomes)
        self.begun = 0
        self.started, self.ended = threading.Event(), threading.Event()

    async def _ask(self) -> Any:
        self.begun += 1
        self.started.set()
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if outcome is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.set()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "LONGEST_WAIT_SECS", 0.0)


def test_what_may_pass_is_tried_again() -> None:
    fs = Fs(ConnectionResetError(), TimeoutError("busy"), "answer")
    assert Calls(fs, 60).call("s3://a", "ask") == "answer"
    assert fs.begun == 3


def test_what_lasts_is_given_up_and_what_is_an_answer_is_not_tried_again() -> None:
    fs = Fs(ConnectionResetError("reset"))
    with pytest.raises(StorageError, match="s3://a: ConnectionResetError: reset") as caught:
        Calls(fs, 60).call("s3://a", "ask")
    assert caught.value.transient
    assert fs.begun == TRIES
    fs = Fs(FileNotFoundError("a"))
    with pytest.raises(FileNotFoundError):
        Calls(fs, 60).call("s3://a", "ask")
    assert fs.begun == 1


def test_after_the_deadline_nothing_is_under_way() -> None:
    fs = Fs(None)
    with pytest.raises(StorageError, match=r"no answer from the store within 0\.1 s"):
        Calls(fs, 0.1).call("s3://a", "ask")
    assert fs.ended.wait(60)
    assert fs.begun == 1


def test_what_is_cancelled_ends_and_is_not_tried_again() -> None:
    fs = Fs(None)
    calls = Calls(fs, 60)
    future = calls.start(fs._ask)
    assert fs.started.wait(60)
    future.cancel()
    assert fs.ended.wait(60)
    assert fs.begun == 1


def test_the_waits_draw_nothing_from_the_generator_of_the_training() -> None:
    drawn = random.getstate()
    with pytest.raises(StorageError):
        Calls(Fs(ConnectionResetError()), 60).call("s3://a", "ask")
    assert random.getstate() == drawn
