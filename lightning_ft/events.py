"""What happened to a checkpoint, one frozen value per protocol step, and how to be told.

The events that a save or a rotation emits are also the points at which the drill and the crash tests kill
the process (`KILL_POINTS`), so that there is no second list to forget.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """Something happened to the checkpoint `path`, or in the directory `path`."""

    path: str
    """The checkpoint, or the directory: a path or URL."""


@dataclass(frozen=True)
class SaveStarted(Event):
    """A save was begun; nothing is on disk yet."""

    step: int
    """Optimizer steps taken."""


@dataclass(frozen=True)
class UploadStarted(Event):
    """A checkpoint that is durable at `source` is about to be copied to `path`; nothing is there yet."""

    step: int
    """Optimizer steps taken."""
    source: str
    """The checkpoint in the local directory."""


@dataclass(frozen=True)
class SaveSkipped(Event):
    """A due save was not begun."""

    step: int
    """Optimizer steps taken."""
    reason: str
    """Why not, in words."""


@dataclass(frozen=True)
class AttemptOpened(Event):
    """The file or directory `attempt` exists and is empty, but for files of other ranks; nothing of the final name."""

    attempt: str
    """Its path, under a hidden name."""


@dataclass(frozen=True)
class FileWritten(Event):
    """Every byte of the file `name` of a directory was handed to the operating system. On the rank that wrote it."""

    name: str
    """Of the file, within the directory."""
    size_bytes: int
    """Of the file."""


@dataclass(frozen=True)
class FileSynced(Event):
    """The bytes of the file `name` of a directory survive a power loss. On the rank that wrote it."""

    name: str
    """Of the file, within the directory."""


@dataclass(frozen=True)
class DataWritten(Event):
    """Every byte, the manifest included, was handed to the operating system; the last are not known to be durable."""

    attempt: str
    """Its path, under a hidden name."""
    size_bytes: int
    """Of the whole checkpoint."""


@dataclass(frozen=True)
class DataSynced(Event):
    """The bytes of the attempt survive a power loss; on an object store, the object is published."""

    attempt: str
    """Its path, under a hidden name."""


@dataclass(frozen=True)
class Renamed(Event):
    """The final name is visible and complete; the directory entry may still be lost with the power."""


@dataclass(frozen=True)
class ReadBack(Event):
    """The checkpoint was read and is what was written (only with `verify_after_write`)."""


@dataclass(frozen=True)
class Committed(Event):
    """The checkpoint is durable under its final name, and, if that was asked for, read back."""

    step: int
    """Optimizer steps taken."""
    generation: str
    """Identity of this save, as in its manifest."""
    size_bytes: int
    """Of the whole checkpoint."""
    secs: float
    """From the request for the save until now."""
    metrics: dict[str, float | int] = field(default_factory=dict)
    """`blocked_secs` (training stood still for the copy, for a place in the queue, and before the optimizer step),
    `staging_secs` (until everything was copied), `queue_secs` (until the writer took it up), `write_secs`,
    `total_secs`, `size_bytes`, `bytes_per_sec` (of the writing); with `verify_after_write` also `read_back_secs`."""


@dataclass(frozen=True)
class SaveFailed(Event):
    """The save was given up; older checkpoints are untouched."""

    step: int
    """Optimizer steps taken."""
    reason: str
    """Why, in words."""


@dataclass(frozen=True)
class DeleteStarted(Event):
    """The checkpoint is about to be deleted; it is still complete."""


@dataclass(frozen=True)
class DeleteHidden(Event):
    """The checkpoint can no longer be found under its name; its data is still there."""


@dataclass(frozen=True)
class Deleted(Event):
    """The data of the checkpoint is gone."""


@dataclass(frozen=True)
class DeleteSkipped(Event):
    """The checkpoint was to be deleted and was not."""

    reason: str
    """Why not, in words."""


@dataclass(frozen=True)
class LeftoverRemoved(Event):
    """What a killed process left behind is gone: a file under a hidden name, an unfinished upload to this path."""


@dataclass(frozen=True)
class PassedOver(Event):
    """A checkpoint was looked at for resuming and cannot be used."""

    reason: str
    """Why, in words."""


@dataclass(frozen=True)
class Resumed(Event):
    """Training continues from the checkpoint."""

    step: int
    """Optimizer steps taken when it was saved."""


EVENT_TYPES: dict[str, type[Event]] = {
    cls.__name__: cls
    for cls in (
        SaveStarted,
        UploadStarted,
        SaveSkipped,
        AttemptOpened,
        FileWritten,
        FileSynced,
        DataWritten,
        DataSynced,
        Renamed,
        ReadBack,
        Committed,
        SaveFailed,
        DeleteStarted,
        DeleteHidden,
        Deleted,
        DeleteSkipped,
        LeftoverRemoved,
        PassedOver,
        Resumed,
    )
}

KILL_POINTS: tuple[str, ...] = (
    "SaveStarted",
    "AttemptOpened",
    "DataWritten",
    "DataSynced",
    "Renamed",
    "Committed",
    "DeleteStarted",
    "DeleteHidden",
    "Deleted",
)
"""In the order in which a save with a rotation emits them. Object stores have no `Renamed`, nor `DeleteHidden` for a
single file."""

# Of a checkpoint that is a directory; those of its files come once per file, on the rank that writes it.
DIRECTORY_KILL_POINTS: tuple[str, ...] = (
    *KILL_POINTS[: KILL_POINTS.index("DataWritten")],
    "FileWritten",
    "FileSynced",
    *KILL_POINTS[KILL_POINTS.index("DataWritten") :],
)

_lock = threading.Lock()
_observers: tuple[Callable[[Event], None], ...] = ()


def observe(callback: Callable[[Event], None]) -> Callable[[], None]:
    """`callback` is called with every event from now on, in the thread that emits it.

    What it raises reaches the emitter: an observer can make a save fail, which is what fault injection needs.

    Ranks: this one alone. Thread: any; events of a save come from the writer, so `callback` should be quick.

    Args:
        callback: Called with the event.

    Returns:
        A function that ends the registration; calling it again does nothing.
    """
    global _observers
    # A wrapper of its own identity, so that one callback registered twice can be un-registered once.
    registered = [callback]

    def call(event: Event) -> None:
        registered[0](event)

    def stop() -> None:
        global _observers
        with _lock:
            _observers = tuple(observer for observer in _observers if observer is not call)

    with _lock:
        _observers = (*_observers, call)
    return stop


def emit(event: Event) -> None:
    """Every observer has seen `event`, in the order of registration, or the first error is raised.

    Thread: main / writer. Observers run outside the lock: one may emit, observe or un-register.
    """
    # Logged first: an observer may be the one that kills the process here.
    logger.debug("%s", event)
    for observer in _observers:
        observer(event)
