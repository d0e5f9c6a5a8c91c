"""Which saves of a fit are due at its boundaries, in its directory and in the local one in front of it."""

from __future__ import annotations

from dataclasses import replace

from lightning_ft.triggers import Facts, LastSave, Pending, Trigger, advance


class Due:
    """The state of the triggers between two boundaries. The same on all ranks.

    Args:
        trigger: When to save.
        local: When to save to the local directory alone; None: there is none.
        step: Optimizer steps taken so far.
        epochs: Epochs finished so far.
    """

    def __init__(self, trigger: Trigger, local: Trigger | None, step: int, epochs: int) -> None:
        self._trigger = trigger
        self._local = local
        self.start_at(step, epochs)

    def start_at(self, step: int, epochs: int) -> None:
        """Training goes on from here: what was due before is not due any more."""
        self._pending = self._local_pending = Pending(LastSave(step, epochs))

    def postpone(self, reason: str) -> None:
        """A save is due for `reason`, unless one is for another, at the next boundary where one can be made."""
        self._pending = replace(self._pending, postponed=self._pending.postponed or reason)

    def put_off(self, reason: str | None, only_local: str | None) -> None:
        """What `at` has returned is not made here, but at the next boundary."""
        self._pending = replace(self._pending, postponed=reason)
        self._local_pending = replace(self._local_pending, postponed=only_local)

    def at(self, facts: Facts) -> tuple[str | None, str | None]:
        """Why a save is due at this boundary, and why one to the local directory is; None: none is."""
        self._pending, reason = advance(self._trigger, self._pending, facts)
        only_local = None
        if self._local is not None:
            self._local_pending, only_local = advance(self._local, self._local_pending, facts)
        return reason, only_local
