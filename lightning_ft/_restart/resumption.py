"""What is said of a restart: which start of which run it is, from what it goes on and where, and what is done again."""

from __future__ import annotations

import logging

from lightning_ft import _words
from lightning_ft._history import timeline
from lightning_ft.storage import Storage

_log = logging.getLogger(__name__)

_LOOKED_AT = 5
"""So many event files are read, newest first, for one of a start that has trained."""


def last_step(dirpath: str, storage: Storage) -> int | None:
    """The last step that an earlier start into `dirpath` is known to have trained; None if no event file tells.

    Blocks on: reading some small files. What cannot be read is passed over: nothing depends on it.
    """
    try:
        for path in timeline.files(dirpath, storage)[::-1][:_LOOKED_AT]:
            start = timeline.read_start(path, storage)
            if start is not None and start.training_at is not None:
                return start.last_step
    except Exception as error:  # stores have errors of their own classes
        _log.debug("event files of %s: %s", dirpath, error)
    return None


def of_start(start: int, run_id: str, path: str, age: float | None) -> str:
    """Which start it is, and from what."""
    old = "" if age is None else f", saved {_words.age(max(0.0, age))} ago"  # clocks of two machines may differ
    return f"start {start} of run {run_id[:8]}: restored from {path}{old}"


def of_steps(step: int, trained: int | None) -> str:
    """What is done again, for the end of the line: `trained` steps are known to have been, and `step` are restored."""
    again = 0 if trained is None else trained - step
    if again < 1:
        return ""
    return (
        f"; the last start had come to step {trained}, so {again} step{'s are' if again > 1 else ' is'} trained again"
    )
