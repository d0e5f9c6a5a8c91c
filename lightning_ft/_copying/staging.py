"""Snapshots: copies of checkpoints in memory that is used again and again, taken at once or while training goes on.

One save with ``staging="overlap"``, who does what, and what is true after it::

    step                        thread    afterwards
    --------------------------  --------  ----------------------------------------------------------------
    stage(): structure          main      plain values, lists and objects are copied, tensors have a place
    stage(): at-once copies     main      what the forward pass may change, and unusual tensors, are copied
    stage(): late copies begin  main      (they run on in another thread, on a device on a stream)
    late copies                 stager    parameters and optimizer state are copied
    finish()                    main      nothing will be read any more: the optimizer may step
    wait()                      writer    every byte is in host memory, and none was changed on the way
    check()                     writer    the same, asked once more just before the commit
    release()                   writer    the memory is free for the next save

Only what an optimizer step changes, and nothing else, may be copied late: parameters in its groups and its state.
The guard is each tensor's version counter, read at the boundary and in `finish`. A write through ``.data`` does not
move that counter: therefore the first late copies of every fit (all, with ``LIGHTNING_FT_CHECK_SNAPSHOT=1``), and in
`finish` what they were made of, are compared by digest with what was there at the boundary.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lightning_ft._copying.copies import (
    PIECE_BYTES,
    Piece,
    copied,
    copy_grouped,
    digest,
    is_streamed,
    launch,
    move,
    pieces,
    storage_bytes,
)
from lightning_ft._copying.copy_plan import Late, Plan, Work
from lightning_ft._copying.lanes import Lanes
from lightning_ft._copying.places import Plans
from lightning_ft._copying.skeleton import Skeleton, name_of

_log = logging.getLogger(__name__)

CHECK_VARIABLE = "LIGHTNING_FT_CHECK_SNAPSHOT"

_THROUGH_DATA = "was changed (through `.data`, past its version counter?)"
_TOO_EARLY = "between the step boundary and the next optimizer step"


class SnapshotError(RuntimeError):
    """A tensor was changed while its copy was still to be taken, so the copy is not the state of any step."""


class SnapshotWithdrawnError(RuntimeError):
    """Nobody can tell whether the copy is good: it is no failure, and another one is to be taken at once."""


class Staged:
    """One snapshot: complete when `wait` has returned, in memory that is used again after `release`.

    Args:
        stager: Whose it is.
        plan: Where its bytes are to be.
        skeleton: The rest of it.
        addresses: Of the storage of each of its tensors.
        late: Whether some of its tensors are copied after `Stager.stage` has returned.
        guards: See `Stager.stage`.
        began: When it was asked for, in seconds of the monotonic clock.
    """

    def __init__(
        self,
        stager: Stager,
        plan: Plan,
        skeleton: Skeleton,
        addresses: list[int],
        late: Late | None,
        guards: Mapping[int, Tensor],
        began: float,
    ) -> None:
        self.odd = skeleton.odd
        """Whether something is in it that ``weights_only=True`` may refuse."""
        self.size_bytes = plan.layout.size_bytes
        """Bytes of all storages; the file is a little larger."""
        self.reductions = plan.reductions
        """What its tensors are to a pickle, from save to save."""
        self.blocked_secs = 0.0
        """How long the main thread was held up, so far; the caller may have counted more."""
        self.staging_secs = 0.0
        """From the beginning until the last byte was copied."""
        self._stager = stager
        self._plan = plan
        self._tensors = skeleton.tensors
        self._storages: dict[int, UntypedStorage] = {}  # with `state.data = ...` training may give them up
        self._addresses = addresses
        self._guards = guards
        self._steps = late.optimizer_steps if late is not None else 0
        self._checkpoint: dict[str, Any] = {}
        self._watched: list[int] = []
        self._versions: list[int] = []
        self._digests: list[tuple[int, str]] = []  # until `wait`
        self._late_digests: list[tuple[int, str]] = []  # until `finish`
        self._copying: Future[None] | None = None
        self._events: list[Any] = []  # of copies that a device makes
        self._barriers: list[tuple[torch.device, Any]] = []  # of those that an optimizer step has to come after
        self._lock = threading.Lock()
        self._settled = late is None
        self._rejected = ""
        self._withdrawn = False
        self._began = began

    @property
    def settled(self) -> bool:
        """Whether it is known if the copy is good: nothing of the training's memory will be looked at any more."""
        return self._settled

    def finish(self) -> None:
        """Training may change everything again; if it has done so too early, `wait` and `check` raise.

        Thread: main. Blocks on: late copies of host memory; a device waits for its own, not the host.
        """
        if self._settled:
            return
        began = time.monotonic()
        if self._copying is not None:
            self._copying.exception()  # waits; an error is raised in `wait`, where a save can fail
        for device, event in self._barriers:
            torch.accelerator.current_stream(device).wait_event(event)
        with self._lock:
            self._settle()
        self.blocked_secs += time.monotonic() - began

    def withdraw_unless(self, optimizer_steps: int) -> None:
        """If so many steps were not expected, since `finish` was not called before one, the copy is not used.

        Either a step was left out, or one was made that no optimizer of torch's has announced; and a change through
        ``.data`` leaves no trace. A change that does is a failure.
        """
        with self._lock:
            if self._settled or optimizer_steps == self._steps:
                return
            self._judge()
            self._settled, self._withdrawn = True, not self._rejected
        if self._copying is not None:
            self._copying.exception()  # waits
        if self._withdrawn:
            self._stager.repeat("steps are counted that no optimizer has announced")

    def wait(self) -> dict[str, Any]:
        """The snapshot; nothing of it will change before `release`.

        Thread: writer. Blocks on: the late copies.

        Raises:
            SnapshotError: A tensor was changed before it was copied.
        """
        if self._copying is not None:
            self._copying.result()
        for event in self._events:
            event.synchronize()
        self.staging_secs = self.staging_secs or time.monotonic() - self._began
        self.check()
        for index, expected in self._digests:
            if digest(self._plan.places[index]) != expected:
                with self._lock:
                    self._reject(f"{self._name(index)} {_THROUGH_DATA}")
                break
        self._digests = []
        self.check()
        return self._checkpoint

    def check(self) -> None:
        """No tensor has been changed before it was copied.

        A change that is under way is not counted yet, so between the end of the copies and the last check there has to
        be more time than changing a tensor takes: writing it to a file is that.

        Thread: writer.

        Raises:
            SnapshotError: One has.
            SnapshotWithdrawnError: Nobody knows.
        """
        with self._lock:
            if not self._settled:
                self._judge()
            elif all(event.query() for event in self._events):
                self._let_go()
            if self._rejected:
                raise SnapshotError(self._rejected)
            if self._withdrawn:
                raise SnapshotWithdrawnError("an optimizer step was left out, or made by other means than its `step`")

    def release(self) -> None:
        """The memory is free. Thread: writer, or the one that gives the snapshot up. Blocks on: copies under way."""
        if self._copying is not None:
            self._copying.exception()
        for event in self._events:
            event.synchronize()
        with self._lock:
            self._settled = True
            self._checkpoint = {}
            self._let_go()
            self._watched, self._digests, self._late_digests = [], [], []
        self._stager.plans.take_back(self._plan)

    # -- taking it: see `Stager.stage` ---------------------------------------------------------------------------

    def _take(self, skeleton: Skeleton, late: Late | None, check: bool) -> None:
        plan = self._plan
        targets = plan.targets
        if plan.unplaced:
            targets = list(targets)
            for number in plan.unplaced:
                targets[number] = copied(self._tensors[number])
        self._checkpoint = skeleton.filled(targets)
        now, later = plan.split(late, skeleton.of_optimizers, self._addresses)
        watched = later.extents
        everything = os.environ.get(CHECK_VARIABLE) == "1"
        held = range(len(plan.places)) if everything else [*watched, *(i for on in now.device.values() for i in on)]
        self._storages = {index: self._source(index).untyped_storage() for index in held}
        self._watched = watched
        self._versions = [self._guard(index)._version for index in watched]
        if everything or (check and watched):
            checked = held if everything else watched
            self._digests = [(index, digest(storage_bytes(self._storages[index]))) for index in checked]
            late_ones = set(watched)
            self._late_digests = [(index, expected) for index, expected in self._digests if index in late_ones]
        for device, indices in now.device.items():
            for event in self._copy_from_device(device, indices):
                # Nothing that is launched after this changes what is still being copied.
                torch.accelerator.current_stream(device).wait_event(event)
        # After those: on one stream, whatever waits for a copy waits for all that were launched before it.
        for device, indices in later.device.items():
            self._barriers += [(device, event) for event in self._copy_from_device(device, indices)]
        self._copy_at_once(now)
        if later.grouped or later.raw:
            # Last: from here on the other thread asks for the interpreter, too.
            self._copying = self._stager.lanes.submit(self._copy_late, later, self._grouped(later))
        if self._settled and not self._events:
            self._let_go()  # training may give up its memory, however long this one waits for the writer

    def _let_go(self) -> None:
        """Nothing of the training's memory will be looked at any more."""
        self._tensors, self._storages, self._guards = [], {}, {}

    def _copy_at_once(self, work: Work) -> None:
        queue = self._pieces(work)
        helpers = min(torch.get_num_threads(), len(queue)) - 1
        others = []
        try:
            for _ in range(helpers):
                others.append(self._stager.lanes.submit(move, queue))
            copy_grouped(*self._grouped(work))
            move(queue)
        finally:
            queue.clear()  # of an interrupted copy: the others end with the piece they have
            for other in others:
                other.exception()  # waits: in no case may it write any more when the memory is given to the next
        for other in others:
            other.result()

    def _copy_late(self, work: Work, grouped: tuple[list[Tensor], list[Tensor]]) -> None:
        """Thread: stager."""
        targets, sources = grouped
        first, group_bytes = 0, 0
        for end, target in enumerate(targets, 1):
            group_bytes += target.nbytes
            if group_bytes >= PIECE_BYTES or end == len(targets):
                copy_grouped(targets[first:end], sources[first:end])
                first, group_bytes = end, 0
        move(self._pieces(work))
        if not self._events:
            self.staging_secs = time.monotonic() - self._began

    def _grouped(self, work: Work) -> tuple[list[Tensor], list[Tensor]]:
        places = [self._plan.places[index] for index in work.grouped]
        return places, work.sources(self._plan.layout.extents, self._addresses)

    def _pieces(self, work: Work) -> deque[Piece]:
        extents, places = self._plan.layout.extents, self._plan.places
        return deque(
            piece
            for index in work.raw
            for piece in pieces(
                places[index].data_ptr(), self._addresses[extents[index].tensor], extents[index].size_bytes
            )
        )

    def _copy_from_device(self, device: torch.device, indices: list[int]) -> list[Any]:
        sources = [storage_bytes(self._storages[index]) for index in indices]
        places = [self._plan.places[index] for index in indices]
        if is_streamed(device):
            event = launch(self._stager.lanes.stream(device), device, places, sources)
            self._events.append(event)
            return [event]
        for place, source in zip(places, sources, strict=True):
            place.copy_(source)
        return []

    def _source(self, index: int) -> Tensor:
        return self._tensors[self._plan.layout.extents[index].tensor]

    def _guard(self, index: int) -> Tensor:
        source = self._source(index)
        return self._guards.get(id(source), source)

    # -- judging it, holding the lock ----------------------------------------------------------------------------

    def _settle(self) -> None:
        if not self._settled:
            self._judge()
            self._judge_sources()
            self._settled = True
            if not self._events:
                self._let_go()

    def _judge(self) -> None:
        for index, version in zip(self._watched, self._versions, strict=True):
            if self._guard(index)._version != version:
                self._reject(f"{self._name(index)} was changed")
                return

    def _judge_sources(self) -> None:
        # The copies may have been quicker than the change, and are good then, which `wait` finds out. The next ones
        # may be slower.
        for index, expected in self._late_digests:
            if not self._rejected and digest(storage_bytes(self._storages[index])) != expected:
                self._stager.give_up_overlap(f"{self._name(index)} {_THROUGH_DATA} {_TOO_EARLY}")
        self._late_digests = []

    def _reject(self, what: str) -> None:
        self._rejected = f"{what} {_TOO_EARLY}, while a copy of it was being taken"
        self._stager.repeat(self._rejected)

    def _name(self, index: int) -> str:
        target = self._plan.targets[self._plan.layout.extents[index].tensor]
        return name_of(self._checkpoint, target) or "a tensor"


