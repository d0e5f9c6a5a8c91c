"""A script whose ranks Lightning spawns: ``python -m tests.distributed.spawned PLACE STRATEGY HOW-IT-ENDS``."""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback
from torch import Tensor

import lightning_ft as ft
from lightning_ft import events
from tests.hangs.ways import c_code_keeps_the_interpreter
from tests.trainer import scenarios as s

STEP = 3
"""After so many steps it happens."""
WITHIN_SECS = 60.0


class Ends(s.Net):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.global_step != STEP:
            return loss
        if self.way == "interrupted" and self.global_rank == 0:
            os.killpg(os.getpgid(0), signal.SIGINT)  # as a terminal does it
        # Rank 0 writes and so ends last.
        if self.global_rank == {"failed": 1, "lost": 0}.get(self.way):
            raise ZeroDivisionError(f"on rank {self.global_rank}")
        if self.global_rank == 1:
            if self.way == "diverged":
                return loss * float("nan")
            if self.way == "hung":
                c_code_keeps_the_interpreter()
            if self.way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        return loss


class SlowWrites(Callback):
    """The write of that step, by rank 0, is not over before rank 1 has ended."""

    def __init__(self, place: str) -> None:
        self.other = Path(place) / "rank1.pid"

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if trainer.global_rank == 1:
            self.other.parent.mkdir(exist_ok=True)
            self.other.write_text(str(os.getpid()))
        events.observe(self.outlast)

    def outlast(self, event: events.Event) -> None:
        if isinstance(event, events.DataWritten) and f"step={STEP:08}" in event.path:
            with suppress(ProcessLookupError):  # nothing is left of it by now
                ended = os.pidfd_open(int(self.other.read_text()))
                assert select.select([ended], [], [], WITHIN_SECS)[0], "rank 1 waits for the write"
                os.close(ended)


def main(place: str, strategy: str, way: str) -> None:
    guards: list[Any] = [ft.PreemptionGuard(), ft.DivergenceGuard()]
    if way == "hung":
        guards.append(ft.HangGuard(step_timeout=timedelta(seconds=3)))
    slow = (partial(SlowWrites, place),) if way in ("failed", "lost") else ()  # else rank 1 waits for it
    trainer = s.trainer(
        place, every=1, max_steps=8, strategy=strategy, devices=2, callbacks=slow, ft_args={"guards": guards}
    )
    trainer.fit(Ends(way), *s.shuffled(), ckpt_path="last")
    print("went on")


if __name__ == "__main__":
    main(*sys.argv[1:])
