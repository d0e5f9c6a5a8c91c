"""What a job under SLURM has to know of itself, and how it is queued again."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta

_log = logging.getLogger(__name__)

RESTARTS = "SLURM_RESTART_COUNT"
_WITHIN_SECS = 60
_LATE = timedelta(minutes=1)  # how far from the limit SLURM may end a job: it looks every half minute
_JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?")


def job_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """What `scontrol requeue` calls this job; None outside of one, and in one that somebody types into.

    A task of an array is queued again alone: as ``ARRAYJOB_TASK``, since the job's own number means all of it where the
    task is the array's last.
    """
    if environment.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return None
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    found = f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")
    return found if _JOB_ID.fullmatch(found) else None


def restarts(environment: Mapping[str, str] = os.environ) -> int:
    """How often SLURM has queued this job again."""
    count = environment.get(RESTARTS, "")
    return int(count) if count.isdecimal() else 0


def requeue(job: str, *, unless_cancelled: bool) -> bool:
    """SLURM will start the job again: it ends this one at once, and us with it, so nothing may come after this.

    Args:
        job: As `job_id` says.
        unless_cancelled: Leave it, if somebody has cancelled it. SLURM would start it again all the same.

    Returns:
        Whether SLURM has taken it. If not, that is said.
    """
    if unless_cancelled and is_cancelled(_scontrol("show", "job", "-o", job)[1]):
        _log.warning("job %s was cancelled, so it is not queued again; its state is saved", job)
        return False
    taken, answer = _scontrol("requeue", job)
    if taken:
        _log.warning("SLURM will start job %s again", job)
        return True
    _log.error("job %s is not queued again: scontrol requeue failed (%s); submit the job anew", job, answer)
    return False


def _scontrol(*arguments: str) -> tuple[bool, str]:
    """Whether it did what it was told, and what it says."""
    command = ["scontrol", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WITHIN_SECS, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    if done.returncode == 0:
        return True, done.stdout
    return False, (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"


def is_cancelled(description: str) -> bool:
    """Whether a job that is being ended has neither reached its time limit nor been preempted.

    Args:
        description: What ``scontrol show job -o`` says of it. Without the facts, the answer is no.
    """
    facts = dict(word.split("=", 1) for word in description.split() if "=" in word)
    if facts.get("JobState") not in ("COMPLETING", "CANCELLED") or facts.get("PreemptTime") != "None":
        return False
    try:
        ran = datetime.fromisoformat(facts["EndTime"]) - datetime.fromisoformat(facts["StartTime"])
        return ran + _LATE < _duration(facts["TimeLimit"])
    except (KeyError, ValueError):
        return facts.get("TimeLimit") == "UNLIMITED"


def _duration(text: str) -> timedelta:
    """Of ``1-02:03:04`` and shorter."""
    days, _, clock = text.rpartition("-")
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return timedelta(days=int(days or 0), hours=hours, minutes=minutes, seconds=seconds)


class _LastWords:
    """What runs when the process ends, after whatever was registered later."""

    def __init__(self) -> None:
        self._what: Callable[[], object] | None = None
        self._registered = False

    def prepare(self) -> None:
        """From now on, something can be left to be done at the very end. The earlier, the later."""
        if not self._registered and multiprocessing.parent_process() is None:
            atexit.register(self._run)
            self._registered = True

    def leave(self, what: Callable[[], object]) -> None:
        """`what` is called at the end of the process; at once in a process that ends without an end."""
        self._what = what
        if not self._registered:  # a child of `multiprocessing` runs nothing of the kind
            self._run()

    def _run(self) -> None:
        what, self._what = self._what, None
        if what is not None:
            what()


last_words = _LastWords()
