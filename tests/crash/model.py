"""What a disk may hold after a crash, computed from a log of every operation: the adversary that no real disk is.

The model is weaker than any file system we know: of what was not synced, *any* part may be there.

- A write is durable once its file was synced. Before, it may be there, missing, or there in some of its blocks.
- A name (of a new file, a rename, an unlink) is durable once its directory was synced. Before, any of these changes may
  have happened or not, in any order; each by itself is atomic. Syncing a file promises nothing about its name.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

BLOCK_BYTES = 512
MANY = 500
"""Combinations of contents of several files, of which not all are tried if there are more."""
ROOT = 0
"""The inode of the directory everything is below; it exists and is durable."""

Name = tuple[int, str]
"""A directory, by its inode, and a name in it."""


@dataclass(frozen=True)
class Names:
    """One atomic change of names: each one now stands for an inode, or for nothing (None)."""

    changes: tuple[tuple[Name, int | None], ...]


@dataclass(frozen=True)
class Write:
    """Bytes of a file."""

    inode: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Size:
    """The size of a file, cut or filled up with zeros."""

    inode: int
    size_bytes: int


@dataclass(frozen=True)
class Sync:
    """A file or a directory was synced."""

    inode: int


@dataclass(frozen=True)
class Reported:
    """The checkpoint of this step was said to be durable."""

    step: int


Operation = Names | Write | Size | Sync | Reported


@dataclass
class Disk:
    """Names and contents, all durable."""

    names: dict[Name, int] = field(default_factory=dict)
    files: dict[int, bytes] = field(default_factory=dict)

    def directory(self, path: Sequence[str]) -> dict[str, bytes] | None:
        """The files in the directory `path`, None if there is no such directory."""
        inode = ROOT
        for part in path:
            found = self.names.get((inode, part))
            if found is None:
                return None
            inode = found
        return {name: self.files[i] for (where, name), i in self.names.items() if where == inode and i in self.files}

    def tree(self, path: Sequence[str], directories: Collection[int]) -> dict[str, bytes | dict[str, bytes]] | None:
        """As `directory`, with those in it that are directories, and their files."""
        files = self.directory(path)
        if files is None:
            return None
        inode = ROOT
        for part in path:
            inode = self.names[inode, part]
        inside = {name for (where, name), i in self.names.items() if where == inode and i in directories}
        return {**files, **{name: self.directory([*path, name]) or {} for name in inside}}


@dataclass
class State:
    """A disk whose last changes are not all durable."""

    durable: Disk
    names: list[Names] = field(default_factory=list)
    data: dict[int, list[Write | Size]] = field(default_factory=dict)
    reported: list[int] = field(default_factory=list)
    lying: bool = False
    """Whether the disk acknowledges the syncs of files and does nothing."""
    _variants: dict[int, list[bytes]] = field(default_factory=dict)

    def apply(self, operation: Operation) -> None:
        """`operation` has returned."""
        if isinstance(operation, Names):
            self.names.append(operation)
            for _, inode in operation.changes:
                if inode is not None:
                    self.durable.files.setdefault(inode, b"")
        elif isinstance(operation, Reported):
            self.reported.append(operation.step)
        elif isinstance(operation, Sync):
            self._sync(operation.inode)
        else:
            self.data.setdefault(operation.inode, []).append(operation)
            self._variants.pop(operation.inode, None)

    def _torn_contents(self, inode: int, seed: int) -> list[bytes]:
        if inode not in self._variants:
            found = _torn_contents(self.durable.files.get(inode, b""), self.data[inode], seed)
            self._variants[inode] = list(found)
        return self._variants[inode]

    def _sync(self, inode: int) -> None:
        if not self.lying:
            self.durable.files[inode] = _content(self.durable.files.get(inode, b""), self.data.pop(inode, []))
            self._variants.pop(inode, None)
        here = [change for change in self.names if any(name[0] == inode for name, _ in change.changes)]
        self.durable.names = _named(self.durable.names, here)
        self.names = [change for change in self.names if change not in here]

    def intact(self) -> Disk:
        """The disk without a crash."""
        files = {inode: _content(data, self.data.get(inode, [])) for inode, data in self.durable.files.items()}
        return Disk(_named(self.durable.names, self.names), files)

    def crashed(self, seed: int) -> Iterator[Disk]:
        """What the disk may hold after a crash now.

        All subsets and orders of few changes; of many, those that are likeliest to hurt, and some by chance.
        """
        contents = {inode: self._torn_contents(inode, seed) for inode in self.data}
        for names in _name_states(self.durable.names, self.names, seed):
            there = {inode: contents[inode] for inode in contents if inode in names.values()}
            for chosen in _choices(there, seed):
                yield Disk(names, {**self.durable.files, **chosen})


def _choices(contents: dict[int, list[bytes]], seed: int) -> Iterator[dict[int, bytes]]:
    """One content per inode: all combinations of few, and of many each content with the others as whole as can be."""
    if math.prod(len(variants) for variants in contents.values()) <= MANY:
        for chosen in itertools.product(*contents.values()):
            yield dict(zip(contents, chosen, strict=True))
        return
    whole = {inode: variants[0] for inode, variants in contents.items()}
    for inode, variants in contents.items():
        for data in variants:
            yield {**whole, inode: data}
    chance = random.Random(seed)
    for _ in range(50):
        yield {inode: chance.choice(variants) for inode, variants in contents.items()}


def _named(names: dict[Name, int], changes: Sequence[Names]) -> dict[Name, int]:
    result = dict(names)
    for change in changes:
        for name, inode in change.changes:
            if inode is None:
                result.pop(name, None)
            else:
                result[name] = inode
    return result


def _content(data: bytes, changes: Sequence[Write | Size]) -> bytes:
    result = bytearray(data)
    for change in changes:
        if isinstance(change, Size):
            del result[change.size_bytes :]
            result.extend(bytes(change.size_bytes - len(result)))
        else:
            result.extend(bytes(max(0, change.offset - len(result))))
            result[change.offset : change.offset + len(change.data)] = change.data
    return bytes(result)


def _name_states(names: dict[Name, int], pending: Sequence[Names], seed: int) -> Iterator[dict[Name, int]]:
    seen = set()
    for chosen in _orders(pending, seed):
        found = _named(names, chosen)
        key = frozenset(found.items())
        if key not in seen:
            seen.add(key)
            yield found


def _orders(pending: Sequence[Names], seed: int) -> Iterator[Sequence[Names]]:
    if len(pending) <= 4:
        for size in range(len(pending) + 1):
            yield from itertools.permutations(pending, size)
        return
    yield from _some_subsets(pending, seed, 40)
    order = random.Random(seed)
    for _ in range(40):
        yield order.sample(pending, order.randint(0, len(pending)))


def _some_subsets(pending: Sequence[Names], seed: int, number: int) -> Iterator[Sequence[Names]]:
    """Each prefix, all but each one, and some by chance, in their order."""
    for at in range(len(pending) + 1):
        yield pending[:at]
        yield [*pending[:at], *pending[at + 1 :]]
    chance = random.Random(seed)
    for _ in range(number):
        yield [one for one in pending if chance.random() < 0.5]


def _torn_contents(data: bytes, pending: Sequence[Write | Size], seed: int) -> Iterator[bytes]:
    seen = set()
    for changes in _torn(pending, seed):
        found = _content(data, changes)
        if found not in seen:
            seen.add(found)
            yield found


def _torn(pending: Sequence[Write | Size], seed: int) -> Iterator[Sequence[Write | Size]]:
    """All of the changes, then some, then of one of them only some blocks."""
    yield pending
    if len(pending) <= 8:
        for chosen in itertools.product((True, False), repeat=len(pending)):
            yield [change for change, there in zip(pending, chosen, strict=True) if there]
    else:
        for at in range(len(pending) + 1):
            yield pending[:at]
            yield [*pending[:at], *pending[at + 1 :]]
        chance = random.Random(seed)
        for _ in range(16):
            yield [change for change in pending if chance.random() < 0.5]
    for at, change in enumerate(pending):
        if isinstance(change, Write):
            for part in _parts(change):
                yield [*pending[:at], part]
                yield [*pending[:at], part, *pending[at + 1 :]]


def _parts(write: Write) -> Iterator[Write]:
    """Only the blocks before, and only those after, each boundary within the write."""
    for cut in range(-write.offset % BLOCK_BYTES or BLOCK_BYTES, len(write.data), BLOCK_BYTES):
        yield Write(write.inode, write.offset, write.data[:cut])
        yield Write(write.inode, write.offset + cut, write.data[cut:])
