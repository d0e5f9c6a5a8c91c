"""The figures as one picture."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

from tests.benchmarks.contenders import TITLES
from tests.benchmarks.figures import Samples
from tests.benchmarks.plan import MIB, Plan, Shape
from tests.benchmarks.targets import Outcome

_OURS, _OTHERS = "tab:blue", "tab:gray"


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: str, samples: Samples, plan: Plan, outcomes: list[Outcome]) -> None:
    """The picture is at `path`."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(3, 2, figsize=(16, 13), layout="constrained")
    large, small = plan.large, plan.small
    copy, write = f"large.limits.memcpy_{min(plan.threads, 2)}_secs", "large.limits.write_secs"
    _bars(axes[0, 0], samples, large, "blocked_secs", 1e3, "blocked per save, ms", {"copy in memory": copy}, log=True)
    _bars(axes[0, 1], samples, small, "blocked_secs", 1e3, "blocked per save, ms", {}, log=True)
    limits = {"buffered write, fsync": write, "O_DIRECT write": "large.limits.direct_secs"}
    _bars(axes[1, 0], samples, large, "durable_secs", 1e3, "until on disk, ms", limits)
    _bars(axes[1, 1], samples, large, "throughput", 1, "steps/s saving back to back, of not saving", {})
    axes[1, 1].set_xlim(0, 1.15)
    _memory(axes[2, 0], samples, large)
    _targets(axes[2, 1], outcomes)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(
    axis: Any,
    samples: Samples,
    shape: Shape,
    quantity: str,
    factor: float,
    title: str,
    limits: dict[str, str],
    *,
    log: bool = False,
) -> None:
    shown = [c for c in TITLES if samples.of(f"{shape.name}.{c}.{quantity}") and c != "none"]
    for row, contender in enumerate(reversed(shown)):
        name = f"{shape.name}.{contender}.{quantity}"
        values = [value * factor for value in samples.of(name)]
        middle = (samples.median(name) or 0.0) * factor
        spread = [[middle - min(values)], [max(values) - middle]]
        color = _OURS if contender in ("overlap", "blocking") else _OTHERS
        axis.barh(row, middle, xerr=spread, color=color, ecolor="black", capsize=3)
        axis.annotate(f" {middle:.3g}", (middle, row + 0.15), va="bottom")
    axis.set_yticks(range(len(shown)), [TITLES[c] for c in reversed(shown)])
    for style, (label, name) in zip(("--", ":"), limits.items(), strict=False):
        median = samples.median(name)
        if median is not None:
            axis.axvline(median * factor, color="tab:red", linestyle=style, label=label)
    if limits:
        axis.legend(loc="lower right")
    if log:
        axis.set_xscale("log")
        low, high = axis.get_xlim()
        axis.set_xlim(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)))
    axis.set_title(f"{title}: {shape.size_bytes / MIB:.0f} MiB, {3 * shape.parameters} tensors")


def _memory(axis: Any, samples: Samples, shape: Shape) -> None:
    for contender, title in TITLES.items():
        values = samples.of(f"memory.{contender}.peak_bytes")
        if values:
            axis.plot(range(1, len(values) + 1), [v / shape.size_bytes for v in values], marker=".", label=title)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("save")
    axis.set_title("peak of extra memory, of the state's size")
    axis.legend()


def _targets(axis: Any, outcomes: list[Outcome]) -> None:
    """One bar per target, in units of the limit; up to 1 it is met, or from 1 on where more is better."""
    for row, outcome in enumerate(reversed(outcomes)):
        if outcome.value is not None:
            axis.barh(row, outcome.value / outcome.limit, color="tab:green" if outcome.met else "tab:red")
    axis.set_yticks(range(len(outcomes)), [o.name for o in reversed(outcomes)], fontsize=8)
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xlim(0, 5)
    axis.set_title("measured, in units of the target (green: met)")
