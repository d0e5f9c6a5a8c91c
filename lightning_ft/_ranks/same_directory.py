"""Whether every rank sees the directory that rank 0 writes: asked before the first step, not at the first restart."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Any

from lightning_ft._names import join, probe_name
from lightning_ft._ranks.dist import Ranks
from lightning_ft.errors import ConfigurationError
from lightning_ft.storage import Storage

_log = logging.getLogger(__name__)


def require_same_directory(ranks: Ranks, dirpath: str, storage_options: Mapping[str, Any] | None) -> None:
    """Every rank has read in `dirpath` what rank 0 has just written there.

    Only rank 0 saves, but every rank loads: a directory that exists on each machine for itself, or that one of them may
    not read, would be noticed when the run has crashed and is started again.

    Ranks: all (a broadcast and a gather, if there is more than one). On disk after: nothing.

    Raises:
        ConfigurationError: Some ranks did not see it; names them.
    """
    if ranks.world_size == 1:
        return
    storage = Storage(storage_options)
    # A name that no rank has asked for before: clients of network file systems remember for a while what was not there.
    token = ranks.decide(lambda: _leave_token(storage, dirpath))
    path = join(dirpath, probe_name(token))
    try:
        problems = ranks.all_gather(_problem(storage, path, token))
    finally:
        if ranks.is_zero:
            _remove(storage, path)
    blind = [(rank, problem) for rank, problem in enumerate(problems) if problem is not None]
    if blind:
        which = "; ".join(f"rank {rank}: {problem}" for rank, problem in blind[:5])
        more = f"; and {len(blind) - 5} more" if len(blind) > 5 else ""
        raise ConfigurationError(
            f"dirpath={dirpath!r}: {len(blind)} of {ranks.world_size} ranks do not see what rank 0 writes there, and "
            f"could not load a checkpoint ({which}{more}); use a directory that all machines share, or a URL"
        )


def _leave_token(storage: Storage, dirpath: str) -> str:
    token = secrets.token_hex(8)
    path = join(dirpath, probe_name(token))
    storage.put(path, token.encode())
    return token


def _problem(storage: Storage, path: str, token: str) -> str | None:
    """Why this rank cannot read the token, None if it can."""
    try:
        with storage.open_read(path) as file:
            found = file.read()
    except FileNotFoundError:
        return "another directory of that name"
    except Exception as error:  # a rank that raised here would leave the others waiting
        return f"{type(error).__name__}: {error}"
    return None if found == token.encode() else "another content than was written"


def _remove(storage: Storage, path: str) -> None:
    try:
        storage.remove_file(path)
    except Exception as error:
        # Raised on this rank alone, it would leave the others waiting. The next start removes it.
        _log.warning("could not remove %s: %s: %s", path, type(error).__name__, error)
