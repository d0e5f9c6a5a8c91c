"""A failed save or upload, and what follows from it for the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lightning_ft._ranks.dist import Ranks, everywhere
from lightning_ft._saving.engine import Writer
from lightning_ft._saving.uploads import Uploads
from lightning_ft.errors import SaveError

GIVE_UP_AFTER = 3
"""Failures in a row after which a run stops, whatever `on_error` says: it is running without a net. Saves and uploads
are counted each for themselves, so that local saves that succeed do not hide a store that is gone."""


@dataclass(frozen=True)
class Failure:
    """A save or an upload that failed."""

    error: SaveError
    in_a_row: int
    ends_the_run: bool
    newest_save: bool
    """Whether the save submitted last failed, so that its state is on no disk."""
    newest_upload: bool
    """Whether the upload submitted last failed, so that its state is on the local disk alone."""


class Fallible(Protocol):
    """What may have failed: see `FaultTolerantCheckpointIO`."""

    def take_failure(self) -> Failure | None: ...
    def settle_failure(self) -> None: ...


def agreed_failure(ranks: Ranks, source: Fallible) -> Failure | None:
    """The oldest failure that any rank has not taken yet, on all ranks; each rank has taken its own.

    Ranks: all. Thread: main. Blocks on: all ranks; one that has not heard of it yet, on its save at hand.
    """
    own = source.take_failure()
    failure = next((found for found in ranks.all_gather(own) if found is not None), None)
    if failure is None:
        return None
    everywhere(failure.error)
    if own is None:
        source.settle_failure()
        source.take_failure()  # or there is none: the save was of one rank only
    return failure


def take_failure(writer: Writer | None, uploads: Uploads | None, on_error: str) -> Failure | None:
    """The oldest failure not yet taken, of saves before uploads; each is taken once. Thread: main."""
    for source in (writer, uploads):
        if source is None or (error := source.take_failure()) is None:
            continue
        in_a_row = source.failures_in_a_row
        return Failure(
            error,
            in_a_row,
            ends_the_run=on_error == "raise" or in_a_row >= GIVE_UP_AFTER,
            newest_save=writer is not None and writer.newest_failed,
            newest_upload=uploads is not None and uploads.newest_failed,
        )
    return None
