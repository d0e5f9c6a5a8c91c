"""The figures of a report as a person reads them: the same in a terminal and on a page."""

from __future__ import annotations

from lightning_ft._history.timeline import Start
from lightning_ft._words import duration, percent, size
from lightning_ft.report.summary import Summary


def figures(summary: Summary) -> list[tuple[str, str]]:
    """The few numbers that matter, each with its name."""
    timeline = summary.timeline
    found = [
        ("goodput", percent(timeline.goodput)),
        ("elapsed", duration(timeline.elapsed_secs)),
        ("restarts", str(timeline.restarts)),
        ("steps trained twice", str(timeline.lost_steps)),
        ("time lost by that", duration(sum(account.lost_secs for account in summary.accounts))),
        ("starting up", duration(sum(account.startup_secs for account in summary.accounts))),
        ("down", duration(sum(account.down_secs for account in summary.accounts))),
        ("stalled by saves", duration(sum(account.stalled_secs for account in summary.accounts))),
    ]
    if summary.writes is not None:
        writes = summary.writes
        found += [
            ("saves", str(writes.count)),
            ("written", size(writes.size_bytes)),
            ("writing", "-" if writes.bytes_per_sec is None else f"{size(writes.bytes_per_sec)}/s"),
            ("durable after", duration(writes.median_durable_secs)),
        ]
    return found


def table(summary: Summary) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """One row per start: heads, rows."""
    heads = ("start", "ranks", "steps", "start-up", "useful", "stalled", "lost", "lost steps", "saves", "failed", "end")
    rows: list[tuple[str, ...]] = [
        (
            str(number),
            str(start.world_size),
            "-" if start.training_at is None else f"{start.first_step}-{start.last_step}",
            duration(account.startup_secs),
            duration(account.useful_secs),
            duration(account.stalled_secs),
            duration(account.lost_secs),
            str(account.lost_steps),
            str(len(start.saves)),
            str(sum(trouble.kind == "save_failed" for trouble in start.troubles)),
            _short(start, last=number == len(summary.accounts)),
        )
        for number, (start, account) in enumerate(zip(summary.timeline.starts, summary.accounts, strict=True), 1)
    ]
    return heads, rows


# Of why a start ended, in the table; what is longer is below it.
_MOST_CHARACTERS = 36


def _short(start: Start, *, last: bool) -> str:
    """How a start ended, in a few words."""
    if start.found_finished:
        return "finished before"
    if start.how is None:
        return "killed, or running" if last else "killed"
    if start.how == "failed":
        return f"failed: {start.reason.partition(':')[0]}" if start.reason else "failed"
    text = _whole(start)
    return text if len(text) <= _MOST_CHARACTERS else start.how


def _whole(start: Start) -> str:
    return f"{start.how}: {start.reason.strip().removesuffix(':')}" if start.reason else str(start.how)


def endings(summary: Summary) -> list[str]:
    """Why starts ended, where that is longer than the table has room for."""
    starts = summary.timeline.starts
    return [
        f"start {number} {_whole(start)}"
        for number, start in enumerate(starts, 1)
        if start.reason and _whole(start) != _short(start, last=number == len(starts))
    ]


def advice(summary: Summary) -> list[str]:
    """How often to save, and why, in sentences."""
    found = summary.recommendation
    if found is None:
        return ["No checkpoint has become durable, so it is not known what one costs."]
    given = found.advice
    if found.too_short:
        useful_secs = sum(account.useful_secs for account in summary.accounts)
        return [
            f"Too short for advice: it has trained for {duration(useful_secs)}. A save stops training for "
            f"{duration(given.cost_secs)} (median), which is worth it every {duration(given.interval_secs)}."
        ]
    because = {
        "optimum": "which is where saves and lost work together cost the least",
        "write": "since a save takes that long in the background, and the next one cannot begin before",
        "least": f"the least that is advised (Daly's rule alone: {duration(given.optimum_secs)})",
        "most": f"the most that is advised, for no more to be lost (Daly's rule alone: {duration(given.optimum_secs)})",
    }[given.limited_by]
    steps = "" if found.every_n_train_steps is None else f", every_n_train_steps={found.every_n_train_steps}"
    lines = [
        f"Save every {duration(given.interval_secs)}{steps}, {because}.",
        f"A save stops training for {duration(given.cost_secs)} (median), and a failure is expected every "
        f"{duration(given.failure_secs)} (this run's, with one assumed in its first day): Daly's rule (2006), which "
        "refines Young's (1974).",
        f"Of the time, {percent(found.lost_share)} would go into saves, work done twice and restarts.",
    ]
    if found.present_interval_secs is not None:
        share = percent(found.present_lost_share)
        lines.append(f"So far there was a save every {duration(found.present_interval_secs)}: {share}.")
    return lines
