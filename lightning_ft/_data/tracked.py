"""Tracked loaders: they yield what the user's loader yields, and their `Tracker` knows where they stand.

The user's loader itself is left as it is: a `DataLoader` gets a twin of a derived class, anything else a proxy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_ft.dataloading import Tracker


def track(loader: Any, tracker: Tracker) -> Any:
    """A loader that yields what `loader` yields and whose place `tracker` knows. `loader` itself is left as it is."""
    original = getattr(loader, "_ft_original", loader)
    tracker.attach(original)
    if isinstance(original, DataLoader):
        # A twin of the user's loader: same fields, a class that derives from its class. No constructor runs, since
        # subclasses have constructors of their own.
        cls = _tracked_class(type(original), tracker.kind)
        tracked: Any = object.__new__(cls)
        vars(tracked).update({**vars(original), "_ft_tracker": tracker, "_ft_original": original, "_iterator": None})
        if tracker.kind == "stateful":
            # Its state lives in the object that is iterated. A cycle would leave its workers to the garbage collector,
            # which closes their queues first, so that each of them takes seconds to notice.
            tracker._owner = weakref.proxy(tracked)
        elif tracker.kind == "replay":
            # Workers that outlive a pass carry random state into the next one, which no restart could give back.
            vars(tracked)["persistent_workers"] = False
        return tracked
    return (_TrackedStateful if tracker.kind == "stateful" else _TrackedIterable)(original, tracker)


class TrackedIterator:
    """Iterator over a tracked loader that opens its pass at the first batch asked for.

    Lightning asks for an iterator long before it asks for a batch: before the sampler's epoch is set, and before a
    checkpoint is restored. An iterator opened then starts its workers on the wrong order, or a second time.
    """

    def __init__(self, tracker: Tracker, create: Callable[[], Iterator[Any]]) -> None:
        self._tracker = tracker
        self._create = create
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> TrackedIterator:
        return self

    def __next__(self) -> Any:
        fresh = self._iterator is None
        if self._iterator is None:
            self._iterator = self._tracker.open(self._create)
        try:
            return self._tracker.fetch(self._iterator)
        except StopIteration:
            if not fresh or self._tracker.delivered or self._tracker.kind not in ("stateful", "dataset"):
                raise
        # A loader with a state of its own that stood at the end of its data has now noticed; its next pass is the one
        # that was asked for. Without this an epoch would silently have no batches.
        self._iterator = self._tracker.reopen(self._create)
        return self._tracker.fetch(self._iterator)


class _TrackedDataLoader:
    """Mixed in before the class of a `DataLoader`."""

    _ft_tracker: Tracker

    def __iter__(self) -> TrackedIterator:
        return TrackedIterator(self._ft_tracker, super().__iter__)  # type: ignore[misc]

    def _get_iterator(self) -> Any:
        with self._ft_tracker.substituted(self):
            return super()._get_iterator()  # type: ignore[misc]


class _Resumable:
    """Tells Lightning that the position of this loader is kept, so that it does not warn of the opposite."""

    _ft_tracker: Tracker

    def state_dict(self) -> dict[str, Any]:
        return self._ft_tracker.position(epoch_over=False)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ft_tracker.resume(state)


def _tracked_class(original: type, kind: str) -> type:
    bases: tuple[type, ...] = (_TrackedDataLoader, original)
    if kind != "stateful":
        bases = (_TrackedDataLoader, _Resumable, original)
    return type(original.__name__, bases, {"__module__": original.__module__, "__qualname__": original.__qualname__})


class _Tracked:
    """Stands before a loader that is no `DataLoader`; everything but iteration is the loader's own."""

    def __init__(self, original: Any, tracker: Tracker) -> None:
        self._ft_original = original
        self._ft_tracker = tracker

    def __iter__(self) -> TrackedIterator:
        return TrackedIterator(self._ft_tracker, lambda: iter(self._ft_original))

    def __len__(self) -> int:
        return len(self._ft_original)  # TypeError where the original has no length, as Lightning expects

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_ft_"):
            raise AttributeError(name)
        return getattr(self._ft_original, name)


class _TrackedStateful(_Tracked):
    """Stands before a loader with a state of its own."""

    # Methods and not left to `__getattr__`: from Python 3.12 on, an `isinstance` check against a protocol, which is how
    # Lightning looks for them, no longer asks it.
    def state_dict(self) -> Any:
        return self._ft_original.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._ft_original.load_state_dict(state)


class _TrackedIterable(_Resumable, _Tracked):
    """Stands before an iterable that keeps no state."""
