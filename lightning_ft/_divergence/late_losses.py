"""Losses on an accelerator, known without waiting for it: each is copied to the host, and looked at once it is there.

::

    the device's stream   ... loss | sticky += loss * 0 | row copied to pinned memory | event | backward, step, ...
    the host              launches all that, goes on, and reads at a later step the rows whose event has happened

`sticky` is NaN from the first loss on that is not finite, and every row has it, so that none is missed where a row
could not be read before its place was needed again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

PLACES = 64
"""So many losses may be on their way. The host is rarely two steps ahead of a device."""


@dataclass(frozen=True)
class Seen:
    """One loss: where it was differentiated, and what it was."""

    batch: int
    """The number of its batch in the run, from 1 on."""
    in_epoch: int
    """The number of its batch in the epoch, from 1 on."""
    step: range
    """The batches of its optimizer step."""
    kind: int
    """Which loss of its batch it is, from 0 on."""
    indices: tuple[Any, ...]
    """Per loader, the indices that its batch was made of."""
    value: float = 0.0
    epoch: int = 0
    """From 0 on, as Lightning counts."""


class LateLosses:
    """The losses on one device that are on their way to the host.

    Thread: main. Nothing here waits for the device but `wait`.

    Args:
        device: Where the losses are.
    """

    def __init__(self, device: torch.device) -> None:
        row = torch.zeros(2, dtype=torch.float32, device=device)
        self._row, self._sticky, self._last = row, row[:1], row[1:]
        self._zero = torch.zeros(1, dtype=torch.float32, device=device)
        # As a copy of what is on the device: pinned memory of whichever device that is.
        self._host = torch.zeros(PLACES, 2, dtype=torch.float32, device="cpu", pin_memory=device.type != "cpu")
        self._device = device
        self._next = 0
        self._missed = False
        self._waiting: deque[tuple[int, Any, Seen, float]] = deque()

    def add(self, loss: Tensor, seen: Seen, factor: float) -> None:
        """`loss`, of one element, is on its way. Blocks on: nothing.

        Args:
            loss: On the device.
            seen: Where it belongs, without its value.
            factor: What its value is to be multiplied by.
        """
        loss = loss.detach().reshape(1)
        self._sticky.addcmul_(loss, self._zero)
        self._last.copy_(loss)
        if len(self._waiting) == PLACES:
            self._waiting.popleft()  # what it was, `sticky` knows as far as it has to be known
            self._missed = True
        place, self._next = self._next, (self._next + 1) % PLACES
        self._host[place].copy_(self._row, non_blocking=True)
        event = torch.accelerator.current_stream(self._device).record_event()
        self._waiting.append((place, event, seen, factor))

    def arrived(self) -> Iterator[Seen]:
        """The losses that have arrived since, in order. Blocks on: nothing.

        After one that is not finite, `forget` is to be called.
        """
        while self._waiting and self._waiting[0][1].query():
            place, _, seen, factor = self._waiting.popleft()
            sticky, value = self._host[place].tolist()
            if self._missed:
                self._missed = False
                value = value if sticky == 0 else math.nan
            yield replace(seen, value=value * factor)

    def wait(self) -> None:
        """All of them have arrived. Blocks on: the device."""
        if self._waiting:
            self._waiting[-1][1].synchronize()

    def forget(self) -> None:
        """What was not finite so far no longer counts. Blocks on: nothing."""
        self._sticky.zero_()
