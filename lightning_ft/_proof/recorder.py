"""A callback that writes down, bit for bit, what a run does: the evidence that two runs are the same."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_ft import events
from lightning_ft._fit import loops
from lightning_ft._proof.kill_point import KillPoint, parse
from lightning_ft._state import random_state
from lightning_ft._state.digest import digest, digest_of_data

END_OF_FIT = b'{"kind": "end", "key": [1],'
"""How the last line of a fit that has ended begins."""


class Recorder(pl.Callback):
    """Appends one line of JSON per trained batch, validated batch, validation, epoch and end of a fit to a file.

    Of weights and optimizer state that are spread over the ranks each rank writes down what it holds.

    Lines reach the operating system at once, so they survive a SIGKILL of the process. A value that differs in one
    bit has another digest.

    Args:
        path: The file; one per rank.
        summaries: Instead of digests of results and states write numbers, a few for each tensor of them, so that two
            runs can be compared that are close and not equal. Batches and random state are digests all the same.
    """

    def __init__(self, path: str, *, summaries: bool = False) -> None:
        self._path = path
        self._of_state = _summary if summaries else _digest
        self._exact = _summary if summaries else _exact

    def _append(self, kind: str, key: list[int], values: dict[str, Any]) -> None:
        line = json.dumps({"kind": kind, "key": key, "values": values, **self._beside(kind)}) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def _beside(self, kind: str) -> dict[str, Any]:
        """What else belongs into a line of that kind, and is not compared."""
        return {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """One line: what was trained on, and everything the next step depends on."""
        schedulers = [_plain_state(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs]
        callbacks = {c.state_key: c.state_dict() for c in loops.callbacks(trainer) if c.state_dict()}
        values = {
            "epoch": trainer.current_epoch,
            "batch index": batch_idx,
            "global step": trainer.global_step,
            "batch": _digest(batch),
            "output": self._exact(outputs),
            "learning rates": [float(g["lr"]) for o in trainer.optimizers for g in o.param_groups],
            **self._trained(trainer, pl_module),
            "requires_grad": digest({n: p.requires_grad for n, p in pl_module.named_parameters()}),
            "scheduler state": self._of_state(schedulers),
            "random state": digest(random_state.capture()),
            "callbacks": {name: self._of_state(_without_paths(state)) for name, state in callbacks.items()},
            # What was logged of this step, which no later one shows; what the end of the epoch shows is not asked for.
            "metrics": self._of_metrics(trainer.fit_loop.epoch_loop._results.metrics(on_step=True)["callback"]),
        }
        self._append("step", [loops.progress(trainer).batch], values)

    def _trained(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        """What the optimizer steps have come to."""
        return {
            "weights": self._of_state(_weights(trainer, pl_module)),
            "optimizer state": self._of_state([_sorted(o.state_dict()) for o in trainer.optimizers]),
        }

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """One line: which batch was validated, when, and what came out."""
        if not trainer.sanity_checking:
            key = [loops.progress(trainer).batch, dataloader_idx, batch_idx]
            self._append("validation", key, {"batch": _digest(batch), "output": self._exact(outputs)})

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """One line: what its metrics are, which the next validation of the epoch writes over.

        Private to Lightning (2.5.5 to 2.6): under which names its results are among the metrics of the callbacks.
        """
        if not trainer.sanity_checking:
            results = trainer.fit_loop.epoch_loop.val_loop._results
            logged = [result for result in results.values() if not result.has_reset]
            names = {name for result in logged for name in results._forked_name(result, on_step=False)}
            metrics = {name: value for name, value in trainer.callback_metrics.items() if name in names}
            self._append("validated", [loops.progress(trainer).batch], {"metrics": self._of_metrics(metrics)})

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """One line: what the epoch's metrics are."""
        self._append("epoch", [trainer.current_epoch], {"metrics": self._of_metrics(trainer.callback_metrics)})

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """One line: how it ended."""
        values = {
            "weights": self._of_state(_weights(trainer, pl_module)),
            "global step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "metrics": self._of_metrics(trainer.callback_metrics),
        }
        self._append("end", [0], values)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """One line: the weights that a script finds after its fit, of a run that was over already too.

        At the end of training other callbacks have yet to put theirs there, such as averages.
        """
        self._append("end", [1], {"weights": self._of_state(_weights(trainer, pl_module))})

    def _of_metrics(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self._exact(value) for name, value in sorted(metrics.items())}


