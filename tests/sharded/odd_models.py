"""Models and optimizers that keep more, or other things, than most: what of theirs comes back from a directory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

WIDTH = 96


class Net(L.LightningModule):
    """Statistics that differ from rank to rank, and an optimizer of the test's."""

    def __init__(self, optimizer: Callable[[L.LightningModule], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        # The second of them lies where rank 1 writes, if nothing is kept for the parameters.
        self.net = nn.Sequential(
            nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 200), nn.BatchNorm1d(200)
        )
        self.optimizer = optimizer or (lambda module: torch.optim.AdamW(module.net.parameters(), lr=0.01))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0] + self.global_rank).sigmoid().pow(2).mean()

    def configure_optimizers(self) -> Any:
        return self.optimizer(self)

    def train_dataloader(self) -> Any:
        data = torch.randn(128, 8, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=8)


class Tied(Net):
    """One weight under two names, a frozen parameter, one without wrapper prefix; a module of another version."""

    class Versioned(nn.Linear):
        _version = 7

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.twin = nn.Linear(WIDTH, 200)
        self.twin.weight = self.net[3].weight
        self.frozen = nn.Parameter(torch.randn(300, 70), requires_grad=False)
        self.versioned = Tied.Versioned(200, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net[:3](batch[0] + self.global_rank)
        out = self.net[4](self.net[3](hidden) + self.twin(hidden))
        return self.versioned(out).pow(2).mean() + self.frozen.sum() * 0


class Odd(Net):
    """Keeps more than tensors, and leaves something out."""

    strict_loading = False

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__(optimizer)
        self.left_out = nn.Parameter(torch.ones(3), requires_grad=False)

    def get_extra_state(self) -> Any:
        return {"rank": self.global_rank, "seen": [1, 2], "table": {"a": torch.full((2,), float(self.global_rank))}}

    def set_extra_state(self, state: Any) -> None:
        pass

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        del state["left_out"]
        state["half"] = self.net[0].weight.detach().bfloat16()
        state["rank"] = torch.tensor(self.global_rank)
        state["net.0.bias"] = state["net.0.bias"] + self.global_rank  # not what it is called
        return state

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {1: self.net[0].weight, "rank": self.global_rank}


class Gan(Net):
    """Two optimizers, by hand; of the second, none of its steps has been made."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, _ = self.optimizers()  # type: ignore[misc]
        first.zero_grad()
        self.manual_backward(self.net(batch[0]).sigmoid().pow(2).mean())
        first.step()
        for p in self.parameters():
            p.grad = None

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net[0].parameters(), lr=0.01, momentum=0.9),
            torch.optim.AdamW(self.net[3].parameters(), lr=torch.tensor(0.01)),
        ]


class Memo(torch.optim.SGD):
    """Keeps numbers, nothing, lists, and tables by number."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                state["nothing"] = None
                state["history"] = [*state.get("history", []), p.detach().clone()][-2:]
                state["table"] = {0: torch.full((2,), float(number)), 7: {"deep": 1.5}}
                state["pair"] = (1, 2)
        return loss


def groups(module: L.LightningModule) -> Any:
    """Two groups, in another order than that of the model, by name."""
    named = list(module.net.named_parameters())  # type: ignore[union-attr,operator]
    biases = [(n, p) for n, p in named if "bias" in n][::-1]
    weights = [(n, p) for n, p in named if "bias" not in n]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": weights}], lr=0.01, amsgrad=True)


def zero_redundancy(module: L.LightningModule) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(module.net.parameters(), torch.optim.AdamW, lr=0.01)  # type: ignore[union-attr,operator]


def lbfgs(module: L.LightningModule) -> Any:
    # By default it ends early where the loss hardly changes, which is another one on each rank.
    return torch.optim.LBFGS(module.net.parameters(), lr=0.01, max_iter=3, tolerance_change=0)  # type: ignore[union-attr,operator]


class Clips(Net):
    """Changes a parameter while it may still be copied: that save is made again, by all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.net[3].weight.clamp_(-0.05, 0.05)
        return super().training_step(batch, batch_idx)


CASES: dict[str, Callable[[], L.LightningModule]] = {
    "plain SGD, without state": lambda: Net(lambda m: torch.optim.SGD(m.net.parameters(), lr=0.01)),
    "Adafactor": lambda: Net(lambda m: torch.optim.Adafactor(m.net.parameters())),
    "groups": lambda: Net(groups),
    "memo": lambda: Net(lambda m: Memo(m.net.parameters(), lr=0.01, momentum=0.9)),
    "tied": lambda: Tied(lambda m: torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01)),
    "tied, frozen given": lambda: Tied(lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9)),
    "odd": Odd,
    "clips": Clips,
    "gan": Gan,
    "LBFGS": lambda: Net(lbfgs),
    "zero redundancy": lambda: Net(zero_redundancy),
}


# -- what cannot come back, and what the refusal says --------------------------------------------------------------


class Keeps(torch.optim.SGD):
    """Keeps something of its own."""

    def __init__(self, parameters: Any, keep: Callable[[Keeps], None]) -> None:
        super().__init__(parameters, lr=0.01)
        self.keep = keep

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.keep(self)
        return loss


class More(torch.optim.SGD):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "scale": 3}


class Empty(Net):
    def get_extra_state(self) -> Any:
        return {}

    def set_extra_state(self, state: Any) -> None:
        pass


class Apart(Net):
    """A parameter goes its own way on each rank."""

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            self.net[3].bias += self.global_rank


class Thaws(Net):
    """One that was frozen when DDP began, and that DDP does not keep alike; found when it is trained.

    Nothing is kept for it that would be new in the checkpoint.
    """

    def __init__(self) -> None:
        super().__init__(lambda module: torch.optim.SGD(module.parameters(), lr=0.1))
        self.net[3].requires_grad_(False)

    def on_train_batch_start(self, *args: Any) -> None:
        if self.global_step == 2:
            self.net[3].requires_grad_(True)


def keeping(where: Callable[[Keeps], Any], what: Any) -> Callable[[], Net]:
    def keep(optimizer: Keeps) -> None:
        optimizer.state[where(optimizer)] = what

    return lambda: Net(lambda module: Keeps(module.parameters(), keep))


def first(optimizer: Keeps) -> Tensor:
    parameter: Tensor = optimizer.param_groups[0]["params"][0]
    return parameter


REFUSED: dict[str, tuple[Callable[[], L.LightningModule], str]] = {
    "more": (lambda: Net(lambda m: More(m.parameters(), lr=0.01)), "optimizer 0: state_dict() has ['scale']"),
    "stranger": (
        lambda: Net(lambda m: torch.optim.SGD([*m.parameters(), nn.Parameter(torch.ones(5))], lr=0.01)),
        "optimizer 0: parameter 8, of shape (5,), is none of the LightningModule",
    ),
    "global": (keeping(lambda o: "all", {"a": 1}), "optimizer 0: keeps a state under 'all'"),
    "digits": (keeping(first, {"0": torch.ones(1)}), "optimizer_0.state.net.0.weight.0 would not come back"),
    "empty": (keeping(first, {"a": {}}), "optimizer_0.state.net.0.weight would not come back"),
    "extra": (Empty, "state_dict._extra_state would not come back"),
    "apart": (Apart, "not the same on all ranks, so they cannot share it out (rank 1: state_dict.net.3.bias)"),
    "thaws": (Thaws, "(rank 1: state_dict.net.3.weight, state_dict.net.3.bias"),
}
