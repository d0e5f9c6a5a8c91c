"""What a fit with our checkpoints cannot have, refused before anything of it is set up."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.strategies import Strategy

from lightning_ft._fit import loops
from lightning_ft._fit.local_tier import LocalTier, require_different
from lightning_ft._sharded.written_by import saves_sharded, saves_through_plugin
from lightning_ft.errors import ConfigurationError
from lightning_ft.plugin import FaultTolerantCheckpointIO


def require_strategy(strategy: Strategy, plugin: FaultTolerantCheckpointIO | None) -> None:
    """It leaves the writing of checkpoints to the plugin, in a layout that both can write.

    Raises:
        ConfigurationError: It does not, or there is no such layout.
    """
    if not saves_through_plugin(strategy):
        raise ConfigurationError(
            f"strategy {type(strategy).__name__} writes checkpoints past the checkpoint plugin, so they "
            "would be neither atomic nor verified; use a single-device or DDP strategy, or FSDPStrategy or "
            "ModelParallelStrategy of lightning_ft"
        )
    saves_sharded(strategy, plugin)


def is_tried_out(trainer: pl.Trainer) -> bool:
    """Whether a `Tuner` tries out batch sizes or learning rates: that is no run to be saved.

    Raises:
        ConfigurationError: A finder would do so within every fit.
    """
    finders = [c for c in loops.callbacks(trainer) if isinstance(c, (BatchSizeFinder, LearningRateFinder))]
    if any(c._early_exit for c in finders):
        return True
    if finders:
        raise ConfigurationError(
            f"{type(finders[0]).__name__} trains at every start, also at a restart, before anything is restored; "
            "tune first (lightning.pytorch.tuner.Tuner), and fit without it"
        )
    return False


def require_local_tier(
    local: LocalTier, dirpath: str, strategy: Strategy, plugin: FaultTolerantCheckpointIO | None
) -> None:
    """Checkpoints can be saved to `local`, and copied from there to `dirpath`.

    Raises:
        ConfigurationError: They cannot, and why.
    """
    require_different(local.dirpath, dirpath)
    if saves_sharded(strategy, plugin):
        raise ConfigurationError(
            f"local_dirpath={local.dirpath!r}: {type(strategy).__name__} writes sharded "
            "checkpoints, of which a local disk would have the parts of some ranks only; save full ones"
        )
    if plugin is None:
        raise ConfigurationError(
            f"local_dirpath={local.dirpath!r}: only FaultTolerantCheckpointIO copies checkpoints "
            f"from there, and this trainer has {type(strategy.checkpoint_io).__name__}"
        )
