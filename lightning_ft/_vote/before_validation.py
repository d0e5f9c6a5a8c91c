"""The state before a validation, for a save of it that is made from within.

A validation changes little of what a checkpoint holds: random state, where its loaders are, metrics, what callbacks
count. That is copied when it begins. Weights and the state of optimizers, which are large, are not: they are looked at
again when the save is made, and if they have changed, or somebody adds to checkpoints what cannot be known, there is no
such save, and the validation runs to its end.

Private to Lightning (2.5.5 to 2.6): `call._call_callbacks_state_dict`, what a checkpoint says of callbacks, under the
keys that are looked for when it is loaded; of torch, `Tensor._version`, which it uses itself to find tensors that have
changed, and documents nowhere.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer import call
from torch import Tensor

from lightning_ft._copying.module_tree import ModuleTree
from lightning_ft._data.loaders import TrackedLoaders
from lightning_ft._fit import lightning_callbacks as _callbacks
from lightning_ft._fit import loops
from lightning_ft._state import metrics, random_state

_SAMPLED = 64
_MOST_BYTES = 16 << 20  # of tensors in the state of callbacks: what keeps a copy of the weights is not copied again


class Before:
    """What of a step boundary is lost by the validation that follows.

    Args:
        trainer: The trainer, about to run a validation.
        tree: Of its module.
        loaders: Its loaders.
    """

    def __init__(self, trainer: pl.Trainer, tree: ModuleTree, loaders: TrackedLoaders) -> None:
        self._trainer = trainer
        self.own = {
            "rng": random_state.capture(),
            # After the last batch of an epoch, what is asked for next is a new pass.
            "loaders": loaders.state(epoch_over=loops.progress(trainer).last_batch, noted=False),
            "metrics": copy.deepcopy(metrics.capture(trainer, tree)),
        }
        """This rank's part of the checkpoint."""
        self.reloads = loops.reloads(trainer)
        self._loops = copy.deepcopy(trainer.fit_loop.state_dict())
        callbacks = call._call_callbacks_state_dict(trainer)
        self._copied = _bytes_of(callbacks) <= _MOST_BYTES
        self._callbacks = copy.deepcopy(callbacks) if self._copied else {}
        self._tensors = _tensors(trainer)
        self._versions = [tensor._version for tensor in self._tensors]
        self._sample = _sample(self._tensors)

    @staticmethod
    def possible(trainer: pl.Trainer) -> bool:
        """Whether a validation that is about to begin could be left, and run in the restart instead."""
        return not (
            trainer.sanity_checking
            or loops.accumulating(trainer)  # gradients are held that no checkpoint has
            or loops.stops_here(trainer)  # a restart would have nothing to train, and not get here
            or trainer.num_training_batches == float("inf")  # the batch after it has been fetched
            or loops.takes_iterator(trainer)
            or not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy))  # weights are gathered for it
            or _callbacks.add_to_checkpoints(trainer)
        )

    @property
    def holds(self) -> bool:
        """Whether nothing that was not copied has changed. Blocks on: the devices, for some numbers."""
        tensors = _tensors(self._trainer)
        return self._copied and (
            list(map(id, tensors)) == list(map(id, self._tensors))
            and [tensor._version for tensor in tensors] == self._versions
            # What is written through `.data`, as averaged weights are that stand in for a validation, has no version.
            and all(map(torch.equal, self._sample, _sample(tensors)))
        )

    def put_into(self, checkpoint: dict[str, Any]) -> None:
        """Lightning's own `checkpoint`, made within the validation, is that of before."""
        checkpoint["loops"]["fit_loop"] = copy.deepcopy(self._loops)
        checkpoint["callbacks"] = copy.deepcopy(self._callbacks)


def _tensors(trainer: pl.Trainer) -> list[Tensor]:
    module = trainer.lightning_module
    found = [*module.parameters(), *module.buffers()]
    states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
    return found + [value for state in states for value in state.values() if isinstance(value, Tensor)]


def _sample(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Some numbers out of some of them, spread over all."""
    usable = [t.detach() for t in tensors if t.layout is torch.strided and t.is_contiguous() and t.numel()]
    every = max(1, len(usable) // _SAMPLED)
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in usable[::every]:
        by_device.setdefault(tensor.device, []).append(tensor.flatten()[tensor.numel() // 2].to(torch.float64))
    return [torch.stack(numbers).cpu() for numbers in by_device.values()]


def _bytes_of(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, dict):
        return sum(map(_bytes_of, state.values()))
    return sum(map(_bytes_of, state)) if isinstance(state, (list, tuple)) else 0
