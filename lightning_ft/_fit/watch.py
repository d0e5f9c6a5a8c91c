"""A guard at work in one fit: what it is told, what it puts into the vote of the ranks, and what it may ask for.

A guard (`lightning_ft.guards`) is a plain value; what it does during a fit is in its watch. One step, as a watch sees
it::

    batch starts            ballot()                        this rank's knowledge goes into the vote
    loss is known           loss_known(loss)                before each backward pass
    before parameters move  before_step(votes)              only with `wants_loss`
    batch is over           batch_over()                    of training, of validation, of the sanity check
    step boundary           decide(votes, progress)         all ranks alike: go on, save, or save and stop
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_ft._data.loaders import TrackedLoaders
from lightning_ft._divergence.left_out import LeftOut
from lightning_ft._fit.directories import Tiers
from lightning_ft._fit.lineage import Line
from lightning_ft._fit.saves import Saves
from lightning_ft._history.pace import Pace
from lightning_ft._ranks.dist import Ranks, raised_everywhere
from lightning_ft.plugin import FaultTolerantCheckpointIO
from lightning_ft.state import Progress


@dataclass(frozen=True)
class Request:
    """What a watch asks for at a boundary. The same on all ranks."""

    reason: str
    """Why, for the log; one line."""
    stop: bool = True
    """Whether the fit ends at this boundary."""
    save: str | None = "stop"
    """The reason in the manifest of the save made at this boundary; None: none is made for this request."""
    exit_code: int | None = None
    """With `stop`: the code with which the process ends once all is durable and the fit is torn down."""
    unsaved_code: int | None = None
    """The same, if the save that was to be made has failed; None: `exit_code` all the same."""

    def code_when(self, *, saved: bool) -> int | None:
        """The code with which the process ends; None: it does not."""
        if self.save is not None and not saved and self.unsaved_code is not None:
            return self.unsaved_code
        return self.exit_code


@dataclass(frozen=True)
class Fit:
    """What a watch knows of the fit it belongs to."""

    trainer: pl.Trainer
    ranks: Ranks
    dirpath: str
    plugin: FaultTolerantCheckpointIO | None
    run_id: Callable[[], str]
    stop: Callable[[], Request | None]
    """What ends the fit before its time, if something does."""
    strict: bool
    saves: Saves
    tiers: Tiers
    loaders: TrackedLoaders
    left_out: LeftOut
    line: Line
    pace: Pace
    go_back: Callable[[], None]
    """To be called before this fit loads an older checkpoint of its own."""
    local_dirpath: str | None = None
    warn_after: timedelta | None = None
    """After how long without a new durable checkpoint the user is warned."""


class Watch:
    """A guard at work. Every method does nothing; a guard's own watch overrides what it needs.

    Thread: main. Ranks: all, at the same points.
    """

    key = ""
    """The name of its state in checkpoints; empty if it has none."""
    topics: tuple[str, ...] = ()
    """What it votes on: names of non-negative integers, of which every rank hears the maximum."""
    wants_loss = False
    """Whether its ballot depends on the loss of the batch, and is to be read before parameters change."""
    anywhere = False
    """Whether its ballot does not depend on the batch, and may be asked for wherever the ranks vote."""
    replaces_lightnings_signals = False
    """Whether signals go into its ballots, so that Lightning need not ask all ranks for them before every batch."""

    def open(self) -> None:
        """Training starts; Lightning's own signal handlers are installed by now."""

    def close(self) -> None:
        """The fit is over, however it ended. Local: asks nothing of other ranks."""

    def ballot(self) -> dict[str, int]:
        """This rank's votes of the batch at hand. Blocks on: nothing.

        With `anywhere` it is also asked for within validations and at the ends of epochs, and in the sanity check
        before `open`.
        """
        return {}

    def loss_known(self, loss: Tensor) -> None:
        """`loss`, not yet scaled, is about to be differentiated. Blocks on: nothing."""

    def before_step(self, votes: Mapping[str, int]) -> None:
        """Parameters are about to change. What is raised here is raised on all ranks."""

    def decide(self, votes: Mapping[str, int], progress: Progress) -> Request | None:
        """What is to happen at this step boundary, from what all ranks have heard."""
        return None

    def urgent(self, votes: Mapping[str, int]) -> bool:
        """Whether what was heard within a validation is worth leaving it. The same on all ranks.

        Then `decide` is asked at once, and the fit, if it is to stop, ends with the state before the validation.
        """
        return False

    def training_over(self) -> None:
        """No further batch will be trained; hooks of the end, and the last save, come next.

        What is raised here is raised on all ranks.
        """

    def refuses_save(self) -> str | None:
        """Why the state of now must not be saved for a restart; None if it may be. The same on all ranks.

        What is raised here is raised on all ranks. Blocks on: what it takes to know, all ranks included.
        """
        return None

    def state(self) -> dict[str, Any]:
        """For a checkpoint, with a `key` only: this rank's own plain data."""
        return {}

    def restore(self, state: dict[str, Any], *, other_ranks: bool) -> None:
        """The fit goes on from a checkpoint that has this `state`.

        Args:
            state: Of this rank; with `other_ranks`, of another one.
            other_ranks: The number of ranks is not that of the checkpoint.
        """

    def phase(self, name: str) -> None:
        """What the trainer does from now on: ``"train"``, ``"validate"``, ``"sanity"``, ``"load"``, ``"end"``.

        The end of a load is the next ballot.
        """

    def batch_over(self) -> None:
        """A batch is over, whatever it was for."""

    def failed(self, error: BaseException) -> None:
        """The fit ends with `error`. Local: other ranks may not have failed, and would not answer."""

    def leave(self, exit_code: int) -> None:
        """The fit was ended by a request and is torn down; the process ends with `exit_code` when this returns."""

    def stays(self) -> None:
        """It does not after all: who has called `fit` has caught the `SystemExit`. Thread: any."""


