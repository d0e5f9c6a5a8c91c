"""The figures as tables: median and, in brackets, lowest to highest."""

from __future__ import annotations

from tests.benchmarks.contenders import TITLES
from tests.benchmarks.figures import Samples
from tests.benchmarks.plan import MIB, Plan, Shape
from tests.benchmarks.replicated import TITLES as REPLICATED
from tests.benchmarks.sharded import TITLES as SHARDED
from tests.benchmarks.targets import Outcome

_LIMITS = {
    "memcpy_1_secs": "copy in memory, 1 thread",
    "memcpy_2_secs": "copy in memory, 2 threads",
    "hash_secs": "xxh3-128",
    "read_secs": "read from the page cache",
    "write_secs": "buffered write, fsync",
    "direct_secs": "O_DIRECT write, fsync",
}
_OWN = ("blocked", "queue", "staging", "write", "total")


def text(samples: Samples, plan: Plan, outcomes: list[Outcome]) -> str:
    """All tables."""
    parts = [
        _limits(samples, plan.large),
        _training(samples, plan.large, plan.threads),
        _training(samples, plan.small, plan.threads),
        *_own(samples, plan.large, plan.small),
        _memory(samples, plan.large),
        _idle(samples, plan),
        _restart(samples, plan.large),
        _sharded(samples, plan.sharded),
        _replicated(samples, plan.sharded),
        _targets(outcomes),
    ]
    return "\n\n".join(parts)


def _limits(samples: Samples, shape: Shape) -> str:
    lines = [f"Limits of this machine, for {shape.size_bytes / MIB:.0f} MiB", f"{'':34} {'ms':>24} {'GiB/s':>6}"]
    for name, title in _LIMITS.items():
        median = samples.median(f"{shape.name}.limits.{name}")
        if median is None:
            lines.append(f"{title:34} {'not supported':>24}")
            continue
        speed = shape.size_bytes / 2**30 / median
        lines.append(f"{title:34} {_spread(samples, f'{shape.name}.limits.{name}', 1e3)} {speed:6.1f}")
    return "\n".join(lines)


def _training(samples: Samples, shape: Shape, threads: int) -> str:
    step_secs = samples.median(f"{shape.name}.none.steps_per_sec")
    tensors = 3 * shape.parameters
    title = f"Training, {shape.size_bytes / MIB:.0f} MiB in {tensors} tensors"
    if step_secs:
        title += f", {1e3 / step_secs:.0f} ms per step"
    copy, write = f"{shape.name}.limits.memcpy_{min(threads, 2)}_secs", f"{shape.name}.limits.write_secs"
    lines = [
        title + "; saves back to back; Lightning's files synced by the benchmark",
        f"{'':34} {'blocked, ms':>24} {'x copy':>7} {'first':>6} {'on disk, ms':>24} {'x write':>7} "
        f"{'steps/s of none':>20} {'longest gap, ms':>24}",
    ]
    for contender, name in TITLES.items():
        prefix = f"{shape.name}.{contender}"
        row = f"{name:34} {_spread(samples, f'{prefix}.blocked_secs', 1e3)}"
        row += f" {_number(samples.ratio(f'{prefix}.blocked_secs', copy), 7, 2)}"
        row += f" {_number(samples.median(f'{prefix}.first_blocked_secs'), 6, 0, 1e3)}"
        row += f" {_spread(samples, f'{prefix}.durable_secs', 1e3)}"
        row += f" {_number(samples.ratio(f'{prefix}.durable_secs', write), 7, 2)}"
        row += f" {_spread(samples, f'{prefix}.throughput', 1, 20, 3)} {_spread(samples, f'{prefix}.gap_secs', 1e3)}"
        lines.append(row.rstrip())
    return "\n".join(lines)


def _own(samples: Samples, *shapes: Shape) -> list[str]:
    """What our events say of the same saves; nothing if they say nothing."""
    lines = []
    for shape in shapes:
        for contender in ("overlap", "blocking"):
            prefix = f"{shape.name}.{contender}.own_"
            spreads = [_spread(samples, f"{prefix}{name}_secs", 1e3) for name in _OWN]
            if samples.median(f"{prefix}{_OWN[0]}_secs") is not None:
                lines.append(f"{f'{shape.size_bytes / MIB:.0f} MiB, {contender}':34} {' '.join(spreads)}")
    if not lines:
        return []
    head = ["What lightning_ft says of these saves, ms", f"{'':34} {' '.join(f'{name:>24}' for name in _OWN)}"]
    return ["\n".join(head + lines)]


def _memory(samples: Samples, shape: Shape) -> str:
    lines = [
        f"Memory beyond training's own, state of {shape.size_bytes / MIB:.0f} MiB; peak of each save, MiB",
        f"{'':34} {'peak':>24} {'x state':>8} {'kept after':>10}  save by save",
    ]
    for contender, title in TITLES.items():
        name = f"memory.{contender}.peak_bytes"
        highest = samples.highest(name)
        if highest is None:
            continue
        each = " ".join(f"{value / MIB:.0f}" for value in samples.of(name))
        kept = samples.of(f"memory.{contender}.kept_bytes")[-1] / MIB
        times = highest / shape.size_bytes
        lines.append(f"{title:34} {_spread(samples, name, 1 / MIB)} {times:8.2f} {kept:10.0f}  {each}")
    return "\n".join(lines)


