"""What a run has learnt of its checkpoints: a small file beside them.

How often it was started from one without having saved a newer one; and which were read and found damaged, which their
manifests do not tell.

A checkpoint that can be loaded, and crashes the run a little later, would catch a job that restarts by itself for ever.
So a start is counted before the checkpoint is loaded, and the count is taken back when a newer checkpoint is durable,
or when the fit ends in a way for which no checkpoint is to blame. What is left over are crashes, kills by a scheduler
among them: from here they look alike.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_ft._names import STARTS_NAME, join, split
from lightning_ft.errors import ConfigurationError, DirectoryInUseError, RestoreError
from lightning_ft.exit_codes import ASKED_TO_END
from lightning_ft.manifest import CheckpointInfo
from lightning_ft.storage import Storage

_log = logging.getLogger(__name__)

_FORMAT = 1


@dataclass(frozen=True)
class Count:
    """Of one checkpoint."""

    name: str
    starts: int


@dataclass(frozen=True)
class Starts:
    """What the file says.

    Attributes:
        limit: After so many starts the checkpoint before is taken.
        counts: By generation of the checkpoint.
        damaged: The names of those in the directory of the file that were found damaged, by generation.
    """

    limit: int = 0
    counts: Mapping[str, Count] = field(default_factory=dict)
    damaged: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: bytes) -> Starts:
        """The inverse of `to_bytes`.

        Raises:
            ValueError: It is something else, or of a later version.
        """
        read = json.loads(data)
        if not isinstance(read, dict) or read.get("format") != _FORMAT:
            raise ValueError(f"format {read.get('format')!r} is not known" if isinstance(read, dict) else "no object")
        try:
            counts = {str(key): Count(str(of["name"]), int(of["starts"])) for key, of in read["starts"].items()}
            damaged = {str(key): str(name) for key, name in read.get("damaged", {}).items()}
            return cls(int(read["limit"]), counts, damaged)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def to_bytes(self) -> bytes:
        """As it is on disk."""
        counts = {key: {"name": count.name, "starts": count.starts} for key, count in self.counts.items()}
        said = {"format": _FORMAT, "limit": self.limit, "starts": counts}
        if self.damaged:
            said["damaged"] = dict(self.damaged)
        return json.dumps(said, indent=1).encode() + b"\n"

    def begun(self, generation: str, name: str) -> Starts:
        """One more start from a checkpoint."""
        starts = self.counts[generation].starts if generation in self.counts else 0
        return replace(self, counts={**self.counts, generation: Count(name, starts + 1)})

    def taken_back(self, generation: str) -> Starts:
        """One start less."""
        count = self.counts.get(generation)
        if count is None:
            return self
        counts = {key: of for key, of in self.counts.items() if key != generation}
        if count.starts > 1:
            counts[generation] = replace(count, starts=count.starts - 1)
        return replace(self, counts=counts)

    def progressed(self) -> Starts:
        """A newer checkpoint is durable: what did not reach the limit is forgotten."""
        return replace(self, counts={key: of for key, of in self.counts.items() if of.starts >= self.limit})

    def among(self, names: Iterable[str]) -> Starts:
        """Those of checkpoints that are still there."""
        present = frozenset(names)
        return replace(
            self,
            counts={key: of for key, of in self.counts.items() if of.name in present},
            damaged={key: name for key, name in self.damaged.items() if name in present},
        )

    def given_up(self, limit: int | None) -> dict[str, int]:
        """Of each checkpoint from which nothing is to be started any more, the number of starts; by generation."""
        return {key: of.starts for key, of in self.counts.items() if limit is not None and of.starts >= limit}


def read(storage: Storage, dirpath: str) -> Starts:
    """What the file in `dirpath` says; nothing, if it is gone or cannot be read: it only ever spares crashes."""
    path = join(dirpath, STARTS_NAME)
    try:
        with storage.open_read(path) as file:
            return Starts.parse(file.read())
    except FileNotFoundError:
        return Starts()
    except (ValueError, ArithmeticError, RecursionError, OSError) as error:
        _log.warning("%s cannot be read, so no start was counted: %s: %s", path, type(error).__name__, error)
        return Starts()


def is_no_fault(error: BaseException) -> bool:
    """Whether `error` ends a fit without telling anything of the checkpoint that it was started from."""
    if isinstance(error, SystemExit):
        return error.code in (None, 0, *ASKED_TO_END)
    return isinstance(error, (KeyboardInterrupt, ConfigurationError, DirectoryInUseError, RestoreError))


class StartCounter:
    """The file of one fit, in each of its directories. Ranks: zero, holding their locks.

    A file that cannot be written does no harm to the training: that is said.

    Args:
        directories: Each with its storage.
        limit: After so many starts the checkpoint before is taken; None: nothing is counted.
    """

    def __init__(self, directories: Mapping[str, Storage], limit: int | None) -> None:
        self._directories = directories
        self._limit = limit
        self._starts = Starts(limit or 0)  # but for what is damaged, which each directory has of its own
        self._damaged: dict[str, dict[str, str]] = {dirpath: {} for dirpath in directories}
        self._generation: str | None = None  # of the checkpoint that this fit was started from and counted for

    def open(self, names: Iterable[str]) -> None:
        """What was counted is known. Thread: main.

        Args:
            names: What is in the directories; without the file's own name among them nothing is read.
        """
        names = frozenset(names)
        if STARTS_NAME not in names:
            return
        for dirpath, storage in self._directories.items():
            found = self._tried(dirpath, lambda: read(storage, dirpath))  # noqa: B023 - called at once
            for generation, count in (found or Starts()).counts.items():
                known = self._starts.counts.get(generation, count)
                most = known if known.starts >= count.starts else count
                self._starts = replace(self._starts, counts={**self._starts.counts, generation: most})
            self._damaged[dirpath] = dict((found or Starts()).damaged)
        damaged = {
            dirpath: {key: name for key, name in of.items() if name in names} for dirpath, of in self._damaged.items()
        }
        starts = self._starts.among(names)
        self._change(replace(starts, counts={}) if self._limit is None else starts, damaged)

    @property
    def given_up(self) -> frozenset[str]:
        """Generations of the checkpoints from which nothing is to be started any more. Thread: any."""
        return frozenset(self._starts.given_up(self._limit))

    def damaged_in(self, dirpath: str) -> frozenset[str]:
        """Generations of the checkpoints in `dirpath` that were found damaged. Thread: any.

        A copy of one in another directory is of the same generation, and may be good.
        """
        return frozenset(self._damaged.get(dirpath, ()))

    def note_damaged(self, infos: Iterable[CheckpointInfo]) -> None:
        """These were read, and are not what was written. Thread: main. On disk after: that they are not."""
        damaged = {dirpath: dict(of) for dirpath, of in self._damaged.items()}
        for info in infos:
            dirpath = split(info.path)[0]
            if info.manifest is not None and dirpath in damaged:
                damaged[dirpath][info.manifest.generation] = info.name
        self._change(self._starts, damaged)

    def begin(self, generation: str, path: str) -> None:
        """The fit starts from a checkpoint, which was not loaded yet. Thread: main. On disk after: the count."""
        begun_in, name = split(path)
        starts, damaged = self._starts, {dirpath: dict(of) for dirpath, of in self._damaged.items()}
        damaged.get(begun_in, {}).pop(generation, None)  # it was, a while ago
        if self._limit is not None:
            self._generation = generation
            starts = starts.begun(generation, name)
        self._change(starts, damaged)

    def take_back(self) -> None:
        """The fit ends, or has ended, and the checkpoint is not to blame; may be repeated. Thread: main."""
        if self._generation is not None:
            self._change(self._starts.taken_back(self._generation))
            self._generation = None

    def progress(self) -> None:
        """A checkpoint of this fit is durable. Thread: writer."""
        if self._generation is not None:
            generation, self._generation = self._generation, None
            counts = {key: of for key, of in self._starts.counts.items() if key != generation}
            self._change(replace(self._starts, counts=counts).progressed())

    def forget(self, names: Iterable[str]) -> None:
        """These checkpoints were deleted: none of them is a damaged one. Thread: writer."""
        known = {of.name for of in self._starts.counts.values()}
        self._change(self._starts.among(known.difference(names)))

    def _change(self, counted: Starts, damaged: dict[str, dict[str, str]] | None = None) -> None:
        """The files say `counted`, each with what is `damaged` there, or are gone if that is nothing."""
        before = {dirpath: replace(self._starts, damaged=of) for dirpath, of in self._damaged.items()}
        self._starts = counted
        if damaged is not None:
            self._damaged = damaged
        for dirpath, storage in self._directories.items():
            starts = replace(counted, damaged=self._damaged[dirpath])
            if starts == before[dirpath]:
                continue
            path = join(dirpath, STARTS_NAME)
            if starts.counts or starts.damaged:
                self._tried(path, lambda: storage.replace(path, starts.to_bytes()))  # noqa: B023 - called at once
            else:
                self._tried(path, lambda: _removed(storage, path))  # noqa: B023 - called at once

    def _tried(self, path: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:  # stores have errors of their own classes
            _log.warning("starts are not counted in %s: %s: %s", path, type(error).__name__, error)
            return None


def _removed(storage: Storage, path: str) -> None:
    try:
        storage.remove_file(path)
    except FileNotFoundError:
        return
