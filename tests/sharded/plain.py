"""Lightning's own sharded strategies on the CPU, where they refuse to run by themselves.

A subclass passes the Trainer's check of the type; torch wants a device, which Lightning does not name for the CPU; and
a full state dict with offload to the CPU frees memory under parameters that are there already.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch.strategies.fsdp as lightning_fsdp
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.api import FullOptimStateDictConfig


class CPUFSDPStrategy(FSDPStrategy):
    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


def _full_context(module: nn.Module, world_size: int, rank0_only: bool = True) -> Any:
    return FullyShardedDataParallel.state_dict_type(
        module,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(offload_to_cpu=False, rank0_only=False),
        FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
    )


def strategy(kind: str, ranks: int, block: type[nn.Module]) -> Strategy:
    """Lightning's own strategy of that kind (see `job.KINDS`)."""
    if kind.startswith("fsdp-"):
        lightning_fsdp._get_full_state_dict_context = _full_context
        return CPUFSDPStrategy(**arguments(kind, ranks, block))
    return ModelParallelStrategy(**arguments(kind, ranks, block))


def arguments(kind: str, ranks: int, block: type[nn.Module]) -> dict[str, Any]:
    """What a strategy of that kind is made with, Lightning's or ours."""
    name, _, state = kind.partition("-")
    if name == "fsdp":
        return {"auto_wrap_policy": {block}, "state_dict_type": state, "process_group_backend": "gloo"}
    by_tensor = 2 if name == "tp" else 1
    return {
        "data_parallel_size": ranks // by_tensor,
        "tensor_parallel_size": by_tensor,
        "save_distributed_checkpoint": state == "sharded",
        "process_group_backend": "gloo",
    }
