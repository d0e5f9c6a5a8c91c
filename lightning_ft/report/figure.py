"""The picture of a run: what its time went into, its steps, and its saves. Needs matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar

from lightning_ft._words import percent
from lightning_ft.report.summary import Summary

# Of what the time went into; the same in the picture, its legend and the page.
COLOURS = {
    "useful": "#2e7d32", "start-up": "#9e9e9e", "stalled": "#f9a825", "lost": "#c62828", "down": "#eeeeee"
}  # fmt: skip
_INCHES_PER_START = 0.35
# Of all rows together: a run that was started a thousand times is still one picture, of thin rows.
_MOST_INCHES = 20.0
_MOST_ROW_LABELS = 50
# Of all starts together. More are no more to be seen on so many pixels, and make a page of many MiB.
_MOST_POINTS = 1000
_UNITS = ((120.0, 1.0, "seconds"), (7200.0, 60.0, "minutes"), (172800.0, 3600.0, "hours"), (math.inf, 86400.0, "days"))

T = TypeVar("T")


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
    rows = 0.4 + min(_MOST_INCHES, _INCHES_PER_START * max(1, len(summary.timeline.starts)))
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lightning-ft"}):
        figure = Figure(figsize=(11, rows + 3.2), layout="constrained")
        FigureCanvasAgg(figure)
        above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [rows, 3.2]})
        clock = _Clock(summary)
        _draw_starts(above, summary, clock)
        _draw_steps(below, summary, clock)
        file = io.BytesIO()
        figure.savefig(file, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else None)
    return file.getvalue()


class _Clock:
    """Times of a run as they stand on its axis: since its beginning, in a unit that can be read."""

    def __init__(self, summary: Summary) -> None:
        starts = summary.timeline.starts
        self.began_at = min((start.began_at for start in starts), default=0.0)
        span_secs = max((start.ended_at for start in starts), default=0.0) - self.began_at
        self._divisor, self.unit = next((divisor, unit) for limit, divisor, unit in _UNITS if span_secs < limit)

    def __call__(self, at: float) -> float:
        return (at - self.began_at) / self._divisor


def _draw_starts(axis: Any, summary: Summary, clock: _Clock) -> None:
    """One row per start: a bar of what its time went into, a tick for each save, a cross for one that failed."""
    starts = summary.timeline.starts
    bars: dict[str, list[tuple[int, float, float]]] = {name: [] for name in COLOURS if name != "stalled"}
    for row, (start, account) in enumerate(zip(starts, summary.accounts, strict=True)):
        training_at = start.training_at if start.training_at is not None else start.ended_at
        bars["start-up"].append((row, start.began_at, training_at))
        bars["useful"].append((row, training_at, account.survived_at))
        bars["lost"] += [(row, back.lost_from, back.at) for back in start.went_back]  # over it
        bars["lost"].append((row, account.survived_at, start.ended_at))
        bars["down"].append((row, start.ended_at, start.ended_at + account.down_secs))
    for name, drawn in bars.items():
        left = [clock(begin) for _, begin, _ in drawn]
        width = [clock(end) - clock(begin) for _, begin, end in drawn]
        axis.barh([row for row, *_ in drawn], width, left=left, color=COLOURS[name], height=0.6)
    saves = [(clock(save.at), row) for row, start in enumerate(starts) for save in start.saves]
    height = 9 if len(starts) <= _MOST_ROW_LABELS else 2
    failures = [
        (clock(trouble.at), row)
        for row, start in enumerate(starts)
        for trouble in start.troubles
        if trouble.kind == "save_failed"
    ]
    _draw_points(axis, _thinned(saves, _MOST_POINTS), marker="|", color="black", markersize=height)
    _draw_points(axis, _thinned(failures, _MOST_POINTS), marker="x", color=COLOURS["lost"], markersize=7)
    rows = range(0, len(starts), _one_in(len(starts), _MOST_ROW_LABELS))
    for row in rows:  # a row without colour is no mistake
        if starts[row].training_at is None:
            begin, end = clock(starts[row].began_at), clock(starts[row].ended_at)
            before = end > clock(max(start.ended_at for start in starts)) / 2
            axis.annotate(
                "nothing was trained", (begin if before else end, row), (-4 if before else 4, 0),
                textcoords="offset points", ha="right" if before else "left", va="center", size=7,
            )  # fmt: skip
    axis.set_yticks(rows, [f"start {row + 1}" for row in rows])
    axis.invert_yaxis()
    axis.set_title(_title(summary), loc="left", fontsize=10)
    _legend(axis, list(bars))


def _one_in(count: int, most: int) -> int:
    """Of `count` things, every n-th is to be drawn."""
    return max(1, math.ceil(count / most))


def _thinned(points: Sequence[T], most: int) -> list[T]:
    """Some of `points`, evenly; the first and the last among them."""
    return [*points[:: _one_in(len(points), most)], *points[-1:]]


def _draw_points(axis: Any, points: Sequence[tuple[float, float]], **style: Any) -> None:
    axis.plot([x for x, _ in points], [y for _, y in points], linestyle="none", **style)


def _legend(axis: Any, names: Sequence[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=COLOURS[name], label=name) for name in names]
    handles.append(Line2D([], [], color="black", marker="|", linestyle="none", label="saved"))
    handles.append(Line2D([], [], color=COLOURS["lost"], marker="x", linestyle="none", label="save failed"))
    axis.legend(handles=handles, ncols=len(handles), fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 1.0))


def _title(summary: Summary) -> str:
    timeline = summary.timeline
    if not timeline.starts:
        return "no start"
    began = datetime.fromtimestamp(timeline.starts[0].began_at, timezone.utc)
    return f"from {began:%Y-%m-%d %H:%M:%S} UTC: goodput {percent(timeline.goodput)}, {timeline.restarts} restarts"


def _draw_steps(axis: Any, summary: Summary, clock: _Clock) -> None:
    """How many steps were trained when; those of one start in one line."""
    starts = summary.timeline.starts
    of_each = max(2, _MOST_POINTS // max(1, len(starts)))
    for start in starts:
        if start.training_at is None:
            continue
        trained = [(at, step) for at, step in start.progress if at >= start.training_at]
        points = _thinned([(start.training_at, start.first_step), *trained], of_each)
        axis.plot([clock(at) for at, _ in points], [step for _, step in points], color=COLOURS["useful"], linewidth=1.4)
    saves = [(clock(save.at), save.step) for start in starts for save in start.saves]
    few = len(saves) <= _MOST_POINTS // 5
    _draw_points(
        axis, _thinned(saves, _MOST_POINTS), marker="o" if few else ".", markersize=3.5 if few else 1.5, color="black"
    )
    axis.set_ylabel("step")
    axis.yaxis.get_major_locator().set_params(integer=True)
    one_in = _one_in(len(saves), _MOST_POINTS)
    drawn = "" if one_in == 1 else f"; one in {one_in} is drawn"
    axis.set_xlabel(f"{clock.unit} from the first start (dots: when a step's checkpoint was durable{drawn})")
    axis.grid(alpha=0.3)
