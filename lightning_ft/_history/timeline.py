"""What the event files of a directory say about its run: starts, saves, failures, lost work, goodput.

Everything here can be worked out by hand from the lines (see `_history.event_file`). Times are seconds; a *step* is an
optimizer step. Of a start::

    began       its first line; where that tells when the process of the fit began, then
    training    the line of that name: what comes before it is the cost of a restart
    went back   each line ``resumed`` after that: what was trained beyond its step is trained again
    survived    the last line of progress whose step the next start has not trained again; of the last start, and of
                one that finished, its last line of progress; *training* if there is none
    ended       its last line, of whatever kind

* lost steps: those of the last line of progress beyond the step from which the next start that trained went on, or,
  before it went back, beyond the step to which it did;
* lost time: from *survived* to *ended*, and, before it went back, from the last line of progress that counts to there;
* stalls: the ``blocked_secs`` of its saves, in which training stood still;
* useful time: from *training* to *survived*, less what was lost in between, and the stalls of the other saves by then;
* goodput: useful time of all starts, divided by the time that has passed: from *began* to *ended* of each, and from
  there to *began* of the next one (none, where the clocks of two machines say that it began before; nor after one that
  finished: the run was over, and not down).

A start that found the run finished, and trained nothing, took no time and was no restart.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_ft._history.event_file import DIRECTORY, SUFFIX
from lightning_ft._names import join, normalise
from lightning_ft.storage import Storage


@dataclass(frozen=True)
class Save:
    """A checkpoint that became durable."""

    at: float
    path: str
    step: int
    blocked_secs: float
    write_secs: float
    total_secs: float
    size_bytes: int


@dataclass(frozen=True)
class Trouble:
    """A save that failed or was left out."""

    at: float
    kind: str
    step: int
    reason: str


@dataclass(frozen=True)
class WentBack:
    """Within a start, training went back to a checkpoint: what it had done since then counts no more."""

    lost_from: float
    """The last progress before it that counts."""
    at: float
    step: int
    """To which it went back."""
    lost_steps: int

    def has(self, at: float) -> bool:
        """Whether what was done `at` that time counts no more."""
        return self.lost_from < at <= self.at


@dataclass(frozen=True)
class Start:
    """One start of the run, as its file tells it."""

    path: str
    """Of the file."""
    run_id: str
    world_size: int
    began_at: float
    training_at: float | None
    """When its first batch was about to be trained; None if it never came so far."""
    first_step: int
    """The step from which it went on then; 0 if from the beginning."""
    progress: tuple[tuple[float, int], ...]
    """When how many steps were trained."""
    saves: tuple[Save, ...]
    troubles: tuple[Trouble, ...]
    ended_at: float
    how: str | None
    """``finished``, ``stopped`` or ``failed``; None: killed, or still running."""
    reason: str
    """Why it was stopped or failed."""
    went_back: tuple[WentBack, ...] = ()
    ordinal: int = 1
    """Greater than that of every start before it that has saved something."""

    @property
    def found_finished(self) -> bool:
        """Whether there was nothing to train."""
        return self.how == "finished" and self.training_at is None

    @property
    def last_step(self) -> int:
        """The last step it is known to have trained, since it went back if it did."""
        at, step = (self.went_back[-1].at, self.went_back[-1].step) if self.went_back else (-math.inf, self.first_step)
        return max((done for when, done in self.progress if when >= at), default=step)

    def survived_at(self, next_step: int | None) -> float | None:
        """When the work that counts ended, if the next start went on from `next_step` (None: there is no next one)."""
        if self.training_at is None:
            return None
        counted = [at for at, step in self.progress if next_step is None or step <= next_step]
        return max([self.training_at, *counted])


@dataclass(frozen=True)
class Account:
    """What became of the time of one start, in seconds, and of its steps."""

    survived_at: float
    """When the work that counts ended; of a start that trained nothing, its own end."""
    startup_secs: float
    useful_secs: float
    stalled_secs: float
    lost_secs: float
    lost_steps: int
    down_secs: float
    """From its last line to the beginning of the next start; none if the run had finished."""


@dataclass(frozen=True)
class Timeline:
    """The starts of a run, in order."""

    starts: tuple[Start, ...]

    @property
    def accounts(self) -> list[Account]:
        """One for each start."""
        accounts = []
        for number, start in enumerate(self.starts):
            later = self.starts[number + 1 :]
            went_on = next((other for other in later if other.training_at is not None), None)
            next_step = None if went_on is None or start.how == "finished" else went_on.first_step
            over = not later or start.how == "finished"
            down_secs = 0.0 if over else max(0.0, later[0].began_at - start.ended_at)
            accounts.append(_account(start, next_step, down_secs))
        return accounts

    @property
    def restarts(self) -> int:
        """How often the run was started again."""
        return sum(not start.found_finished for start in self.starts[1:])

    @property
    def failures(self) -> int:
        """How many starts were killed or failed, and were followed by another one."""
        return sum(start.how in (None, "failed") for start in self.starts[:-1])

    @property
    def lost_steps(self) -> int:
        """Steps that were trained again."""
        return sum(account.lost_steps for account in self.accounts)

    @property
    def elapsed_secs(self) -> float:
        """In which the run was up, or was to be."""
        return self.running_secs + sum(account.down_secs for account in self.accounts)

    @property
    def running_secs(self) -> float:
        """Time in which the run was up: `elapsed_secs` without the times between the starts."""
        return sum(start.ended_at - start.began_at for start in self.starts if not start.found_finished)

    @property
    def goodput(self) -> float | None:
        """The part of the elapsed time that was useful, 0 to 1; None if no time has passed."""
        if self.elapsed_secs <= 0:
            return None
        return sum(account.useful_secs for account in self.accounts) / self.elapsed_secs

    @property
    def saves(self) -> list[Save]:
        """Every save of every start."""
        return [save for start in self.starts for save in start.saves]


def _account(start: Start, next_step: int | None, down_secs: float) -> Account:
    survived_at = start.survived_at(next_step)
    if start.found_finished:
        return Account(start.ended_at, 0.0, 0.0, 0.0, 0.0, 0, down_secs)
    if start.training_at is None or survived_at is None:
        return Account(start.ended_at, start.ended_at - start.began_at, 0.0, 0.0, 0.0, 0, down_secs)
    lost_steps = 0 if next_step is None else max(0, start.last_step - next_step)
    # What it went back from later is lost from *survived* on anyway.
    undone = [back for back in start.went_back if back.at <= survived_at]
    undone_secs = sum(back.at - back.lost_from for back in undone)
    counted_stalls = sum(
        save.blocked_secs
        for save in start.saves
        if save.at <= survived_at and not any(back.has(save.at) for back in undone)
    )
    return Account(
        survived_at=survived_at,
        startup_secs=start.training_at - start.began_at,
        useful_secs=max(0.0, survived_at - start.training_at - undone_secs - counted_stalls),
        stalled_secs=sum(save.blocked_secs for save in start.saves),
        lost_secs=start.ended_at - survived_at + undone_secs,
        lost_steps=lost_steps + sum(back.lost_steps for back in start.went_back),
        down_secs=down_secs,
    )


def read(dirpath: str, storage: Storage) -> Timeline:
    """What the event files in `dirpath` tell, those of its newest run; without any, no start.

    Raises:
        OSError: They cannot be read.
    """
    found = [read_start(path, storage) for path in files(dirpath, storage)]
    return of_newest_run([start for start in found if start is not None])


def files(dirpath: str, storage: Storage) -> list[str]:
    """The event files in `dirpath`, by the time when their starts began. Raises OSError."""
    directory = join(normalise(dirpath), DIRECTORY)
    return [join(directory, name) for name in sorted(storage.listdir(directory)) if name.endswith(SUFFIX)]


def read_start(path: str, storage: Storage) -> Start | None:
    """The start that the event file `path` tells of; None if it tells of none. Raises OSError."""
    with storage.open_read(path) as file:
        return start_of_lines(path, io.BytesIO(file.read()))


def of_newest_run(starts: Sequence[Start]) -> Timeline:
    """The starts that belong to the run of the last one, by when they began.

    Those of one run come in the order of their ordinals, whatever the clocks of their machines say. One whose run has
    saved nothing belongs to that of the next one that has: that one had nothing to continue and began again, as a run
    of another id.
    """
    ordered = sorted(starts, key=lambda start: start.began_at)
    newest = next((start.run_id for start in reversed(ordered) if start.run_id), "")
    saved = {start.run_id for start in ordered if start.saves}
    belong: list[Start] = []
    is_next = True
    for start in reversed(ordered):
        if start.run_id == newest or start.run_id in saved:
            is_next = start.run_id == newest
        if is_next:
            belong.append(start)
    belong.reverse()
    of_it = iter(sorted((start for start in belong if start.run_id == newest), key=lambda start: start.ordinal))
    return Timeline(tuple(next(of_it) if start.run_id == newest else start for start in belong))


def start_of_lines(path: str, lines: Iterable[bytes]) -> Start | None:
    """The start that the lines of a file tell of; None if there is no ``started``.

    A line that is cut short or damaged is passed over.
    """
    first: dict[str, dict[str, Any]] = {}
    progress: list[tuple[float, int]] = []
    saves: list[Save] = []
    troubles: list[Trouble] = []
    went_back: list[WentBack] = []
    stretch = 0  # where the lines of progress begin since it went back
    ended_at = -math.inf
    for line in lines:  # of which there are a million in a week or two: nothing is kept of those that are not needed
        record = _parsed(line)
        if record is None:
            continue
        at, event = record["at"], record["event"]
        ended_at = max(ended_at, at)
        if event == "progress":
            progress.append((at, int(record.get("step", 0))))
        elif event == "committed":
            saves.append(_save(record))
        elif event == "resumed" and "training" in first:
            since = went_back[-1].at if went_back else first["training"]["at"]
            went_back.append(_went_back(progress[stretch:], since, at, int(record.get("step", 0))))
            stretch = len(progress)
        elif event in ("save_failed", "save_skipped"):
            troubles.append(Trouble(at, event, int(record.get("step", 0)), str(record.get("reason", ""))))
        else:
            first.setdefault(event, record)
    started, training, ended = (first.get(event, {}) for event in ("started", "training", "ended"))
    if not started:
        return None
    return Start(
        path=path,
        run_id=str(training.get("run_id", "")),
        world_size=int(started.get("world_size", 1)),
        began_at=min(started["at"], started.get("process_at", started["at"])),
        training_at=training.get("at"),
        first_step=int(training.get("step", 0)),
        progress=tuple(progress),
        saves=tuple(saves),
        troubles=tuple(troubles),
        ended_at=ended_at,
        how=str(ended["how"]) if "how" in ended else None,
        reason=str(ended.get("reason", "")),
        went_back=tuple(went_back),
        ordinal=int(started.get("start", 1)),
    )


def _went_back(progress: Sequence[tuple[float, int]], since: float, at: float, step: int) -> WentBack:
    lost_from = max([since, *(when for when, done in progress if done <= step)])
    return WentBack(lost_from, at, step, max(0, max((done for _, done in progress), default=step) - step))


def _save(record: Mapping[str, Any]) -> Save:
    return Save(
        at=record["at"],
        path=str(record.get("path", "")),
        step=int(record.get("step", 0)),
        blocked_secs=float(record.get("blocked_secs", 0.0)),
        write_secs=float(record.get("write_secs", 0.0)),
        total_secs=float(record.get("total_secs", 0.0)),
        size_bytes=int(record.get("size_bytes", 0)),
    )


_NUMBERS = ("at", "process_at", "start", "world_size", "step", "blocked_secs", "write_secs", "total_secs", "size_bytes")


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None  # the last line of a run that was killed while it wrote
    if not isinstance(record, dict) or not isinstance(record.get("event"), str) or "at" not in record:
        return None
    return record if all(_is_number(record[name]) for name in _NUMBERS if name in record) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
