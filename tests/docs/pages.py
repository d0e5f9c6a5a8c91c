"""The pages of the documentation, as Markdown: their links, headings, tables and code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_MARKDOWN = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Page:
    """One file of Markdown."""

    path: Path

    @cached_property
    def tokens(self) -> list[Token]:
        return _MARKDOWN.parse(self.path.read_text())

    @cached_property
    def inline(self) -> list[Token]:
        return [child for token in self.tokens for child in token.children or ()]

    @property
    def links(self) -> Iterator[str]:
        """Where links and images lead to."""
        for token in self.inline:
            target = token.attrs.get("href") or token.attrs.get("src")
            if isinstance(target, str):
                yield target

    @cached_property
    def anchors(self) -> set[str]:
        """What links to headings are called, on GitHub and in the pages of Sphinx."""
        found: dict[str, int] = {}
        names = set()
        for opening, heading in zip(self.tokens, self.tokens[1:], strict=False):
            if opening.type == "heading_open":
                text = "".join(child.content for child in heading.children or () if child.type != "softbreak")
                slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
                found[slug] = again = found.get(slug, -1) + 1
                names.add(f"{slug}-{again}" if again else slug)
        return names

    @property
    def spans(self) -> Iterator[str]:
        """What stands in backticks."""
        return (token.content for token in self.inline if token.type == "code_inline")

    def blocks(self, *languages: str) -> list[str]:
        """Fenced code of these languages."""
        return [token.content for token in self.tokens if token.type == "fence" and token.info.strip() in languages]

    def rows(self, header: str) -> list[list[str]]:
        """The rows of the first table that has this cell in its header; each cell as its Markdown."""
        lines = iter(self.path.read_text().splitlines())
        for line in lines:
            if line.startswith("|") and header in _cells(line):
                next(lines)
                rows = []
                for row in lines:
                    if not row.startswith("|"):
                        break
                    rows.append(_cells(row))
                return rows
        raise AssertionError(f"{self.path} has no table with {header!r} in its header")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


README = Page(ROOT / "README.md")
PAGES = [README, *map(Page, sorted(DOCS.glob("*.md")))]
FORMAT = Page(ROOT / "lightning_ft" / "FORMAT.md")


def name(page: Any) -> str:
    """For pytest."""
    return str(page.path.relative_to(ROOT))
