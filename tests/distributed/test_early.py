"""J1, before the fit has begun: one rank fails while all are set up, and the others end, and say which it was."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback

import lightning_ft as ft
from lightning_ft import exit_codes
from lightning_ft._fit import guarding
from lightning_ft._preemption import grace
from tests import ranks
from tests.ranks import Rank
from tests.trainer import scenarios as s

pytestmark = pytest.mark.distributed


def fail(here: str, place: str, failing: int) -> None:
    if here == place and int(os.environ["RANK"]) == failing:
        raise ZeroDivisionError(f"in {place} of rank {failing}")


class Data(L.LightningDataModule):
    def __init__(self, place: str, failing: int) -> None:
        super().__init__()
        self.fail = partial(fail, place=place, failing=failing)

    def prepare_data(self) -> None:
        self.fail("prepare_data")

    def setup(self, stage: str) -> None:
        self.fail("setup of data")

    def train_dataloader(self) -> Any:
        return s.shuffled()[0]


class Other(Callback):
    def __init__(self, place: str, failing: int) -> None:
        self.fail = partial(fail, place=place, failing=failing)

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.fail("setup of a callback")


class Module(s.Net):
    def __init__(self, place: str, failing: int) -> None:
        super().__init__()
        self.fail = partial(fail, place=place, failing=failing)

    def setup(self, stage: str) -> None:
        self.fail("setup of the module")

    def configure_model(self) -> None:
        self.fail("configure_model")

    def on_fit_start(self) -> None:
        self.fail("on_fit_start")


def fit(rank: Rank, place: str, failing: int, ckpt_path: str | None) -> tuple[str, Any]:
    trainer = s.ddp(str(rank.root / "checkpoints"), every=1, max_steps=2, callbacks=(partial(Other, place, failing),))
    try:
        trainer.fit(Module(place, failing), datamodule=Data(place, failing), ckpt_path=ckpt_path)
    except BaseException as error:
        # What has failed lives on, as if it had much to clear away.
        rank.tell(f"rank {rank.number} is out")
        rank.wait_for(f"rank {1 - rank.number} is out")
        return f"{type(error).__name__}: {error}", getattr(error, "code", 1)
    raise AssertionError("nothing failed")


@pytest.mark.parametrize(
    ("place", "failing", "ckpt_path"),
    [
        ("setup of data", 1, None),
        ("setup of a callback", 0, "last"),
        ("prepare_data", 0, "last"),
        ("on_fit_start", 1, None),
        pytest.param("prepare_data", 0, None, marks=pytest.mark.slow),
        pytest.param("setup of data", 0, "last", marks=pytest.mark.slow),
        pytest.param("setup of the module", 1, None, marks=pytest.mark.slow),
        pytest.param("configure_model", 0, None, marks=pytest.mark.slow),
    ],
)
def test_j1_one_rank_fails_before_the_fit_begins(
    place: str, failing: int, ckpt_path: str | None, tmp_path: Path
) -> None:
    ended = ranks.values(fit, tmp_path, place, failing, ckpt_path)
    assert ended[failing] == (f"ZeroDivisionError: in {place} of rank {failing}", 1)
    words = f"PeerLostError: rank {failing} failed: ZeroDivisionError: in {place} of rank {failing}"
    assert ended[1 - failing] == (words, exit_codes.PEER_LOST)


def fit_where_nodes_differ(rank: Rank) -> list[str]:
    """A grace period that is none, and then a watcher that cannot be started: both on rank 1 alone."""
    ended = []
    for name in ("environment", "watcher"):
        with pytest.MonkeyPatch.context() as patch:
            if rank.number == 1 and name == "environment":
                patch.setenv(grace.ENVIRONMENT, "soon")
            if rank.number == 1 and name == "watcher":
                patch.setattr(guarding, "arm", unable)
            trainer = s.ddp(str(rank.root / name), every=1, max_steps=2, ft_args={"guards": (ft.PreemptionGuard(),)})
            with pytest.raises(ft.FaultToleranceError) as raised:
                trainer.fit(s.Net(), s.shuffled()[0])
            ended.append(f"{raised.type.__name__}: {raised.value}")
    # As if there was much to clear away: connections stay.
    rank.tell(f"rank {rank.number} is out")
    rank.wait_for(f"rank {1 - rank.number} is out")
    return ended


def unable(guards: Any) -> None:
    raise ft.ConfigurationError("HangGuard: no watcher here")


def test_what_one_node_alone_cannot_do_ends_the_others_too(tmp_path: Path) -> None:
    ended = ranks.values(fit_where_nodes_differ, tmp_path)
    assert ended[0][0] == ended[1][0]
    assert ended[0][0].startswith(f"ConfigurationError: {grace.ENVIRONMENT}='soon'")
    assert ended[1][1] == "ConfigurationError: HangGuard: no watcher here"
    assert ended[0][1] == "PeerLostError: rank 1 failed: ConfigurationError: HangGuard: no watcher here"
