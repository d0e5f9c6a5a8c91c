"""A small model that shards badly, on every strategy, and what of it all ranks together hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import strategies as theirs
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

import lightning_ft as ft

WIDTH = 7  # divisible by no number of ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.scale = nn.Linear(WIDTH, 1), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(x) * self.scale
        return out


class Net(L.LightningModule):
    """Blocks that are sharded one by one, a frozen parameter, one with one element, and buffers.

    Args:
        optimizer: "adamw" (two parameter groups), "sgd" (with momentum), "flat" (the same, of what FSDP has flattened)
            or "two" (one for each half, by hand).
        wrap: Applied to the blocks before they are sharded: `torch.compile`, activation checkpointing.
    """

    def __init__(self, optimizer: str = "adamw", wrap: Callable[[nn.Module], nn.Module] | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(Block(), Block(), Head())
        self.frozen = nn.Parameter(torch.randn(5, WIDTH), requires_grad=optimizer == "flat")
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.kind, self.wrap = optimizer, wrap
        self.automatic_optimization = optimizer != "two"
        self.sharded = False

    def configure_model(self) -> None:
        if self.sharded:
            return
        self.sharded = True
        if self.wrap is not None:
            for i in range(2):
                self.net[i] = self.wrap(self.net[i])
        if isinstance(self.trainer.strategy, theirs.ModelParallelStrategy):
            from torch.distributed.fsdp import fully_shard

            mesh = self.device_mesh["data_parallel"]
            for block in self.net:
                fully_shard(block, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1
        (x,) = batch
        loss: Tensor = (self.net(x) - x.sum(1, keepdim=True)).square().mean()
        if self.automatic_optimization:
            return loss
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.net(batch[0]).sum())

    def train_dataloader(self) -> Any:
        data = torch.randn(240, WIDTH, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=4)

    val_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        if self.kind == "sgd":
            return torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        if self.kind == "flat":  # FSDP with use_orig_params=False
            return torch.optim.SGD(self.trainer.strategy.model.parameters(), lr=0.01, momentum=0.9)
        if self.kind == "two":
            return [
                torch.optim.AdamW(self.net[0].parameters(), lr=1e-3),
                torch.optim.SGD([*self.net[1].parameters(), *self.net[2].parameters()], lr=0.01, momentum=0.9),
            ]
        biases = [p for n, p in self.net.named_parameters() if n.endswith("bias")]
        # In another order than that of the model.
        weights = [p for n, p in self.net.named_parameters() if not n.endswith("bias")][::-1]
        groups = [{"params": biases, "weight_decay": 0.0}, {"params": weights}]
        return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)


class PlainFSDP(theirs.FSDPStrategy):
    """Lightning's own, with the least that makes it run on the CPU."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(
            model, sharding_strategy=self.sharding_strategy, device_id=torch.device("cpu"), **self.kwargs
        )


def strategy(kind: str, world_size: int) -> Any:
    """``fsdp`` or ``mp``, with ``.full`` or ``.sharded``, or ``ddp``, or ``ddp.sharded``.

    With ``plain.`` in front: Lightning's own.
    """
    plain = kind.startswith("plain.")
    name, _, form = kind.removeprefix("plain.").partition(".")
    if name == "fsdp":
        arguments: dict[str, Any] = {"auto_wrap_policy": {Block}, "state_dict_type": form.partition("-")[0]}
        if form.endswith("-compiled"):  # a block within would be sharded behind the compiler's back
            arguments["auto_wrap_policy"] = {torch._dynamo.OptimizedModule}
        if form.endswith("-flat"):
            arguments["use_orig_params"] = False
        return PlainFSDP(**arguments) if plain else ft.FSDPStrategy(**arguments)
    if name == "mp":
        cls = theirs.ModelParallelStrategy if plain else ft.ModelParallelStrategy
        return cls(data_parallel_size=world_size, tensor_parallel_size=1, save_distributed_checkpoint=form == "sharded")
    return theirs.DDPStrategy(process_group_backend="gloo")


class Look(L.Callback):
    """What is there when training starts, or a hook of the test's own."""

    def __init__(self, then: Callable[[L.Trainer], Any] | None = None) -> None:
        self.then = then or gathered
        self.found: Any = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.found = self.then(trainer)


def trainer(kind: str, world_size: int, root: Path, steps: int, *callbacks: L.Callback, **arguments: Any) -> L.Trainer:
    if kind == "ddp.sharded":
        arguments = {"plugins": [ft.FaultTolerantCheckpointIO(layout="sharded")], **arguments}
    return L.Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy(kind, world_size), max_steps=steps,
        callbacks=list(callbacks), default_root_dir=root, logger=False, enable_progress_bar=False,
        enable_model_summary=False, limit_val_batches=0, enable_checkpointing=bool(callbacks),
        **arguments,
    )  # fmt: skip


def gathered(trainer: L.Trainer) -> dict[str, Tensor]:
    """All weights and all optimizer state, whole, by name; put together by torch and not by the package."""
    options = StateDictOptions(full_state_dict=True)
    wrapped = isinstance(trainer.strategy, theirs.FSDPStrategy)
    model: Any = trainer.strategy.model if wrapped else trainer.lightning_module
    found = {name: value.detach().clone() for name, value in get_model_state_dict(model, options=options).items()}
    for number, optimizer in enumerate(trainer.strategy.optimizers):
        state: Any = get_optimizer_state_dict(model, optimizer, options=options)
        for name, values in state["state"].items():
            found.update({f"{number}.{name}.{key}": value.detach().clone() for key, value in values.items()})
    # Which torch takes out in some of these cases, and in some not.
    prefixes = re.compile(r"(_orig_mod|_checkpoint_wrapped_module)\.")
    return {prefixes.sub("", name): value for name, value in found.items()}


def differences(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> list[str]:
    """The names of what is not bit for bit the same, dtypes included."""
    names = sorted({*expected, *actual})
    return [
        name
        for name in names
        if name not in expected
        or name not in actual
        or expected[name].dtype != actual[name].dtype
        or not torch.equal(expected[name], actual[name])
    ]
