"""One contender in a real `Trainer` run: blocked time, time to durable, throughput and heartbeat."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from tests.benchmarks import heartbeat
from tests.benchmarks.contenders import CONTENDERS
from tests.benchmarks.model import Layers, loader, quiet
from tests.benchmarks.pace import Pace
from tests.benchmarks.plan import Shape

Script = Callable[[Pace, Layers], Iterator[None]]
"""What happens when: each ``yield`` lets one step be trained, and saves are made after what precedes the ``yield``."""

ALL = 1 << 30


class Driver(Callback):
    """Follows the script; the first of the callbacks, so what it allows at a step's end is saved at that end."""

    def __init__(self, script: Iterator[None], pace: Pace) -> None:
        self._script = script
        self._pace = pace
        self._hook_began = 0.0
        self._step_ended = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        next(self._script)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self._hook_began = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: Any) -> None:
        if self._pace.saves and self._pace.saves[-1].began >= self._step_ended:  # made just before this step
            self._pace.saves[-1].waited_secs = pl_module.callbacks_done - self._hook_began
        try:
            next(self._script)
        except StopIteration:
            trainer.should_stop = True
        self._step_ended = time.perf_counter()


def follow(script: Script, contender: str, shape: Shape, rows: int, threads: int, dirpath: str) -> Pace:
    """The script was followed to its end; what was saved and when."""
    torch.set_num_threads(threads)
    pace = Pace()
    model = Layers(shape, rows)
    arguments = CONTENDERS[contender](pace, dirpath)
    driver = Driver(script(pace, model), pace)
    arguments["callbacks"] = [driver, *arguments.get("callbacks", [])]
    trainer = L.Trainer(**quiet(default_root_dir=dirpath, **arguments))
    pace.install(trainer)
    trainer.fit(model, loader())
    pace.close()
    return pace


def measure(
    dirpath: str, contender: str, shape: Shape, rows: int, threads: int, steps: int, beats: int
) -> dict[str, list[float]]:
    """Samples by quantity; without those of the first save, which allocates what later ones may use again."""
    window_secs: list[float] = []
    gaps: list[float] = []
    counted: list[int] = []

    def script(pace: Pace, model: Layers) -> Iterator[None]:
        yield  # the optimizer makes its state
        pace.allow(1)
        yield
        pace.wait()
        # Back to back: after each step within the window a save is made if the one before is durable.
        began = time.perf_counter()
        pace.allow(ALL)
        for _ in range(steps):
            yield
        window_secs.append(time.perf_counter() - began)
        pace.allow(0)
        pace.wait()
        counted.append(len(pace.saves))

        def beat() -> None:
            if contender == "none":
                gaps.append(heartbeat.worst_gap_of_secs(0.5))
            else:
                gaps.append(heartbeat.worst_gap(lambda: pace.is_durable))

        for _ in range(beats):
            pace.allow(1)
            model.during = beat
            yield
            pace.wait()

    saves = follow(script, contender, shape, rows, threads, dirpath).saves
    counted_saves = saves[1 : counted[0]]
    samples = {"steps_per_sec": [steps / window_secs[0]], "gap_secs": gaps}
    if contender != "none":
        samples["first_blocked_secs"] = [saves[0].blocked_secs]
        samples["blocked_secs"] = [save.blocked_secs for save in counted_saves]
        samples["waited_secs"] = [save.waited_secs for save in counted_saves]
        samples["durable_secs"] = [save.durable_secs for save in counted_saves]
        for name in sorted({name for save in counted_saves for name in save.metrics}):
            samples[f"own_{name}"] = [save.metrics[name] for save in counted_saves]
    return samples
