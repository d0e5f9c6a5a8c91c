"""A training that Lightning itself starts on two ranks, of which one fails while rank 0 writes.

Run as a program, with the directory as its argument. The write goes on until Lightning's launcher has noticed that its
other process has failed, which is when it would kill this one.
"""

from __future__ import annotations

import logging
import sys
import threading

from lightning_ft import events
from tests.distributed.test_exceptions import STEP, Fails
from tests.trainer import scenarios as s


class Noticed(logging.Handler):
    """Set by the line that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "the others are killed" in record.getMessage():
            self.event.set()


def main(dirpath: str) -> None:
    noticed = Noticed()
    log = logging.getLogger("lightning_ft")
    log.setLevel(logging.INFO)
    log.addHandler(noticed)
    log.addHandler(logging.StreamHandler())

    def write_until_noticed(event: events.Event) -> None:
        if isinstance(event, events.DataWritten) and f"step={STEP:08}" in event.path:
            noticed.event.wait(60)

    events.observe(write_until_noticed)
    s.ddp(dirpath, every=1, max_steps=8).fit(Fails(1, "training_step"), *s.shuffled(), ckpt_path="last")


if __name__ == "__main__":
    main(sys.argv[1])
