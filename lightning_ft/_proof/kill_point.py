"""Where a drill kills a process: how it is written, and what that means."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ft import events

KillPoint = int | str
"""A batch number (killed at its end), or an event of the save protocol, such as ``"Renamed"`` or ``"Renamed:2"``.

``"DataSynced:2@1"`` and ``"5@1"`` kill rank 1 alone, and nobody else. Without a rank each kills itself there, at the
end of a batch when all have come so far.
"""


def check_kill_point(point: KillPoint) -> None:
    """Nothing happens if `point` can be reached.

    Raises:
        ValueError: It is no batch number from 1 on, and no event.
    """
    parse(point)


@dataclass(frozen=True)
class Place:
    """Where and on which rank (None: any) to kill."""

    event: type[events.Event] | None
    count: int
    rank: int | None

    @property
    def is_batch_of_all(self) -> bool:
        """Whether it is a batch, at which all ranks are killed."""
        return self.event is None and self.rank is None


def parse(point: KillPoint) -> Place:
    """What `point` means.

    Raises:
        ValueError: It is no batch number from 1 on, and no event.
    """
    where, at, rank = str(point).partition("@")
    name, colon, count = where.partition(":")
    if (at and not rank.isdecimal()) or (colon and not count.isdecimal()):
        raise ValueError(f"kill point {point!r}: write 'NAME:COUNT@RANK', the last two as numbers, or without them")
    if colon and int(count) < 1:
        raise ValueError(f"kill point {point!r}: events are counted from 1")
    on_rank = int(rank) if at else None
    if name in events.EVENT_TYPES:
        return Place(events.EVENT_TYPES[name], int(count or 1), on_rank)
    if colon or not name.lstrip("-").isdecimal():
        raise ValueError(f"kill point {point!r}: give a batch number or one of {', '.join(events.KILL_POINTS)}")
    if int(name) < 1:
        raise ValueError(f"kill point {point!r}: batches are counted from 1")
    return Place(None, int(name), on_rank)
