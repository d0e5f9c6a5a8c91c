"""Samples by name, and the one number that each kind of them is reported as."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any


class Samples:
    """Lists of numbers by names like ``large.overlap.blocked_secs``."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = defaultdict(list)

    def add(self, prefix: str, samples: dict[str, list[float]]) -> None:
        """`samples` are added to what was measured in other rounds."""
        for name, values in samples.items():
            self._values[f"{prefix}.{name}"] += values

    def of(self, name: str) -> list[float]:
        """All samples of `name`, in the order in which they were taken; none if it was not measured."""
        return self._values.get(name, [])

    def last(self, name: str) -> float:
        """The newest sample of `name`."""
        return self._values[name][-1]

    def median(self, name: str) -> float | None:
        """The median of `name`; None if there is no sample."""
        values = self.of(name)
        return statistics.median(values) if values else None

    def highest(self, name: str) -> float | None:
        """The highest sample of `name`; None if there is none."""
        return max(self.of(name), default=None)

    def ratio(self, name: str, other: str) -> float | None:
        """The median of `name` in units of the median of `other`; None if one was not measured."""
        value, unit = self.median(name), self.median(other)
        return value / unit if value is not None and unit else None

    def growth(self, name: str) -> float | None:
        """By how much the highest is above the first two (of which the second may find what the first left behind)."""
        values = self.of(name)
        return max(values) - max(values[:2]) if values else None

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file: everything, and what is made of it."""
        figures = {
            name: {
                "median": statistics.median(values) if values else None,
                "lowest": min(values, default=None),
                "highest": max(values, default=None),
                "count": len(values),
            }
            for name, values in sorted(self._values.items())
        }
        return {"figures": figures, "samples": dict(sorted(self._values.items()))}
