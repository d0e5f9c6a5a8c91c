"""Sizes, times, shares and errors as people read them."""

from __future__ import annotations

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def duration(secs: float) -> str:
    """`3.2 ms`, `5.0 s`, `12 min`, `3.4 h`, `2.1 d`."""
    if secs < 1:
        return f"{secs * 1e3:.1f} ms" if secs else "0 s"
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if secs < limit:
            return f"{secs / divisor:.1f} {unit}"
    return f"{secs / 86400:.1f} d"


def age(secs: float) -> str:
    """`12 s`, `5 min`, `3.4 h`, `2.1 d`: what a progress bar has room for."""
    if secs < 7200:
        return f"{secs:.0f} s" if secs < 120 else f"{secs / 60:.0f} min"
    return duration(secs)


def percent(share: float | None) -> str:
    """`98.3 %`; `-` if it is not known."""
    return "-" if share is None else f"{share * 100:.1f} %"


def size(size_bytes: float) -> str:
    """`11.5 MiB`."""
    for unit in _BINARY:
        if size_bytes < 1024 or unit == _BINARY[-1]:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    raise AssertionError


def error(of: BaseException) -> str:
    """`ValueError: no such thing`, the last line of its traceback; an error that has no text is no other error."""
    try:
        return f"{type(of).__name__}: {of}"
    except Exception:  # of whoever wrote its `__str__`, and what is to be told is something else
        return f"{type(of).__name__} (its text cannot be made)"
