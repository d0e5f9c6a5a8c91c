"""`python -m tests.benchmarks`: measure, print tables, write a JSON file and a picture."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

import lightning
import torch

from lightning_ft.__about__ import __version__
from tests.benchmarks import fresh, idle, limits, memory, plot, replicated, report, restart, sharded, targets, training
from tests.benchmarks.contenders import CONTENDERS
from tests.benchmarks.figures import Samples
from tests.benchmarks.plan import FULL, QUICK, Plan, Shape

_BEGAN = time.monotonic()


def main() -> None:
    """Exit code 0 whatever was measured, if all of it could be measured."""
    plan, out = _arguments()
    out.mkdir(parents=True, exist_ok=True)
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "lightning_ft": __version__,
        "platform": platform.platform(),
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()), end="\n\n", flush=True)
    samples = Samples()
    # On the disk that is measured: where the results go.
    with _scratch(out) as scratch:
        _measure(samples, plan, scratch)
    outcomes = targets.judge(samples, plan)
    print(report.text(samples, plan, outcomes))
    data = {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine,
        "plan": plan.as_dict(),
        "targets": [asdict(outcome) for outcome in outcomes],
        **samples.as_dict(),
    }
    Path(out, "bench.json").write_text(json.dumps(data, indent=1) + "\n")
    written = [str(out / "bench.json")]
    if plot.available():
        plot.draw(str(out / "bench.png"), samples, plan, outcomes)
        written.append(str(out / "bench.png"))
    else:
        print("\nno picture: matplotlib is not installed (pip install 'lightning-ft[plot]')")
    print(f"\n{' and '.join(written)}; {time.monotonic() - _BEGAN:.0f} s")


def _arguments() -> tuple[Plan, Path]:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller and once: a minute and a half")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="directory for results (%(default)s)")
    parser.add_argument("--state-mib", type=float, help=f"size of the large state ({FULL.large_mib:g})")
    parser.add_argument("--small-mib", type=float, help=f"size of the state of small tensors ({FULL.small_mib:g})")
    parser.add_argument("--sharded-mib", type=float, help=f"size of the sharded state ({FULL.sharded_mib:g})")
    parser.add_argument("--rounds", type=int, help=f"each contender runs once in each ({FULL.rounds})")
    parser.add_argument(
        "--steps", type=int, help=f"steps of a throughput window ({FULL.large_steps}, {FULL.small_steps})"
    )
    parser.add_argument("--memory-saves", type=int, help=f"saves whose memory is measured ({FULL.memory_saves})")
    parser.add_argument("--idle-steps", type=int, help=f"steps of an idle measurement ({FULL.idle_steps})")
    parser.add_argument("--idle-pairs", type=int, help=f"idle measurements ({FULL.idle_pairs})")
    parser.add_argument("--threads", type=int, help=f"torch threads while training ({FULL.threads})")
    given = vars(parser.parse_args())
    plan, out = QUICK if given.pop("quick") else FULL, given.pop("out")
    changes = {("large_mib" if k == "state_mib" else k): v for k, v in given.items() if v is not None}
    for name, value in changes.items():
        if value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    if "steps" in changes:
        changes["large_steps"] = changes["small_steps"] = changes.pop("steps")
    if "memory_saves" in changes:
        changes["other_memory_saves"] = min(plan.other_memory_saves, changes["memory_saves"])
    return replace(plan, **changes), out


@contextmanager
def _scratch(parent: Path) -> Iterator[str]:
    """An empty directory that is gone afterwards, with whatever was left in it."""
    path = tempfile.mkdtemp(prefix=".scratch-", dir=parent)
    try:
        yield path
    finally:
        shutil.rmtree(path)


def _measure(samples: Samples, plan: Plan, scratch: str) -> None:
    checkpoints = str(Path(scratch, "restart"))
    _say("the checkpoint of the restarts")
    path = fresh.call(restart.prepare, checkpoints, plan.large, plan.threads)
    for turn in range(plan.rounds):
        _say(f"round {turn + 1} of {plan.rounds}")
        for shape in (plan.large, plan.small):
            samples.add(f"{shape.name}.limits", fresh.call(limits.measure, scratch, shape.size_bytes, turn))
            _train(samples, plan, shape, turn, scratch)
        for way in _rotated(restart.WAYS, turn):
            samples.add(f"restart.{way}", fresh.call(restart.measure, path, way, plan.threads))
    shutil.rmtree(checkpoints)
    _save_sharded(samples, plan, scratch)
    for contender in CONTENDERS:
        if contender in ("none", "floor"):
            continue
        _say(f"memory: {contender}")
        saves = plan.memory_saves if contender == "overlap" else plan.other_memory_saves
        with _scratch(Path(scratch)) as dirpath:
            measured = fresh.call(memory.measure, dirpath, contender, plan.large, plan.threads, saves)
        samples.add(f"memory.{contender}", measured)
    _say("idle")
    with _scratch(Path(scratch)) as dirpath:
        samples.add("idle.one", fresh.call(idle.measure, dirpath, plan.idle_steps, plan.idle_pairs))
    with _scratch(Path(scratch)) as dirpath:
        samples.add("idle.two", idle.measure_two_ranks(dirpath, plan.idle_steps, plan.idle_pairs))


def _train(samples: Samples, plan: Plan, shape: Shape, turn: int, scratch: str) -> None:
    """One run of every contender; throughput in units of the same round's run without saves."""
    steps = plan.large_steps if shape == plan.large else plan.small_steps
    for contender in _rotated(tuple(CONTENDERS), turn):
        _say(f"  {shape.name}: {contender}")
        with _scratch(Path(scratch)) as dirpath:
            measured = fresh.call(
                training.measure, dirpath, contender, shape, plan.batch_rows, plan.threads, steps, plan.beats
            )
        samples.add(f"{shape.name}.{contender}", measured)
    undisturbed = samples.last(f"{shape.name}.none.steps_per_sec")
    for contender in CONTENDERS:
        speed = samples.last(f"{shape.name}.{contender}.steps_per_sec")
        samples.add(f"{shape.name}.{contender}", {"throughput": [speed / undisturbed]})


def _save_sharded(samples: Samples, plan: Plan, scratch: str) -> None:
    """Once in a run, whatever the number of rounds: most of its time is two processes that start."""
    shape = plan.sharded
    samples.add("sharded.limits", sharded.measure_limits(scratch, shape.size_bytes))
    for contender in sharded.CONTENDERS:
        _say(f"  two ranks: {contender}")
        with _scratch(Path(scratch)) as dirpath:
            measured = sharded.measure(dirpath, contender, shape, plan.batch_rows, plan.threads, plan.sharded_saves)
        samples.add(f"sharded.{contender}", measured)
    _say("  two ranks: DDP, in both layouts")
    with _scratch(Path(scratch)) as dirpath:
        both = replicated.measure(
            dirpath, shape, plan.batch_rows, plan.threads, plan.sharded_saves, plan.replicated_rounds
        )
    for layout, of_layout in both.items():
        samples.add(f"replicated.{layout}", of_layout)


def _rotated(names: tuple[str, ...], turn: int) -> tuple[str, ...]:
    """Whoever follows a heavy writer is not always the same one."""
    turn %= len(names)
    return names[turn:] + names[:turn]


def _say(what: str) -> None:
    print(f"{time.monotonic() - _BEGAN:5.0f} s  {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
