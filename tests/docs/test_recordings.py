"""Pictures of terminals are of what programs wrote."""

from __future__ import annotations

import html
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from tests.docs.pages import DOCS, ROOT

PICTURES = sorted(DOCS.glob("*.svg"))


@pytest.fixture(scope="module")
def record() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record", DOCS / "record.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["record"] = module
    spec.loader.exec_module(module)
    return module


def text(picture: str) -> str:
    return html.unescape(" ".join(re.findall(r"<text[^>]*>([^<]*)</text>", picture))).replace("\xa0", " ")


def test_it_shows_the_screen_that_is_left(record: ModuleType, tmp_path: Path) -> None:
    program = (
        r"print('\x1b[31mred\x1b[0m', __import__('os').isatty(1)); print('first\rlast!\x1b[K'); print('\x1b[5Cfar')"
    )
    picture = record.drawn(record.run([sys.executable, "-c", program], 40, str(tmp_path)), 40, "a title", "x")
    shown = text(picture)
    assert "True" in shown, "it was no terminal"
    assert "last!" in shown
    assert "first" not in shown
    assert "far" in shown
    assert "a title" in shown
    (red,) = re.findall(r'<text class="(x-r\d+)"[^>]*>red</text>', picture)
    (plain,) = re.findall(r'<text class="(x-r\d+)"[^>]*>&#160;True</text>', picture)
    assert red != plain
    ElementTree.fromstring(picture)  # noqa: S314


def test_a_program_that_fails_is_no_recording(record: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as raised:
        record.run([sys.executable, "-c", "print('why'); raise SystemExit(3)"], 40, str(tmp_path))
    assert raised.value.returncode == 3
    assert b"why" in raised.value.output
    assert b"why" in record.run(raised.value.cmd, 40, str(tmp_path), code=3), "it is to end so"


def test_every_recording_is_there(record: ModuleType) -> None:
    assert {path.stem for path in PICTURES} == {*record.RECORDINGS, "how-it-works"}
    assert {path.stem for path in PICTURES if record.RECORDINGS.get(path.stem)} == set(record.RECORDINGS)


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_pictures_stand_alone(picture: Path) -> None:
    """GitHub shows pictures without asking other servers for anything."""
    content = picture.read_text()
    assert ElementTree.fromstring(content).tag.endswith("svg")  # noqa: S314
    assert re.findall(r"(?:url\(|href=|src=)[\"']?(https?:[^\"')]+)", content) == []


def test_they_say_what_the_programs_say(record: ModuleType) -> None:
    demo = text((DOCS / "demo.svg").read_text())
    assert "IDENTICAL bit for bit" in demo
    assert "IDENTICAL bit for bit" in (ROOT / "examples" / "demo.py").read_text()
    assert demo.count("SIGKILL after step") == 2
    assert "PASS: killed at batch" in text((DOCS / "drill.svg").read_text())
    listed = text((DOCS / "list.svg").read_text())
    assert "broken" in listed
    assert 'ckpt_path="last" takes this one' in listed
    report = text((DOCS / "report.svg").read_text())
    assert report.count("killed") == 2
    assert report.count("finished") == 1
    for name, recording in record.RECORDINGS.items():
        assert recording.title in text((DOCS / f"{name}.svg").read_text())
