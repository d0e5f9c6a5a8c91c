"""The most memory that each of many saves takes, beyond what training itself takes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.model import Layers
from tests.benchmarks.pace import Pace
from tests.benchmarks.plan import Shape
from tests.benchmarks.training import follow

# Of a step without a save, until nothing more is allocated for the first time.
_WARM_STEPS = 3


def measure(dirpath: str, contender: str, shape: Shape, threads: int, saves: int) -> dict[str, list[float]]:
    """Bytes beyond the peak of steps without a save: at the peak of each save, and after it; in order."""
    peaks: list[float] = []
    kept: list[float] = []

    def script(pace: Pace, model: Layers) -> Iterator[None]:
        for _ in range(_WARM_STEPS):
            yield
        _return_free_memory()
        _reset_peak()
        for _ in range(_WARM_STEPS):
            yield
        base_bytes, resting_bytes = _peak_bytes(), _own_bytes(_status())
        for _ in range(saves):
            _reset_peak()
            pace.allow(1)
            yield
            pace.wait()
            peaks.append(float(_peak_bytes() - base_bytes))
            kept.append(float(_own_bytes(_status()) - resting_bytes))

    follow(script, contender, shape, 1, threads, dirpath)
    return {"peak_bytes": peaks, "kept_bytes": kept}


def _return_free_memory() -> None:
    """The allocator gives back what making the model has left: later it would hide as much of a save's memory."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # not every C library has it
        trim(0)


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """Of all but mapped files: the kernel keeps the peak of everything, and those are subtracted as they are now."""
    status = _status()
    return status["VmHWM"] - status["RssFile"]


def _own_bytes(status: dict[str, int]) -> int:
    """Private memory and shared: staging memory is mapped as shared."""
    return status["RssAnon"] + status["RssShmem"]


def _status() -> dict[str, int]:
    lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}
