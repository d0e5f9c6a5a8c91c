"""J1, J2: an exception on one rank while a checkpoint is being written: said at once, nobody hangs, nothing is lost.

The write is held until the other rank's fit is over and this one has said why, so every test shows that nobody has
waited for it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

import lightning_ft as ft
from lightning_ft import events, exit_codes
from lightning_ft._saving import writers
from tests import ranks
from tests.ranks import Outcome, Rank
from tests.trainer import scenarios as s

pytestmark = pytest.mark.distributed

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
        self.said = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
        if "ZeroDivisionError" in self.lines[-1]:
            self.said.set()

    def notes(self, event: events.Event) -> None:
        if isinstance(event, events.Committed):
            self.lines.append(f"committed {os.path.basename(event.path)}")


def fit(rank: Rank, failing: int, place: str, savers: tuple[Any, ...] = ()) -> tuple[list[str], str, Any]:
    """What one rank says, which error ends its fit, and with which code it would end the process."""
    notes = Noted()
    logging.getLogger("lightning_ft").addHandler(notes)
    events.observe(notes.notes)

    def hold(event: events.Event) -> None:
        if place != "killed" and isinstance(event, events.DataWritten) and f"step={in_flight(place):08}" in event.path:
            rank.wait_for(f"rank {1 - rank.number} is out")
            notes.said.wait(ranks.WITHIN_SECS)

    events.observe(hold)
    trainer = s.ddp(str(rank.root / "checkpoints"), every=1, callbacks=savers, max_steps=8)
    loader, val = s.shuffled()
    if place == "loader" and rank.number == failing:
        loader = torch.utils.data.DataLoader(FailingItems(), batch_size=4, num_workers=1)
    try:
        trainer.fit(Fails(failing, place), loader, val)
    except BaseException as error:
        rank.tell(f"rank {rank.number} is out")
        return notes.lines, f"{type(error).__name__}: {error}", getattr(error, "code", 1)
    raise AssertionError("nothing failed")


def run(root: Path, failing: int, place: str, *savers: Any) -> list[Outcome]:
    ended = ranks.run(fit, root, failing, place, savers)
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
    ended = ranks.run(fit, tmp_path, failing, "killed")
    assert ended[failing].exit_code == -signal.SIGKILL
    assert ended[1 - failing].exit_code == 0, ended[1 - failing].error or "it hangs"
    _, error, code = ended[1 - failing].value
    assert error.startswith(f"PeerLostError: rank {failing} failed: it is gone")
    assert code == exit_codes.PEER_LOST


# -- callbacks that save on an exception ---------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("kind", [OnExceptionCheckpoint, ModelCheckpoint])
def test_j1_nobody_saves_alone(kind: Any, failing: int, tmp_path: Path) -> None:
    place = tmp_path / "others"
    saver = partial(kind, place) if kind is OnExceptionCheckpoint else partial(kind, place, save_on_exception=True)
    ended = run(tmp_path, failing, "training_step", saver)
    assert "ZeroDivisionError" in ended[failing].value[1]
    assert any(f"{kind.__name__} will not save on an exception" in line for line in ended[0].value[0])
    assert not list(place.glob("*.ckpt"))


def saves_in_its_own_hook(rank: Rank) -> tuple[str, bool]:
    """A callback of the user's own does what is written in many a guide."""

    class Own(L.Callback):
        def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
            trainer.save_checkpoint(rank.root / f"own{rank.number}.ckpt")

    trainer = s.ddp(str(rank.root / "checkpoints"), every=1, callbacks=(Own,), max_steps=8)
    try:
        trainer.fit(Fails(1, "training_step"), *s.shuffled())
    except BaseException as error:
        return type(error).__name__, (rank.root / f"own{rank.number}.ckpt").exists()
    raise AssertionError("nothing failed")


def test_j1_a_save_in_a_hook_of_the_users_own(tmp_path: Path) -> None:
    """Rank 0 writes it, as always, and waits for nobody."""
    outcomes = ranks.values(saves_in_its_own_hook, tmp_path)
    assert outcomes == [("PeerLostError", True), ("ZeroDivisionError", False)]


