"""The picture of a run: what its time went into, its steps, and its saves. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from lightning_ft.report.summary import Summary

# Of what the time went into; the same in the picture, its legend and the page.
COLOURS = {
    "useful": "#2e7d32", "start-up": "#9e9e9e", "stalled": "#f9a825", "lost": "#c62828", "down": "#eeeeee"
}  # fmt: skip
_INCHES_PER_START = 0.35


def available() -> bool:
    """Whether matplotlib is installed."""
    import importlib.util

    return importlib.util.find_spec("matplotlib") is not None


def png(summary: Summary) -> bytes:
    """The picture, as a PNG."""
    return _rendered(summary, "png")


def svg(summary: Summary) -> str:
    """The picture, as SVG, for a page."""
    text = _rendered(summary, "svg").decode()
    return text[text.index("<svg") :]


def _rendered(summary: Summary, kind: str) -> bytes:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of its own, and no `pyplot`: a notebook's settings and windows are nobody's business here.
    height = 3.6 + _INCHES_PER_START * max(1, len(summary.timeline.starts))
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lightning-ft"}):
        figure = Figure(figsize=(11, height), layout="constrained")
        FigureCanvasAgg(figure)
        ratios = [height - 3.2, 3.2]
        above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": ratios})
        _draw_starts(above, summary)
        _draw_steps(below, summary)
        file = io.BytesIO()
        figure.savefig(file, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()


def _draw_starts(axis: Any, summary: Summary) -> None:
    """One row per start: a bar of what its time went into, a tick for each save, a cross for one that failed."""
    origin = summary.timeline.starts[0].began_at if summary.timeline.starts else 0.0
    for row, (start, account) in enumerate(zip(summary.timeline.starts, summary.accounts, strict=True)):
        training_at = start.training_at if start.training_at is not None else start.ended_at
        lost_from = start.ended_at - account.lost_secs
        parts = [
            ("start-up", start.began_at, training_at),
            ("useful", training_at, lost_from),
            ("lost", lost_from, start.ended_at),
            ("down", start.ended_at, start.ended_at + account.down_secs),
        ]
        for name, begin, end in parts:
            axis.barh(row, end - begin, left=begin - origin, color=COLOURS[name], height=0.6)
        for save in start.saves:
            axis.plot(save.at - origin, row, marker="|", color="black", markersize=9)
        for trouble in start.troubles:
            marker = "x" if trouble.kind == "save_failed" else "."
            axis.plot(trouble.at - origin, row, marker=marker, color=COLOURS["lost"], markersize=7)
    axis.set_yticks(range(len(summary.timeline.starts)))
    axis.set_yticklabels([f"start {number + 1}" for number in range(len(summary.timeline.starts))])
    axis.invert_yaxis()
    axis.set_title(_title(summary), loc="left", fontsize=10)
    _legend(axis, [name for name in COLOURS if name != "stalled"])


def _legend(axis: Any, names: Sequence[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=COLOURS[name], label=name) for name in names]
    handles.append(Line2D([], [], color="black", marker="|", linestyle="none", label="saved"))
    handles.append(Line2D([], [], color=COLOURS["lost"], marker="x", linestyle="none", label="save failed"))
    axis.legend(handles=handles, ncols=len(handles), fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 1.0))


def _title(summary: Summary) -> str:
    if not summary.timeline.starts:
        return "no start"
    began = datetime.fromtimestamp(summary.timeline.starts[0].began_at, timezone.utc)
    return f"from {began:%Y-%m-%d %H:%M:%S} UTC"


def _draw_steps(axis: Any, summary: Summary) -> None:
    """How many steps were trained when; those of one start in one line."""
    origin = summary.timeline.starts[0].began_at if summary.timeline.starts else 0.0
    for start in summary.timeline.starts:
        if start.training_at is None:
            continue
        points = [(start.training_at, start.first_step), *start.progress]
        axis.plot(
            [at - origin for at, _ in points], [step for _, step in points], color=COLOURS["useful"], linewidth=1.4
        )
        axis.plot(
            [save.at - origin for save in start.saves], [save.step for save in start.saves],
            linestyle="none", marker="o", markersize=3.5, color="black",
        )  # fmt: skip
    axis.set_ylabel("step")
    axis.set_xlabel("seconds from the first start (dots: when a step's checkpoint was durable)")
    axis.grid(alpha=0.3)
