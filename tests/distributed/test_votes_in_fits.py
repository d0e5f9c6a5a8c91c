"""Votes of two ranks in one fit: nobody waits, validations have other lengths and are left together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

import lightning_ft as ft
from lightning_ft._fit import guarding
from lightning_ft._fit.watch import Request, Watch, Watches
from lightning_ft._vote import validation
from lightning_ft._vote.ballot import Vote
from lightning_ft.state import Progress
from tests.asked import Asked
from tests.ranks import Rank, values
from tests.trainer import scenarios as s

pytestmark = pytest.mark.distributed

VAL_BATCHES = 3, 7
"""Of the ranks."""


class AskedOnce(Asked):
    """Asks once for the end, in the place of `PreemptionGuard`."""

    replaces_lightnings_signals = True

    def __init__(self) -> None:
        super().__init__()
        self.decided: list[int] = []

    def decide(self, votes: Mapping[str, int], progress: Progress) -> Request | None:
        if not votes.get("asked") or self.decided:
            return None
        self.decided.append(progress.step)
        return Request("asked")


class Module(L.LightningModule):
    """Draws random numbers in training and validation; what it saw is in its lists."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.losses: list[str] = []
        self.validated: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.layer(batch[0]) - torch.rand(())).pow(2).mean()
        self.losses.append(float(loss.detach()).hex())
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated.append((self.global_step, batch_idx))
        self.log("val", self.layer(batch[0]).mean() + torch.rand(()), sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class At(Callback):
    """Calls a function at a batch of a validation."""

    def __init__(self, step: int, batch: int, call: Callable[[], None]) -> None:
        self.at = step, batch
        self.call = call

    def on_validation_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if (trainer.global_step, batch_idx) == self.at and not trainer.sanity_checking:
            self.call()


def _fit(rank: Rank, watch: Watch, *callbacks: Callback, **kwargs: Any) -> tuple[Module, L.Trainer, Vote]:
    torch.manual_seed(rank.number)
    rows = torch.arange(64.0).reshape(32, 2) / 64
    lengths = (VAL_BATCHES[rank.number], VAL_BATCHES[1 - rank.number])[: kwargs.pop("loaders", 1)]
    val = [DataLoader(TensorDataset(rows[:length]), batch_size=1) for length in lengths]
    votes: list[Vote] = []
    close = Vote.close

    def closed(vote: Vote) -> None:
        votes.append(vote)
        close(vote)

    ckpt_path = kwargs.pop("ckpt_path", None)
    saver = ft.FaultTolerantCheckpoint(rank.root / "run", every_n_epochs=100, save_on_train_end=False)
    with (
        mock.patch.object(guarding, "watches", return_value=Watches([watch])),
        mock.patch.object(Vote, "close", closed),
    ):
        arguments = {"max_epochs": 2, "strategy": "ddp", "devices": 2, "use_distributed_sampler": False, **kwargs}
        trainer = L.Trainer(**{**s.COMMON, **arguments}, callbacks=[*callbacks, saver])
        module = Module()
        trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=4), val, ckpt_path=ckpt_path)
    (vote,) = votes
    return module, trainer, vote


_COLLECTIVES = (
    "all_reduce", "broadcast", "all_gather", "gather", "scatter", "barrier", "all_gather_into_tensor",
    "monitored_barrier",
)  # fmt: skip


class Counts(Callback):
    """How many collectives the main thread began between the starts of two batches, whoever asked for them."""

    def __init__(self) -> None:
        self.counted: list[int] = []
        self._patches = [mock.patch.object(dist, name, mock.Mock(wraps=getattr(dist, name))) for name in _COLLECTIVES]
        self._mocks = [patch.start() for patch in self._patches]

    def on_train_batch_start(self, *args: Any) -> None:
        self.counted.append(sum(m.call_count for m in self._mocks))

    def close(self) -> list[int]:
        for patch in self._patches:
            patch.stop()
        return [b - a for a, b in zip(self.counted, self.counted[1:], strict=False)]


def _nobody_waits(rank: Rank) -> dict[str, Any]:
    counts = Counts()
    _, _, vote = _fit(rank, AskedOnce(), counts, limit_val_batches=0, num_sanity_val_steps=0, max_epochs=1)
    per_step = counts.close()
    before = Counts()
    arguments = {"max_epochs": 1, "strategy": "ddp", "devices": 2, "limit_val_batches": 0}
    plain = L.Trainer(**{**s.COMMON, **arguments}, callbacks=[before])
    plain.fit(Module(), DataLoader(TensorDataset(torch.zeros(64, 2)), batch_size=4))
    return {"ours": per_step, "plain": before.close(), "one host": vote.within_one_host}


