"""What a watcher says of a hang: who is late, what each rank does, where its threads are. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from lightning_ft._watcher.page import Phase
from lightning_ft._watcher.process import DEBUGGED, STOPPED

_THREAD = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_STANDARD = re.compile(r"^<|/lib/python[0-9.]+/(?!site-packages/|dist-packages/)")


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
    where: str = ""
    """The line of Python that its main thread is at; empty if that is not known."""

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
        at = f"at {self.where}, " if self.where else ""
        return (
            f"rank {self.rank} ({self.host}, pid {self.pid}): {self.steps} steps completed, {doing}, {at}"
            f"not gone on for {self.still_secs:.1f} s; {self.state}"
        )


def late(statuses: Sequence[Status], world_size: int, over: Collection[int] = ()) -> list[int]:
    """The ranks that the others wait for, as far as that can be told; empty if it cannot.

    Those that have ended; else, if the fit of some is `over`, those whose is not; else those that no watcher speaks
    for; else those that cannot go on by themselves; else those that have not come as far as the others.
    """
    gone = [status.rank for status in statuses if status.ended]
    if gone:
        return sorted(gone)
    if over:
        return sorted(set(range(world_size)) - set(over))
    missing = sorted(set(range(world_size)) - {status.rank for status in statuses})
    if missing:
        return missing
    halted = [status.rank for status in statuses if status.halted]
    if halted:
        return sorted(halted)
    least = min((status.position for status in statuses), default=0)
    behind = [status.rank for status in statuses if status.position == least]
    return sorted(behind) if len(behind) < len(statuses) else []


def verdict(
    reason: str,
    statuses: Sequence[Status],
    world_size: int,
    absent: Collection[int] = (),
    over: Collection[int] = (),
) -> str:
    """The lines that every watcher prints.

    Args:
        reason: Why the ranks end.
        statuses: Of the ranks that have said something.
        world_size: How many ranks there are.
        absent: Those that have not come to where all are to meet.
        over: Those whose fit has ended, so that they are watched no longer.
    """
    names, how = sorted(absent), ": not come to the process group"
    if not absent:
        names, how = late(statuses, world_size, over) if world_size > 1 else [], ""
    seen = {status.rank for status in statuses} | set(absent) | set(over)
    held_up = [status for status in statuses if status.where and (world_size == 1 or status.rank in names)]
    lines = ["; ".join([reason, *(f"rank {status.rank} is at {status.where}" for status in held_up[:1])])]
    if names:
        lines.append(f"late: rank{'s' if len(names) > 1 else ''} {', '.join(map(str, names))}{how}")
    elif world_size > 1:
        lines.append("late: nobody in particular, all ranks have come equally far")
    lines += [status.line() for status in sorted(statuses, key=lambda status: status.rank)]
    lines += [f"rank {rank}: its fit is over" for rank in sorted(over)]
    if world_size > 1:
        lines += [f"rank {rank}: its watcher does not answer" for rank in sorted(set(range(world_size)) - seen)]
    return "\n".join(lines)


def arranged(stacks: str) -> str:
    """The stacks that `faulthandler` has written: that of the main thread first, those of our own threads last."""
    return "\n".join(sorted(_threads(stacks), key=lambda lines: (not _is_main(lines), _is_ours(lines))))


def where(stacks: str) -> str:
    """The line that the main thread is at, without what it calls of the standard library; empty if nothing tells."""
    main = next((thread for thread in _threads(stacks) if _is_main(thread)), "")
    frames = _FRAME.findall(main)
    own = [frame for frame in frames if not _STANDARD.search(frame[0])] or frames
    return "{}:{} in {}".format(*own[0]) if own else ""


def _threads(stacks: str) -> list[str]:
    """One text for each thread."""
    return [thread.strip("\n") for thread in _THREAD.split(stacks) if thread.strip()]


def _is_main(thread: str) -> bool:
    """All others begin in `threading`."""
    frames = _FRAME.findall(thread)
    return bool(frames) and not (frames[-1][0].endswith("threading.py") and frames[-1][2].startswith("_bootstrap"))


def _is_ours(thread: str) -> bool:
    return any("lightning_ft" in PurePath(file).parts for file, _, _ in _FRAME.findall(thread))
