"""The rank of one of two hosts, which trains with the other.

``python -m tests.hangs.host PLACE HOW-IT-HANGS SECONDS``, of which it has so many to start.
"""

from __future__ import annotations

import sys

import lightning_ft as ft
from tests.hangs.trainings import Hanging, secs, trainer
from tests.trainer import scenarios as s


def main(place: str, what: str, startup_secs: str) -> None:
    guard = ft.HangGuard(step_timeout=secs(3), validation_timeout=secs(60), startup_timeout=secs(float(startup_secs)))
    hosts = trainer(f"{place}/checkpoints", guard, num_nodes=2, strategy="ddp", devices=1)
    hosts.fit(Hanging(what), s.loader(shuffle=True), ckpt_path="last")


if __name__ == "__main__":
    main(*sys.argv[1:])
