"""When, in one fit, ballots are cast and read.

::

    batch starts            the ballot of the batch is cast; if a watch waits for the loss, not yet
    loss is known           else it is cast here, before each backward pass
    parameters change       with such a watch it is read here
    step boundary           it is read
    validation              ballots of its own, one per second (`_vote.validation`)
    end of an epoch         one more, of watches that can be asked anywhere, cast and read at once
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_ft._fit import loops
from lightning_ft._fit.watch import Watches
from lightning_ft._ranks.dist import Ranks
from lightning_ft._vote.ballot import WITHIN, Vote
from lightning_ft._vote.ballot_box import HIGHEST_VOTE
from lightning_ft.errors import ConfigurationError

VALIDATION_TOPICS = ("validating", "validation_batch_us", "validation_needed")
"""What is voted on in validations only."""

_BATCH = ("furthest_batch", "batches_left")
"""The number of the batch that a ballot is about, and what it leaves of the highest vote: the maxima of both over the
ranks tell whether all of them have meant the same one."""
_LOSS = ("furthest_loss", "losses_left")
"""The same of the loss within the batch, of ranks that have differentiated one."""
_STEP = 1 << 20
"""More losses than anybody differentiates for one optimizer step."""


class Voting:
    """The ballots of one fit, and what was heard in those of the step at hand.

    Ranks: all, at the same points: with a watch that waits for the loss, all differentiate as many losses per batch, or
    none. If they do not, that is an error, since each would take the others' votes for those of another loss. Thread:
    main.

    Args:
        trainer: The trainer.
        ranks: The ranks of the run.
        watches: The watches, opened later.
        topics: What the session votes on itself.
        own: Its votes.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        ranks: Ranks,
        watches: Watches,
        topics: tuple[str, ...],
        own: Callable[[], dict[str, int]],
    ) -> None:
        self._trainer = trainer
        self._watches = watches
        self._own = own
        topics = (*topics, *VALIDATION_TOPICS, *watches.topics, *((*_BATCH, *_LOSS) if watches.wants_loss else ()))
        self.vote = Vote(
            ranks, topics, loops.collective_timeout(trainer) or WITHIN,
            where=lambda: f"vote of batch {loops.progress(trainer).batch + 1}",
        )  # fmt: skip
        self._heard: dict[str, int] = {}
        self._cast_here = True
        self._steps = self._losses = 0  # of this batch, and since the step before

    def batch_starts(self) -> None:
        """The batch is about to be trained. This rank's vote is cast, unless a watch waits for the loss."""
        if self.vote.cast_open:
            # The step before had no end: `on_train_batch_start` or the data said that the epoch was over.
            self.vote.read()
        self._heard = {}
        self._cast_here = False
        self._steps = self._losses = 0
        if not self._watches.wants_loss:
            self._cast()

    def loss_known(self, loss: Tensor) -> None:
        """`loss` is about to be differentiated. A vote that waited for it is cast."""
        self._watches.loss_known(loss)
        if self._watches.wants_loss:
            self._hear()  # of the loss before this one, if the batch has several
            self._losses += 1
            self._cast()

    def before_optimizer_step(self) -> None:
        """Parameters may change. Blocks on: with a watch that waits for the loss, all ranks.

        Raises:
            FaultToleranceError: What a watch raises, on all ranks.
        """
        if self._watches.wants_loss:
            self.end_of_batch()  # if this rank has differentiated nothing, others may have
            self._watches.before_step(self._heard)
            self._steps += 1
            self._losses = 0

    def end_of_batch(self) -> None:
        """What the ranks know of the batch is heard, also if no loss of it was differentiated on some of them."""
        if not self._cast_here:
            self._cast()
        self._hear()

    def take(self, *, afresh: bool) -> dict[str, int]:
        """What the ranks have heard since the boundary before.

        Args:
            afresh: Watches that can be are asked once more now: at the end of an epoch, whose hooks may take as long as
                many a step. Blocks on: all ranks.
        """
        self.end_of_batch()
        if afresh and self._watches.anywhere:
            self.vote.cast({**self._place(of_loss=False), **self._watches.ballot_between_steps()})
            self._hear()
        heard, self._heard = self._heard, {}
        return heard

    def note(self, heard: Mapping[str, int]) -> None:
        """`heard` elsewhere than in a batch is known at the next boundary."""
        before = self._heard
        self._heard = {**before, **{topic: max(vote, before.get(topic, 0)) for topic, vote in heard.items()}}

    def forget(self) -> None:
        """The batch at hand is given up, on all ranks. Blocks on: all ranks, if its ballot was cast."""
        if self.vote.cast_open:
            self.vote.read()
        self._heard, self._cast_here = {}, True

    def close(self) -> None:
        """Nothing is left of the vote. Local: asks nothing of other ranks."""
        self.vote.close()

    def _cast(self) -> None:
        self._cast_here = True
        self.vote.cast({**self._place(), **self._own(), **self._watches.ballot()})

    def _place(self, *, of_loss: bool = True) -> dict[str, int]:
        if not self._watches.wants_loss:
            return {}
        batches: Any = self._trainer.fit_loop.epoch_loop.batch_progress
        place = {_BATCH: batches.total.ready}
        if of_loss and self._losses:
            place[_LOSS] = self._steps * _STEP + self._losses
        return {
            topic: vote for pair, at in place.items() for topic, vote in zip(pair, (at, HIGHEST_VOTE - at), strict=True)
        }

    def _require_same(self, heard: dict[str, int]) -> None:
        """Else this is not raised everywhere: others may be in a collective that this rank will not come to."""
        found = []
        for topic, left in (_BATCH, _LOSS):
            furthest, rest = heard.pop(topic, 0), heard.pop(left, 0)
            found.append((HIGHEST_VOTE - rest if rest else furthest, furthest))
        (batch, later_batch), (loss, later_loss) = found
        if batch != later_batch:
            where = f"batch {batch}, and another in batch {later_batch}"
        elif loss != later_loss:
            where = f"{_in_words(loss)}, and another in {_in_words(later_loss)}, of batch {batch}"
        else:
            return
        raise ConfigurationError(
            f"DivergenceGuard: one rank is in {where}. All ranks must differentiate as many losses for each optimizer "
            "step; where they do not, leave that guard out: guards=[PreemptionGuard()]"
        )

    def _hear(self) -> None:
        if self.vote.cast_open:
            heard = self.vote.read()
            self._require_same(heard)
            if self._heard:
                self.note(heard)
            else:
                self._heard = heard


def _in_words(place: int) -> str:
    step, loss = divmod(place, _STEP)
    return f"loss {loss} for optimizer step {step + 1}"