def _metrics(trainer: L.Trainer) -> dict[str, str]:
    return {name: float(value).hex() for name, value in trainer.callback_metrics.items()}


def _validations(rank: Rank) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with mock.patch.object(validation, "_MOST_BATCHES", 1):
        # Ranks with other numbers of batches, of which nobody asks for anything.
        module, trainer, _ = _fit(rank, AskedOnce(), num_sanity_val_steps=-1, val_check_interval=4)
        seen["whole"] = module.losses, module.validated, _metrics(trainer)
        # Of two loaders one rank has more of the one and less of the other; what is logged is reduced after each.
        module, _, _ = _fit(rank, AskedOnce(), loaders=2, num_sanity_val_steps=0, max_epochs=1)
        seen["two loaders"] = module.validated
        for by in (0, 1):
            # By rank 1 when rank 0 is through with its validation, which waits for the other one; and by rank 0.
            watch = AskedOnce()
            at = At(4, 5 if by else 1, lambda watch=watch: setattr(watch, "known", True))  # type: ignore[misc]
            callbacks = [at] if rank.number == by else []
            begun, first, _ = _fit(rank, watch, *callbacks, num_sanity_val_steps=-1, val_check_interval=4)
            last = begun.validated[-1]
            ended, trainer, _ = _fit(rank, AskedOnce(), num_sanity_val_steps=-1, val_check_interval=4, ckpt_path="last")
            seen[f"by {by}"] = {
                "decided": watch.decided, "stopped": first.global_step, "left": last,
                "losses": begun.losses + ended.losses,
                "validated": ended.validated, "metrics": _metrics(trainer),
            }  # fmt: skip
            names = [info.name for info in ft.list_checkpoints(str(rank.root / "run"))]
            seen[f"by {by}"]["names"] = names
            dist.barrier()
            if rank.number == 0:
                for name in names:
                    (rank.root / "run" / name).unlink()
            dist.barrier()
        # In the sanity check: nothing is trained before it is noticed.
        watch = AskedOnce()
        watch.known = rank.number == 1
        module, trainer, _ = _fit(rank, watch, num_sanity_val_steps=-1)
        seen["sanity"] = watch.decided, module.validated, trainer.global_step
    return seen


def _both(rank: Rank) -> dict[str, Any]:
    seen = {"waits": _nobody_waits(rank), **_validations(rank)}
    dist.destroy_process_group()
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values(_both, tmp_path_factory.mktemp("votes"))


def test_i10_no_collective_is_added_to_a_step(seen: list[dict[str, Any]]) -> None:
    """Ranks of one host ask nothing of each other through a group, and Lightning's own question is left out."""
    for rank in seen:
        waits = rank["waits"]
        assert waits["one host"]
        assert set(waits["ours"]) == {0}
        assert set(waits["plain"]) == {1}, "Lightning asks all ranks for signals before every batch, as of 2.6"


def test_validations_of_other_lengths(seen: list[dict[str, Any]]) -> None:
    for rank, batches in zip(seen, VAL_BATCHES, strict=True):
        _, validated, _ = rank["whole"]
        assert validated == [(step, batch) for step in (0, 4, 8, 12, 16) for batch in range(batches)]


def test_validations_of_several_loaders(seen: list[dict[str, Any]]) -> None:
    for number, rank in enumerate(seen):
        lengths = VAL_BATCHES[number], VAL_BATCHES[1 - number]
        assert rank["two loaders"] == [(8, batch) for length in lengths for batch in range(length)]


@pytest.mark.parametrize("by", [0, 1])
def test_all_ranks_leave_a_validation(by: int, seen: list[dict[str, Any]]) -> None:
    for rank, batches in zip(seen, VAL_BATCHES, strict=True):
        stopped, (losses, validated, metrics) = rank[f"by {by}"], rank["whole"]
        assert stopped["decided"] == [4]
        assert stopped["stopped"] == 4
        assert len(stopped["names"]) == 1
        # Voted after the batch of the signal, heard after the next one; a rank that is through has no more.
        assert stopped["left"] == (4, min(6 if by else 2, batches - 1))
        assert stopped["losses"] == losses
        assert stopped["validated"] == validated[batches:]
        assert stopped["metrics"] == metrics


def test_the_sanity_check_is_left(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        decided, validated, step = rank["sanity"]
        assert decided == [0]
        assert validated == [(0, 0), (0, 1)]
        assert step == 0
