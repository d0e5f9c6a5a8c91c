"""When a save is let through, and the times of each."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L

_TIMEOUT_SECS = 120.0


@dataclass
class Save:
    """One save; times by `perf_counter`."""

    path: str
    began: float
    returned: float = 0.0
    durable: float = 0.0
    waited_secs: float = 0.0
    """Before the optimizer step that followed."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the contender says of it by itself."""

    @property
    def blocked_secs(self) -> float:
        """How long the main thread stood still for it, by our clock or by the contender's, whichever says more."""
        return max(self.returned - self.began + self.waited_secs, self.metrics.get("blocked_secs", 0.0))

    @property
    def durable_secs(self) -> float:
        """From the call until it is complete under its name, and synced."""
        return self.durable - self.began


class Pace:
    """Contenders ask for a save after every step; let through is one when the one before is durable.

    Thread: main, but for `durable` and `fail`, which are called where the contender finds out.
    """

    def __init__(self) -> None:
        self.saves: list[Save] = []
        self.on_return: Callable[[Save], None] = lambda save: None
        self.removes = True
        """Whether the save before is removed here; else the contender does that."""
        self._left = 0
        self._is_durable = threading.Event()
        self._is_durable.set()
        self._error: BaseException | str | None = None
        self._aside = ThreadPoolExecutor(max_workers=1)  # removing a large file takes time that is nobody's save

    def allow(self, saves: int) -> None:
        """So many saves more are let through."""
        self._left = saves

    @property
    def due(self) -> bool:
        """Whether a save asked for now is let through."""
        self._raise()
        return self._left > 0 and self._is_durable.is_set()

    @contextmanager
    def saving(self, path: str) -> Iterator[None]:
        """The save is made inside; when it returns, the training goes on."""
        self._left -= 1
        self._is_durable.clear()
        save = Save(path, time.perf_counter())
        self.saves.append(save)
        yield
        save.returned = time.perf_counter()
        self.on_return(save)

    def install(self, trainer: L.Trainer) -> None:
        """Every `trainer.save_checkpoint` is timed, and does nothing unless it is due."""
        original = trainer.save_checkpoint

        def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> None:
            if self.due:
                with self.saving(str(filepath)):
                    original(filepath, *args, **kwargs)

        vars(trainer)["save_checkpoint"] = save_checkpoint

    def durable(self, metrics: dict[str, float] | None = None) -> None:
        """The save under way is on disk. Thread: any."""
        now = time.perf_counter()
        self.saves[-1].durable = now
        self.saves[-1].metrics = dict(metrics or {})
        if self.removes and len(self.saves) > 1:
            self._aside.submit(_remove, self.saves[-2].path)
        self._is_durable.set()

    def fail(self, error: BaseException | str) -> None:
        """The save under way failed; the main thread raises it. Thread: any."""
        self._error = error
        self._is_durable.set()

    def aside(self, function: Callable[[], None]) -> None:
        """`function` runs in a thread of its own, and its failure is the save's."""

        def run() -> None:
            try:
                function()
            except BaseException as error:
                self.fail(error)

        self._aside.submit(run)

    @property
    def is_durable(self) -> bool:
        """Whether no save is under way."""
        return self._is_durable.is_set()

    def wait(self) -> None:
        """No save is under way."""
        if not self._is_durable.wait(_TIMEOUT_SECS):
            raise RuntimeError(f"{self.saves[-1].path} is not durable after {_TIMEOUT_SECS:.0f} s")
        self._raise()

    def close(self) -> None:
        """What was removed aside is gone."""
        self._aside.shutdown()

    def _raise(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"{self.saves[-1].path} was not saved: {self._error}")


def _remove(path: str) -> None:
    if Path(path).is_dir():
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError):
            Path(path).unlink()
