"""One version, and a changelog that knows what there is."""

from __future__ import annotations

import re
from pathlib import Path

import lightning_ft as ft
from lightning_ft.__about__ import __version__

ROOT = Path(__file__).parents[2]
SECTIONS = ("Security", "Corruption", "Removed", "Deprecated", "Added", "Changed", "Fixed")


def changelog() -> dict[str, str]:
    """The text of each version, newest first."""
    parts = re.split(r"^## (.+)\n", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_version_is_written_once() -> None:
    assert ft.__version__ == __version__
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project
    assert '[tool.hatch.version]\npath = "lightning_ft/__about__.py"' in project
    files = [ROOT / "pyproject.toml", ROOT / "constraints.txt", *ROOT.glob("lightning_ft/**/*.py")]
    assert [path.name for path in files if f'"{__version__}"' in path.read_text()] == ["__about__.py"]


def test_the_changelog_has_this_version_and_its_sections_in_order() -> None:
    versions = changelog()
    release = re.match(r"\d+\.\d+\.\d+", __version__)
    assert release is not None
    assert any(heading.split(" ")[0] == release[0] for heading in versions)
    for heading, text in versions.items():
        sections = re.findall(r"^### (.+)$", text, flags=re.MULTILINE)
        assert sections == [name for name in SECTIONS if name in sections], heading


def test_the_changelog_names_everything_that_is_public() -> None:
    text = "".join(changelog().values())
    assert [name for name in sorted(ft.__all__) if not re.search(rf"\b{name}\b", text)] == []
    assert [extra for extra in ("cli", "s3", "plot", "safetensors") if f"`{extra}`" not in text] == []
