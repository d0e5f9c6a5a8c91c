"""The checkpoint to go back to: the newest one of the line at hand whose state is finite."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_ft import _names, discovery
from lightning_ft._fit.lineage import Line
from lightning_ft._fit.watch import Fit
from lightning_ft._restart.loading import Loading
from lightning_ft.manifest import CheckpointInfo
from lightning_ft.storage import Storage

_log = logging.getLogger(__name__)


def candidates(infos: Iterable[CheckpointInfo], line: Line, before: int) -> list[CheckpointInfo]:
    """The checkpoints that led to the state of now and were made before batch `before` was trained, newest first."""
    found = [
        (info.manifest, info)
        for info in infos
        if discovery.run_of(info) == line.run_id and _names.parse_checkpoint_name(info.name)
    ]
    led_here = [
        info
        for manifest, info in found
        if manifest is not None
        and manifest.batch < before
        and (manifest.start == line.start or (manifest.start < line.start and manifest.batch <= line.from_batch))
    ]
    return sorted(led_here, key=lambda info: info.order, reverse=True)


def weights_not_finite(module: nn.Module) -> frozenset[str]:
    """The names of what is trained of `module` on this rank and holds not only numbers. Blocks on: the device."""
    return frozenset(
        name
        for name, p in module.named_parameters()
        if p.requires_grad and not is_lazy(p) and not is_all_numbers(getattr(p, "_local_tensor", p).detach())
    )


def is_all_numbers(values: Tensor) -> bool:
    """Whether `values`, of any dtype and layout, holds nothing that is not finite. Blocks on: the device."""
    if values.is_sparse:
        values = values.coalesce().values()
    # Of floating-point numbers of a byte, torch cannot ask that.
    return bool(torch.isfinite(values if values.element_size() > 1 else values.float()).all())


@dataclass(frozen=True)
class Found:
    """What there is to go back to."""

    path: str
    """The newest finite checkpoint, verified; empty if there is none."""
    batch: int = 0
    """How many batches are done there."""
    poisoned: tuple[str, ...] = ()
    """Newer ones, in which weights are not finite: they were read."""


def find(fit: Fit, before: int, suspect_from: int | None) -> Found:
    """The newest finite checkpoint that every rank sees. The same on all ranks.

    Ranks: all; rank 0 decides. Blocks on: writes under way, reading the checkpoint and those passed over.

    Args:
        fit: The fit.
        before: The first batch that had a bad loss.
        suspect_from: Of checkpoints of this batch and later ones nobody knows whether their weights are finite, so they
            are looked into; None: of all it is known that they are, since a finite loss came of them.
    """
    fit.saves.drained()
    options = fit.plugin.storage_options if fit.plugin is not None else None
    trained = {name for name, p in fit.trainer.lightning_module.named_parameters() if p.requires_grad}

    def usable(path: str, batch: int, poisoned: list[str]) -> bool:
        verified = discovery.verify(path, "full", options)
        if verified.problem is not None:
            _log.warning("passed over %s: %s", path, verified.problem)
            fit.tiers.note_damaged([verified])
            return False
        if suspect_from is not None and batch >= suspect_from and not _is_finite(path, trained, options):
            _log.warning("passed over %s: it holds weights that are not finite", path)
            poisoned.append(path)
            return False
        return True

    def choose(local_too: bool) -> Found:
        line, poisoned = fit.line, list[str]()
        for info in candidates(fit.tiers.infos(), line, before):
            assert info.manifest is not None
            if (local_too or not fit.tiers.is_local(info.path)) and usable(info.path, info.manifest.batch, poisoned):
                return Found(info.path, info.manifest.batch, tuple(poisoned))
        # Of another directory or run, but what this line began from.
        if line.from_path and line.from_path not in poisoned and line.from_batch < before:
            ours = discovery.verify(line.from_path, "listed", options).manifest is not None
            if ours and usable(line.from_path, line.from_batch, []):
                return Found(line.from_path, line.from_batch, tuple(poisoned))
        return Found("", poisoned=tuple(poisoned))

    found = fit.ranks.decide(lambda: choose(True))
    if found.path and fit.tiers.is_local(found.path) and not all(fit.ranks.all_gather(Storage().exists(found.path))):
        found = fit.ranks.decide(lambda: choose(False))
    return found


def _is_finite(path: str, trained: set[str], options: dict[str, Any] | None) -> bool:
    """Whether the trained weights in a checkpoint are numbers. Blocks on: reading it."""
    # Verified a moment ago, and written by this run.
    state = Loading(Storage(options), "size", options).load(path, None, False)["state_dict"]
    return all(is_all_numbers(value) for name, value in state.items() if name in trained)


def remove(fit: Fit, poisoned: Iterable[str]) -> None:
    """Checkpoints whose weights are not finite are gone, so that no restart takes one. Ranks: zero."""
    options = fit.plugin.storage_options if fit.plugin is not None else None
    for path in poisoned:
        if not fit.tiers.has(path):
            continue
        Storage(options).remove(path)
        _log.warning(
            "%s is removed: its weights are not finite, though the last loss before it was; nothing can go on from it",
            path,
        )
