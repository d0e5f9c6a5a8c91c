"""When a fit votes: once per batch, or per loss, and at the end of an epoch, however its training is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

import lightning_ft as ft
from lightning_ft._fit import guarding
from lightning_ft._fit.watch import Request, Watch, Watches
from lightning_ft._vote.ballot import Vote
from lightning_ft.state import Progress
from tests.trainer import runs

BATCHES = 8


class Numbered(Watch):
    """Numbers its ballots, and writes down what happens: everything that is told is told in `said`."""

    topics = ("number", "loss")
    anywhere = True

    def __init__(self, wants_loss: bool) -> None:
        self.wants_loss = wants_loss
        self.said: list[str] = []
        self.number = 0
        self.losses = 0

    def ballot(self) -> dict[str, int]:
        self.number += 1
        self.said.append(f"cast {self.number}")
        return {"number": self.number, "loss": self.losses}

    def loss_known(self, loss: Tensor) -> None:
        self.losses += 1
        self.said.append("loss")

    def before_step(self, votes: Mapping[str, int]) -> None:
        self.said.append(f"step {votes['number']}")
        assert votes["loss"] == self.losses, "parameters would change before their loss was voted on"

    def decide(self, votes: Mapping[str, int], progress: Progress) -> Request | None:
        # The number that was heard: of the batch, or of a batch and what came after it.
        self.said.append(f"decide {votes.get('number')}")
        return None

    def batch_over(self) -> None:
        self.said.append("over")


class Numbers(Numbered):
    """Does not wait for the loss, and is asked once per batch only."""

    anywhere = False


class Automatic(runs.Line):
    pass


class Nothing(runs.Line):
    """Every second batch is skipped."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


class Lbfgs(runs.Line):
    """The forward and backward pass are evaluated three times per step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3, max_eval=3, tolerance_grad=0.0, tolerance_change=0.0)


class Manual(runs.Line):
    """Two losses and two steps per batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


class Sum(runs.Line):
    """Two losses and one step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for _ in range(2):
            self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Iterates(runs.Line):
    """Takes its batches by itself."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.layer(batch[1]).pow(2).mean()


class Ends(runs.Line):
    """Ends its epochs early, at the fourth batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 else None


def _fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, watch: Numbered, model: L.LightningModule, **kwargs: Any
) -> Vote:
    made: list[Vote] = []
    monkeypatch.setattr(guarding, "watches", lambda *_: Watches([watch]))
    close = Vote.close
    monkeypatch.setattr(Vote, "close", lambda vote: (made.append(vote), close(vote))[1])
    saver = ft.FaultTolerantCheckpoint(tmp_path, every_n_epochs=100, save_on_train_end=False)
    runs.fit(runs.trainer(saver, **kwargs), model)
    (vote,) = made
    assert not vote.cast_open
    return vote


PLAIN = ["cast", "loss", "over", "decide"]


@pytest.mark.parametrize(
    ("model", "kwargs", "batch"),
    [
        (Automatic, {}, [PLAIN]),
        (Automatic, {"accumulate_grad_batches": 3}, [PLAIN]),
        (Automatic, {"limit_train_batches": 3}, [PLAIN]),
        (Nothing, {}, [PLAIN, ["cast", "over", "decide"]]),
        (Lbfgs, {}, [["cast", "loss", "loss", "loss", "over", "decide"]]),
        (Manual, {}, [["cast", "loss", "loss", "over", "decide"]]),
        (Iterates, {}, [PLAIN]),
        (Ends, {}, [PLAIN]),
    ],
    ids=["automatic", "accumulated", "limited", "nothing", "lbfgs", "manual", "iterator", "ended"],
)
def test_one_ballot_per_batch(
    model: Any, kwargs: Any, batch: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    watch = Numbers(wants_loss=False)
    vote = _fit(monkeypatch, tmp_path, watch, model(), **kwargs)
    said = [word.split()[0] for word in watch.said]
    batches = kwargs.get("limit_train_batches", BATCHES) if model is not Ends else 3
    expected = [word for number in range(batches) for word in batch[number % len(batch)]]
    if model is Ends:
        expected += ["cast"]  # of the batch that was not trained
    assert said == [*expected, "over", "decide"]  # the end of the epoch
    # Each batch decides upon its own ballot, the end of the epoch upon one that nothing was decided upon.
    assert watch.said[-1] == (f"decide {watch.number}" if model is Ends else "decide None")
    assert vote.read_count == said.count("cast")
    assert vote.waited_count == 0


@pytest.mark.parametrize(
    ("model", "kwargs", "batch"),
    [
        (Automatic, {}, [["loss", "cast", "step", "over", "decide"]]),
        (
            Automatic,
            {"accumulate_grad_batches": 2},
            [["loss", "cast", "over", "decide"], ["loss", "cast", "step", "over", "decide"]],
        ),
        (Nothing, {}, [["loss", "cast", "step", "over", "decide"], ["cast", "step", "over", "decide"]]),
        (Lbfgs, {}, [["loss", "cast", "step"] * 3 + ["over", "decide"]]),
        (Manual, {}, [["loss", "cast", "step"] * 2 + ["over", "decide"]]),
        (Sum, {}, [["loss", "cast", "loss", "cast", "step", "over", "decide"]]),
        (Iterates, {}, [["loss", "cast", "step", "over", "decide"]]),
    ],
    ids=["automatic", "accumulated", "nothing", "lbfgs", "manual", "sum", "iterator"],
)
def test_one_ballot_per_loss_heard_before_parameters_change(
    model: Any, kwargs: Any, batch: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    watch = Numbered(wants_loss=True)
    _fit(monkeypatch, tmp_path, watch, model(), **kwargs)
    said = [word.split()[0] for word in watch.said]
    expected = [word for number in range(BATCHES) for word in batch[number % len(batch)]]
    # Where training starts and ends the ranks are asked, too.
    assert said == ["cast", "decide", *expected, "over", "cast", "decide", "cast", "decide"]
