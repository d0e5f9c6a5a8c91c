"""`lightning-ft report`: what became of a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_ft.report import figure
from tests.cli.conftest import Answer
from tests.unit.test_timeline import started, three_kills, training, write

Ft = Callable[..., Answer]


def test_three_kills_in_words_and_as_json(ft: Ft, tmp_path: Path) -> None:
    three_kills(tmp_path)
    answer = ft("report", tmp_path)
    assert answer.code == 0
    figures = dict(re.findall(r"^(\S[a-z ]+?)  +(\S.*)$", answer.out, re.MULTILINE))
    assert figures["goodput"] == "35.8 %"  # 38 s of 106 s, see the table in test_timeline
    assert (figures["restarts"], figures["steps trained twice"], figures["down"]) == ("3", "25", "20.0 s")
    assert len(re.findall(r"killed$|finished$", answer.out, re.MULTILINE)) == 4
    document = ft("report", tmp_path, "--json").json
    assert document["goodput"] == pytest.approx(38 / 106)
    assert (document["restarts"], document["lost_steps"], document["failures"]) == (3, 25, 3)
    assert [start["lost_steps"] for start in document["starts"]] == [15, 10, 0, 0]
    assert document["recommendation"]["every_n_train_steps"] >= 1


def test_a_page_and_a_picture(ft: Ft, tmp_path: Path) -> None:
    three_kills(tmp_path)
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    assert ft("report", tmp_path, "--html", page, "--png", picture).code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "35.8 %" in text
    assert text.count("<tr>") == 5
    assert text.count("<svg") == 1
    assert not re.search(r"<script|src=|href=[\"']http", text)


def test_without_matplotlib_there_is_a_page_and_no_picture(
    ft: Ft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three_kills(tmp_path)
    monkeypatch.setattr(figure, "available", lambda: False)
    assert ft("report", tmp_path, "--html", tmp_path / "report.html").code == 0
    assert "<svg" not in (tmp_path / "report.html").read_text()
    answer = ft("report", tmp_path, "--png", tmp_path / "report.png")
    assert (answer.code, "lightning-ft[plot]" in answer.err) == (6, True)


def test_names_of_directories_are_no_html(ft: Ft, tmp_path: Path) -> None:
    directory = tmp_path / "<b>run"
    directory.mkdir()
    three_kills(directory)
    assert ft("report", directory, "--html", tmp_path / "report.html").code == 0
    assert "<b>run" not in (tmp_path / "report.html").read_text()


def test_a_run_that_has_saved_nothing_yet(ft: Ft, tmp_path: Path) -> None:
    write(tmp_path, "1", [started(0), training(1, 0)])
    answer = ft("report", tmp_path, "--html", tmp_path / "report.html", "--png", tmp_path / "report.png")
    assert answer.code == 0
    assert "No checkpoint has become durable" in answer.out


def test_without_event_files_there_is_no_report(ft: Ft, tmp_path: Path) -> None:
    answer = ft("report", tmp_path)
    assert (answer.code, answer.out) == (3, "")
    assert "no event files" in answer.err
