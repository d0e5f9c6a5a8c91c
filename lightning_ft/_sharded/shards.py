"""A sharded checkpoint as it is on disk: what is in it, and reading parts of it, verified.

A directory in the layout of `torch.distributed.checkpoint` as Lightning writes it: ``.metadata`` says which tensor is
in which piece of which ``__R_N.distcp``, ``meta.pt`` holds all the rest, and, if it is ours, ``manifest.json`` the size
and the digest of each of these files.
"""

from __future__ import annotations

import io
import itertools
import logging
import math
import pathlib
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_ft._names import is_local, join
from lightning_ft._sharded.places import Piece
from lightning_ft._sharded.wrappers import plain_name
from lightning_ft.errors import CheckpointError, CorruptCheckpointError
from lightning_ft.manifest import METADATA, REST, FileRecord, Manifest
from lightning_ft.storage import Storage

_log = logging.getLogger(__name__)

Depth = Literal["full", "size", "off"]
# Under which of these the weights are depends on the strategy that saved them.
_WEIGHTS = ("state_dict", "model")
_DCP = "torch.distributed.checkpoint."
_OPTIMIZER = re.compile(r"optimizer_([0-9]+)\Z")
# Beyond so many, files are opened and verified when they are read and closed then, whatever was verified before.
_MOST_OPEN = 256


