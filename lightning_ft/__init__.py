"""Kill a Lightning training anywhere, start the same command again, and every later number is the same.

The usual use is one callback::

    import lightning as L
    import lightning_ft as ft

    trainer = L.Trainer(callbacks=[ft.FaultTolerantCheckpoint("runs/1", every_n_train_steps=500)])
    trainer.fit(model, datamodule, ckpt_path="last")

or, with every guard, ``L.Trainer(**ft.fault_tolerance("runs/1"))``.

Importing the package loads neither torch nor Lightning: each public name loads its module on first use. So
``list_checkpoints``, ``last_good`` and ``verify`` work quickly on a login node, and also where the training
environment itself is what broke.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_ft.__about__ import __version__
from lightning_ft._sharded import registry

if TYPE_CHECKING:
    import lightning_ft.events as events
    import lightning_ft.testing as testing
    from lightning_ft.callback import FaultTolerantCheckpoint
    from lightning_ft.discovery import last_good, list_checkpoints, verify
    from lightning_ft.errors import (
        CheckpointError,
        ConfigurationError,
        CorruptCheckpointError,
        DirectoryInUseError,
        DivergenceError,
        FaultToleranceError,
        ManifestError,
        NoUsableCheckpointError,
        PeerLostError,
        RankFailure,
        RestoreError,
        SaveError,
        StorageError,
        TopologyError,
        UnsupportedFormatError,
    )
    from lightning_ft.guards.divergence import DivergenceGuard
    from lightning_ft.guards.hang import HangGuard
    from lightning_ft.guards.preemption import PreemptionGuard
    from lightning_ft.manifest import CheckpointInfo, Manifest
    from lightning_ft.plugin import FaultTolerantCheckpointIO
    from lightning_ft.preset import fault_tolerance
    from lightning_ft.strategies import FSDPStrategy, ModelParallelStrategy

# These names are promised: they change only after a deprecation that warns for at least two minor releases.
# Anything else that can be imported, from here or from a module of the package, is not, underscore or none.
__all__ = [
    "CheckpointError",
    "CheckpointInfo",
    "ConfigurationError",
    "CorruptCheckpointError",
    "DirectoryInUseError",
    "DivergenceError",
    "DivergenceGuard",
    "FSDPStrategy",
    "FaultToleranceError",
    "FaultTolerantCheckpoint",
    "FaultTolerantCheckpointIO",
    "HangGuard",
    "Manifest",
    "ManifestError",
    "ModelParallelStrategy",
    "NoUsableCheckpointError",
    "PeerLostError",
    "PreemptionGuard",
    "RankFailure",
    "RestoreError",
    "SaveError",
    "StorageError",
    "TopologyError",
    "UnsupportedFormatError",
    "__version__",
    "events",
    "fault_tolerance",
    "last_good",
    "list_checkpoints",
    "testing",
    "verify",
]

_MODULE_OF = {
    "CheckpointError": "errors",
    "CheckpointInfo": "manifest",
    "ConfigurationError": "errors",
    "CorruptCheckpointError": "errors",
    "DirectoryInUseError": "errors",
    "DivergenceError": "errors",
    "DivergenceGuard": "guards.divergence",
    "FSDPStrategy": "strategies",
    "FaultToleranceError": "errors",
    "FaultTolerantCheckpoint": "callback",
    "FaultTolerantCheckpointIO": "plugin",
    "HangGuard": "guards.hang",
    "Manifest": "manifest",
    "ManifestError": "errors",
    "ModelParallelStrategy": "strategies",
    "NoUsableCheckpointError": "errors",
    "PeerLostError": "errors",
    "PreemptionGuard": "guards.preemption",
    "RankFailure": "errors",
    "RestoreError": "errors",
    "SaveError": "errors",
    "StorageError": "errors",
    "TopologyError": "errors",
    "UnsupportedFormatError": "errors",
    "fault_tolerance": "preset",
    "last_good": "discovery",
    "list_checkpoints": "discovery",
    "verify": "discovery",
}
_SUBMODULES = frozenset({"events", "testing"})


def __getattr__(name: str) -> Any:
    """Load the module that defines a public name, once (PEP 562)."""
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    # Found without this function from now on.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names too that are not loaded yet."""
    return sorted({*globals(), *__all__})


# Two names in a dictionary of Lightning's, once that is imported; nothing is imported for it.
registry.register()
