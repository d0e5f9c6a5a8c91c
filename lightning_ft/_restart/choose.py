"""`ckpt_path="last"`: one decision, made on rank 0 and told to all ranks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors import checkpoint_connector

from lightning_ft import _names, discovery
from lightning_ft._fit import local_tier, loops
from lightning_ft._fit.local_tier import LocalTier
from lightning_ft._ranks.dist import Ranks
from lightning_ft._restart.elsewhere import refuse_new_directory
from lightning_ft._restart.fallback import last_of_others
from lightning_ft._restart.fetched import Fetched
from lightning_ft._restart.shared_verification import Ask, SharedVerification
from lightning_ft.discovery import Verifying
from lightning_ft.errors import CheckpointError, NoUsableCheckpointError
from lightning_ft.storage import Storage

_log = logging.getLogger(__name__)


def choose_for_all(
    ranks: Ranks,
    dirpath: str,
    depth: discovery.Depth,
    storage_options: dict[str, Any] | None,
    local: LocalTier | None,
    fetched: Fetched,
    sharing: SharedVerification,
    give_up_after: int | None,
) -> tuple[str | None, bool]:
    """What `choose` says on rank 0, on every rank; in a local directory only what every rank sees there.

    Rank 0 decides and verifies a single file; a checkpoint that is a directory is verified by all ranks together.

    Ranks: all (a broadcast, and if the choice is local a gather; for each directory that is verified both).

    Raises:
        NoUsableCheckpointError: See `choose`; also if the only checkpoints are local ones of another machine.
        ConfigurationError: The local directory holds checkpoints of something else.
    """

    def decide(ask: Ask) -> tuple[str | None, bool]:
        verifying = fetched.noting(sharing.verifying(ask, fetched.verify))
        return choose(dirpath, depth, storage_options, local, verifying, give_up_after)

    def decide_without_local(ask: Ask) -> tuple[str | None, bool]:
        verifying = fetched.noting(sharing.verifying(ask, fetched.verify))
        return _without_local(str(path), blind, dirpath, depth, storage_options, verifying, give_up_after)

    path, ours = ranks.decide_with_help(decide, sharing.help_with)
    if local is None or path is None or _names.split(path)[0] != local.dirpath:
        return path, ours
    found = ranks.all_gather(_generation(path))
    blind = [rank for rank, generation in enumerate(found) if generation is None or generation != found[0]]
    if not blind:
        return path, ours
    return ranks.decide_with_help(decide_without_local, sharing.help_with)


def _generation(path: str) -> str | None:
    try:
        manifest, _ = Storage().read_manifest(path)
    except (CheckpointError, OSError):
        return None
    return None if manifest is None else manifest.generation


def _without_local(
    path: str,
    blind: list[int],
    dirpath: str,
    depth: discovery.Depth,
    storage_options: dict[str, Any] | None,
    verifying: Verifying,
    give_up_after: int | None,
) -> tuple[str | None, bool]:
    reason = f"not seen by rank{'s' if len(blind) > 1 else ''} {', '.join(map(str, blind))}"
    chosen = choose(dirpath, depth, storage_options, verifying=verifying, give_up_after=give_up_after)
    if chosen[0] is None:
        raise NoUsableCheckpointError(dirpath, [(path, f"{reason}, and there is no other in dirpath")])
    _log.warning("passed over %s: %s; the run goes on from %s", path, reason, chosen[0])
    return chosen


def choose(
    dirpath: str,
    depth: discovery.Depth,
    storage_options: dict[str, Any] | None,
    local: LocalTier | None = None,
    verifying: Verifying = discovery.verify,
    give_up_after: int | None = discovery.AS_RECORDED,
) -> tuple[str | None, bool]:
    """The checkpoint to continue from, and whether it is one of ours; None to start from the beginning.

    The newest good checkpoint of the newest run, in either directory if there are two; else a `last*.ckpt` that a
    `ModelCheckpoint` left in the directory.

    Ranks: zero. Blocks on: reading the chosen file once, for ``depth="full"``.

    Raises:
        NoUsableCheckpointError: There are checkpoints and none can be used: never a silent fresh start.
        ConfigurationError: The local directory holds checkpoints of something else.
    """
    if local is None:
        selection = discovery.select(dirpath, depth, storage_options, verifying, give_up_after)
    else:
        local_tier.require_own(local.dirpath, dirpath)
        selection = local_tier.select(local.dirpath, dirpath, depth, storage_options, verifying, give_up_after)
    for path, reason in selection.passed_over:
        _log.warning("passed over %s: %s", path, reason)
    if selection.futile_starts and selection.chosen is not None:
        _log.warning(
            "the run was started %d times from %s, and as often as it may be from every one before it, and has saved "
            "nothing: something else must be the cause. It goes on from the newest all the same",
            selection.futile_starts, selection.chosen.path,
        )  # fmt: skip
    if selection.chosen is not None:
        return selection.chosen.path, True
    reasons = list(selection.passed_over)
    if selection.empty:
        other, unusable = last_of_others(selection, depth, storage_options)
        if other is not None:
            return other, False
        reasons += unusable
    if reasons:
        raise NoUsableCheckpointError(dirpath, reasons)
    return None, False


def begin_anew(dirpath: str, storage_options: dict[str, Any] | None) -> None:
    """Training starts from the beginning: one line says so, and Lightning's advice for another callback is not given.

    Ranks: zero. Blocks on: listing the directory.

    Raises:
        ConfigurationError: The run goes on elsewhere, see `elsewhere`.
    """
    refuse_new_directory(dirpath)
    others = [i.name for i in discovery.select(dirpath, "listed", storage_options).foreign]
    if others:
        _log.warning(
            "%s holds no checkpoint of a FaultTolerantCheckpoint: training starts from the beginning, and not from %s "
            "(give its path as ckpt_path to start there)",
            dirpath, " or ".join(others[:3]),
        )  # fmt: skip
    else:
        _log.warning("no checkpoint in %s: training starts from the beginning", dirpath)
    warnings.filterwarnings("ignore", message=r".*there is no last checkpoint available\..*")


def insist(trainer: pl.Trainer, path: str) -> Callable[[], None]:
    """Lightning loads `path`, once, even where another `ModelCheckpoint` has a younger ``last.ckpt``.

    The returned function takes that back, for a fit that ends before it loads.

    Lightning takes whichever candidate has the latest modification time. That says nothing of which state is newer,
    nor of whether the file is whole. And it asks the store without the `storage_options` of the plugin.
    """
    finding = checkpoint_connector.get_filesystem  # type: ignore[attr-defined]  # imported there

    def get_filesystem(candidate: Any, **kwargs: Any) -> Any:
        return _Chosen() if candidate == path else finding(candidate, **kwargs)

    connector = trainer._checkpoint_connector
    original = connector.resume_start

    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        undo()
        original(path if checkpoint_path is not None else None, *args, **kwargs)

    undos = [
        loops.replaced(connector, "resume_start", resume_start),
        loops.replaced(checkpoint_connector, "get_filesystem", get_filesystem),
    ]

    def undo() -> None:
        for each in undos:
            each()

    return undo


class _Chosen:
    """What Lightning asks of the file system of a candidate, answered for one that is chosen already."""

    def exists(self, path: Any) -> bool:
        return True

    def modified(self, path: Any) -> datetime:
        return datetime.max.replace(tzinfo=timezone.utc)
