"""What happens inside a script that is drilled: its trainer writes elsewhere, is recorded, and may be killed.

`lightning-ft drill` starts the user's own command with a value in the environment (`VARIABLE`), which every process of
it inherits, whoever starts them. The first `FaultTolerantCheckpoint` that such a process makes finds it, and trainers
made after that are prepared: see `_prepare`. Nothing else of the script is touched.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from lightning_ft import _loops, _names, events
from lightning_ft._digest import digest
from lightning_ft._recorder import KillPoint, KillSwitch, Recorder

VARIABLE = "LIGHTNING_FT_DRILL"
"""Name in the environment; its value is an `Assignment` as JSON."""


@dataclass(frozen=True)
class Assignment:
    """What a drilled process is to do."""

    directory: str
    """Of this run: traces in it, checkpoints and whatever else the trainer writes below it."""
    start: int
    """Which start of the run this is; 0 is the first."""
    steps: int | None
    kill_at: KillPoint | None
    summaries: bool

    def environment(self) -> dict[str, str]:
        """What to add to the environment of the command."""
        return {VARIABLE: json.dumps(asdict(self))}


def killed_file(assignment: Assignment) -> Path:
    """Is there as soon as the kill point of this start has been reached."""
    return Path(assignment.directory) / f"{assignment.start}.killed"


def events_file(assignment: Assignment) -> Path:
    """JSON lines: the events of the save protocol, each with the batch trained last, and facts about the fit."""
    return Path(assignment.directory) / f"{assignment.start}.events"


def begin() -> None:
    """Trainers made from now on are prepared, if this process is drilled. Called once per callback of ours."""
    value = os.environ.get(VARIABLE)
    if value is None or getattr(pl.Trainer.__init__, "_drilled", False):
        return
    assignment = Assignment(**json.loads(value))
    original: Callable[..., None] = pl.Trainer.__init__

    @functools.wraps(original)
    def init(trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        original(trainer, *args, **kwargs)
        _prepare(trainer, assignment)

    init._drilled = True  # type: ignore[attr-defined]
    pl.Trainer.__init__ = init  # type: ignore[method-assign,assignment]


def _prepare(trainer: pl.Trainer, assignment: Assignment) -> None:
    """`trainer` writes below the drill's directory only, ends when told, is recorded and killed as assigned."""
    from lightning_ft.callback import FaultTolerantCheckpoint  # which calls `begin`

    ours = [c for c in _loops.callbacks(trainer) if isinstance(c, FaultTolerantCheckpoint)]
    base = Path(assignment.directory)
    trainer._default_root_dir = str(base / "root")  # type: ignore[attr-defined]
    for callback in _loops.callbacks(trainer):
        if isinstance(callback, FaultTolerantCheckpoint):
            callback._redirect(functools.partial(_elsewhere, base))
        elif isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            callback.dirpath = _elsewhere(base, os.fspath(callback.dirpath))
    notes = [note for logger in trainer.loggers if (note := _redirect_logger(logger, base))]
    if not ours:
        return
    if getattr(pl.Trainer, "_drilled_fits", 0):
        _write(events_file(assignment), {"note": "the script makes further trainers: only the first was compared"})
        return
    pl.Trainer._drilled_fits = 1  # type: ignore[attr-defined]
    if assignment.steps is not None:
        trainer.fit_loop.epoch_loop.max_steps = assignment.steps
    _loops.callbacks(trainer)[:0] = [_Drilled(assignment, notes)]


def _elsewhere(base: Path, dirpath: str) -> str:
    """The same other directory for the same one, in every start."""
    name = _names.split(_names.normalise(dirpath))[1]
    return str(base / "checkpoints" / f"{name}-{(digest(_names.normalise(dirpath)) or '')[:8]}")


def _redirect_logger(logger: Any, base: Path) -> str | None:
    """`logger` writes below `base`, if it is known how to tell it; what to say if not."""
    for name in ("_root_dir", "_save_dir"):
        if getattr(logger, name, None) is not None:
            setattr(logger, name, str(base / "root"))
            return None
    return f"{type(logger).__name__} logged to where it always does"


class _Drilled(Recorder):
    """Records a fit and kills it. One file per rank, whose number is known once the processes are there."""

    def __init__(self, assignment: Assignment, notes: list[str]) -> None:
        super().__init__("", summaries=assignment.summaries)
        self._assignment = assignment
        self._notes = notes
        self._switch: KillSwitch | None = None
        self._trainer: pl.Trainer | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or self._path:
            return
        assignment, rank = self._assignment, trainer.global_rank
        self._path = str(Path(assignment.directory) / f"{assignment.start}.rank{rank}.jsonl")
        self._trainer = trainer
        if assignment.kill_at is not None:
            self._switch = KillSwitch(assignment.kill_at, rank, before=killed_file(assignment).touch)
        if rank == 0:
            for note in self._notes:
                self._write({"note": note})
            facts = {"world_size": trainer.world_size, "accelerator": type(trainer.accelerator).__name__}
            self._write({"fact": facts})
            events.observe(self._on_event)

    def _write(self, line: dict[str, Any]) -> None:
        _write(events_file(self._assignment), line)

    def _on_event(self, event: events.Event) -> None:
        assert self._trainer is not None
        batch = _loops.progress(self._trainer).batch
        step = getattr(event, "step", None)
        self._write({"event": type(event).__name__, "path": event.path, "step": step, "batch": batch})

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(trainer, *args, **kwargs)
        if self._switch is not None:
            self._switch.on_train_batch_end(trainer, *args, **kwargs)


def _write(path: Path, line: dict[str, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)
