"""What a watcher says of a hang: who is late, what each rank does, where its threads are. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_ft._watcher.page import Phase
from lightning_ft._watcher.process import DEBUGGED, STOPPED


@dataclass(frozen=True)
class Status:
    """What one rank's watcher knows of it."""

    rank: int
    host: str
    pid: int
    phase: int
    steps: int
    position: int
    state: str
    """Of its main thread; begins with a word of `process`."""
    still_secs: float
    """Since it has gone on."""
    ended: bool = False
    """Whether the process is gone already."""
    saving: bool = False

    def to_message(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Status:
        """The inverse of `to_message`; raises TypeError for anything else."""
        return cls(**message)

    @property
    def halted(self) -> bool:
        """Whether it cannot go on by itself."""
        return self.ended or self.state.startswith((STOPPED, DEBUGGED, "in a wait that", "a zombie", "gone"))

    def line(self) -> str:
        """For the list of ranks."""
        if self.ended:
            return (
                f"rank {self.rank} ({self.host}, pid {self.pid}): its process has ended; {self.steps} steps completed"
            )
        doing = {
            Phase.STARTUP: "starting",
            Phase.STEP: f"{'behind' if self.position % 2 else 'before'} the loss of batch {self.position // 2 + 1}",
            Phase.VALIDATION: "validating",
            Phase.BETWEEN: "between epochs",
            Phase.SAVE: "waiting for a save",
        }[Phase(self.phase)]
        return (
            f"rank {self.rank} ({self.host}, pid {self.pid}): {self.steps} steps completed, {doing}, "
            f"not gone on for {self.still_secs:.1f} s; {self.state}"
        )


def late(statuses: Sequence[Status], world_size: int) -> list[int]:
    """The ranks that the others wait for, as far as that can be told; empty if it cannot.

    Those that have ended; else those that no watcher speaks for; else those that cannot go on by themselves; else those
    that have not come as far as the others.
    """
    gone = [status.rank for status in statuses if status.ended]
    if gone:
        return sorted(gone)
    missing = sorted(set(range(world_size)) - {status.rank for status in statuses})
    if missing:
        return missing
    halted = [status.rank for status in statuses if status.halted]
    if halted:
        return sorted(halted)
    least = min((status.position for status in statuses), default=0)
    behind = [status.rank for status in statuses if status.position == least]
    return sorted(behind) if len(behind) < len(statuses) else []


def verdict(reason: str, statuses: Sequence[Status], world_size: int) -> str:
    """The lines that every watcher prints."""
    names = late(statuses, world_size)
    seen = {status.rank for status in statuses}
    lines = [reason]
    if world_size > 1:
        if names:
            lines.append(_late(names))
        else:
            lines.append("late: nobody in particular, all ranks have come equally far")
    lines += [status.line() for status in sorted(statuses, key=lambda status: status.rank)]
    if world_size > 1:
        lines += [f"rank {rank}: its watcher does not answer" for rank in sorted(set(range(world_size)) - seen)]
    return "\n".join(lines)


def not_come(ranks: Sequence[int]) -> str:
    """The line about ranks that others wait for where they are to meet."""
    return f"{_late(ranks)}: not come to the process group"


def _late(ranks: Sequence[int]) -> str:
    return f"late: rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
