"""A checkpoint that one rank has loaded, on all ranks: its structure as a pickle, its tensors from memory to memory.

====================  ================================  ========================================================
Step (in this order)  Rank 0                            The others
====================  ================================  ========================================================
load                  has the checkpoint                wait
structure             sends all that is no tensor data  have it, as a pickle
memory                nothing                           have memory for the data of every tensor
data                  sends it, piece by piece          receive it, in place
build                 nothing                           have the checkpoint
====================  ================================  ========================================================

After "load", "memory" and "build" all ranks know whether one of them has failed. Memory: one copy of the checkpoint per
rank, as when each loads for itself, and `BUCKET_BYTES`; on rank 0, three times what the structure takes, too.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_ft._hang import headway
from lightning_ft._ranks.dist import Ranks
from lightning_ft.errors import ConfigurationError, RestoreError

# Smaller tensors are sent together: a message takes as long as some hundred KiB.
BUCKET_BYTES = 4 << 20
# One message: what a rank that has died is noticed after, and small enough for any backend.
PIECE_BYTES = 64 << 20


def load_once(load: Callable[[], Any], map_location: Any | None) -> Any:
    """As `load_on_zero`, among all processes there are. Ranks: all, whether or not they have told each other anything.

    Raises:
        ConfigurationError: `map_location` is something else than the CPU.
    """
    if map_location not in (None, "cpu", torch.device("cpu")):
        raise ConfigurationError(f'map_location={map_location!r}: load="broadcast" loads to the CPU; leave it out')
    with contextlib.closing(Ranks()) as ranks:
        return load_on_zero(ranks, load)


def load_on_zero(ranks: Ranks, load: Callable[[], Any]) -> Any:
    """What ``load()`` returns on rank 0, which alone calls it, on every rank; tensors on the CPU.

    Tensors that share memory do so on every rank.

    Ranks: all. Thread: main. Blocks on: rank 0's `load`, and all ranks.

    Raises:
        FaultToleranceError: Rank 0's, on every rank, or that of a rank that cannot hold what it is sent.
        RankFailure: In place of an error of another tree, on the ranks where it did not happen.
        RestoreError: What was loaded cannot be sent.
    """
    if ranks.world_size == 1:
        return load()
    loaded: list[Any] = []
    storages: list[torch.UntypedStorage] = []

    def read() -> tuple[bytes, list[int]]:
        loaded.append(load())
        structure = _take_apart(loaded[0], storages)
        return structure, [storage.nbytes() for storage in storages]

    structure, sizes_bytes = ranks.decide(read)
    if not ranks.is_zero:
        storages += ranks.together(lambda: [_memory(size_bytes) for size_bytes in sizes_bytes])
        _send(ranks, storages)
        return ranks.together(lambda: _Together(io.BytesIO(structure), storages).load())
    ranks.together(lambda: None)
    _send(ranks, storages)
    return ranks.together(lambda: loaded[0])


def _take_apart(value: Any, storages: list[torch.UntypedStorage]) -> bytes:
    """A pickle of `value` without the data of its tensors, which are added to `storages`."""
    stream = io.BytesIO()
    try:
        _Apart(stream, storages).dump(value)
    except Exception as error:  # whatever a user's class does when pickled
        raise RestoreError(
            f'the checkpoint cannot be sent to the other ranks ({type(error).__name__}: {error}); with load="each" '
            "every rank reads it for itself"
        ) from error
    return stream.getvalue()


class _Apart(pickle.Pickler):
    """Leaves out the memory of tensors, in the way `torch.save` does."""

    def __init__(self, stream: io.BytesIO, storages: list[torch.UntypedStorage]) -> None:
        super().__init__(stream, protocol=4)
        self._storages = storages
        self._indices: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.TypedStorage):
            return self._index(value._untyped_storage), value.dtype
        if isinstance(value, torch.UntypedStorage):
            return self._index(value), None
        return None

    def _index(self, storage: torch.UntypedStorage) -> int:
        if storage.device.type != "cpu":
            raise RestoreError(f"it holds a tensor on the device {storage.device}")
        index = self._indices.setdefault(storage._cdata, len(self._storages))
        if index == len(self._storages):
            self._storages.append(storage)
        return index


class _Together(pickle.Unpickler):
    """Builds what `_Apart` has taken apart around other memory. What it reads comes from rank 0 of this run."""

    def __init__(self, stream: io.BytesIO, storages: list[torch.UntypedStorage]) -> None:
        super().__init__(stream)
        self._storages = storages

    def persistent_load(self, pid: Any) -> Any:
        index, dtype = pid
        # Of dtypes that have no storage of their own torch, too, rebuilds tensors from a typed one, of bytes.
        return torch.TypedStorage(wrap_storage=self._storages[index], dtype=dtype or torch.uint8, _internal=True)  # type: ignore[no-untyped-call]


def _memory(size_bytes: int) -> torch.UntypedStorage:
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu").untyped_storage()


def _send(ranks: Ranks, storages: list[torch.UntypedStorage]) -> None:
    """`storages` hold on every rank what they hold on rank 0."""
    bucket = torch.empty(BUCKET_BYTES, dtype=torch.uint8, device="cpu")
    for group in _messages(storages):
        headway.made()
        if len(group) == 1:
            ranks.fill_from_zero(group[0])
            continue
        sizes_bytes = [len(view) for view in group]
        message = bucket[: sum(sizes_bytes)]
        if ranks.is_zero:
            torch.cat(group, out=message)
        ranks.fill_from_zero(message)
        if not ranks.is_zero:
            for part, view in zip(torch.split(message, sizes_bytes), group, strict=True):
                view.copy_(part)


def _messages(storages: list[torch.UntypedStorage]) -> Iterator[list[torch.Tensor]]:
    """The bytes of `storages`, the same on every rank: a piece of one, or several that fit into a bucket."""
    small: list[torch.Tensor] = []
    small_bytes = 0
    for storage in storages:
        view = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        if len(view) > BUCKET_BYTES // 4:
            yield from ([piece] for piece in torch.split(view, PIECE_BYTES))
        elif len(view):
            if small_bytes + len(view) > BUCKET_BYTES:
                yield small
                small, small_bytes = [], 0
            small.append(view)
            small_bytes += len(view)
    if small:
        yield small
