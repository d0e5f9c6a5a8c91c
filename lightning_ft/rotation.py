"""Rotation: after a checkpoint has committed, the ones the policy gives up are deleted. Runs in the writer thread."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lightning_ft import discovery, events, retention
from lightning_ft.manifest import Manifest
from lightning_ft.storage import Storage

_log = logging.getLogger(__name__)


def rotate(
    dirpath: str,
    newest: str,
    run_id: str,
    policy: retention.Retention,
    storage_options: Mapping[str, Any] | None,
    committed: Manifest,
) -> None:
    """`dirpath` holds what `policy` keeps of run `run_id`, judged from a fresh listing.

    Nothing is deleted unless `newest` is listed and good. A file that cannot be deleted stays, with a warning: one
    too many is no danger to the run.

    Thread: writer. On disk after: at least `policy.keep_last` good checkpoints, once so many were made.
    """
    storage = Storage(storage_options)
    try:
        infos = discovery.list_checkpoints(dirpath, storage_options)
    except Exception as error:  # stores have errors of their own classes
        _log.warning("no rotation after %s: cannot list %s: %s", newest, dirpath, error)
        events.emit(events.DeleteSkipped(dirpath, f"{type(error).__name__}: {error}"))
        return
    for decision in retention.plan(infos, policy, run_id, newest, pinned=frozenset()):
        if decision.keep:
            continue
        try:
            storage.remove(decision.path)
        except Exception as error:
            _log.warning("could not remove %s: %s", decision.path, error)
            events.emit(events.DeleteSkipped(decision.path, f"{type(error).__name__}: {error}"))
