"""That a test on the device which fails, dies or leaves something behind is seen to."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from tests.devices import fakeacc
from tests.devices.fakeacc import on_fakeacc


@on_fakeacc
def fails() -> None:
    raise AssertionError(f"on {torch.accelerator.current_accelerator()}")


@on_fakeacc
def dies() -> None:
    os._exit(7)


@on_fakeacc
def leaves_a_thread() -> None:
    threading.Thread(target=threading.Event().wait, args=(5,), name="lightning-ft-writer", daemon=True).start()


@on_fakeacc
def hangs() -> None:
    threading.Event().wait()


@on_fakeacc
def works() -> None:
    assert torch.ones(4, device="fakeacc").cpu().tolist() == [1] * 4


@fakeacc.needs_compiler
@pytest.mark.parametrize(
    ("test", "message"),
    [(fails, "AssertionError: on fakeacc"), (dies, "died, exit code 7"), (leaves_a_thread, "threads left running")],
)
def test_what_goes_wrong_is_said_and_the_next_test_runs(test: object, message: str) -> None:
    assert callable(test)
    with pytest.raises(pytest.fail.Exception, match=message):
        test()
    works()


@fakeacc.needs_compiler
def test_a_test_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    works()
    monkeypatch.setattr(fakeacc, "TEST_SECS", 0.2)
    with pytest.raises(pytest.fail.Exception, match="took more than 0 s"):
        hangs()
