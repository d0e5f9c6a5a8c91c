"""Two ranks, one bad loss: all act together, before the step, and nothing that is finite is lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

import lightning_ft as ft
from lightning_ft._divergence.left_out import VARIABLE
from lightning_ft._state.digest import digest
from lightning_ft._vote.ballot import Vote
from tests.guards import diverging as d
from tests.ranks import Rank, values

pytestmark = pytest.mark.distributed

DDP: dict[str, Any] = {"strategy": "ddp", "devices": 2}
BATCHES = d.BATCHES // 2  # of each rank, in an epoch
BAD = 6


def finite(path: Any) -> bool:
    state = torch.load(path, weights_only=True)["state_dict"]
    return all(bool(torch.isfinite(value).all()) for value in state.values())


def stopped(rank: Rank, bad: int) -> dict[str, Any]:
    model, trainer, error = d.fit(rank.root / f"bad{bad}", ft.DivergenceGuard(), d.Net(at=(BAD,), rank=bad), **DDP)
    weights = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    return {**vars(error), "code": error.code, "reached": trainer.global_step, "finite": weights}


def train(rank: Rank) -> dict[str, Any]:
    """Everything that two ranks are needed for, in one life of their processes."""
    found: dict[str, Any] = {f"bad{bad}": stopped(rank, bad) for bad in (0, 1)}
    for name, guard in (("skip", ft.DivergenceGuard(action="rollback")), ("warn", ft.DivergenceGuard(action="warn"))):
        model, trainer, error = d.fit(rank.root / name, guard, d.Net(at=(BAD,), rank=1), **DDP)
        assert error is None
        found[name] = {**d.end_of(model, trainer), "trained": model.trained}
    rare = {**DDP, "ft_args": {"every_n_train_steps": 3}}
    model, trainer, error = d.fit(rank.root / "more", ft.DivergenceGuard(action="rollback"), Bad(4, 5, 6), **rare)
    assert error is None
    found["more"] = d.end_of(model, trainer)
    os.environ[VARIABLE] = "4-6"
    found["asked"] = d.end_of(*d.fit(rank.root / "asked", None, d.Net(), **rare)[:2])
    del os.environ[VARIABLE]
    return found


class Bad(d.Net):
    """The first of these on rank 0, the others on rank 1."""

    def __init__(self, *at: int) -> None:
        super().__init__(at=at)

    def is_bad(self, batch: Any) -> bool:
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        return super().is_bad(batch) and (number == self.at[0]) is (self.global_rank == 0)


def test_j3_one_of_two_ranks_diverges(tmp_path: Path) -> None:
    found = values(train, tmp_path)
    for bad in (0, 1):  # all stop together, before the step
        ends = [of_rank[f"bad{bad}"] for of_rank in found]
        assert str(ends[0]) == str(ends[1])
        assert ends[0]["code"] == 77
        assert ends[0]["batch"] == BAD
        assert ends[0]["step"] == ends[0]["reached"] == BAD - 1
        assert ends[0]["finite"]
        assert [len(losses) for losses in ends[0]["losses"]] == [int(rank == bad) for rank in (0, 1)]
        assert len(ends[0]["indices"][bad][0]) == 4
        good = ft.last_good(tmp_path / f"bad{bad}")
        assert good is not None
        assert good.path == ends[0]["restart_from"]
        assert good.manifest is not None
        assert good.manifest.batch == BAD - 2
        assert finite(good.path)
        assert Path(ends[0]["emergency"]).name == f"diverged-step={BAD - 1:08d}.ckpt"
        assert ft.verify(ends[0]["emergency"]).problem is None
    back = [of_rank["skip"] for of_rank in found]
    assert back[0]["steps"] == back[1]["steps"] == 2 * BATCHES - 1
    assert back[0]["weights"]["net.0.weight"].equal(back[1]["weights"]["net.0.weight"])
    assert all(bool(torch.isfinite(w).all()) for w in back[0]["weights"].values())
    assert all(len(of_rank["trained"]) == 2 * BATCHES + 1 for of_rank in back)  # one batch twice, one for nothing
    for of_rank in found:  # three that were bad, since one checkpoint
        for name, value in of_rank["more"].items():
            assert digest(value) == digest(of_rank["asked"][name]), name
    # Whatever is trained on, what is not finite takes no place in the rotation.
    assert not all(bool(torch.isfinite(w).all()) for w in found[0]["warn"]["weights"].values())
    assert [info.name for info in ft.list_checkpoints(tmp_path / "warn")] == [
        "step=00000004.ckpt",
        "step=00000002.ckpt",
    ]
    assert all(finite(info.path) for info in ft.list_checkpoints(tmp_path / "warn"))


# -- other ways to take a step -----------------------------------------------------------------------------------


class Lbfgs(d.Net):
    """Three losses per step, between which the weights move; the second of a bad batch is bad."""

    def __init__(self, *at: int) -> None:
        super().__init__(at=at, rank=1)
        self.seen: dict[int, int] = {}

    def is_bad(self, batch: Any) -> bool:
        return super().is_bad(batch) and self.evaluation == 2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self.evaluation = self.seen[number] = self.seen.get(number, 0) + 1
        # No dropout: what a rank takes for the loss must not decide how often it is computed.
        self.net.eval()
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=1e-2, max_iter=3, tolerance_grad=0, tolerance_change=0)


class Gan(d.Gan):
    """Bad on one rank alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.trained = [*getattr(self, "trained", []), batch[0].flatten().int().tolist()]
        return loss

    def __init__(self, *at: int, which: str) -> None:
        super().__init__(-1, which)
        self.at = at

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self.is_bad = number in self.at and self.global_rank == 1
        super().manual_backward(loss, *args, **kwargs)


