"""Emergency checkpoints: the state in which a run has diverged, to be looked into. No restart takes one by itself.

They lie beside the others, under names of their own, as complete and as verifiable as those; their manifest says
``"reason": "emergency"`` and ``"boundary": "none"``, so that ``ckpt_path="last"`` passes them by. The newest two stay.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning_ft import _names
from lightning_ft._fit.watch import Fit
from lightning_ft._saving.options import SaveOptions
from lightning_ft.discovery import list_checkpoints
from lightning_ft.errors import RestoreError
from lightning_ft.manifest import Manifest
from lightning_ft.storage import Storage

_log = logging.getLogger(__name__)

KEPT = 2


def save(fit: Fit, step: int, about: dict[str, Any]) -> str:
    """The state as it is now is durable in the directory of the run; returns its path, empty if that failed.

    Whatever goes wrong is logged, and not raised: the reason why the run ends is another one. Ranks: all, wherever they
    are, as long as it is the same place. Thread: main. Blocks on: all ranks, and the write.

    Args:
        fit: What diverged.
        step: Optimizer steps taken.
        about: What is known of it: plain data, the same on all ranks.
    """
    options = fit.plugin.storage_options if fit.plugin is not None else None
    try:
        path = fit.ranks.decide(lambda: _new_path(fit.dirpath, step, options))
        saved = fit.saves.make_emergency(path, about, SaveOptions(partial(_keep_newest, fit.dirpath, options)))
    except Exception:
        _log.exception("the state in which the run has diverged could not be saved")
        return ""
    return path if saved else ""


def _new_path(dirpath: str, step: int, options: Mapping[str, Any] | None) -> str:
    return _names.join(dirpath, _names.emergency_name(step, Storage(options).listdir(dirpath)))


def _keep_newest(dirpath: str, options: Mapping[str, Any] | None, committed: Manifest) -> None:
    """Thread: writer. On disk after: at most so many emergency checkpoints as are kept."""
    ours = [info for info in list_checkpoints(dirpath, options) if _names.parse_emergency_name(info.name)]
    known = [info for info in ours if info.manifest is not None and info.problem is None]
    for info in sorted(known, key=lambda info: (info.order, info.name), reverse=True)[KEPT:]:
        Storage(options).remove(info.path)


def require_not_one(saved: Mapping[str, Any], path: str, *, strict: bool) -> None:
    """`path` was not saved in an emergency, or is resumed from all the same.

    Args:
        saved: What this package has added to the checkpoint.
        path: The checkpoint.
        strict: Whether it is an error.

    Raises:
        RestoreError: It is one, and `strict`.
    """
    emergency = saved.get("emergency")
    if emergency is None:
        return
    better = emergency["restart_from"]
    what = (
        f"{path} was saved in an emergency, in the middle of a step that had diverged (batch {emergency['batch']}): it "
        "is not for resuming" + (f". Start from {better}" if better else "")
    )
    if strict:
        raise RestoreError(f"{what}, or give FaultTolerantCheckpoint(strict=False) to resume from it all the same")
    _log.warning("%s; resumed all the same, since strict=False", what)
