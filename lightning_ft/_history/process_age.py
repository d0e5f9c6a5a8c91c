"""When this process began: what comes before its first fit, imports above all, belongs to the cost of a restart."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

_claimed_by: list[int] = []


def began_at() -> float | None:
    """When this process began, in seconds since 1970 by the clock of now; None from the second call on.

    What it did before a second fit is no start-up. None too in a notebook or a shell, where it waited for a person; and
    without /proc.
    """
    pid = os.getpid()
    if pid in _claimed_by or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return None
    _claimed_by[:] = [pid]
    try:
        stat = Path("/proc/self/stat").read_text(errors="replace")
        uptime_secs = time.clock_gettime(time.CLOCK_BOOTTIME)
    except (AttributeError, OSError):
        return None
    # Behind the name of the program, which may contain anything: the 22nd field of all.
    ticks = int(stat.rpartition(")")[2].split()[19])
    return time.time() - (uptime_secs - ticks / os.sysconf("SC_CLK_TCK"))