class Stager:
    """Takes snapshots, at most one of them with copies under way, and owns their memory.

    Thread: main, unless a method says otherwise.

    Args:
        overlap: Whether late copies are made at all.
    """

    def __init__(self, overlap: bool) -> None:
        self.overlaps = overlap
        """Whether late copies are made: not any more once one of them went wrong."""
        self.to_be_repeated = False
        """Whether a save is due because the snapshot of the last one could not be used."""
        self._pending: Staged | None = None
        self._checked = False
        self.lanes = Lanes()
        self.plans = Plans()

    def stage(
        self, checkpoint: dict[str, Any], late: Late | None = None, guards: Mapping[int, Tensor] | None = None
    ) -> Staged:
        """A snapshot of `checkpoint`: what training does from now on does not show in it, if `finish` comes in time.

        Tensors are copied to host memory; those that share a storage share one in the copy. Everything else is
        deep-copied.

        Blocks on: the copies, but those of `late` storages; on a device, on nothing: its own work waits instead.

        Args:
            checkpoint: What Lightning made for a save.
            late: What may be copied after this has returned, until `finish`; None: nothing.
            guards: By the id of a tensor of `checkpoint`: the one whose version counter tells that it was changed, if
                that is not its own.

        Raises:
            Exception: What an object raises that cannot be copied; no memory is held for the snapshot then.
        """
        began = time.monotonic()
        self.finish()
        late = late if self.overlaps else None
        plan, skeleton, addresses = self.plans.prepare(checkpoint)
        staged = Staged(self, plan, skeleton, addresses, late, guards or {}, began)
        try:
            staged._take(skeleton, late, check=not self._checked)
            if plan.alike is not None:  # else they would never be asked for
                plan.templates.update(skeleton.templates())
        except BaseException:
            staged.release()
            raise
        self._checked = self._checked or bool(staged._watched)
        self._pending = staged
        staged.blocked_secs = time.monotonic() - staged._began
        if late is None and not staged._events:
            staged.staging_secs = staged.blocked_secs
        return staged

    def finish(self) -> None:
        """Training may change everything again. Blocks on: late copies under way."""
        if self._pending is not None:
            self._pending.finish()
            self._pending = None

    def step_is_over(self, optimizer_steps: int) -> None:
        """Late copies end here: nobody knows what else but an optimizer may change parameters from now on.

        Blocks on: late copies under way.

        Args:
            optimizer_steps: Taken so far.
        """
        if self._pending is not None:
            self._pending.withdraw_unless(optimizer_steps)
        self.finish()

    def close(self) -> None:
        """No thread is left and no memory is held."""
        self.finish()
        self.lanes.close()
        self.plans.clear()

    def take_repeat(self) -> bool:
        """Whether a save has to be made again, since parameters were changed while they were copied; asked once."""
        due, self.to_be_repeated = self.to_be_repeated, False
        return due

    def give_up_overlap(self, reason: str) -> None:
        """From now on everything is copied at once. Thread: any."""
        if self.overlaps:
            self.overlaps = False
            _log.warning('%s; from now on saves copy at once, as with staging="blocking"', reason)

    def repeat(self, reason: str) -> None:
        """The last snapshot is not used, and another one, copied at once, is to be taken. Thread: any."""
        self.to_be_repeated = True
        self.give_up_overlap(f"{reason}; the save is repeated")
