"""`fault_tolerance`: everything of this package that fits every run, in one call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO

from lightning_ft.callback import FaultTolerantCheckpoint
from lightning_ft.errors import ConfigurationError
from lightning_ft.guards import AnyGuard, DivergenceGuard, HangGuard, PreemptionGuard
from lightning_ft.plugin import FaultTolerantCheckpointIO


class TrainerArguments(TypedDict):
    """Arguments of a `Trainer`."""

    callbacks: list[pl.Callback]
    plugins: list[Any]


def fault_tolerance(
    dirpath: str | os.PathLike[str] | None = None,
    *,
    every_n_train_steps: int | Literal["auto"] | None = "auto",
    keep_last: int = 3,
    guards: Sequence[AnyGuard] | None = None,
    storage_options: dict[str, Any] | None = None,
    callbacks: pl.Callback | Sequence[pl.Callback] | None = None,
    plugins: Any = None,
) -> TrainerArguments:
    """A trainer with these arguments saves, restarts and stops as it should, wherever it runs.

    ::

        trainer = L.Trainer(**ft.fault_tolerance("runs/1", callbacks=[EarlyStopping("val")]), max_epochs=10)
        trainer.fit(model, data, ckpt_path="last")

    Other callbacks and plugins go in here, and not beside it: ``L.Trainer(**ft.fault_tolerance("runs/1"),
    callbacks=[...])`` gives the trainer two lists of callbacks, a TypeError.

    ``every_n_train_steps="auto"`` saves first after a minute; for a short run give a number.

    It saves as often as pays, reads back the size of every file, saves and stops on a signal (`PreemptionGuard`), stops
    before a loss that is not finite is learned from (`DivergenceGuard`), and ends a run that hangs (`HangGuard`).
    Signals are noted from now on: the earlier in a script this is called, the better.

    Whoever wants another combination makes a `FaultTolerantCheckpoint` and a `FaultTolerantCheckpointIO`.

    Args:
        dirpath: See `FaultTolerantCheckpoint`.
        every_n_train_steps: See there.
        keep_last: See there.
        guards: Exactly these, as in `FaultTolerantCheckpoint`; () for none. Default: the three above.
        storage_options: See `FaultTolerantCheckpointIO`.
        callbacks: Other callbacks of the trainer, as it takes them: one, or several.
        plugins: Other plugins of the trainer, likewise. With one for checkpoints among them, ours is left out.

    Raises:
        ConfigurationError: An argument has a value it cannot have.
    """
    callbacks, plugins = _listed("callbacks", callbacks, pl.Callback), _listed("plugins", plugins, object)
    if guards is not None and (isinstance(guards, str) or not isinstance(guards, Sequence)):
        raise ConfigurationError(f"guards={guards!r}: must be a list or tuple of guards")
    if any(isinstance(callback, FaultTolerantCheckpoint) for callback in callbacks):
        raise ConfigurationError("callbacks: has a FaultTolerantCheckpoint, which fault_tolerance() makes itself")
    writes = [plugin for plugin in plugins if isinstance(plugin, CheckpointIO)]
    if writes and storage_options is not None:
        raise ConfigurationError(
            f"storage_options={storage_options!r}: give them to the {type(writes[0]).__name__} among the plugins"
        )
    if guards is None:
        guards = (PreemptionGuard(), DivergenceGuard(), HangGuard())
    checkpoint = FaultTolerantCheckpoint(
        dirpath, every_n_train_steps=every_n_train_steps, keep_last=keep_last, guards=guards
    )
    ours = FaultTolerantCheckpointIO(verify_after_write="size", storage_options=storage_options)
    return {"callbacks": [*callbacks, checkpoint], "plugins": [*plugins] if writes else [*plugins, ours]}


def _listed(name: str, given: Any, kind: type) -> list[Any]:
    """One thing or several, as a `Trainer` takes them."""
    if given is None:
        return []
    if isinstance(given, (list, tuple)):
        return list(given)
    if not isinstance(given, kind):
        raise ConfigurationError(f"{name}={given!r}: must be a {kind.__name__}, or a list or tuple of these")
    return [given]
