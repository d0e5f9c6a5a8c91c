"""How often to save: what a save costs against what a failure loses.

Young's rule: J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM
17(9), 1974. Daly's: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
Generation Computer Systems 22(3), 2006, equation 37. Both take a save for something that stops the work. Here it does
so only while the state is copied; the rest is written in the background, and saves cannot follow each other faster
than that takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def young(cost_secs: float, failure_secs: float) -> float:
    """Work between two saves that loses the least time to saves and failures together, to first order.

    Args:
        cost_secs: For how long a save stops the work.
        failure_secs: Mean time between two failures.
    """
    return math.sqrt(2 * cost_secs * failure_secs)


def daly(cost_secs: float, failure_secs: float) -> float:
    """As `young`, to higher order; `failure_secs` where a save costs half of that or more."""
    if cost_secs >= 2 * failure_secs:
        return failure_secs
    ratio = cost_secs / (2 * failure_secs)
    return young(cost_secs, failure_secs) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_secs


def lost_share(interval_secs: float, cost_secs: float, failure_secs: float, restart_secs: float = 0.0) -> float:
    """The part of the time that saves, work done twice and restarts take, to first order, 0 to 1.

    Args:
        interval_secs: Work between two saves.
        cost_secs: For how long a save stops the work.
        failure_secs: Mean time between two failures.
        restart_secs: From a failure to the first step after it.
    """
    per_save = cost_secs / (interval_secs + cost_secs)
    per_failure = ((interval_secs + cost_secs) / 2 + restart_secs) / failure_secs
    return min(1.0, per_save + per_failure)


@dataclass(frozen=True)
class Advice:
    """How often to save, and why."""

    interval_secs: float
    limited_by: str
    """What decided: ``"optimum"``, ``"write"`` (the time that a save takes in the background), ``"least"`` or
    ``"most"``."""
    optimum_secs: float
    """What `daly` says, before the limits."""
    cost_secs: float
    failure_secs: float


# Where nothing has failed yet. Published runs on thousands of accelerators saw a failure every few hours; a node alone
# runs for months. A day between them errs towards saving too often, which costs next to nothing here.
ASSUMED_FAILURE_SECS = 24 * 3600.0
LEAST_SECS = 60.0
MOST_SECS = 3600.0


def failure_secs(running_secs: float, failures: int) -> float:
    """Mean time between failures, of a run that was up for `running_secs` and failed so often.

    Without a failure, and before the first has told much, `ASSUMED_FAILURE_SECS` counts as one more failure after one
    more such time.
    """
    return (running_secs + ASSUMED_FAILURE_SECS) / (failures + 1)


def advise(
    cost_secs: float,
    write_secs: float,
    mean_failure_secs: float,
    least_secs: float = LEAST_SECS,
    most_secs: float = MOST_SECS,
) -> Advice:
    """How often a run should save.

    Args:
        cost_secs: For how long a save stops the work.
        write_secs: How long it takes until it is durable: saves that come faster would wait for each other.
        mean_failure_secs: See `failure_secs`.
        least_secs: Not more often than this.
        most_secs: Not more seldom than this.

    Raises:
        ValueError: A time is not positive (or, of a cost, negative), or the least is above the most.
    """
    if cost_secs < 0 or write_secs < 0 or mean_failure_secs <= 0 or not 0 < least_secs <= most_secs:
        raise ValueError(
            f"cost_secs={cost_secs}, write_secs={write_secs}, mean_failure_secs={mean_failure_secs}, "
            f"least_secs={least_secs}, most_secs={most_secs}: costs of at least 0, other times above 0, least <= most"
        )
    optimum = daly(cost_secs, mean_failure_secs)
    interval, limited_by = (optimum, "optimum") if optimum <= most_secs else (most_secs, "most")
    for limit, name in ((least_secs, "least"), (write_secs, "write")):  # the last one is no choice
        if interval < limit:
            interval, limited_by = limit, name
    return Advice(interval, limited_by, optimum, cost_secs, mean_failure_secs)
