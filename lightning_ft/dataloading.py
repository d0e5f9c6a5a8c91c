"""Exact positions for ordinary data loaders.

A *tracked* loader yields the batches its original would yield, and its `Tracker` can say where it stands and start
another process there. What makes that exact, whatever the number of workers and however far they prefetched:

1. Everything random about a pass over the data comes from one seed, derived from a root seed and the number of the
   pass. Samplers, `__iter__` and fetches of the main process run in private random streams
   (`_state.random_state.Stream`), so the training's random state and the data's never mix.
2. To continue a pass, its order is drawn again from the same seed, and *indices* are skipped, not samples.
3. Every batch of indices carries a seed, which the dataset applies where the batch is made: in the worker, or in the
   main process. Random augmentation then depends neither on the worker count nor on prefetching.

That is for loaders of kind ``indexed``; for the others see `_data.kinds`.

On another number of ranks, an ``indexed`` loader goes on within an epoch: what is left of the order is dealt out anew
(`_data.elastic`, `_data.deal`). The others, whose positions are those of one rank, are refused there.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_ft._data import deal as _deal
from lightning_ft._data import elastic
from lightning_ft._data.elastic import Change, DataRank
from lightning_ft._data.kinds import is_stateful, kind_of, kind_of_dataset, leaves_by_itself, length_of
from lightning_ft._data.order import IndexSource, RepeatedOrder, SamplerState, SeededDataset
from lightning_ft._hang import headway
from lightning_ft._state import random_state
from lightning_ft._state.digest import digest
from lightning_ft.errors import RestoreError

_log = logging.getLogger(__name__)
_PROGRESS_BATCHES = 1000  # a line of progress per so many batches thrown away
_END = object()


class Tracker:
    """Where one loader stands: which pass, how many batches of it were delivered, and how to get there again.

    Args:
        index: Place of the loader among the loaders of the run.
        root_seed: Seed of the run on this rank.
        rank: This rank, of those with data of their own; they augment differently even where they draw the same order.
        seed_batches: Whether batches carry seeds (``FaultTolerantCheckpoint(seed_workers=...)``).
        number_pass: Numbers the passes by something else than how many there were (a validation by when it runs).
        stage: What the loader is for, for messages.
        ranks: How many have data of their own.
    """

    def __init__(
        self,
        index: int,
        root_seed: int,
        rank: int,
        seed_batches: bool,
        number_pass: Callable[[], int] | None = None,
        stage: str = "train",
        ranks: int = 1,
    ) -> None:
        self._index = index
        self._name = f"{stage} dataloader {index}"
        self._root_seed = root_seed
        self._rank = rank
        self._data_rank = DataRank(rank, max(ranks, rank + 1))
        self._seed_batches = seed_batches
        self._number_pass = number_pass
        self._resume: dict[str, Any] | None = None
        self._begun = False
        self._loader: Any = None
        self._owner: Any = None  # of the state, where there is one
        self.kind = ""
        self.passes = 0  # begun since the run began
        self.cycles = -1  # begun since the epoch began, less one
        self.delivered = 0
        self.exhausted = False
        self._digest: str | None = None
        self._samplers: SamplerState | None = None
        self._order_state: dict[str, Any] = {}
        self._deal: dict[str, Any] | None = None
        self._fetching: random_state.Stream | None = None
        self._dataset: SeededDataset | None = None
        self._drawn: dict[int, Any] = {}  # indices of the batches that are being fetched, and of the last ones

    def attach(self, loader: Any) -> None:
        """This tracker speaks for `loader` (the original, not the tracked one)."""
        self._loader = loader
        self.kind = kind_of(loader)
        self._owner = loader.dataset if self.kind == "dataset" else loader
        self._samplers = SamplerState(loader) if isinstance(loader, DataLoader) else None
        if getattr(loader, "num_workers", 0) and not getattr(loader, "in_order", True):
            _log.warning(
                "%s has in_order=False: its batches come in no order that could be repeated, so after a restart some "
                "are trained twice and others not", self._name,
            )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """What a position in this loader depends on."""
        loader = self._loader
        facts: dict[str, Any] = {"type": type(loader).__name__}
        if isinstance(loader, DataLoader):
            facts["batch size"] = loader.batch_size
            facts["drop_last"] = loader.drop_last
            facts["sampler"] = type(loader.sampler).__name__
            facts["dataset length"] = length_of(loader.dataset)
        facts["batches"] = length_of(loader)
        return facts

    # -- position ------------------------------------------------------------------------------------------------

    def position(self, *, epoch_over: bool) -> dict[str, Any]:
        """Where the loader stands after everything it has delivered, as plain data.

        Args:
            epoch_over: The epoch is complete: the next batch asked for begins a new pass.
        """
        if self._resume is not None:
            return copy.deepcopy(self._resume)  # nothing was asked for since
        state: dict[str, Any] = {
            "kind": self.kind,
            "root_seed": self._root_seed,
            "passes": self.passes,
            "cycles": self.cycles,
            "delivered": self.delivered,
            "exhausted": self.exhausted,
            "begun": self._begun,
            "epoch_over": epoch_over or not self._begun,
            "digest": self._digest,
        }
        if self._samplers is not None:
            # A pass is drawn again from where its samplers stood when it began; the next pass from where they are.
            state["samplers"] = self._samplers.capture() if state["epoch_over"] else self._order_state
        if self._deal is not None and not state["epoch_over"]:
            state["deal"] = self._deal
        if not self.passes:
            return state  # a loader that was never begun is the one the script makes, and to ask some begins them
        if self.kind in ("stateful", "dataset"):
            state["state"] = copy.deepcopy(self._owner.state_dict())
        if self._fetching is not None and (self.kind in ("stateful", "dataset") or not self._seed_batches):
            state["fetching"] = self._fetching.state  # else each batch, or the replay from the start, seeds it anew
        return state

    def resume(self, state: dict[str, Any], change: Change | None = None) -> None:
        """The next pass opened continues at `state` (of `position`); nothing is fetched before that.

        Args:
            state: Where to continue.
            change: The number of ranks is not the one that `state` was taken on.

        Raises:
            RestoreError: `state` was taken from another kind of loader, or one with other samplers.
            TopologyError: It means nothing on this number of ranks.
        """
        if state["kind"] != self.kind:
            raise RestoreError(
                f"{self._name}: the checkpoint holds the position of a {state['kind']!r} loader, "
                f"this run has a {self.kind!r} one ({type(self._loader).__name__}). Use the loader of the run that "
                "saved it, or start at an epoch's end with strict=False."
            )
        if change is not None:
            state = _deal.dealt_anew(
                state, self._loader, self._data_rank, change, self._name, self.describe(), anew=self._begins_anew()
            )
        self._resume = state
        self._root_seed = state["root_seed"]
        if self._samplers is not None:
            # Not when the pass is opened: by then Lightning has told the samplers which epoch it is.
            self._samplers.restore(state["samplers"], common=change is not None)
            if change is not None:
                state["samplers"] = self._samplers.capture()  # of the samplers that a restart of this run will have

    @property
    def has_cycled(self) -> bool:
        """Whether the pass to be continued is not the first one of its epoch."""
        return bool((self._resume or {}).get("cycles", 0) > 0)

    def batches_left(self) -> tuple[int, int] | None:
        """How many batches a whole pass has, and how many the one to be continued has left; None if not dealt anew."""
        deal = (self._resume or {}).get("deal", {})
        if not deal.get("dealt_anew"):
            return None
        drop_last = bool(self._loader.drop_last)
        left = len(_deal.Rest(self._loader, deal, self._data_rank))
        return len(self._loader), elastic.batches(left, deal["batch_size"], drop_last)

    def begin_epoch(self) -> None:
        """Passes are counted anew: a loader that is cycled within an epoch is told from one that is in its first."""
        self.cycles = -1

    # -- iteration -----------------------------------------------------------------------------------------------

    def open(self, create: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """A pass over the loader is open, new or where `resume` said, and the iterator stands before its next batch."""
        state, self._resume = self._resume, None
        self._begun = True
        if state is None or state["epoch_over"]:
            return self._open_next(state, create)
        return self._open_at(state, create)

    def _open_next(self, state: dict[str, Any] | None, create: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        if state is not None:
            self.passes = state["passes"]
            self._load(state)
            if "state" in state and state["begun"] and not leaves_by_itself(state["state"]):
                samplers = self._samplers.capture() if self._samplers is not None else None
                self._leave_pass(create, state)
                if self._samplers is not None and samplers is not None and self._repeated_sampler() is not None:
                    self._samplers.restore(samplers)  # leaving the old pass drew an order
        self.passes = self.passes + 1 if self._number_pass is None else self._number_pass()
        self.cycles += 1
        self.delivered = 0
        self.exhausted = False
        self._digest = None
        if self._samplers is not None:
            self._order_state = self._samplers.capture()
        if self.kind == "indexed":
            self._deal = _deal.describe(self._loader, self._seed("order"), self._data_rank)
        return self._create(create, None)

    def _open_at(self, state: dict[str, Any], create: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        self.passes = state["passes"]
        self.cycles = state["cycles"]
        self.delivered = state["delivered"]
        self.exhausted = state["exhausted"]
        self._digest = state["digest"]
        self._deal = state.get("deal")
        if self._samplers is not None:
            self._samplers.restore(state["samplers"])
            self._order_state = state["samplers"]
        self._load(state)
        iterator = self._create(create, state.get("fetching"))
        if self.kind == "replay":
            self._replay(iterator, state)
        return iterator

    def _load(self, state: dict[str, Any]) -> None:
        if "state" in state:
            self._owner.load_state_dict(state["state"])

    def _leave_pass(self, create: Callable[[], Iterator[Any]], state: dict[str, Any]) -> None:
        # The state was taken at the last batch of an epoch, and says so; what the run did next was to ask for another
        # iterator. Doing the same leaves the old pass behind: taking the first iterator for the new epoch would give
        # an epoch without batches. A generator reads its position when it first runs, and so does a dataset.
        ended = state["exhausted"] or state["delivered"] == length_of(self._loader)
        if ended and self.kind == "dataset":
            return  # its first iterator will have no items: see `reopen`
        with random_state.Stream(self._seed("leave", self._rank)).active():
            old = self._create(create, None)
            if self.kind == "stateful" and not isinstance(old, GeneratorType):
                return
            if ended and next(old, _END) is not _END:
                self._load(state)  # it saw by itself that its data had ended: the batch was one of the new pass
            elif not ended and not self._goes_on(create, state):
                next(self._create(create, None), None)

    def _goes_on(self, create: Callable[[], Iterator[Any]], state: dict[str, Any]) -> bool:
        # The epoch ended before the data did. Some iterate on from there in the next epoch, others begin anew, and
        # nothing tells which but a trial: two iterators end where one that was asked twice does, or they do not.
        def after(iterators: int, batches: int) -> str | None:
            self._load(state)
            for _ in range(iterators):
                iterator = self._create(create, None)
                for _ in range(batches):
                    next(iterator, None)
            return digest(self._owner.state_dict())

        asked_again, asked_once = after(2, 1), after(1, 2)
        self._load(state)
        if asked_again is None:
            raise RestoreError(
                f"{self._name}: its epoch ended before its data, and its state cannot be pickled, "
                "so nothing tells whether the next epoch goes on or begins anew"
            )
        return asked_again == asked_once

    def reopen(self, create: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The pass just opened, which turned out to be the end of the one before, is opened anew."""
        self.exhausted = False
        return self._create(create, None)

    def _create(self, create: Callable[[], Iterator[Any]], fetching: dict[str, Any] | None) -> Iterator[Any]:
        if self._dataset is not None:
            self._dataset.reseed(self._seed("batch", self._rank))
        self._fetching = random_state.Stream(self._seed("fetch", self._rank), fetching)
        with random_state.Stream(self._seed("create", self._rank)).active():
            return create()

    def fetch(self, iterator: Iterator[Any]) -> Any:
        """The next batch; where the main process makes it, from the loader's own random stream."""
        assert self._fetching is not None, "fetch follows open"
        try:
            with self._fetching_draws(self._fetching):
                batch = next(iterator)
        except StopIteration:
            self.exhausted = True
            raise
        self.delivered += 1
        if self.kind == "replay":
            self._digest = digest(batch)
        return batch

    def _note_drawn(self, ordinal: int, indices: Any) -> None:
        # In a new pass, numbers begin anew: what is above this one is of the pass before.
        self._drawn = {n: i for n, i in self._drawn.items() if self.delivered - 2 <= n < ordinal}
        self._drawn[ordinal] = indices

    def indices(self, ahead: int = 0) -> Any:
        """What the dataset was asked for to make the batch delivered last, or one before; None if nobody knows.

        Args:
            ahead: How many batches were delivered since.
        """
        return self._drawn.get(self.delivered - 1 - ahead)

    def _fetching_draws(self, stream: random_state.Stream) -> AbstractContextManager[None]:
        """Where what a fetch draws in the main process comes from."""
        if self.kind != "indexed":
            return stream.active()
        # The sampler draws from a stream of its own (see `IndexSource`): left are the dataset and the collation.
        if self._loader.num_workers:
            # They draw in workers. Entering a stream would drop a value that numpy had cached, and that must not depend
            # on the number of workers.
            random_state.forget_cached_normal()
            return nullcontext()
        return stream.lent() if self._dataset is not None else stream.active()

    def _replay(self, iterator: Iterator[Any], state: dict[str, Any]) -> None:
        total = state["delivered"]
        if not total and not state["exhausted"]:
            return
        name = type(getattr(self._loader, "dataset", self._loader)).__name__
        _log.warning(
            "%s (%s) keeps no state: fetching %d batches again to reach its position. Give it "
            "state_dict/load_state_dict to skip this.", self._name, name, total,
        )  # fmt: skip
        self.delivered = 0
        for count in range(1, total + 1):
            try:
                self.fetch(iterator)
            except StopIteration:
                raise RestoreError(
                    f"{self._name} ({name}) ended after {count - 1} batches of its epoch, fetched again, and {total} "
                    "had been trained: it does not repeat itself and keeps no state, so it cannot be resumed."
                ) from None
            headway.made()
            if count % _PROGRESS_BATCHES == 0:
                _log.warning("%s: %d of %d batches fetched again", self._name, count, total)
        if total and state["digest"] is None:
            _log.warning(
                "%s (%s): its batches cannot be pickled, so nothing checks that it repeats itself",
                self._name, name,
            )  # fmt: skip
        elif self._digest != state["digest"]:
            raise RestoreError(
                f"{self._name} ({name}): batch {total} of its epoch, fetched again, is not the one that was "
                "trained. The loader does not repeat itself and keeps no state, so its position cannot be "
                "restored. Give it state_dict/load_state_dict."
            )
        if state["exhausted"]:
            next(iterator, None)

    # -- what a tracked loader's passes are made of --------------------------------------------------------------

    def _seed(self, *purpose: int | str) -> int:
        return random_state.mix(self._root_seed, self._index, self.passes, *purpose)

    @contextmanager
    def substituted(self, loader: Any) -> Iterator[None]:
        """Inside, `loader` builds its iterator from seeded indices and a seeded dataset; afterwards it is as it was."""
        # DataLoader.__setattr__ refuses these names after construction, hence the dictionary.
        fields = vars(loader)
        replaced: dict[str, Any] = {"generator": torch.Generator().manual_seed(self._seed("base", self._rank))}
        if self.kind == "indexed":
            name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
            seed_of = self._batch_seed if self._seed_batches else None
            base = getattr(loader, name)
            replaced[name] = IndexSource(
                base, self._order_stream, seed_of, lambda: self.delivered, lambda: self._rest(base), self._note_drawn
            )
        if self._seed_batches and kind_of_dataset(loader) == "map":
            self._dataset = SeededDataset(loader.dataset, self._seed("batch", self._rank))
            replaced["dataset"] = self._dataset
        sampler = self._repeated_sampler()
        if sampler is not None:
            assert self._samplers is not None
            # A copy, which the iterator keeps: many ask the sampler to begin when they are asked for their first batch.
            replaced["batch_sampler"] = copy.copy(loader.batch_sampler)
            replaced["batch_sampler"].sampler = RepeatedOrder(
                sampler, self._samplers, self._order_stream, lambda: self.passes
            )
        kept = {name: fields[name] for name in replaced}
        fields.update(replaced)
        try:
            yield
        finally:
            fields.update(kept)

    def _repeated_sampler(self) -> Any:
        """The sampler of a loader that keeps its own state, if that state does not hold the sampler's."""
        batches = getattr(self._loader, "batch_sampler", None)
        if self.kind != "stateful" or self._samplers is None or kind_of_dataset(self._loader) != "map":
            return None
        # Batch samplers of users may do anything with their samplers.
        known = type(batches).__name__ == "BatchSampler" and type(batches).__module__.startswith("torch")
        sampler = getattr(batches, "sampler", None)
        return sampler if known and not is_stateful(sampler) else None

    def _order_stream(self) -> random_state.Stream:
        return random_state.Stream(self._seed("order"))

    def _rest(self, base: Any) -> Any:
        dealt_anew = self._deal is not None and self._deal.get("dealt_anew")
        return _deal.rest(self._loader, self._deal or {}, self._data_rank) if dealt_anew else base

    def _batch_seed(self, ordinal: int) -> int:
        if self._deal is not None and self._deal.get("dealt_anew"):
            # Batches are counted anew then, and must not draw what the first ones of the pass drew.
            return random_state.mix(self._seed("batch", self._rank, "from", self._deal["offset"]), ordinal)
        return random_state.mix(self._seed("batch", self._rank), ordinal)

    def _begins_anew(self) -> bool:
        """Whether a loader with a state of its own keeps nothing but its place in a pass: at the end it needs none."""
        torchdata = type(self._loader).__module__.startswith("torchdata.")
        return torchdata and self._repeated_sampler() is not None and not is_stateful(self._loader.dataset)
