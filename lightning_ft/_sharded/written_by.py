"""Which strategies leave the writing of checkpoints to the plugin, and in what form."""

from __future__ import annotations

from lightning.pytorch.strategies import Strategy

from lightning_ft.errors import ConfigurationError
from lightning_ft.plugin import FaultTolerantCheckpointIO


def saves_through_plugin(strategy: Strategy) -> bool:
    """Whether every checkpoint of `strategy` passes through its `checkpoint_io`.

    Lightning's own method does so. One that takes its place declares it, with an attribute of that name.
    """
    return _is_lightnings_own(strategy) or getattr(strategy, "saves_through_plugin", False) is True


def _is_lightnings_own(strategy: Strategy) -> bool:
    return type(strategy).save_checkpoint is Strategy.save_checkpoint


def saves_sharded(strategy: Strategy, plugin: FaultTolerantCheckpointIO | None) -> bool:
    """Whether every rank copies and writes a part of each checkpoint of our callback."""
    return getattr(strategy, "saves_sharded", False) is True or saves_replicated(strategy, plugin)


def saves_replicated(strategy: Strategy, plugin: FaultTolerantCheckpointIO | None) -> bool:
    """Whether the parts are shares of what all ranks have alike, which the strategy itself would save as one file.

    Raises:
        ConfigurationError: That is asked for, and this strategy does not have it.
    """
    if plugin is None or plugin.layout == "file" or getattr(strategy, "saves_sharded", False) is True:
        return False
    name = type(strategy).__name__
    if not _is_lightnings_own(strategy):
        raise ConfigurationError(
            f'layout="sharded": {name} was told to save full checkpoints, and makes them in its own way; ask it for '
            "sharded ones, by its own arguments, or leave layout out"
        )
    if getattr(strategy, "_model_averager", None) is not None or getattr(strategy, "_model_averaging_period", None):
        raise ConfigurationError(
            f'layout="sharded": with model_averaging_period, the ranks of {name} have different weights most of the '
            "time, of which they cannot share out one state; leave layout out"
        )
    return True
