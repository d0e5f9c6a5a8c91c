"""All ranks go on from the same checkpoint, or none does: asked right after the load, before anything is restored."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lightning_ft._fit import loops
from lightning_ft._names import KEY
from lightning_ft._ranks.dist import Ranks
from lightning_ft._state.digest import digest_of_data
from lightning_ft.errors import RestoreError

_log = logging.getLogger(__name__)

_GENERATION = "generation"


def compare_next_load(trainer: pl.Trainer, ranks: Ranks) -> Callable[[], None]:
    """The next time this trainer loads, or does not, all ranks do the same; the returned function takes that back.

    What a rank has loaded is compared before the user's hooks see it, which may make of it what belongs to this rank.

    Ranks: all. Blocks on, then: all ranks having loaded; every byte of what they loaded is hashed.
    """
    # Private to Lightning (2.5.5 to 2.6): it has no hook between the load and the first use of what was loaded.
    connector = trainer._checkpoint_connector
    original = connector.resume_start
    active = True

    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        undo()
        ranks.together(lambda: original(checkpoint_path, *args, **kwargs))
        require_same(ranks, checkpoint_path, connector._loaded_checkpoint if checkpoint_path else None)

    take_back = loops.replaced(connector, "resume_start", resume_start)

    def undo() -> None:
        nonlocal active
        if active:  # once: what was there before is then somebody else's to take back
            take_back()
        active = False

    return undo


def require_same(ranks: Ranks, path: Any, checkpoint: dict[str, Any] | None) -> None:
    """Every rank has loaded the same checkpoint, or none has loaded any.

    Args:
        ranks: The ranks of the run; all of them call this.
        path: Where this one has loaded from, for the message.
        checkpoint: What it has loaded, None if nothing. What is not the same on all ranks by its nature, such as the
            shards of a tensor, does not count.

    Raises:
        RestoreError: On all ranks; says which ranks differ from rank 0, and in what.
    """
    if ranks.world_size == 1:
        return
    loaded = ranks.all_gather(None if checkpoint is None else (str(path), _digests(checkpoint)))
    different = [(rank, what) for rank, other in enumerate(loaded) if (what := _difference(loaded[0], other))]
    if different:
        which = "; ".join(f"rank {rank}: {what}" for rank, what in different[:5])
        more = f"; and {len(different) - 5} more" if len(different) > 5 else ""
        origin = "nothing" if loaded[0] is None else loaded[0][0]
        raise RestoreError(
            f"the ranks have loaded different checkpoints: {len(different)} of {ranks.world_size} have not what rank 0 "
            f"has loaded ({origin}): {which}{more}. Nothing was trained. Make every rank see the same directory, or "
            'let one rank read for all: FaultTolerantCheckpointIO(load="broadcast")'
        )


def _digests(checkpoint: dict[str, Any]) -> dict[str, str | None]:
    """One digest for each part of the checkpoint, and the id of the save."""
    parts = {str(name): digest_of_data(part) for name, part in checkpoint.items()}
    return {**parts, _GENERATION: (checkpoint.get(KEY) or {}).get(_GENERATION)}


_Loaded = tuple[str, dict[str, "str | None"]]


def _difference(of_zero: _Loaded | None, other: _Loaded | None) -> str | None:
    """What `other` is that rank 0's is not, None if they are the same."""
    if of_zero is None or other is None:
        if of_zero is other:
            return None
        return "nothing" if other is None else f"{other[0]}"
    path, expected = of_zero
    other_path, found = other
    where = "" if other_path == path else f" ({other_path})"
    if found[_GENERATION] != expected[_GENERATION]:
        return f"generation {found[_GENERATION]} instead of {expected[_GENERATION]}{where}"
    parts = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    return f"other {', '.join(parts)}{where}" if parts else None
