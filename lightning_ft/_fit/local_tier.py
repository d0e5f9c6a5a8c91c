"""A local directory in front of the one of the run: whose it is, and the newest good checkpoint of both."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lightning_ft import _names, discovery
from lightning_ft._disk.disk_file import sync_dir
from lightning_ft.discovery import Depth, Selection, Verifying, run_of
from lightning_ft.errors import ConfigurationError
from lightning_ft.manifest import CheckpointInfo
from lightning_ft.retention import Retention
from lightning_ft.triggers import Trigger


@dataclass(frozen=True)
class LocalTier:
    """The directory that is written first, when it is written without the other one, and what stays in it."""

    dirpath: str
    trigger: Trigger
    retention: Retention

    @classmethod
    def of(
        cls, dirpath: str | os.PathLike[str], every_n_train_steps: int | None, keep_last: int, remote: str | None
    ) -> LocalTier:
        """The tier that these arguments of `FaultTolerantCheckpoint` describe.

        Raises:
            ConfigurationError: One of them has a value it cannot have, under its own name there.
        """
        if not isinstance(dirpath, (str, os.PathLike)) or not os.fspath(dirpath):
            raise ConfigurationError(f"local_dirpath={dirpath!r}: must be the path of a directory, or None")
        normalised = _names.normalise(dirpath)
        if not _names.is_local(normalised):
            raise ConfigurationError(
                f"local_dirpath={dirpath!r}: must be in a mounted file system; a URL belongs into dirpath"
            )
        if remote is not None:
            require_different(normalised, remote)
        try:
            return cls(normalised, Trigger(every_n_train_steps), Retention(keep_last))
        except ConfigurationError as error:  # which begins with the name of the argument
            raise ConfigurationError(f"local_{error}") from error


def require_different(local_dirpath: str, dirpath: str) -> None:
    """The two are not one directory.

    Raises:
        ConfigurationError: They are.
    """
    if _names.is_local(dirpath) and os.path.realpath(local_dirpath) == os.path.realpath(dirpath):
        raise ConfigurationError(
            f"local_dirpath={local_dirpath!r}: is dirpath; with one directory only, leave local_dirpath out"
        )


def claim(local_dirpath: str, dirpath: str) -> None:
    """`local_dirpath` is known to hold checkpoints of `dirpath`, and of nothing else.

    Ranks: zero. Thread: main, holding the lock of `local_dirpath`. On disk after: a file with the name of `dirpath`.

    Raises:
        ConfigurationError: See `require_own`.
    """
    require_own(local_dirpath, dirpath)
    path = _names.join(local_dirpath, _names.ORIGIN_NAME)
    if origin(local_dirpath) == dirpath:
        return
    with open(path, "w") as file:
        file.write(dirpath + "\n")
        file.flush()
        os.fsync(file.fileno())
    sync_dir(local_dirpath)


def require_own(local_dirpath: str, dirpath: str) -> None:
    """No checkpoint in `local_dirpath` belongs to anything but `dirpath`.

    A script that was given another `dirpath` would otherwise continue the run of the one before, without a word.

    Raises:
        ConfigurationError: There are checkpoints, and it is not known that they do.
    """
    other = origin(local_dirpath)
    if other == dirpath or not os.path.isdir(local_dirpath):
        return
    if not any(name.endswith(_names.SUFFIX) and not name.startswith(".") for name in os.listdir(local_dirpath)):
        return
    marker = _names.join(local_dirpath, _names.ORIGIN_NAME)
    whose = f"for dirpath={other!r}" if other else "for nothing that is known"
    raise ConfigurationError(
        f"local_dirpath={local_dirpath!r}: holds checkpoints that were saved {whose}, not for {dirpath!r}. Give each "
        f"dirpath a local directory of its own, or empty this one; if they do belong to {dirpath!r}, because it was "
        f"moved, write its new name into {marker}"
    )


def origin(local_dirpath: str) -> str | None:
    """The directory or URL that `local_dirpath` is in front of, None if nobody has said that."""
    try:
        with open(_names.join(local_dirpath, _names.ORIGIN_NAME)) as file:
            return file.read().strip()
    except FileNotFoundError:
        return None


def select(
    local_dirpath: str,
    dirpath: str,
    depth: Depth = "full",
    storage_options: Mapping[str, Any] | None = None,
    verifying: Verifying = discovery.verify,
    give_up_after: int | None = discovery.AS_RECORDED,
) -> Selection:
    """The newest good checkpoint of both directories; of one that is in both, the local copy.

    A local copy is taken for that only if its digest is the one that the manifest in `dirpath` has. A copy that is
    damaged gives way to the other one.

    Ranks: zero; the answer is broadcast. Blocks on: reading the local checkpoints down to the first good one, and what
    is in `dirpath` only where it is newer than that.

    Raises:
        OSError: A directory cannot be listed.
    """
    local = discovery.select(local_dirpath, depth, None, verifying, give_up_after)
    remote = discovery.select(
        dirpath, "size" if depth == "full" else depth, storage_options, give_up_after=give_up_after
    )
    if bool(local.futile_starts) != bool(remote.futile_starts) and local.chosen and remote.chosen:
        # One of them has a checkpoint that was not tried in vain.
        tried = local if local.futile_starts else remote
        assert tried.chosen is not None
        passed = (*tried.passed_over, (tried.chosen.path, discovery.futile(tried.futile_starts)))
        tried = replace(tried, chosen=None, passed_over=passed, futile_starts=0)
        local, remote = (tried, remote) if local.futile_starts else (local, tried)
    if depth == "full" and remote.chosen is not None and _newest(local.chosen, remote.chosen) is remote.chosen:
        remote = discovery.select(dirpath, depth, storage_options, verifying, give_up_after)
    passed_over = dict((*local.passed_over, *remote.passed_over))
    chosen = _newest(local.chosen, remote.chosen)
    if chosen is not None and not _one_run(local, remote):
        run_id = _newest_run(
            discovery.list_checkpoints(local_dirpath), discovery.list_checkpoints(dirpath, storage_options)
        )
        for candidate in (local.chosen, remote.chosen):
            if candidate is not None and run_of(candidate) != run_id:
                passed_over[candidate.path] = f"belongs to the older run {run_of(candidate)}"
        chosen = _newest(*(c if c and run_of(c) == run_id else None for c in (local.chosen, remote.chosen)))
    return Selection(
        chosen,
        tuple(passed_over.items()),
        (*local.foreign, *remote.foreign),
        empty=local.empty and remote.empty,
        futile_starts=(local if chosen is local.chosen else remote).futile_starts,
    )


def _newest(local: CheckpointInfo | None, remote: CheckpointInfo | None) -> CheckpointInfo | None:
    if local is None or remote is None:
        return local or remote
    assert local.manifest is not None
    assert remote.manifest is not None
    if local.manifest.generation == remote.manifest.generation and local.manifest.digest != remote.manifest.digest:
        return remote
    return remote if remote.order > local.order else local


def _one_run(local: Selection, remote: Selection) -> bool:
    """Whether no other run can be in play: both have chosen of one, or one of them has nothing at all."""
    if local.empty or remote.empty:
        return True
    if local.chosen is None or remote.chosen is None:
        return False
    return run_of(local.chosen) == run_of(remote.chosen)


def _newest_run(*listings: Iterable[CheckpointInfo]) -> str | None:
    """The run of the newest manifest that can be read: an older one is never continued in its place."""
    readable = [i for infos in listings for i in infos if run_of(i) is not None]
    newest = max(readable, key=lambda info: info.order, default=None)
    return None if newest is None else run_of(newest)
