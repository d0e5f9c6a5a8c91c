"""`lightning-ft report`: what became of a run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_ft.report import figure
from tests.cli.conftest import Answer
from tests.unit.test_timeline import Line, committed, progress, started, three_kills, training, write

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


def test_help_lists_the_keys_of_the_document(ft: Ft, tmp_path: Path) -> None:
    three_kills(tmp_path)
    keys = set(ft("report", tmp_path, "--json").json) - {"command"}
    listed = ft("report", "--help").out.partition("JSON:")[2].partition("Exit code")[0]
    assert {name.strip() for name in re.sub(r":\s+\[[^]]*\]", "", listed).split(",")} == keys


def test_a_page_and_a_picture(ft: Ft, tmp_path: Path) -> None:
    three_kills(tmp_path)
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    assert ft("report", tmp_path, "--html", page, "--png", picture).code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "35.8 %" in text
    assert text.count("<tr>") == 5
    assert text.count("<svg") == 1
    assert text.count(">nothing was trained<") == 1  # killed before its first step
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


@pytest.mark.parametrize("option", ["--html", "--png"])
def test_a_file_that_cannot_be_written_is_named(ft: Ft, tmp_path: Path, option: str) -> None:
    three_kills(tmp_path)
    answer = ft("report", tmp_path, option, tmp_path / "nowhere" / "report")
    assert (answer.code, answer.out) == (5, "")
    assert f"{option}: {tmp_path}/nowhere/report cannot be written: No such file or directory" in answer.err


def test_a_name_that_is_no_text_is_on_the_page_all_the_same(ft: Ft, tmp_path: Path) -> None:
    directory = tmp_path / "run-\udcff"
    directory.mkdir()
    three_kills(directory)
    assert ft("report", directory, "--html", tmp_path / "report.html").code == 0
    assert "run-\\udcff</h1>" in (tmp_path / "report.html").read_text()


def test_a_month_of_saves_is_a_picture_of_few_points(ft: Ft, tmp_path: Path) -> None:
    lines: list[Line] = [started(0), training(60, 0)]
    for minute in range(1, 12_000):
        lines += [progress(60 * minute, minute), committed(60 * minute + 1, minute, 0.1)]
    write(tmp_path, "1", lines)
    assert ft("report", tmp_path, "--html", tmp_path / "report.html").code == 0
    text = (tmp_path / "report.html").read_text()
    assert "days from the first start (dots: when a step's checkpoint was durable; one in 12 is drawn)" in text
    assert 1000 < text.count("<use") < 2500
    assert len(text) < 500_000


def test_a_hundred_starts_are_a_picture_of_thin_rows(ft: Ft, tmp_path: Path) -> None:
    for number in range(100):
        write(tmp_path, f"{number:03d}", [started(10 * number), training(10 * number + 1, number)])
    assert ft("report", tmp_path, "--html", tmp_path / "report.html").code == 0
    text = (tmp_path / "report.html").read_text()
    height_points = float(re.findall(r"<svg[^>]* height=\"([0-9.]+)pt\"", text)[0])
    assert height_points < 25 * 72
    assert text.count(">start ") == 50


def test_the_advice_for_two_directories_is_from_the_saves_of_one_and_the_uploads_to_the_other(
    ft: Ft, tmp_path: Path
) -> None:
    def commit(at: float, path: str, blocked_secs: float, total_secs: float) -> Line:
        return (at, "committed", {"path": path, "step": 1, "blocked_secs": blocked_secs, "write_secs": total_secs,
                                  "total_secs": total_secs, "size_bytes": 1000})  # fmt: skip

    lines: list[Line] = [started(0), training(1, 0)]
    for number in range(5):
        lines += [commit(100 * number + 10, f"/nvme/{number}.ckpt", 8.0, 9.0)]
        lines += [commit(100 * number + 90, f"/run/{number}.ckpt", 0.0, 70.0)] if number % 2 == 0 else []
    write(tmp_path, "1", lines)
    document = ft("report", tmp_path, "--json").json
    assert (document["writes"]["count"], document["writes"]["size_bytes"]) == (5, 5000)
    assert (document["writes"]["median_blocked_secs"], document["writes"]["median_durable_secs"]) == (8.0, 70.0)
    assert document["recommendation"]["advice"]["cost_secs"] == 8.0
    assert document["recommendation"]["present_interval_secs"] == 100.0


def ended(at: float, how: str, reason: str) -> Line:
    return (at, "ended", {"how": how, "reason": reason})


def test_why_a_start_ended_is_told_below_the_table(ft: Ft, tmp_path: Path) -> None:
    """Messages of hundreds of characters have no place in it."""
    long = "DivergenceError: loss nan in batch 26; " + "indices 1, 2, 3, " * 40
    write(tmp_path, "1", [started(0), training(1, 0), progress(2, 1), ended(3, "failed", long)])
    write(tmp_path, "2", [started(4), training(5, 1), ended(6, "failed", "KeyboardInterrupt:")])
    write(tmp_path, "3", [started(7), training(8, 1), ended(9, "stopped", "SIGTERM on rank 0")])
    write(tmp_path, "4", [started(9), ended(9, "finished", "")])
    out = ft("report", tmp_path).out
    lines = out[out.index("start  ranks") :].splitlines()
    assert max(map(len, lines[:5])) < 130
    assert lines[1].endswith("  failed: DivergenceError")
    assert lines[2].endswith("  failed: KeyboardInterrupt")
    assert lines[3].endswith("  stopped: SIGTERM on rank 0")
    assert lines[4].endswith("  finished before")
    assert lines[5] == f"start 1 failed: {long.strip()}"
    assert lines[6] == ""


def test_a_short_run_gets_no_advice_in_steps_that_it_never_trains(ft: Ft, tmp_path: Path) -> None:
    three_kills(tmp_path)
    out = ft("report", tmp_path).out
    assert "Too short for advice: it has trained for 38.0 s." in out
    assert "every_n_train_steps" not in out
    cheap = [committed(60 * n, n, 0.001) for n in range(1, 10)]
    write(tmp_path, "5", [started(200), training(201, 40), *cheap, progress(900, 99)])
    out = ft("report", tmp_path).out
    assert re.search(
        r"Save every 60.0 s, every_n_train_steps=\d+, the least that is advised \(Daly's rule alone: ", out
    )


def test_a_run_that_has_saved_nothing_yet(ft: Ft, tmp_path: Path) -> None:
    write(tmp_path, "1", [started(0), training(1, 0)])
    answer = ft("report", tmp_path, "--html", tmp_path / "report.html", "--png", tmp_path / "report.png")
    assert answer.code == 0
    assert "No checkpoint has become durable" in answer.out


def test_without_event_files_there_is_no_report(ft: Ft, tmp_path: Path) -> None:
    answer = ft("report", tmp_path)
    assert (answer.code, answer.out) == (3, "")
    assert "no event files" in answer.err
