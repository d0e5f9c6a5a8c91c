"""A watch that is told of a signal, as a guard is, without one."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_ft._fit.watch import Watch


class Asked(Watch):
    """Knows of a signal from the moment it is told."""

    topics = ("asked",)
    anywhere = True

    def __init__(self) -> None:
        self.known = False

    def ballot(self) -> dict[str, int]:
        return {"asked": int(self.known)}

    def urgent(self, votes: Mapping[str, int]) -> bool:
        return bool(votes.get("asked"))
