"""Where the next snapshot goes: into the place of an earlier one, which is made anew only where something changed."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightning_ft._copying.alike import Alike
from lightning_ft._copying.buffers import Buffers
from lightning_ft._copying.copies import is_streamed
from lightning_ft._copying.copy_plan import Plan
from lightning_ft._copying.layout import Signature, signature
from lightning_ft._copying.skeleton import Skeleton

_log = logging.getLogger(__name__)

Prepared = tuple[Plan, Skeleton, list[int]]
"""A place for a copy, the copy without its bytes, and the addresses of these."""


class Plans:
    """Plans that are free, and the memory that belongs to them.

    Thread: main, unless a method says otherwise.
    """

    def __init__(self) -> None:
        self.made = 0
        """How many snapshots had to be in memory at once, so far."""
        self._free: list[Plan] = []

    def prepare(self, checkpoint: dict[str, Any]) -> Prepared:
        """A plan for a copy of `checkpoint`, no longer free. Blocks on: looking through the checkpoint."""
        known = self._known(checkpoint)
        if known is not None:
            return known
        # In a thread, so that small objects that live long do not lie among the tensors of the training. The C
        # library gives each thread a heap of its own, and on that of the training every such object keeps the memory
        # of two gradients apart: without this it was seen to grow by two thirds of all gradients.
        with ThreadPoolExecutor(1, "lightning-ft-staging") as thread:
            try:
                making = thread.submit(self._made, checkpoint)
            except RuntimeError as error:  # a limit of processes; or the interpreter ends, and may want to save
                _log.debug("looked through the checkpoint without a further thread: %s", error)
                return self._made(checkpoint)
            try:
                return making.result()
            except BaseException:
                if making.exception() is None:  # interrupted while it was waited for
                    self.take_back(making.result()[0])
                raise

    def take_back(self, plan: Plan) -> None:
        """`plan` is free for the next snapshot. Thread: any."""
        self._free.append(plan)

    def clear(self) -> None:
        """The memory of plans that are free is given back."""
        self._free.clear()

    def _known(self, checkpoint: dict[str, Any]) -> Prepared | None:
        if not self._free:
            return None
        plan = self._free.pop(0)  # now: a handler of a signal may save, too, and its copy must be another one
        addresses = None
        try:
            if plan.alike is not None:
                skeleton = Skeleton(checkpoint, plan.templates)
                addresses = plan.alike.addresses(skeleton.tensors)
        finally:
            if addresses is None:
                self._free.insert(0, plan)
        return None if addresses is None else (plan, skeleton, addresses)

    def _made(self, checkpoint: dict[str, Any]) -> Prepared:
        skeleton = Skeleton(checkpoint)
        entries, addresses = signature(skeleton.tensors)
        plan = self._plan_for(entries)
        plan.templates = {}
        alike = Alike(skeleton.tensors, entries)
        plan.alike = alike if alike.can_tell else None
        return plan, skeleton, addresses

    def _plan_for(self, entries: Signature) -> Plan:
        pinned = any(is_streamed(device) for device in {entry[2] for entry in entries if entry})
        while free := [plan for plan in self._free if plan.buffers.pinned == pinned]:
            plan = next((plan for plan in free if plan.entries == entries), free[0])
            try:
                self._free.remove(plan)
            except ValueError:  # the handler of a signal has taken it, in the main thread
                continue
            if plan.entries != entries:
                plan.arrange(entries)
            return plan
        self._free.clear()  # of another kind, if any
        self.made += 1
        return Plan(entries, Buffers(pinned))
