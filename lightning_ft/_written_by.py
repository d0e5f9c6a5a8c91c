"""Which strategies leave the writing of checkpoints to the plugin, and in what form."""

from __future__ import annotations

from lightning.pytorch.strategies import Strategy


def saves_through_plugin(strategy: Strategy) -> bool:
    """Whether every checkpoint of `strategy` passes through its `checkpoint_io`.

    Lightning's own method does so. One that takes its place declares it, with an attribute of that name.
    """
    lightnings_own = type(strategy).save_checkpoint is Strategy.save_checkpoint
    return lightnings_own or getattr(strategy, "saves_through_plugin", False) is True


def saves_sharded(strategy: Strategy) -> bool:
    """Whether every rank copies and writes a part of each checkpoint (`FaultTolerantCheckpointIO.save_sharded`)."""
    return getattr(strategy, "saves_sharded", False) is True
