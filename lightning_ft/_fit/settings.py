"""What the user asked for: the arguments of `FaultTolerantCheckpoint`, validated."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from lightning_ft._fit.local_tier import LocalTier
from lightning_ft.guards import AnyGuard
from lightning_ft.retention import Retention
from lightning_ft.triggers import Trigger


@dataclass(frozen=True)
class Settings:
    """The arguments by their meaning; see the callback for what each of them is."""

    trigger: Trigger
    retention: Retention
    local: LocalTier | None
    save_on_train_end: bool
    guards: tuple[AnyGuard, ...]
    max_restarts_without_progress: int | None
    warn_if_not_durable_after: timedelta | None
    seed_workers: bool
    strict: bool
