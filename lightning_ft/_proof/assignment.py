"""What the drill tells the processes of the script that it drills, and where these write."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_ft import _names
from lightning_ft._proof.kill_point import KillPoint

VARIABLE = "LIGHTNING_FT_DRILL"
"""Name in the environment; its value is an `Assignment` as JSON."""


@dataclass(frozen=True)
class Assignment:
    """What a drilled process is to do."""

    directory: str
    """Of this run: traces in it, checkpoints and whatever else the trainers write below it."""
    start: int
    """Which start of the run this is; 0 is the first."""
    steps: int | None = None
    save_every_n_steps: int | None = None
    """Save after so many steps too; None: when the script says."""
    kill_at: KillPoint | None = None
    once_durable: bool = False
    """`kill_at` is a batch, after which is killed as soon as a checkpoint is durable."""
    durable_from: int = 0
    """... of at least so many optimizer steps, if one becomes durable in time."""
    summaries: bool = False

    def environment(self) -> dict[str, str]:
        """What to add to the environment of the command."""
        return {VARIABLE: json.dumps(asdict(self))}


def killed_file(assignment: Assignment) -> Path:
    """Is there as soon as the kill point of this start has been reached."""
    return Path(assignment.directory) / f"{assignment.start}.killed"


def events_file(assignment: Assignment) -> Path:
    """JSON lines: the events of the save protocol, and facts about the fit."""
    return Path(assignment.directory) / f"{assignment.start}.events"


def is_ours(path: str) -> bool:
    """Whether ``"last"`` may choose the checkpoint `path`; not what other callbacks write through our plugin."""
    return _names.parse_checkpoint_name(_names.split(path)[1]) is not None
