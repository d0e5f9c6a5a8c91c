"""Every state a crash may leave, shown to discovery: it has to take a good checkpoint, the newest reported or newer."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import lightning_ft as ft
from lightning_ft import discovery
from lightning_ft._names import parse_checkpoint_name, parse_leftover
from tests.crash.model import Disk, Names, Operation, Reported, State


@dataclass
class Explored:
    """What was seen."""

    prefixes: int = 0
    states: int = 0
    """That differ, as what is on the disk and what had been reported go."""
    violations: list[str] = field(default_factory=list)
    later: list[tuple[Disk, list[int]]] = field(default_factory=list)
    """Some of the states, each with the steps reported before: to start again from."""


class Shop(Protocol):
    """Shows files to the code under test."""

    def is_good(self, data: bytes) -> bool:
        """Whether a checkpoint of these bytes verifies in full."""

    def choose(self, files: dict[str, bytes]) -> str | None:
        """The name of the one that a directory of these files is resumed from."""


class LocalShop:
    """Shows a directory of a real file system.

    Args:
        place: An empty directory.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._files: dict[bytes, Path] = {}
        self._shown = 0

    def is_good(self, data: bytes) -> bool:
        return ft.verify(str(self._file(data))).problem is None

    def choose(self, files: dict[str, bytes]) -> str | None:
        self._shown += 1
        shown = self._place / f"shown-{self._shown}"
        shown.mkdir()
        for name, data in files.items():
            os.link(self._file(data), shown / name)
        chosen = discovery.select(str(shown)).chosen
        return None if chosen is None else chosen.name

    def _file(self, data: bytes) -> Path:
        if data not in self._files:
            self._files[data] = self._place / str(len(self._files))
            self._files[data].write_bytes(data)
        return self._files[data]


class Explorer:
    """Judges the states of the directory `path`.

    Args:
        shop: See there.
        path: Of the checkpoints, below the root of the log.
        keep: So many good ones have to be there, once so many were reported.
    """

    def __init__(self, shop: Shop, path: Sequence[str], keep: int) -> None:
        self._shop = shop
        self._path = path
        self._keep = keep
        self._whole: dict[str, int] = {}
        self._digests: dict[bytes, str] = {}
        self._data: dict[str, bytes] = {}
        self._good: dict[str, bool] = {}
        self._chosen: dict[frozenset[tuple[str, str]], str | None] = {}

    def explore(
        self,
        log: Sequence[Operation],
        base: Disk,
        *,
        reported: Iterable[int] = (),
        lying: bool = False,
        every: int = 10**9,
        enough: int = 50,
    ) -> Explored:
        """What is wrong in any state after any prefix of `log`.

        Args:
            log: See `model.Operation`.
            base: What was there before, durable.
            reported: The steps reported before.
            lying: Files are not synced by syncing them. All that is asked for then: nothing broken is taken, and the
                newest that is whole is.
            every: Of so many states one is kept in `Explored.later`.
            enough: Violations, after which no more are looked for.
        """
        self._learn(log, base)
        found = Explored()
        seen = set()
        state = State(Disk(dict(base.names), dict(base.files)), reported=list(reported), lying=lying)
        for number, operation in enumerate(log):
            state.apply(operation)
            found.prefixes += 1
            for disk in state.crashed(number):
                files = disk.directory(self._path)
                names = {name: self._keep_content(data) for name, data in (files or {}).items()}
                key = (frozenset(names.items()), files is None, len(state.reported))
                if key in seen:
                    continue
                seen.add(key)
                found.states += 1
                if found.states % every == 0:
                    found.later.append((disk, list(state.reported)))
                wrong = self._broken(names) if lying else self._wrong(names, set(state.reported))
                if wrong:
                    found.violations.append(f"after operation {number}, {_short(operation)}: {wrong}")
                    if len(found.violations) == enough:
                        return found
        return found

    def _learn(self, log: Sequence[Operation], base: Disk) -> None:
        """What the whole files are: as they were when they were last seen under their names by a living process."""
        state = State(Disk(dict(base.names), dict(base.files)))
        last = {}
        for operation in [None, *log]:
            if operation is not None:
                state.apply(operation)
            if operation is None or isinstance(operation, (Names, Reported)):
                last.update(state.intact().directory(self._path) or {})
        for name, data in last.items():
            if parsed := parse_checkpoint_name(name):
                self._whole[self._keep_content(data)] = parsed[0]

    def _keep_content(self, data: bytes) -> str:
        digest = self._digests.get(data)
        if digest is None:
            digest = self._digests[data] = hashlib.blake2b(data, digest_size=16).hexdigest()
            self._data[digest] = data
            self._good[digest] = self._shop.is_good(data)
        return digest

    def _broken(self, names: dict[str, str]) -> str:
        """What discovery says that is not true."""
        shown = {name: digest for name, digest in names.items() if not parse_leftover(name)}
        wrong = [name for name, digest in shown.items() if self._good[digest] != (digest in self._whole)]
        if wrong:
            return f"good, or not good, wrongly: {wrong}"
        chosen = self._choose(names)
        newest = max((self._whole[d] for d in shown.values() if d in self._whole), default=None)
        taken = None if chosen is None else self._whole.get(shown[chosen])
        return "" if taken == newest else f"{chosen} is taken, and step {newest} is the newest whole one"

    def _wrong(self, names: dict[str, str], reported: set[int]) -> str:
        """The same, and what our protocol promises."""
        if wrong := self._broken(names):
            return wrong
        shown = {name: digest for name, digest in names.items() if not parse_leftover(name)}
        torn = [name for name, digest in shown.items() if digest not in self._whole]
        if torn:
            return f"not whole under their final names: {torn}"
        steps = {self._whole[digest] for digest in shown.values()}
        newest = max(reported, default=0)
        if reported and max(steps, default=0) < newest:
            return f"step {newest} was reported, and of {sorted(steps)} none is as new"
        if len(steps) < min(self._keep, len(reported)):
            return f"{len(steps)} are left of {len(reported)} reported, and {self._keep} are to be kept"
        return ""

    def _choose(self, names: dict[str, str]) -> str | None:
        key = frozenset(names.items())
        if key not in self._chosen:
            self._chosen[key] = self._shop.choose({name: self._data[digest] for name, digest in names.items()})
        return self._chosen[key]


def lay_out(disk: Disk, path: Sequence[str], root: Path) -> None:
    """The directory `path` below `root` holds what it holds on `disk`."""
    files = disk.directory(path)
    if files is None:
        return
    target = root.joinpath(*path)
    target.mkdir(parents=True)
    for name, data in files.items():
        (target / name).write_bytes(data)


def _short(operation: Operation) -> str:
    text = repr(operation)
    return text if len(text) < 200 else f"{text[:90]}...{text[-90:]}"
