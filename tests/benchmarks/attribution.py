"""Where the idle cost goes: `python -m tests.benchmarks.attribution`. A profiler slows everything down: shares only."""

from __future__ import annotations

import cProfile
import pstats
import sys
import tempfile
from pathlib import Path

import torch

from lightning_ft._ranks import dist
from tests.benchmarks.fresh import silence
from tests.benchmarks.idle import Toy, loader, trainer

STEPS = 2000
ROWS = 45


def main() -> None:
    """Print the functions called in steps of a toy run with the callback, by time including what they call."""
    silence()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as dirpath:
        for way in ("none", "ours"):  # twice: the first run imports
            profile = cProfile.Profile()
            run = trainer(dirpath, STEPS, 1, way=way)
            profile.runcall(run.fit, Toy(), loader(STEPS, 1))
    package = str(Path(dist.__file__).parent)
    rows = []
    for (file, line, name), (_, calls, own, total, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if file.startswith(package) and calls >= STEPS - 1:
            rows.append((total / STEPS, own / STEPS, calls / STEPS, f"{Path(file).name}:{line} {name}"))
    print(f"{'us/step with calls':>18} {'own':>7} {'calls':>6}  function ({STEPS} steps, profiled: slower than real)")
    for total, own, calls, name in sorted(rows, reverse=True)[:ROWS]:
        print(f"{total * 1e6:18.1f} {own * 1e6:7.1f} {calls:6.1f}  {name}")


if __name__ == "__main__":
    sys.exit(main())