@dataclass(frozen=True)
class Saved:
    """One entry of a directory; `shape` and `dtype` are those of the whole tensor, None if it is no tensor."""

    key: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor, in pieces, and not a pickled object."""
        return self.shape is not None


@dataclass(frozen=True)
class Wanted:
    """Pieces of a saved tensor, and where they go: parts of `into`, memory of this rank that nobody reads yet."""

    saved: Saved
    pieces: tuple[Piece, ...]
    into: Callable[[], Tensor]

    @property
    def parts(self) -> list[Piece]:
        """The pieces with anything in them."""
        return [piece for piece in self.pieces if piece.numel]


class Shards:
    """One sharded checkpoint, opened to be read. Close it: it may hold files open.

    Thread: main. Asks nothing of other ranks.

    Args:
        storage: Where it is.
        path: The directory.
        depth: How much is verified: see `FaultTolerantCheckpointIO`. Nothing can be without a manifest.

    Raises:
        CheckpointError: It is no directory of this kind, or a part of it is not readable or not what was written.
    """

    def __init__(self, storage: Storage, path: str, depth: Depth) -> None:
        self.path = path
        self._storage = storage
        self._depth = depth
        self._open_files: dict[str, BinaryIO] = {}
        self._held = ExitStack()
        self.manifest: Manifest | None = self._read_manifest()
        self._compared = self.manifest is not None and depth == "full"
        self._metadata = self._read_metadata()
        self.weights: dict[str, Saved] = {}
        """By plain name, in the order in which they were saved."""
        self.nested: dict[str, Any] = {}
        """What is among the weights and is no tensor, but a tree of values as in `optimizers`."""
        self.optimizers: list[dict[str, Any]] = []
        """Trees of dictionaries and lists with `Saved` for leaves: ``{"state": ..., "param_groups": ...}``."""
        self._sort_entries()

    def close(self) -> None:
        """No file is open."""
        self._open_files = {}
        self._held.close()

    # -- what is in it -------------------------------------------------------------------------------------------

    def _read_manifest(self) -> Manifest | None:
        try:
            return self._storage.read_manifest(self.path)[0]
        except IsADirectoryError as error:
            raise CorruptCheckpointError(
                self.path,
                f"is a directory without {METADATA}, neither a checkpoint file nor a sharded one; give a checkpoint in "
                'it (lightning-ft list shows them), or ckpt_path="last"',
            ) from error

    def _read_metadata(self) -> Metadata:
        try:
            with self._opened(METADATA) as file:
                data = file.read()
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.path} is neither a checkpoint file nor a sharded one: it has no {METADATA}"
            ) from error
        try:
            metadata = _Unpickler(io.BytesIO(data)).load()
        except Exception as error:  # whatever damaged pickles raise
            raise CorruptCheckpointError(
                self.path, f"{METADATA} cannot be read: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(metadata, Metadata) or metadata.storage_data is None or metadata.planner_data is None:
            raise CorruptCheckpointError(self.path, f"{METADATA} does not say what is where")
        for index, info in metadata.storage_data.items():
            if getattr(info, "transform_descriptors", None):
                raise CheckpointError(
                    f"{self.path}: {index.fqn} was written through an extension; that is not read here"
                )
        return metadata

    def _sort_entries(self) -> None:
        optimizers: dict[int, dict[str, Any]] = {}
        for key, entry in self._metadata.state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata):
                saved = Saved(key, tuple(entry.size), entry.properties.dtype)
            else:
                saved = Saved(key, None, None)
            path = self._metadata.planner_data.get(key, (key,))
            if path[0] in _WEIGHTS and len(path) == 2:
                self.weights[plain_name(str(path[1]))] = saved
            elif path[0] in _WEIGHTS and len(path) > 2:
                put(self.nested, (plain_name(str(path[1])), *path[2:]), saved)
            elif (match := _OPTIMIZER.match(str(path[0]))) and len(path) > 1:
                put(optimizers.setdefault(int(match[1]), {}), path[1:], saved)
            else:
                raise CheckpointError(
                    f"{self.path} holds {key!r}, which belongs neither to a model nor to an optimizer: Lightning's "
                    "Trainer has not written it"
                )
        if sorted(optimizers) != list(range(len(optimizers))):
            raise CorruptCheckpointError(
                self.path, f"it holds the optimizers {sorted(optimizers)} and not those between"
            )
        self.optimizers = [
            {"state": tree.get("state", {}), "param_groups": tree.get("param_groups", [])}
            for _, tree in sorted(optimizers.items())
        ]

    def read_rest(self, weights_only: bool | None) -> dict[str, Any]:
        """Everything that is neither weights nor optimizer state: what Lightning's strategy returns from a load."""
        try:
            with self._opened(REST) as file:
                rest: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only)
        except FileNotFoundError as error:
            raise CorruptCheckpointError(self.path, f"{REST} is missing") from error
        except (CheckpointError, OSError):
            raise
        except Exception as error:  # whatever damaged pickles raise, and what holds more than is allowed
            reason = f"{REST} cannot be read: {type(error).__name__}: {error}"
            raise CorruptCheckpointError(self.path, reason) from error
        return rest

    # -- verification --------------------------------------------------------------------------------------------

    def files_of(self, entries: Iterable[Saved]) -> set[str]:
        """The files in which `entries` are, whole."""
        return {self._file_of(index) for saved in entries for index in self._indices(saved)}

    def files_wanted(self, wanted: Iterable[Wanted]) -> set[str]:
        """The files in which `wanted` is."""
        return {self._file_of(item.storage_index) for one in wanted for item in self._items(one)}

    def check_presence(self) -> None:
        """Every file that ``.metadata`` tells of is there, and as large as what it says is in it.

        Raises:
            CorruptCheckpointError: One is not.
        """
        needed: dict[str, int] = {}
        for info in self._metadata.storage_data.values():
            needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
        records = self._records()
        for name, least_bytes in sorted(needed.items()):
            try:
                size_bytes = self._storage.size(join(self.path, name))
            except FileNotFoundError as error:
                raise CorruptCheckpointError(self.path, f"{name} is missing") from error
            if size_bytes < least_bytes:
                raise CorruptCheckpointError(self.path, f"{name} has {size_bytes} bytes and not {least_bytes}")
            if records and name not in records:
                raise CorruptCheckpointError(self.path, f"{name} is not in the manifest")

    def verify(self, names: Iterable[str]) -> None:
        """These files are what was written, as deep as asked for, and those very bytes will be read.

        Raises:
            CorruptCheckpointError: One is not.
        """
        if not self._compared:
            return
        new = sorted(set(names) - self._open_files.keys())  # of a store, what is held need not be fetched again
        held = len(self._open_files) + len(new) <= _MOST_OPEN
        for name in new:
            if held:
                self._open_files[name] = self._held.enter_context(self._open(name))
            else:
                self._open(name).close()

    def verify_only(self, names: Iterable[str]) -> None:
        """As `verify`, on behalf of other ranks: nothing of these files will be read here.

        Of local files only: what comes from a store may be damaged on the way to any reader.
        """
        if self._compared and is_local(self.path):
            for name in names:
                self._open(name).close()

    def trust(self) -> None:
        """Its files were compared a moment ago, by this process or another rank: they are not again."""
        if is_local(self.path):
            self._compared = False

    def _records(self) -> dict[str, FileRecord]:
        return self.manifest.files if self.manifest is not None else {}

    def _open(self, name: str) -> BinaryIO:
        if not self._compared:
            return self._storage.open_read(join(self.path, name))
        record = self._records().get(name)
        if record is None:
            raise CorruptCheckpointError(self.path, f"{name} is not in the manifest")
        return self._storage.open_verified_file(self.path, name, record)

    def _opened(self, name: str) -> _Opened:
        held = self._open_files.get(name)
        return _Opened(held, kept=True) if held is not None else _Opened(self._open(name), kept=False)

    # -- reading -------------------------------------------------------------------------------------------------

    def read_objects(
        self, entries: Iterable[Saved], weights_only: bool | None, progress: Callable[[int], None] = lambda _: None
    ) -> dict[str, Any]:
        """Whole values by key: tensors on the CPU, and whatever else was pickled. Each file is opened once."""
        entries = list(entries)
        found: dict[str, Any] = {}
        whole = [saved for saved in entries if saved.is_tensor]
        for saved in whole:
            found[saved.key] = torch.empty(saved.shape or (), dtype=saved.dtype)
        wanted = [
            Wanted(saved, (Piece.whole(saved.shape or ()),), (lambda tensor: lambda: tensor)(found[saved.key]))
            for saved in whole
        ]
        self.read(wanted, progress)
        pickled = [(index, saved.key) for saved in entries if not saved.is_tensor for index in self._indices(saved)]
        for name, items in self._by_file(pickled, key=lambda item: item[0]):
            with self._opened(name) as file:
                for index, key in items:
                    found[key] = self._unpickled(file, index, weights_only is not False)
        return found

    def read(self, wanted: Iterable[Wanted], progress: Callable[[int], None] = lambda _: None) -> None:
        """Everything `wanted` is where it belongs. Memory beside that: one saved piece of a tensor.

        Each file is read once, from its beginning to its end.

        Raises:
            CorruptCheckpointError: Something of it is not in the files.
        """
        items = [(item, one) for one in wanted for item in self._items(one)]
        for name, of_file in self._by_file(items, key=lambda pair: pair[0].storage_index):
            with self._opened(name) as file:
                piece, at = None, None
                for item, one in of_file:
                    if item.storage_index != at:  # several destinations may share one saved piece
                        piece, at = self._piece(file, item.storage_index), item.storage_index
                        progress(self._info(item.storage_index).length)
                    assert piece is not None
                    source = piece
                    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                        source = source.narrow(dimension, offset, length)
                    assert item.dest_index.index is not None
                    target = one.parts[item.dest_index.index].part_of(one.into())
                    for dimension, (offset, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
                        target = target.narrow(dimension, offset, length)
                    with torch.no_grad():
                        target.copy_(source)

    def _items(self, one: Wanted) -> list[Any]:
        """What of which saved pieces goes where; together they are all that is wanted."""
        entry = self._metadata.state_dict_metadata[one.saved.key]
        assert isinstance(entry, TensorStorageMetadata)
        parts = one.parts
        items = create_read_items_for_chunk_list(one.saved.key, entry, [piece.chunk() for piece in parts])
        if sum(math.prod(item.lengths) for item in items) != sum(piece.numel for piece in parts):
            raise CorruptCheckpointError(self.path, f"the pieces of {one.saved.key} are not the whole of it")
        return items

    def _piece(self, file: BinaryIO, index: Any) -> Tensor:
        tensor = self._unpickled(file, index, weights_only=True)
        if not isinstance(tensor, Tensor):
            raise CorruptCheckpointError(self.path, f"{index.fqn} is no tensor")
        return tensor

    def _unpickled(self, file: BinaryIO, index: Any, weights_only: bool) -> Any:
        data = io.BytesIO(self._bytes_of(file, index))
        try:
            return torch.load(data, map_location="cpu", weights_only=weights_only)
        except Exception as error:  # whatever damaged pickles raise
            reason = f"{index.fqn} in {self._file_of(index)} cannot be read: {type(error).__name__}: {error}"
            raise CorruptCheckpointError(self.path, reason) from error

    def _bytes_of(self, file: BinaryIO, index: Any) -> bytes:
        info = self._info(index)
        file.seek(info.offset)
        data = file.read(info.length)
        if len(data) != info.length:
            raise CorruptCheckpointError(self.path, f"{info.relative_path} ends within {index.fqn}")
        return data

    def _info(self, index: Any) -> Any:
        try:
            return self._metadata.storage_data[index]
        except KeyError as error:
            raise CorruptCheckpointError(self.path, f"{METADATA} does not say where {index.fqn} is") from error

    def _file_of(self, index: Any) -> str:
        return str(self._info(index).relative_path)

    def _indices(self, saved: Saved) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex

        entry = self._metadata.state_dict_metadata[saved.key]
        if isinstance(entry, TensorStorageMetadata):
            return [MetadataIndex(saved.key, chunk.offsets) for chunk in entry.chunks]
        return [MetadataIndex(saved.key)]

    def _by_file(self, items: list[Any], key: Callable[[Any], Any]) -> Iterator[tuple[str, list[Any]]]:
        files: dict[str, list[Any]] = {}
        for item in items:
            files.setdefault(self._file_of(key(item)), []).append(item)
        for name in sorted(files):
            yield name, sorted(files[name], key=lambda item: self._info(key(item)).offset)


class _Opened:
    """A file for a ``with``, which closes it unless it is kept open for more."""

    def __init__(self, file: BinaryIO, *, kept: bool) -> None:
        self._file, self._kept = file, kept

    def __enter__(self) -> BinaryIO:
        self._file.seek(0)
        return self._file

    def __exit__(self, *_: object) -> None:
        if not self._kept:
            self._file.close()


class _Unpickler(pickle.Unpickler):
    """Reads ``.metadata`` and executes nothing else: a pickle may name any function."""

    _ALLOWED = frozenset(
        {("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"), ("builtins", "set")}
    )

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # its name in pickles of Python 3.13
        found = super().find_class(module, name) if self._is_known(module, name) else None
        if found is None or (module == "torch" and not (name == "Size" or isinstance(found, torch.dtype))):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in it")
        return found

    def _is_known(self, module: str, name: str) -> bool:
        if module == "pathlib":
            found = getattr(pathlib, name, None)
            return isinstance(found, type) and issubclass(found, pathlib.PurePath)
        if module.startswith(_DCP):
            # A class of its own, and not one that a module of it has imported.
            found = getattr(import_module(module), name, None)
            return isinstance(found, type) and found.__module__.startswith(_DCP)
        return module == "torch" or (module, name) in self._ALLOWED


def leaves(tree: Any) -> list[Saved]:
    """Everything saved in a tree of `Shards.optimizers`."""
    if isinstance(tree, Saved):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [leaf for child in children for leaf in leaves(child)]


def with_values(tree: Any, objects: dict[str, Any]) -> Any:
    """`tree` with values, by key, in place of what stands for them."""
    if isinstance(tree, Saved):
        return objects[tree.key]
    if isinstance(tree, dict):
        return {name: with_values(child, objects) for name, child in tree.items()}
    return [with_values(child, objects) for child in tree] if isinstance(tree, list) else tree


def put(tree: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    """`value` is in `tree` at `path`, whose integers are positions in lists."""
    container: Any = tree
    for here, after in itertools.pairwise(path):
        empty: Any = [] if isinstance(after, int) else {}
        if isinstance(here, int):
            container.extend([None] * (here + 1 - len(container)))
            if container[here] is None:
                container[here] = empty
            container = container[here]
        else:
            container = container.setdefault(here, empty)
    if isinstance(path[-1], int):
        container.extend([None] * (path[-1] + 1 - len(container)))
    container[path[-1]] = value