class KillSwitch(pl.Callback):
    """Kills this process with SIGKILL at one point of the run, as a crash would: nothing is flushed or closed.

    At a batch, without a rank, it waits for the others: no rank is killed before all have ended that batch.

    Args:
        point: See `KillPoint`.
        rank: Of this process.
        before: Called right before, in the thread that reached the point.
    """

    def __init__(self, point: KillPoint, rank: int = 0, before: Callable[[], None] = lambda: None) -> None:
        self._place = parse(point)
        self._before = before
        self._left = self._place.count
        self._forget: Callable[[], None] | None = None
        self._here = self._place.rank in (None, rank)
        if self._here and self._place.event is not None:
            self._forget = events.observe(self._on_event)

    def _on_event(self, event: events.Event) -> None:
        if type(event) is self._place.event:
            self._left -= 1
            if self._left == 0:
                self._kill()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The end of the batch that was named."""
        if self._here and self._place.event is None and loops.progress(trainer).batch == self._place.count:
            if self._place.rank is None:
                trainer.strategy.barrier("kill point")  # else a slower rank has written down one batch less, or not
            self._kill()

    def _kill(self) -> None:
        self._before()
        kill()


def kill() -> None:
    """This process is gone, as in a crash."""
    os.kill(os.getpid(), signal.SIGKILL)


def _weights(trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
    """The module's state; with FSDP the shards that this rank holds, since asking for the state would gather them."""
    module = trainer.strategy.model
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if module is None or fsdp is None or not isinstance(module, fsdp.FullyShardedDataParallel):
        return dict(pl_module.state_dict())
    state: dict[str, Any] = {}
    managed: set[int] = set()
    for number, part in enumerate(fsdp.FullyShardedDataParallel.fsdp_modules(module)):
        if part._handle is not None:
            flat = part._handle.flat_param
            # After a validation the outermost one still holds all of its parameters, and its shard beside them.
            state[f"shard {number}"] = getattr(flat, "_local_shard", flat)
            managed |= {id(p) for p in (flat, *(flat._params or ()))}
    state.update({name: p for name, p in module.named_parameters() if id(p) not in managed})
    return {**state, **dict(module.named_buffers())}


def _digest(value: Any) -> str | None:
    """A digest of all of `value`; where that cannot be pickled, as with a function in it, of the data in it."""
    return digest(value) or digest_of_data(value)


def _exact(value: Any) -> Any:
    """Numbers as their exact hexadecimal text where they are scalars, digests elsewhere."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value).hex() if value.is_floating_point() else int(value)
    if isinstance(value, dict):
        return {str(k): _exact(v) for k, v in value.items()}
    return _digest(value) if value is not None else None


def _summary(value: Any) -> Any:
    """`value` with a few numbers in place of each tensor, in double precision.

    These are the mean, the mean magnitude, the least and the greatest, the first and the last element; of a tensor with
    one element, that.
    """
    if isinstance(value, Tensor):
        value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        flat = value.detach().reshape(-1).double().cpu()
        if flat.numel() < 2:
            return [float(x).hex() for x in flat]
        numbers = (flat.mean(), flat.abs().mean(), flat.min(), flat.max(), flat[0], flat[-1])
        return [float(x).hex() for x in numbers]
    if isinstance(value, dict):
        return {str(key): _summary(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_summary(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else _digest(value)


def _sorted(state: Any) -> Any:
    """An optimizer's state without the order in which it came to have its entries, which steps and loads make anew."""
    if isinstance(state, dict):
        return {key: _sorted(state[key]) for key in sorted(state, key=str)}
    return [_sorted(item) for item in state] if isinstance(state, list) else state


def _plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without the functions some keep in it."""
    return {k: v for k, v in state.items() if not callable(v)}


def _without_paths(state: Any) -> Any:
    """A callback's state without file names, which differ between directories."""
    if isinstance(state, dict):
        return {k: _without_paths(v) for k, v in state.items() if "path" not in str(k) and k not in _FILES}
    return state


_FILES = ("dirpath", "best_k_models", "time_elapsed")
