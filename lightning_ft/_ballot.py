"""The vote of the ranks at every step: what one of them knows, all of them act on after the same batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Vote:
    """One tiny asynchronous all-reduce per step: cast at the start of a batch, read at its end.

    Each topic is a non-negative integer and the result is the maximum over the ranks, so every rank reads the same
    and acts at the same step. Nothing waits unless a rank is late.
    """

    def __init__(self, group: dist.ProcessGroup | None, topics: Sequence[str]) -> None:
        if len(set(topics)) != len(topics):
            raise ValueError(f"topics={topics!r}: one is named twice, and its votes would be mixed up")
        self._group = group
        self._topics = tuple(topics)
        self._ballot: torch.Tensor | dict[str, int] | None = None
        self._work: dist.Work | None = None

    @property
    def cast_open(self) -> bool:
        """Whether a ballot was cast and not yet read."""
        return self._ballot is not None

    def cast(self, **topics: int) -> None:
        """The ballot of this step is on its way. Ranks: all, once per step. Thread: main. Blocks on: nothing."""
        assert self._ballot is None, "a ballot is cast once per step and read before the next"
        if self._group is None:
            self._ballot = {name: topics.get(name, 0) for name in self._topics}
            return
        self._ballot = torch.tensor([topics.get(name, 0) for name in self._topics], dtype=torch.int64, device="cpu")
        self._work = dist.all_reduce(self._ballot, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def read(self) -> dict[str, int]:
        """The agreed result of the ballot. Ranks: all. Blocks on: the slowest rank having started its step."""
        ballot, self._ballot = self._ballot, None
        assert ballot is not None, "read follows cast"
        if isinstance(ballot, dict):
            return ballot
        assert self._work is not None
        self._work.wait()
        self._work = None
        return dict(zip(self._topics, ballot.tolist(), strict=True))
