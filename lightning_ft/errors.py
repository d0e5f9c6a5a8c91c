"""Everything this package raises on its own account, in one tree.

::

    Exception
    └── FaultToleranceError            anything below; catch this one to catch them all
        ├── ConfigurationError         an argument cannot be right (also a ValueError)
        ├── SaveError                  a checkpoint was not written; the ones before it are untouched
        ├── StorageError               a store did not do what it was asked for (also an OSError)
        ├── CheckpointError            something on disk cannot be used
        │   ├── CorruptCheckpointError     a file is damaged or incomplete
        │   ├── NoUsableCheckpointError    there are checkpoints, and none of them is good
        │   └── ManifestError              a manifest cannot be read or written
        │       └── UnsupportedFormatError     written by a version this one cannot read
        ├── RestoreError               a good checkpoint does not fit the present run
        │   └── TopologyError              ... because the number of ranks differs
        ├── DivergenceError            the loss is bad, and a guard ends the run (also a SystemExit)
        ├── DirectoryInUseError        another live process writes into the directory
        └── RankFailure                another rank failed and said so
            └── PeerLostError              ... or is gone, or far too late, and this one ends (also a SystemExit)

Every class survives pickling with its attributes and notes, because errors travel between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lightning_ft.exit_codes import DIVERGED, PEER_LOST


class FaultToleranceError(Exception):
    """Root of every error of this package."""

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException would call `cls(*args)`, which fails for every class whose constructor does not take
        # exactly what it passes on to `super().__init__`, subclasses written by users included.
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(cls: type[FaultToleranceError], args: tuple[Any, ...], state: dict[str, Any]) -> FaultToleranceError:
    """The error is as it was pickled, without its constructor having run again."""
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigurationError(FaultToleranceError, ValueError):
    """An argument, a directory or a combination of options cannot be right; nothing was started."""


class SaveError(FaultToleranceError):
    """A save failed; no checkpoint of that name became visible because of it, older ones are untouched.

    Attributes:
        path: Final name the checkpoint would have had.
        step: Optimizer step that was to be saved, if known by then.
    """

    def __init__(self, message: str, path: str = "", step: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.step = step


class StorageError(FaultToleranceError, OSError):
    """A store failed, or did not answer in time: says nothing about what it holds.

    What is missing or forbidden stays `FileNotFoundError` or `PermissionError`.

    Attributes:
        path: What was asked for.
        transient: Whether the same request may succeed a little later.
    """

    def __init__(self, message: str, path: str = "", transient: bool = False) -> None:
        super().__init__(message)
        self.path = path
        self.transient = transient


class CheckpointError(FaultToleranceError):
    """Something on disk cannot be used as a checkpoint."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint is damaged or incomplete; take an older one.

    Attributes:
        path: The damaged file.
        reason: What is wrong with it.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class NoUsableCheckpointError(CheckpointError):
    """A directory holds checkpoints and none is good, so that starting from zero would lose work silently.

    Attributes:
        dirpath: The directory that was searched.
        reasons: Each file with the reason why it cannot be used.
    """

    def __init__(self, dirpath: str, reasons: Iterable[tuple[str, str]]) -> None:
        self.dirpath = dirpath
        self.reasons = tuple((path, reason) for path, reason in reasons)
        files = "".join(f"\n  {path}: {reason}" for path, reason in self.reasons)
        super().__init__(
            f"{dirpath} holds {len(self.reasons)} checkpoint(s) and none of them can be used:{files}\n"
            "Repair or move these files away; with none of them left, training starts from the beginning."
        )


class ManifestError(CheckpointError):
    """A manifest cannot be read, or does not fit where it has to be written."""


class UnsupportedFormatError(ManifestError):
    """A checkpoint needs a newer version of this package; it is intact and must not be deleted."""


class RestoreError(FaultToleranceError):
    """A good checkpoint does not fit the present run; no training step was taken from it."""


class TopologyError(RestoreError):
    """A checkpoint of one number of ranks cannot be continued on another; no step was trained.

    Attributes:
        saved: Number of (data-parallel) ranks that wrote it.
        present: Number of them now.
    """

    def __init__(self, message: str, saved: int = 0, present: int = 0) -> None:
        super().__init__(message)
        self.saved = saved
        self.present = present


class DivergenceError(FaultToleranceError, SystemExit):
    """The loss was not finite, or too high, and `DivergenceGuard` ends the run; raised on all ranks at the same step.

    Uncaught, it ends the process with `exit_codes.DIVERGED`, without a traceback; what it says was logged before.

    Attributes:
        step: Optimizer steps taken.
        batch: The batch with the bad loss, numbered over the run from 1 on.
        losses: Per rank, its bad losses; empty for a rank that had none.
        indices: Per rank, per loader, the indices that the batch was made of; None where nobody knows them.
        emergency: The emergency checkpoint; empty if there is none.
        restart_from: The last finite checkpoint; empty if there is none.
    """

    code = DIVERGED

    def __init__(
        self,
        message: str,
        *,
        step: int = 0,
        batch: int = 0,
        losses: Sequence[Sequence[float]] = (),
        indices: Sequence[Sequence[Any]] = (),
        emergency: str = "",
        restart_from: str = "",
    ) -> None:
        super().__init__(message)
        self.step = step
        self.batch = batch
        self.losses = tuple(tuple(each) for each in losses)
        self.indices = tuple(tuple(each) for each in indices)
        self.emergency = emergency
        self.restart_from = restart_from


class DirectoryInUseError(FaultToleranceError):
    """Another live process, or another trainer of this one, writes checkpoints into the directory."""


class RankFailure(FaultToleranceError):
    """Another rank failed; raised on its peers, so that they stop with its reason and not in a timeout.

    Attributes:
        rank: The rank that failed.
        message: Its error, as text.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank} failed: {message}")
        self.rank = rank
        self.message = message


class PeerLostError(RankFailure, SystemExit):
    """Another rank has failed, is gone, or is late beyond its time; if it has failed, it has the traceback.

    Uncaught, it ends the process with `exit_codes.PEER_LOST`, so that a scheduler can tell the rank that failed from
    those that lost it. Python prints nothing then: it is in the log before it is raised.

    Attributes:
        rank: The first of `ranks`; -1 if that cannot be told.
        message: Its error, or what is known of it, as text.
        ranks: All that are lost, as far as that can be told.
    """

    code = PEER_LOST

    def __init__(self, rank: int, message: str, ranks: Sequence[int] | None = None) -> None:
        super().__init__(rank, message)
        if rank < 0:
            self.args = (message,)
        self.ranks = tuple(ranks) if ranks is not None else (rank,)
