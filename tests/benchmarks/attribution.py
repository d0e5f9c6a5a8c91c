"""Where the idle cost goes: `python -m tests.benchmarks.attribution`. A profiler slows everything down: shares only."""

from __future__ import annotations

import cProfile
import pstats
import sys
import tempfile
from pathlib import Path

import torch

import lightning_ft as ft
from tests.benchmarks.fresh import silence
from tests.benchmarks.idle import Toy, loader, trainer

ROWS = 45


def main(steps: int = 2000) -> None:
    """Print the functions called in steps of a toy run with the callback, by time including what they call."""
    silence()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as dirpath:
        for way in ("none", "ours"):  # twice: the first run imports
            profile = cProfile.Profile()
            run = trainer(dirpath, steps, 1, way=way)
            profile.runcall(run.fit, Toy(), loader(steps, 1))
    package = str(Path(ft.__file__).parent)
    rows = []
    for (file, line, name), (_, calls, own, total, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if file.startswith(package) and calls >= steps - 1:
            rows.append((total / steps, own / steps, calls / steps, f"{Path(file).relative_to(package)}:{line} {name}"))
    print(f"{'us/step with calls':>18} {'own':>7} {'calls':>6}  function ({steps} steps, profiled: slower than real)")
    for total, own, calls, name in sorted(rows, reverse=True)[:ROWS]:
        print(f"{total * 1e6:18.1f} {own * 1e6:7.1f} {calls:6.1f}  {name}")


if __name__ == "__main__":
    sys.exit(main())
