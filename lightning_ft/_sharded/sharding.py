"""Sharded saves, seen from the main thread: what the ranks have to agree on before each of them copies its part."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from lightning_ft._copying.copy_plan import Late
from lightning_ft._copying.layout import has_one_storage
from lightning_ft._copying.staging import Staged, Stager
from lightning_ft._ranks.dist import WRITERS, Ranks
from lightning_ft._sharded.plan import LocalState, Part, share_out
from lightning_ft._sharded.replicated import Replicated
from lightning_ft.errors import SaveError
from lightning_ft.manifest import Manifest

TIMEOUT = timedelta(minutes=30)
"""How much longer the slowest rank may take for its file than the fastest; after that it is taken for gone."""


class WriterGroup:
    """The process group of the writer threads. Nothing else uses it, so that no order of collectives can be broken.

    Ranks: construct on all ranks at the same point, in the main thread.
    """

    def __init__(self, timeout: timedelta = TIMEOUT) -> None:
        self._lock = threading.Lock()
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timeout, group_desc=WRITERS)

    @property
    def broken(self) -> bool:
        """Whether a collective of it failed, or it was closed: it is of no use any more. Thread: any."""
        with self._lock:
            return self._group is None

    @contextlib.contextmanager
    def used(self) -> Iterator[dist.ProcessGroup]:
        """The group, for one save; after an error that is not DCP's own it is closed. Thread: writer.

        Raises:
            SaveError: Another rank cannot be reached.
        """
        with self._lock:
            group = self._group
        if group is None:
            raise SaveError("the connection to the other ranks was lost in an earlier save")
        try:
            yield group
        except CheckpointException:
            raise  # every rank has heard of it
        except Exception as error:
            # Ranks that are waiting for this one hear of it now, and not when their time is over.
            del group
            text = f"the connection to the other ranks was lost: {type(error).__name__}: {error}"
            error.__traceback__ = None  # its frames hold on to the group
            self.close()
            raise SaveError(text) from error

    def close(self) -> None:
        """The group is gone. Local: asks nothing of other ranks. Thread: any."""
        with self._lock:
            group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


@dataclass(frozen=True)
class _Offer:
    """What each rank comes with."""

    path: str
    manifest: Manifest
    changed: bool
    group_broken: bool
    problem: str


@dataclass(frozen=True)
class Agreed:
    """What all ranks have agreed on for one save, and what this one does."""

    path: str
    manifest: Manifest
    state: LocalState
    parts: tuple[Part, ...]
    everyone: tuple[tuple[Part, ...], ...]
    metadata: Metadata | None
    group: WriterGroup | None
    rank: int


class Sharding:
    """The ranks of one fit, as far as sharded saves need them, and the plan of the last one.

    Ranks: construct on all ranks at the same point, and call every method but `close` on all of them. Thread: main.

    Args:
        ranks: Of the fit, which closes them; None: their own.
        timeout: See `TIMEOUT`.
    """

    def __init__(self, ranks: Ranks | None = None, timeout: timedelta = TIMEOUT) -> None:
        self.ranks = ranks or Ranks()
        self._owns_ranks = ranks is None
        self.planned = 0
        """How often a plan had to be made."""
        self._timeout = timeout
        self._group = self._new_group()
        self._signature: list[Any] | None = None
        self._parts: tuple[Part, ...] = ()
        self._everyone: tuple[tuple[Part, ...], ...] = ()
        self._metadata: Metadata | None = None

    def _new_group(self) -> WriterGroup | None:
        return WriterGroup(self._timeout) if self.ranks.world_size > 1 else None

    def agree(self, state: dict[str, Any] | Replicated, path: str, manifest: Manifest) -> Agreed:
        """Every rank knows what it writes, and where: to rank 0's `path`, with the identity in rank 0's `manifest`.

        Blocks on: all ranks. One small exchange; two more when something about the state has changed on any rank.

        Raises:
            SaveError: The state of some rank cannot be saved; the same on all ranks.
        """
        local, problem, changed = None, "", True
        try:
            local = LocalState(state)
            signature = local.signature()
            changed = signature != self._signature
        except Exception as error:  # the others wait for this rank
            problem = self._problem(error)
        broken = self._group is not None and self._group.broken
        offers = self.ranks.all_gather(_Offer(path, manifest, changed, broken, problem))
        if any(offer.group_broken for offer in offers):
            if self._group is not None:
                self._group.close()
            self._group = self._new_group()
        _raise_any([offer.problem for offer in offers])
        assert local is not None
        if any(offer.changed for offer in offers):
            self._signature = None
            self._plan(local)
            self._signature = signature
        first = offers[0]
        return Agreed(
            first.path, first.manifest, local, self._parts, self._everyone, self._metadata, self._group, self.ranks.rank
        )

    def _problem(self, error: Exception) -> str:
        if isinstance(error, SaveError):
            return str(error)  # of what is the same on all ranks, and said once then
        return f"rank {self.ranks.rank}: {type(error).__name__}: {error}"

    def _plan(self, local: LocalState) -> None:
        self.planned += 1
        problem, plan = "", None
        try:
            plan = local.plan()
        except Exception as error:
            problem = self._problem(error)
        offers = self.ranks.gather((problem, plan))

        def decide() -> list[tuple[Part, ...]]:
            assert offers is not None
            _raise_any([problem for problem, _ in offers])
            try:
                parts, self._metadata = share_out([plan for _, plan in offers if plan is not None])
            except Exception as error:
                raise SaveError(f"the ranks' parts do not make one state: {type(error).__name__}: {error}") from error
            self._everyone = tuple(map(tuple, parts))
            return list(self._everyone)

        self._parts = self.ranks.distribute(decide)

    def close(self) -> None:
        """The groups are gone. Local: asks nothing of other ranks; nothing may be being written."""
        if self._group is not None:
            self._group.close()
        if self._owns_ranks:
            self.ranks.close()


def _raise_any(problems: list[str]) -> None:
    found = dict.fromkeys(problem for problem in problems if problem)
    if found:
        raise SaveError("; ".join(found))


class Unstaged:
    """Stands where the copy would be, on a rank that could not make one; the others hear of it in its place.

    Args:
        error: Why not.
    """

    def __init__(self, error: BaseException) -> None:
        self.size_bytes = 0
        self.reductions: dict[int, Any] = {}
        self.blocked_secs = self.staging_secs = 0.0
        self._error = error

    def wait(self) -> dict[str, Any]:
        if isinstance(self._error, Exception):
            raise self._error
        raise SaveError(f"interrupted while the state was copied ({type(self._error).__name__})")

    def check(self) -> None:
        pass

    def release(self) -> None:
        pass


def stage(stager: Stager, agreed: Agreed, checkpoint: dict[str, Any], late: Late | None) -> Staged:
    """A snapshot of what this rank writes, in the form that `ShardedSave` wants. Blocks on: see `Stager.stage`."""
    staged: dict[str, Any] = {"items": {}, "optimizer_states": {}, "objects": {}}
    if agreed.rank == 0:
        staged["checkpoint"] = checkpoint
    guards: dict[int, Tensor] = {}
    addresses, never = set[int](), set[int]()
    for number, part in enumerate(agreed.parts):
        value = agreed.state.find(part.source)
        if part.item.tensor_data is None:
            staged["objects"][number] = value
            continue
        tensor = value.detach()
        if part.rows is not None:
            tensor = tensor[slice(*part.rows)]
        own = _alone(tensor)
        staged["optimizer_states" if agreed.state.is_of_optimizer(part.source) else "items"][number] = own
        if late is None:
            continue
        guards[id(own)] = agreed.state.counted(part.source)
        if own is not tensor:  # what is known by the address of the whole is true of the part
            address = tensor.untyped_storage().data_ptr()
            if address in late.addresses:
                addresses.add(own.untyped_storage().data_ptr())
            if address in late.never:
                never.add(own.untyped_storage().data_ptr())
    if late is not None:
        late = replace(late, addresses=late.addresses | addresses, never=late.never | never)
    return stager.stage(staged, late, guards)


def _alone(tensor: Tensor) -> Tensor:
    """The same memory, as a tensor of which it is the whole storage, where that can be had without a copy.

    The stager copies whole storages: here only what is to be written of them.
    """
    if not has_one_storage(tensor) or not tensor.is_contiguous() or not tensor.nbytes:
        return tensor
    storage, size_bytes = tensor.untyped_storage(), tensor.nbytes
    if storage.nbytes() == size_bytes:
        return tensor
    first = tensor.storage_offset() * tensor.itemsize
    alone = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alone.set_(storage[first : first + size_bytes], 0, tensor.shape, tensor.stride())