def _idle(samples: Samples, plan: Plan) -> str:
    lines = [
        f"Idle: microseconds per step, nothing due, {plan.idle_steps} steps",
        f"{'':34} {'no callback':>24} {'callback':>24} {'added':>24} {'by guards':>24} {'the least to add':>24}",
    ]
    for name, title in (("one", "one process"), ("two", "two ranks")):
        kinds = ("none", "ours", "added", "guards", "floor_added")
        spreads = [_spread(samples, f"idle.{name}.{kind}_secs", 1e6) for kind in kinds]
        lines.append(f"{title:34} {' '.join(spreads)}")
    return "\n".join(lines)


def _restart(samples: Samples, shape: Shape) -> str:
    titles = {
        "read": "raw read into memory that is there",
        "lightning": "TorchCheckpointIO().load_checkpoint",
        "ours": "lightning_ft: choose, verify, load",
    }
    lines = [
        f"Restart from {shape.size_bytes / MIB:.0f} MiB in the page cache",
        f"{'':35} {'ms':>23} {'x Lightning':>11}",
    ]
    for way, title in titles.items():
        ratio = samples.ratio(f"restart.{way}.secs", "restart.lightning.secs")
        lines.append(f"{title:35}{_spread(samples, f'restart.{way}.secs', 1e3)} {_number(ratio, 11, 2)}")
    return "\n".join(lines)


def _sharded(samples: Samples, shape: Shape) -> str:
    limit = "sharded.limits"
    lines = [
        f"Sharded saves of two ranks, {shape.size_bytes / MIB:.0f} MiB together",
        f"{'':34} {'blocked, ms':>24} {'x Lightning':>11} {'x copy':>7} {'first':>6} {'on disk, ms':>24} "
        f"{'x Lightning':>11} {'x write':>7}",
    ]
    for contender, title in SHARDED.items():
        blocked, durable = f"sharded.{contender}.blocked_secs", f"sharded.{contender}.durable_secs"
        row = f"{title:34} {_spread(samples, blocked, 1e3)}"
        row += f" {_number(samples.ratio(blocked, 'sharded.lightning.blocked_secs'), 11, 2)}"
        row += f" {_number(samples.ratio(blocked, f'{limit}.memcpy_secs'), 7, 2)}"
        row += f" {_number(samples.median(f'sharded.{contender}.first_blocked_secs'), 6, 0, 1e3)}"
        row += f" {_spread(samples, durable, 1e3)}"
        row += f" {_number(samples.ratio(durable, 'sharded.lightning.durable_secs'), 11, 2)}"
        row += f" {_number(samples.ratio(durable, f'{limit}.write_secs'), 7, 2)}"
        lines.append(row)
    titles = {"memcpy_secs": "both copy in memory", "write_secs": "both write and sync", "direct_secs": "with O_DIRECT"}
    for name, title in titles.items():
        lines.append(f"{title:34} {_spread(samples, f'{limit}.{name}', 1e3)}")
    return "\n".join(lines)


def _replicated(samples: Samples, shape: Shape) -> str:
    lines = [
        f"Saves of two DDP ranks, {shape.size_bytes / MIB:.0f} MiB, on one disk",
        f"{'':34} {'blocked, ms':>24} {'x file':>7} {'first':>6} {'on disk, ms':>24} {'x file':>7} {'x write':>7} "
        f"{'MiB by rank 0':>13} {'by rank 1':>9}",
    ]
    for layout, title in REPLICATED.items():
        name = f"replicated.{layout}"
        blocked, durable = f"{name}.blocked_secs", f"{name}.durable_secs"
        row = f"{title:34} {_spread(samples, blocked, 1e3)}"
        row += f" {_number(samples.ratio(blocked, 'replicated.file.blocked_secs'), 7, 2)}"
        row += f" {_number(samples.median(f'{name}.first_blocked_secs'), 6, 0, 1e3)} {_spread(samples, durable, 1e3)}"
        row += f" {_number(samples.ratio(durable, 'replicated.file.durable_secs'), 7, 2)}"
        row += f" {_number(samples.ratio(durable, 'sharded.limits.write_secs'), 7, 2)}"
        row += f" {_number(samples.median(f'{name}.rank_0_bytes'), 13, 1, 1 / MIB)}"
        row += f" {_number(samples.median(f'{name}.rank_1_bytes'), 9, 1, 1 / MIB)}"
        lines.append(row)
    return "\n".join(lines)


def _targets(outcomes: list[Outcome]) -> str:
    lines = [f"{'Targets':70} {'measured':>10} {'target':>12} {'the least':>10}"]
    for outcome in outcomes:
        limit = f"{'>=' if outcome.at_least else '<='} {outcome.limit:g} {outcome.unit}"
        verdict = {True: "met", False: "NOT MET", None: "not measured"}[outcome.met]
        least = _number(outcome.least, 10, 3)
        lines.append(f"{outcome.name:70} {_number(outcome.value, 10, 3)} {limit:>12} {least}  {verdict}")
    return "\n".join(lines)


def _number(value: float | None, width: int, digits: int, factor: float = 1) -> str:
    return f"{'-':>{width}}" if value is None else f"{value * factor:{width}.{digits}f}"


def _spread(samples: Samples, name: str, factor: float, width: int = 24, digits: int | None = None) -> str:
    values = [value * factor for value in samples.of(name)]
    median = samples.median(name)
    if median is None:
        return f"{'-':>{width}}"
    if digits is None:
        digits = 1 if median * factor < 100 else 0
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), median * factor, max(values)))
    return f"{f'{middle} ({low} to {high})':>{width}}"