def plain(rank: Rank, failing: int) -> None:
    trainer = s.plain_trainer(
        str(rank.root / "checkpoints"), every=1, strategy="ddp", devices=2, max_steps=8,
        callbacks=(partial(OnExceptionCheckpoint, rank.root),),
    )  # fmt: skip
    trainer.fit(Fails(failing, "training_step"), *s.shuffled())


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_j1_plain_lightning_hangs(failing: int, tmp_path: Path) -> None:
    """What all this is for. If this fails, Lightning has learnt it."""
    ended = ranks.run(plain, tmp_path, failing, within_secs=30)
    assert [outcome.exit_code for outcome in ended] == [None, None]


# -- other ways to leave -------------------------------------------------------------------------------------------


class Leaves(s.Net):
    """One rank leaves in its fourth step with an exception that is no error."""

    def __init__(self, exception: BaseException) -> None:
        super().__init__()
        self.exception = exception

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1 and self.trainer.global_step == STEP:
            raise self.exception
        return super().training_step(batch, batch_idx)


def leave(rank: Rank, exception: BaseException) -> tuple[str, Any]:
    trainer = s.ddp(str(rank.root / "checkpoints"), every=1, max_steps=8)
    try:
        trainer.fit(Leaves(exception), *s.shuffled())
    except BaseException as error:
        return str(error), getattr(error, "code", None)
    raise AssertionError("nobody left")


@pytest.mark.parametrize(
    ("exception", "code"), [(SystemExit(3), 3), (KeyboardInterrupt(), 1)], ids=["SystemExit", "KeyboardInterrupt"]
)
def test_one_rank_leaves(exception: BaseException, code: int, tmp_path: Path) -> None:
    outcomes = ranks.values(leave, tmp_path, exception)
    assert outcomes[1][1] == code
    assert outcomes[0][0].startswith(f"rank 1 failed: {type(exception).__name__}")
    assert outcomes[0][1] == exit_codes.PEER_LOST


def memory_is_short(rank: Rank) -> str:
    trainer = s.trainer(str(rank.root / "checkpoints"), every=1, max_steps=8, accumulate_grad_batches=2)
    model = Leaves(torch.OutOfMemoryError("CUDA out of memory."))
    model.training_step = lambda batch, batch_idx: torch.empty(1 << 60)  # type: ignore[method-assign]
    try:
        trainer.fit(model, *s.shuffled())
    except RuntimeError:
        return traceback.format_exc()
    raise AssertionError("this machine has enough")


def test_a_lack_of_memory_says_what_to_do(tmp_path: Path) -> None:
    (said,) = ranks.values(memory_is_short, tmp_path, world_size=1)
    assert "Trainer(accumulate_grad_batches=4), which is 2 now" in said


# -- a write that does not end -------------------------------------------------------------------------------------


def write_that_hangs(rank: Rank) -> list[str]:
    notes = Noted()
    logging.getLogger("lightning_ft").addHandler(notes)
    writers.GRACE_SECS = 0.5

    def hang(event: events.Event) -> None:
        if isinstance(event, events.DataWritten) and f"step={STEP:08}" in event.path:
            threading.Event().wait()

    events.observe(hang)
    trainer = s.trainer(str(rank.root / "checkpoints"), every=1, max_steps=8)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Fails(0, "training_step"), *s.shuffled())
    return notes.lines


def test_a_write_that_hangs_is_given_up(tmp_path: Path) -> None:
    """The process ends all the same; what was being written is not to be seen."""
    (said,) = ranks.values(write_that_hangs, tmp_path, world_size=1)
    assert any("given up" in line and f"step={STEP:08}.ckpt" in line for line in said)
    good = ft.last_good(str(tmp_path / "checkpoints"))
    assert good is not None
    assert good.name == f"step={STEP - 1:08}.ckpt"
