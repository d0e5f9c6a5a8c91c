"""J1, J2: an exception on one rank while a checkpoint is being written: said at once, nobody hangs, nothing is lost.

The write is held until the other rank's fit is over, so every test shows that nobody has waited for it.
"""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import lightning_ft as ft
from lightning_ft import events, exit_codes
from tests import ranks
from tests.ranks import Outcome, Rank
from tests.trainer import scenarios as s

pytestmark = pytest.mark.distributed

ENDS_WITHIN_SECS = 60
"""From the start of all ranks to the end of the last; far below the half hour after which a collective gives up."""
STEP = 3


def in_flight(place: str) -> int:
    """The step whose save is being written then: a batch is fetched one step ahead."""
    return STEP - 1 if place == "loader" else STEP


class Fails(s.Net):
    """Fails on one rank, in one place, in the step after the third."""

    def __init__(self, rank: int, place: str) -> None:
        super().__init__()
        self.rank = rank
        self.place = place

    def fail(self, place: str, step: int = STEP) -> None:
        if place == self.place and self.global_rank == self.rank and self.trainer.global_step == step:
            if place == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError(f"in {place} of rank {self.rank}")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.fail("training_step")
        self.fail("killed")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.fail("validation_step", STEP + 1)  # which comes before the save of that step
        return super().validation_step(batch, batch_idx)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.fail("optimizer_step")
        super().optimizer_step(*args, **kwargs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.fail("on_train_batch_start")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.fail("on_save_checkpoint", STEP + 1)


class FailingItems(s.Numbers):
    """An item of the fourth batch of either rank cannot be read."""

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if i >= 2 * 4 * STEP:
            raise ZeroDivisionError("in a worker of the loader")
        return super().__getitem__(i)


class Noted(logging.Handler):
    """What this rank says and does, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def notes(self, event: events.Event) -> None:
        if isinstance(event, events.Committed):
            self.lines.append(f"committed {os.path.basename(event.path)}")


def fit(rank: Rank, failing: int, place: str, savers: tuple[Callback, ...] = ()) -> tuple[list[str], str, Any]:
    """What one rank says, which error ends its fit, and with which code it would end the process."""
    notes = Noted()
    logging.getLogger("lightning_ft").addHandler(notes)
    events.observe(notes.notes)

    def hold(event: events.Event) -> None:
        if place != "killed" and isinstance(event, events.DataWritten) and f"step={in_flight(place):08}" in event.path:
            rank.wait_for(f"rank {1 - rank.number} is out")

    events.observe(hold)
    trainer = s.ddp(
        str(rank.root / "checkpoints"), every=1, callbacks=tuple(lambda c=c: c for c in savers), max_steps=8
    )
    loader, val = s.shuffled()
    if place == "loader" and rank.number == failing:
        loader = torch.utils.data.DataLoader(FailingItems(), batch_size=4, num_workers=1)
    try:
        trainer.fit(Fails(failing, place), loader, val)
    except BaseException as error:
        rank.tell(f"rank {rank.number} is out")
        return notes.lines, f"{type(error).__name__}: {error}", getattr(error, "code", 1)
    raise AssertionError("nothing failed")


def run(root: Path, failing: int, place: str, *savers: Callback) -> list[Outcome]:
    ended = ranks.run(fit, root, failing, place, savers, within_secs=ENDS_WITHIN_SECS)
    for outcome in ended:
        assert outcome.exit_code in (0, -signal.SIGKILL), outcome.error or "it hangs"
    good = ft.last_good(str(root / "checkpoints"))
    assert good is not None
    # The hooks of the module come after everything that the ranks do together: rank 0 may have made that save.
    made = STEP + 1 if (place, failing) == ("on_save_checkpoint", 1) else in_flight(place)
    assert good.name == f"step={made:08}.ckpt"
    return ended


PLACES = [
    ("training_step", 0), ("training_step", 1), ("validation_step", 0), ("loader", 1), ("optimizer_step", 0),
    ("on_train_batch_start", 1), ("on_save_checkpoint", 1), ("on_save_checkpoint", 0),
]  # fmt: skip


@pytest.mark.parametrize(("place", "failing"), PLACES)
def test_j1_an_exception_on_one_rank(place: str, failing: int, tmp_path: Path) -> None:
    ended = run(tmp_path, failing, place)
    said, error, code = ended[failing].value
    assert "ZeroDivisionError" in error
    assert code == 1
    first = next(line for line in said if "ZeroDivisionError" in line)
    assert "Traceback (most recent call last)" in first
    said_by_peer, error, code = ended[1 - failing].value
    assert error.startswith(f"PeerLostError: rank {failing} failed: ")
    assert "ZeroDivisionError" in error
    assert code == exit_codes.PEER_LOST
    assert any(f"rank {failing} failed" in line for line in said_by_peer)
    # Both have ended while rank 0 was writing; it has said so before that was over.
    said_by_zero = ended[0].value[0]
    told = next(i for i, line in enumerate(said_by_zero) if "ZeroDivisionError" in line)
    assert told < said_by_zero.index(f"committed step={in_flight(place):08}.ckpt")


@pytest.mark.parametrize("failing", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_is_named(failing: int, tmp_path: Path) -> None:
    ended = ranks.run(fit, tmp_path, failing, "killed", within_secs=ENDS_WITHIN_SECS)
    assert ended[failing].exit_code == -signal.SIGKILL
    assert ended[1 - failing].exit_code == 0, ended[1 - failing].error or "it hangs"
    _, error, code = ended[1 - failing].value
    assert error.startswith(f"PeerLostError: rank {failing} failed: it is gone")
    assert code == exit_codes.PEER_LOST
