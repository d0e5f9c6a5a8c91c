"""Who ends the process, and who has caught what would have ended it."""

from __future__ import annotations

import contextlib
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from lightning_ft import exit_codes
from lightning_ft._preemption.leaving import _Left


def leave(marker: Path) -> None:
    raise _Left(exit_codes.PREEMPTED, marker.touch)


def catch(marker: Path) -> None:
    with contextlib.suppress(SystemExit):
        leave(marker)


@pytest.mark.parametrize(("target", "code", "stays"), [(leave, exit_codes.PREEMPTED, False), (catch, 0, True)])
def test_a_child_that_ends_has_not_caught_it(target: Any, code: int, stays: bool, tmp_path: Path) -> None:
    marker = tmp_path / "stays"
    child = multiprocessing.get_context("fork").Process(target=target, args=(marker,))
    child.start()
    child.join()
    assert (child.exitcode, marker.exists()) == (code, stays)
