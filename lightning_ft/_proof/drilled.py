"""What happens inside a script that is drilled: its trainers write elsewhere, one is recorded, and may be killed.

`lightning-ft drill` starts the user's own command with a value in the environment (`VARIABLE`), which every process of
it inherits, whoever starts them. The first `FaultTolerantCheckpoint` that such a process makes finds it, and from then
on every trainer is prepared when it is made, and again before it is used. Nothing else of the script is touched.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from typing_extensions import override

from lightning_ft import events
from lightning_ft._fit import loops
from lightning_ft._proof.assignment import VARIABLE, Assignment, events_file, is_ours, killed_file
from lightning_ft._proof.own_attributes import attributes
from lightning_ft._proof.recorder import END_OF_FIT, KillSwitch, Recorder, kill
from lightning_ft._proof.redirect import file_elsewhere, redirect

# A save takes a fraction of this for any model that is drilled; after it the next batch is trained, and waits again.
_DURABLE_WITHIN_SECS = 20.0


def begin() -> None:
    """Trainers are prepared from now on, if this process is drilled. Called once per callback of ours."""
    value = os.environ.get(VARIABLE)
    if value is None or hasattr(pl.Trainer, "_drill"):
        return
    drill = _Drill(Assignment(**json.loads(value)))
    pl.Trainer._drill = drill  # type: ignore[attr-defined]
    original = pl.Trainer.__init__

    @functools.wraps(original)
    def init(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        original(trainer, *args, **kwargs)
        drill.prepare(trainer)  # the script may ask where the logs are

    pl.Trainer.__init__ = init  # type: ignore[method-assign,assignment]
    for name in ("fit", "validate", "test", "predict"):
        # Callbacks may have come since, and a trainer may be older than the first callback.
        setattr(pl.Trainer, name, _prepared(name, getattr(pl.Trainer, name), drill))
    pl.Trainer.save_checkpoint = _elsewhere(  # type: ignore[method-assign]
        pl.Trainer.save_checkpoint, Path(drill.assignment.directory)
    )


def _elsewhere(save: Callable[..., Any], base: Path) -> Callable[..., Any]:
    @functools.wraps(save)
    def call(trainer: pl.Trainer, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        return save(trainer, file_elsewhere(base, filepath), *args, **kwargs)

    return call


def _prepared(name: str, method: Callable[..., Any], drill: _Drill) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> Any:
        drill.prepare(trainer)
        if name == "fit":
            drill.before_fit(trainer)
        else:
            drill.say(f"what trainer.{name} gives: the fit alone was compared")
        return method(trainer, *args, **kwargs)

    return call


class _Drill:
    """One process of a drilled script."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self._recorded: pl.Trainer | None = None
        self._said: set[str] = set()

    def prepare(self, trainer: pl.Trainer) -> None:
        """What `trainer` writes is below the drill's directory."""
        for note in redirect(trainer, Path(self.assignment.directory)):
            self.say(note)

    def before_fit(self, trainer: pl.Trainer) -> None:
        """`trainer` ends when told; if it is the first with a callback of ours, its fit is recorded, and killed."""
        from lightning_ft.callback import FaultTolerantCheckpoint

        steps, loop = self.assignment.steps, trainer.fit_loop.epoch_loop
        if steps is not None:
            loop.max_steps = steps if loop.max_steps == -1 else min(steps, loop.max_steps)
        ours = [c for c in loops.callbacks(trainer) if isinstance(c, FaultTolerantCheckpoint)]
        if (every := self.assignment.save_every_n_steps) is not None:
            for callback in ours:
                callback._save_also_every(every)
        if not ours:
            self.say("fits without a FaultTolerantCheckpoint")
        elif self._recorded is None:
            self._recorded = trainer
            trigger = ours[0].settings.trigger
            by_clock = trigger.auto or trigger.train_time_interval is not None
            loops.callbacks(trainer)[:0] = [_Drilled(self.assignment, by_clock)]
        elif self._recorded is not trainer:
            self.say("fits of further trainers: that of the first was compared")

    def say(self, note: str) -> None:
        """`note` is in the events, once per process."""
        if note not in self._said:
            self._said.add(note)
            _write(events_file(self.assignment), {"note": note})


