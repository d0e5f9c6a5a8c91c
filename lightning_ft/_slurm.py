"""What a job under SLURM has to know of itself, and how it is queued again."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import re
import subprocess
from collections.abc import Callable, Mapping

_log = logging.getLogger(__name__)

_WITHIN_SECS = 60
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


def requeue(job: str) -> bool:
    """SLURM will start the job again: it ends this one at once, and us with it, so nothing may come after this.

    Returns:
        Whether SLURM has taken it. If not, that is said.
    """
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WITHIN_SECS, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    else:
        if done.returncode == 0:
            _log.warning("SLURM will start job %s again", job)
            return True
        problem = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
    _log.error(
        "the job is not queued again: %s failed (%s); the state is saved, submit the job anew",
        " ".join(command),
        problem,
    )
    return False


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
