"""What a save is asked for with, and what is known of the checkpoint before there is one."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from lightning_ft.__about__ import __version__
from lightning_ft._copying.copy_plan import Late
from lightning_ft._names import KEY
from lightning_ft.errors import ConfigurationError
from lightning_ft.manifest import Manifest
from lightning_ft.state import versions


@dataclass(frozen=True)
class SaveOptions:
    """What our callback tells the plugin about a save, through `Trainer.save_checkpoint(storage_options=...)`."""

    on_commit: Callable[[Manifest], None] | None = None
    late: Late | None = None
    """What may be copied while training goes on; None: nothing, the next thing to happen may be anything."""
    replaceable: bool = False
    """Whether a newer save may take the place of this one while it waits."""
    asked_at: float = field(default_factory=time.monotonic)
    """When training stopped for it, by `time.monotonic`."""


def options_of(storage_options: Any) -> SaveOptions:
    """What was given as `storage_options`, if it is ours.

    Raises:
        ConfigurationError: It is given by anybody but our callback.
    """
    if storage_options is not None and not isinstance(storage_options, SaveOptions):
        raise ConfigurationError(
            f"storage_options={storage_options!r}: give them to FaultTolerantCheckpointIO(storage_options=...), "
            "so that loading and removing use them too"
        )
    return storage_options or SaveOptions()


def manifest_of(checkpoint: dict[str, Any]) -> Manifest:
    """The manifest of a save, complete but for size and digest."""
    ours = checkpoint.get(KEY, {})
    step = int(checkpoint.get("global_step", 0))
    return Manifest(
        generation=ours.get("generation", uuid.uuid4().hex),
        run_id=ours.get("run_id", ""),
        start=ours.get("start", 0),
        step=ours.get("step", step),
        batch=ours.get("batch", step),
        epoch=int(checkpoint.get("epoch", 0)),
        reason=ours.get("reason", "user"),
        boundary=ours.get("boundary", "none"),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        parent=ours.get("parent"),
        versions={
            **versions(),
            "lightning": str(checkpoint.get("pytorch-lightning_version", "")),
            "lightning_ft": __version__,
        },
        topology={"world_size": ours.get("world_size", 1)},
        metrics={},
        size_bytes=0,
        digest="",
    )
