"""The report as one document for a browser: no script, no file beside it, nothing fetched."""

from __future__ import annotations

import html
from collections.abc import Sequence
from datetime import datetime, timezone

from lightning_ft.__about__ import __version__
from lightning_ft.report import words
from lightning_ft.report.summary import Summary

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; margin-bottom: 0; } h2 { font-size: 1.1em; margin-top: 2em; }
.figures { display: flex; flex-wrap: wrap; gap: 1em; margin: 1.5em 0; }
.figures div { border: 1px solid #ddd; border-radius: 6px; padding: .6em 1em; min-width: 8em; }
.figures b { display: block; font-size: 1.5em; }
table { border-collapse: collapse; } th, td { text-align: right; padding: .2em .8em; border-bottom: 1px solid #eee; }
th:first-child, td:first-child, td.text { text-align: left; } svg { width: 100%; height: auto; }
"""


def page(summary: Summary, picture: str | None) -> str:
    """The document.

    Args:
        summary: The run.
        picture: SVG; None where there is nothing to draw it with.
    """
    made = datetime.now(timezone.utc)
    figures = "".join(
        f"<div><b>{html.escape(value)}</b>{html.escape(name)}</div>" for name, value in words.figures(summary)
    )
    advice = "".join(f"<p>{html.escape(line)}</p>" for line in words.advice(summary))
    heads, rows = words.table(summary)
    endings = "".join(f"<p>{html.escape(line)}</p>" for line in words.endings(summary))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(summary.dirpath)}</title>"
        f"<style>{_STYLE}</style>"
        f"<h1>{html.escape(summary.dirpath)}</h1><p>Made {made:%Y-%m-%d %H:%M} UTC by lightning-ft {__version__}.</p>"
        f"<div class=figures>{figures}</div>"
        f"{picture or '<p>Without matplotlib there is no picture.</p>'}"
        f"<h2>Starts</h2>{_table(heads, rows)}{endings}"
        f"<h2>How often to save</h2>{advice}"
        "</html>\n"
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
