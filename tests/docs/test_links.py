"""Every link leads somewhere, and every page can be found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import DOCS, FORMAT, PAGES, README, ROOT, Page, name


def broken(page: Page) -> list[str]:
    found = []
    for link in page.links:
        if link.partition(":")[0] in ("http", "https", "mailto"):
            continue
        path, _, anchor = link.partition("#")
        target = page.path if not path else (page.path.parent / path)
        if not target.exists():
            found.append(f"{link}: there is no {target}")
        elif anchor and anchor not in Page(target).anchors:
            found.append(f"{link}: {target.name} has no such heading")
    return found


@pytest.mark.parametrize("page", [*PAGES, FORMAT, Page(ROOT / "CHANGELOG.md")], ids=name)
def test_relative_links_lead_somewhere(page: Page) -> None:
    assert broken(page) == []


def test_the_check_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `last` step, two\n\n[a](no.md) [b](page.md#one-last-step-two) [c](#one) ![d](no.svg)\n")
    assert [text.partition(":")[0] for text in broken(Page(page))] == ["no.md", "#one", "no.svg"]


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {(README.path.parent / link.partition("#")[0]).resolve() for link in README.links}
    apart = {"index.md", "api.md", "format.md"}  # of the HTML alone; the README has FORMAT.md itself
    assert {page for page in DOCS.glob("*.md") if page.name not in apart} - linked == set()


def test_every_page_is_in_the_contents_of_the_html() -> None:
    listed = (DOCS / "index.md").read_text().split()
    assert {page.stem for page in DOCS.glob("*.md")} - set(listed) == {"index"}


def test_the_first_screen_has_the_two_commands_and_the_six_lines() -> None:
    first = "\n".join(README.path.read_text().splitlines()[:24])
    assert "$ make demo" in first
    assert "$ make test" in first
    assert 'ckpt_path="last"' in first
