"""Lightning's sharded strategies, with every checkpoint going through the plugin: atomic, in the background, verified.

Both take the arguments of the strategy they derive from, and both work on the CPU. What differs is only where a
checkpoint goes and how it is read (`_ShardedCheckpoints`)::

                     state of this rank                        on disk
    sharded          its shards, by name                       a directory in Lightning's layout, with a manifest
    full             rank 0: everything; the others: nothing   one file, as with any other strategy

Whatever is on disk loads into either strategy, on any number of ranks: see `_sharded.loading`.

Of Lightning's own strategies (2.5.5 to 2.6) these use what is private: `_setup_model`, `_state_dict_type`,
`_save_distributed_checkpoint` and `_checkpoint_io`, for none of which there is a public way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch import strategies as theirs
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ft._ranks.dist import everywhere
from lightning_ft._sharded.own_state import differing, own_state
from lightning_ft._sharded.places import Places, note_wrapper
from lightning_ft._sharded.positions import by_name, by_position
from lightning_ft._sharded.wrappers import plain_name, plain_names, plain_optimizer_state
from lightning_ft.errors import ConfigurationError
from lightning_ft.plugin import FaultTolerantCheckpointIO

__all__ = ["FSDPStrategy", "ModelParallelStrategy"]

_log = logging.getLogger(__name__)


class _ShardedCheckpoints(theirs.ParallelStrategy):
    """Checkpoints through the plugin. Ranks: all call save and load, at the same points."""

    _names_known_of: Module | None = None
    saves_through_plugin = True
    """What `FaultTolerantCheckpoint` asks of a strategy that has a `save_checkpoint` of its own."""

    @property
    @abstractmethod
    def saves_sharded(self) -> bool:
        """Whether every rank writes its part of a checkpoint."""

    @property
    @abstractmethod
    def weights_key(self) -> str:
        """Under which name the weights stand in a directory that plain Lightning's strategy of this kind writes."""

    def _plugin(self) -> FaultTolerantCheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = FaultTolerantCheckpointIO()
        plugin = self._checkpoint_io
        if not isinstance(plugin, FaultTolerantCheckpointIO):
            raise ConfigurationError(
                f"{type(self).__name__} saves and loads through FaultTolerantCheckpointIO, and this trainer has "
                f"{type(plugin).__name__}: take it out of Trainer(plugins=...)"
            )
        return plugin

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """`checkpoint` is on its way to `filepath`, of which rank 0's is taken. Ranks: all."""
        path = self.broadcast(os.fspath(filepath))
        plugin = self._plugin()
        self._look_once(checkpoint)
        if self.saves_sharded:
            state = {self.weights_key: checkpoint.pop("state_dict")}
            for number, optimizer_state in enumerate(checkpoint.pop("optimizer_states", [])):
                state[f"optimizer_{number}"] = optimizer_state
            plugin.save_sharded(state, checkpoint, path, storage_options)
        elif self.is_global_zero:
            plugin.save_checkpoint(checkpoint, path, storage_options)

    def _look_once(self, checkpoint: dict[str, Any]) -> None:
        """At the first save of a model: it can be loaded, and what would not be the same then is said."""
        module = self.lightning_module
        assert module is not None
        if module is self._names_known_of:
            return
        self._require_known_names(module, checkpoint["state_dict"])
        self._names_known_of = module
        own: list[Any] = [None] * self.world_size
        dist.all_gather_object(own, own_state(module, checkpoint.get("callbacks", {})))
        if (different := differing(own)) and self.is_global_zero:
            more = f" and {len(different) - 5} more" if len(different) > 5 else ""
            _log.warning(
                "ranks differ in %s%s: checkpoints hold what rank 0 has, which a restart gives to all, so it is not "
                "exact. Let the ranks have the same: SyncBatchNorm does, for running statistics; of shards, a callback "
                "can keep none", ", ".join(different[:5]), more,
            )  # fmt: skip

    def _require_known_names(self, module: pl.LightningModule, weights: dict[str, Any]) -> None:
        """A `state_dict` of the user's own may name things as it likes."""
        places = Places(module)
        unknown = places.unplaced(weights)
        missing = [] if not module.strict_loading else sorted(places.by_name.keys() - map(places.canonical, weights))
        unknown, missing = self.broadcast((unknown, missing))  # only rank 0 may have all weights
        if unknown or missing:
            error = ConfigurationError(
                f"state_dict() of {type(module).__name__}, or of a module in it, gives {unknown[:5]}, which are no "
                f"parameters or buffers, and leaves out {missing[:5]}: {type(self).__name__} could not load that. Keep "
                "what is no parameter in on_save_checkpoint; to leave something out, set strict_loading = False"
            )
            raise everywhere(error)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Weights and, for a fit, optimizers are what rank 0's `checkpoint_path` holds; returns the rest. Ranks: all.

        Weights are copied to where they belong and not given to `load_state_dict`, whose hooks do not run.

        Raises:
            CheckpointError: It is damaged; nothing has changed.
            RestoreError: It does not fit; nothing has changed.
        """
        path = self.broadcast(os.fspath(checkpoint_path))
        module = self.lightning_module
        assert module is not None
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        return self._plugin().load_sharded(
            path,
            module,
            self.optimizers if fitting else None,
            strict=module.strict_loading,
            weights_only=weights_only,
        )

    @override
    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if self._checkpoint_io is not None:  # Lightning's sharded strategies forget about it
                self._checkpoint_io.teardown()


class FSDPStrategy(_ShardedCheckpoints, theirs.FSDPStrategy):
    """Lightning's `FSDPStrategy`, same arguments, with checkpoints through `FaultTolerantCheckpointIO`.

    One file, by default; a directory, written by all ranks, with ``state_dict_type="sharded"``.

    ``accelerator="cpu"`` works. Name in the registry: ``"fsdp_ft"``.
    """

    strategy_name = "fsdp_ft"

    @property
    @override
    def saves_sharded(self) -> bool:
        return self._state_dict_type == "sharded"

    @property
    @override
    def weights_key(self) -> str:
        return "model"

    @override
    def setup_environment(self) -> None:
        shape = self.kwargs.get("device_mesh")
        if not isinstance(shape, tuple):
            super().setup_environment()
            return
        # Lightning takes the mesh for one of CUDA devices.
        del self.kwargs["device_mesh"]
        try:
            super().setup_environment()
            from torch.distributed.device_mesh import init_device_mesh

            self.kwargs["device_mesh"] = init_device_mesh(self.root_device.type, shape)
        except BaseException:
            self.kwargs["device_mesh"] = shape
            raise

    def _fsdp_arguments(self) -> dict[str, Any]:
        return {
            "cpu_offload": self.cpu_offload,
            "mixed_precision": self.mixed_precision_config,
            "sharding_strategy": self.sharding_strategy,
            # Without one, torch asks for an accelerator. Lightning gives the index, and the CPU has none.
            "device_id": torch.device("cpu"),
            **self.kwargs,
        }

    @override
    def _setup_model(self, model: Module) -> Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        _silence_torch_about_itself()
        module, wrapped = model, any(isinstance(m, FullyShardedDataParallel) for m in model.modules())
        if self.root_device.type != "cpu" or wrapped:
            model = super()._setup_model(model)
            note_wrapper(module, model)
            return model
        model = FullyShardedDataParallel(model, **self._fsdp_arguments())
        # It is wrapped now, of which Lightning would warn where a policy is given.
        given, self.kwargs = self.kwargs, {k: v for k, v in self.kwargs.items() if k != "auto_wrap_policy"}
        try:
            model = super()._setup_model(model)
        finally:
            self.kwargs = given
        note_wrapper(module, model)
        return model

    @contextlib.contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import enable_wrap

        if self.root_device.type != "cpu":
            with super().model_sharded_context():
                yield
            return
        with enable_wrap(wrapper_cls=FullyShardedDataParallel, **self._fsdp_arguments()):
            yield

    @contextlib.contextmanager
    def _state_dict_type_is_set(self) -> Iterator[None]:
        from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
        from torch.distributed.fsdp import api

        assert self.model is not None
        # Of parameters that are on the CPU already torch's copy to there would be a view, whose memory it frees:
        # rank 0 dies of SIGSEGV. There it must gather on all ranks.
        offload = self.root_device.type != "cpu"
        weights: Any
        optimizer: Any
        if self.saves_sharded:
            kind = api.StateDictType.SHARDED_STATE_DICT
            weights = api.ShardedStateDictConfig(offload_to_cpu=offload)
            optimizer = api.ShardedOptimStateDictConfig(offload_to_cpu=offload)
        else:
            kind = api.StateDictType.FULL_STATE_DICT
            weights = api.FullStateDictConfig(offload_to_cpu=offload, rank0_only=offload)
            optimizer = api.FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=True)
        with Fsdp.state_dict_type(self.model, kind, weights, optimizer):
            yield

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights by plain name: of this rank if sharded, else all of them, on rank 0. Ranks: all."""
        assert self.model is not None
        with self._state_dict_type_is_set():
            state = self.model.state_dict()
        return plain_names(state) if self.saves_sharded or self.is_global_zero else {}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As Lightning's: by name if sharded, else on rank 0, by position among the model's parameters. Ranks: all."""
        from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        assert self.model is not None
        assert self.lightning_module is not None
        with self._state_dict_type_is_set():
            state: dict[str, Any] = Fsdp.optim_state_dict(self.model, optimizer)
        if self.saves_sharded:
            return plain_optimizer_state(state)
        # torch's own function for this sorts the positions in each group, and then another order of the optimizer than
        # that of the model is lost.
        return by_position(state, Places(self.lightning_module).parameter_names()) if self.is_global_zero else {}


def _silence_torch_about_itself() -> None:
    """What FSDP warns of at every save, and only torch could change, is not shown in this process any more.

    Not by ``catch_warnings`` around a save: that makes Python forget what it has shown, and show it all again, the
    user's own warnings included.
    """
    for category, message, module in (
        (FutureWarning, r"FSDP\.state_dict_type\(\)", ""),
        (FutureWarning, "Please use DTensor instead and we are deprecating ShardedTensor", ""),
        (UserWarning, "`_get_pg_default_device` will be deprecated", r"torch\.distributed\.fsdp\."),
        (UserWarning, "Multiple backends are registered with this ProcessGroup", r"torch\.distributed\.fsdp\."),
    ):
        warnings.filterwarnings("ignore", message, category, module)


class ModelParallelStrategy(_ShardedCheckpoints, theirs.ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy`, same arguments, with checkpoints through `FaultTolerantCheckpointIO`.

    A directory, written by all ranks, by default; one file with ``save_distributed_checkpoint=False``.

    ``accelerator="cpu"`` works; give ``process_group_backend="gloo"`` where torch would choose another one. Name in
    the registry: ``"model_parallel_ft"``.
    """

    strategy_name = "model_parallel_ft"

    @property
    @override
    def saves_sharded(self) -> bool:
        return self._save_distributed_checkpoint

    @property
    @override
    def weights_key(self) -> str:
        return "state_dict"

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights by plain name: the tensors of this rank if sharded, else all of them, on rank 0. Ranks: all."""
        assert self.model is not None
        state = plain_names(self.model.state_dict())
        return state if self.saves_sharded else self._gathered(state)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """As Lightning's: by name if sharded, else on rank 0, by position among the model's parameters. Ranks: all.

        What the optimizer holds, and no more: where it has not stepped yet, Lightning would take a step with gradients
        of zero, so that the first real one is counted as the second.
        """
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        assert self.model is not None
        known = [(plain_name(name), id(p)) for name, p in self.model.named_parameters()]
        keys: Mapping[int, Any]
        if self.saves_sharded:
            keys = {parameter: name for name, parameter in known}
        else:
            keys = {parameter: position for position, (_, parameter) in enumerate(known)}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        unknown = sum(id(p) not in keys for p in parameters)
        if unknown:
            raise ConfigurationError(
                f"{type(optimizer).__name__}: {unknown} of its parameters are not the model's any more: make it in "
                "configure_optimizers, of the model as configure_model has parallelised it"
            )
        state = by_name(optimizer.state_dict(), [keys[id(p)] for p in parameters])
        return state if self.saves_sharded else self._gathered(state)

    def _gathered(self, state: dict[Any, Any]) -> dict[Any, Any]:
        """`state` with whole tensors, on the CPU, on rank 0; nothing on the others, which help. One at a time."""
        from torch.distributed.tensor import DTensor

        def whole(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: whole(item) for key, item in value.items()}
            if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
                return type(value)(whole(item) for item in value)
            if not isinstance(value, torch.Tensor):
                return value
            value = value.detach()
            if isinstance(value, DTensor):
                value = value.full_tensor()
            return value.cpu() if self.is_global_zero else None

        gathered: dict[Any, Any] = whole(state)
        return gathered if self.is_global_zero else {}