class _Drilled(Recorder):
    """Records one fit and kills it. One file per rank, whose number is known once the processes are there."""

    def __init__(self, assignment: Assignment, saves_by_clock: bool) -> None:
        super().__init__("", summaries=assignment.summaries)
        self._assignment = assignment
        self._saves_by_clock = saves_by_clock
        self._state = "before"
        self._switch: KillSwitch | None = None
        self._durable: _Durable | None = None
        self._trains = False
        self._before: dict[str, Any] = {}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        begin()  # a process that was spawned with the trainer has made no callback
        if stage != "fit" or _tunes(trainer):
            return
        if self._state != "before":
            _write(events_file(self._assignment), {"note": "further fits of the trainer: the first was compared"})
            return
        assignment, rank = self._assignment, trainer.global_rank
        path = Path(assignment.directory) / f"{assignment.start}.rank{rank}.jsonl"
        # Not of one that has failed, and whose launcher has started this process in its place.
        if path.exists() and END_OF_FIT in path.read_bytes():
            _write(events_file(assignment), {"note": "fits of further processes: that of the first was compared"})
            return
        self._state, self._path = "fitting", str(path)
        if assignment.kill_at is not None and not assignment.once_durable:
            self._switch = KillSwitch(assignment.kill_at, rank, before=killed_file(assignment).touch)
        if rank == 0:
            # By the clock alone, no two runs save after the same batches.
            by_clock = self._saves_by_clock and assignment.save_every_n_steps is None
            self._durable = _Durable(0 if by_clock else assignment.durable_from)
            facts = {
                "world_size": trainer.world_size,
                "accelerator": type(trainer.accelerator).__name__,
                "saves_by_clock": self._saves_by_clock,
                "seeded": "PL_GLOBAL_SEED" in os.environ,  # by seed_everything
            }
            _write(events_file(assignment), {"fact": facts})
            events.observe(functools.partial(self._on_event, self._durable))

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_end(trainer, pl_module)
        if self._state == "fitting":
            self._state = "over"

    def _on_event(self, durable: _Durable, event: events.Event) -> None:
        line = {"event": type(event).__name__, "path": event.path, "step": getattr(event, "step", None)}
        _write(events_file(self._assignment), line)
        if isinstance(event, events.Committed) and is_ours(event.path):
            durable.committed(event.step)

    @override
    def _append(self, kind: str, key: list[int], values: dict[str, Any]) -> None:
        if self._state == "fitting":  # and not before a fit, where batches may be validated, nor after it
            super()._append(kind, key, values)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Before the hooks of all others: the state that the batch begins with.
        if self._state == "fitting":
            self._before = {"attributes": attributes(trainer, pl_module), "module": type(pl_module).__name__}
            if not self._trains:
                self._before |= {"begun": self._trained(trainer, pl_module)}
            self._trains = True

    @override
    def _beside(self, kind: str) -> dict[str, Any]:
        return self._before if kind == "step" else {}

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._before |= {"steps": loops.progress(trainer).step}
        super().on_train_batch_end(trainer, *args, **kwargs)
        assignment = self._assignment
        if self._state != "fitting" or assignment.kill_at is None:
            return
        if self._switch is not None:
            self._switch.on_train_batch_end(trainer, *args, **kwargs)
        elif self._durable is not None and loops.progress(trainer).batch >= int(assignment.kill_at):
            self._kill_once_durable(self._durable)

    def _kill_once_durable(self, durable: _Durable) -> None:
        # The save that this waits for needs nothing more of the training; other ranks wait for this one.
        if durable.wanted.wait(_DURABLE_WITHIN_SECS) or durable.any.is_set():
            killed_file(self._assignment).touch()
            kill()


class _Durable:
    """Which saves of this process have become durable.

    Args:
        wanted_step: A save of at least so many optimizer steps is waited for.
    """

    def __init__(self, wanted_step: int) -> None:
        self._wanted_step = wanted_step
        self.any = threading.Event()
        self.wanted = threading.Event()

    def committed(self, step: int) -> None:
        """A save of `step` is durable."""
        self.any.set()
        if step >= self._wanted_step:
            self.wanted.set()


def _tunes(trainer: pl.Trainer) -> bool:
    """Whether batch sizes or learning rates are tried out, and nothing is trained."""
    finders = (c for c in loops.callbacks(trainer) if isinstance(c, (BatchSizeFinder, LearningRateFinder)))
    return any(finder._early_exit for finder in finders)


def _write(path: Path, line: dict[str, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)