def _scaled() -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    return [MixedPrecision("16-mixed", "cpu", scaler=scaler), ft.FaultTolerantCheckpointIO(async_save=False)]


class Overflows(d.Net):
    """Under a scaler, the gradients of one rank overflow and its loss does not: that is no divergence."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx).float()
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        return loss * 1e37 if number == 2 and self.global_rank == 1 else loss


class Silent(Gan):
    """In every other batch rank 1 alone differentiates something, and nobody takes a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 2:
            return super().training_step(batch, batch_idx)
        self.losses = 0
        if self.global_rank == 1:
            with self.trainer.strategy.model.no_sync():  # type: ignore[union-attr, operator]
                self.manual_backward(self.critic(batch[1]).mean())
        return None


UNUSED = {"strategy": "ddp_find_unused_parameters_true"}  # of a GAN, each loss has gradients of its own
KINDS: dict[str, tuple[Any, dict[str, Any], list[int]]] = {
    "lbfgs": (Lbfgs, {}, [BAD]),
    "critic": (lambda *at: Gan(*at, which="critic"), UNUSED, [BAD]),
    "generator": (lambda *at: Gan(*at, which="generator"), UNUSED, [BAD]),
    "first of two": (lambda *at: d.Net(at=at, rank=1), {"accumulate_grad_batches": 2}, [5, 6]),
    "none on rank 0": (lambda *at: Silent(*at, which="critic"), UNUSED, [5]),
    "bf16": (lambda *at: d.Net(at=at, rank=1), {"precision": "bf16-mixed"}, [BAD]),
    "scaler": (lambda *at: Overflows(at=at, rank=1), {"plugins": _scaled}, [BAD]),
}


def other_ways(rank: Rank) -> dict[str, Any]:
    """Each way stopped, gone back, and asked to leave out what the others leave out."""
    votes: list[Vote] = []
    make = Vote.__init__

    def noted(self: Vote, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        votes.append(self)

    Vote.__init__ = noted  # type: ignore[method-assign]
    found = {}
    for name, (kind, arguments, left_out) in KINDS.items():
        made = {key: value() if callable(value) else value for key, value in arguments.items()}

        def fit(
            what: str, guard: Any, *at: int, kind: Any = kind, made: Any = made, name: str = name
        ) -> tuple[Any, Any, Any]:
            again = {"plugins": _scaled()} if "plugins" in made else {}
            return d.fit(rank.root / name / what, guard, kind(*at), **{**DDP, **made, **again})

        model, trainer, error = fit("stop", ft.DivergenceGuard(), left_out[0])
        assert error is not None, name
        stop = {
            "code": error.code, "batch": error.batch, "step": (error.step, trainer.global_step),
            "finite": all(bool(torch.isfinite(p).all()) for p in model.parameters()),
        }  # fmt: skip
        model, trainer, error = fit("back", ft.DivergenceGuard(action="rollback"), left_out[0])
        assert error is None, name
        back = d.end_of(model, trainer)
        os.environ[VARIABLE] = ",".join(map(str, left_out))
        model, trainer, error = fit("asked", ft.DivergenceGuard())
        assert error is None, name
        del os.environ[VARIABLE]
        asked = d.end_of(model, trainer)
        equal = {key: digest(back[key]) == digest(asked[key]) for key in back}
        found[name] = {
            "stop": stop, "equal": equal, "weights": digest([p.detach().clone() for p in model.parameters()]),
            "votes": [vote.read_count for vote in votes], "losses": getattr(model, "seen", None),
            "scale": getattr(getattr(trainer.precision_plugin, "scaler", None), "_scale", None),
        }  # fmt: skip
        votes.clear()
    found["uneven"] = uneven(rank)
    return found


class Uneven(Gan):
    """Rank 1 differentiates one more loss."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.global_rank == 1:
            with self.trainer.strategy.model.no_sync():  # type: ignore[union-attr, operator]
                super().manual_backward(loss, retain_graph=True)
        super().manual_backward(loss, *args, **kwargs)


def uneven(rank: Rank) -> str:
    """Whichever rank finds it out first says it to the other."""
    with pytest.raises((ft.ConfigurationError, ft.PeerLostError)) as refused:
        d.fit(rank.root / "uneven", ft.DivergenceGuard(), Uneven(which="critic"), **{**DDP, **UNUSED})
    return str(refused.value)


def test_j3_one_of_two_ranks_diverges_within_other_ways_to_take_a_step(tmp_path: Path) -> None:
    found = values(other_ways, tmp_path)
    for name, (_, _, left_out) in KINDS.items():
        one, other = found[0][name], found[1][name]
        assert one["stop"] == other["stop"], name
        assert (one["stop"]["code"], one["stop"]["batch"], one["stop"]["finite"]) == (77, left_out[0], True), name
        assert one["votes"] == other["votes"], name
        assert all(one["equal"].values()), (name, one["equal"])
        assert all(other["equal"].values()), (name, other["equal"])
        assert one["weights"] == other["weights"], name
    assert set(found[0]["lbfgs"]["losses"].values()) == {3}
    assert found[0]["scaler"]["scale"] == 2.0**5, "a step was left out, and then the scale grew every other step"
    uneven = "loss 2 for optimizer step 1, and another in loss 1 for optimizer step 2, of batch 1"
    assert [uneven in of_rank["uneven"] for of_rank in found] == [True, True], [of_rank["uneven"] for of_rank in found]