class Watches(Watch):
    """Several watches as one."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        self._watches = tuple(watches)
        self.topics = tuple(topic for watch in self._watches for topic in watch.topics)
        self.wants_loss = any(watch.wants_loss for watch in self._watches)
        self.anywhere = any(watch.anywhere for watch in self._watches)
        self.replaces_lightnings_signals = any(watch.replaces_lightnings_signals for watch in self._watches)

    def __iter__(self) -> Iterator[Watch]:
        return iter(self._watches)

    @raised_everywhere()
    def open(self) -> None:
        for watch in self._watches:
            watch.open()

    def close(self) -> None:
        """Each of them is closed, also if another one raises."""
        with ExitStack() as stack:
            for watch in self._watches:
                stack.callback(watch.close)

    def ballot(self) -> dict[str, int]:
        return {topic: vote for watch in self._watches for topic, vote in watch.ballot().items()}

    def ballot_between_steps(self) -> dict[str, int]:
        """The votes of those watches that can be asked anywhere."""
        asked = (watch for watch in self._watches if watch.anywhere)
        return {topic: vote for watch in asked for topic, vote in watch.ballot().items()}

    def loss_known(self, loss: Tensor) -> None:
        for watch in self._watches:
            watch.loss_known(loss)

    @raised_everywhere()
    def before_step(self, votes: Mapping[str, int]) -> None:
        for watch in self._watches:
            if watch.wants_loss:
                watch.before_step(votes)

    @raised_everywhere()
    def decide_all(self, votes: Mapping[str, int], progress: Progress) -> list[Request]:
        """What each of them asks for, in their order."""
        asked = [watch.decide(votes, progress) for watch in self._watches]
        return [request for request in asked if request is not None]

    def urgent(self, votes: Mapping[str, int]) -> bool:
        return any([watch.urgent(votes) for watch in self._watches])

    @raised_everywhere()
    def training_over(self) -> None:
        for watch in self._watches:
            watch.training_over()

    @raised_everywhere()
    def refuses_save(self) -> str | None:
        refusals = [watch.refuses_save() for watch in self._watches]
        return next((why for why in refusals if why is not None), None)

    def state(self) -> dict[str, Any]:
        return {watch.key: watch.state() for watch in self._watches if watch.key}

    def restore(self, state: dict[str, Any], *, other_ranks: bool) -> None:
        for watch in self._watches:
            if watch.key in state:
                watch.restore(state[watch.key], other_ranks=other_ranks)

    def phase(self, name: str) -> None:
        for watch in self._watches:
            watch.phase(name)

    def batch_over(self) -> None:
        for watch in self._watches:
            watch.batch_over()

    def failed(self, error: BaseException) -> None:
        for watch in self._watches:
            watch.failed(error)

    def leave(self, exit_code: int) -> None:
        for watch in self._watches:
            watch.leave(exit_code)

    def stays(self) -> None:
        for watch in self._watches:
            watch.stays()
