from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lightning_ft import events
from lightning_ft._history.event_file import DIRECTORY, History
from lightning_ft._history.timeline import read
from lightning_ft.storage import Storage


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def at_once(function: Callable[[], None]) -> None:
    function()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def committed(path: str, step: int) -> events.Committed:
    return events.Committed(path, step, "0" * 32, 1000, 2.0, {"blocked_secs": 0.5, "write_secs": 1.5})


def test_a_file_per_start_with_a_line_per_event(tmp_path: Path) -> None:
    clock = Clock()
    history = History(str(tmp_path), Storage(), at_once, clock=clock)
    history.write("started", start=1)
    clock.now += 5
    history.note(committed(str(tmp_path / "step=00000010.ckpt"), 10))
    history.note(events.SaveFailed("b", 20, "disk full"))
    history.note(events.SaveSkipped("c", 30, "busy"))
    history.note(events.DeleteStarted("d"))  # nothing of a save
    history.close("stopped", "SIGTERM")
    (file,) = (tmp_path / DIRECTORY).iterdir()
    assert str(file) == history.path
    assert file.name.startswith("20231114T221320")
    assert [(line["at"], line["event"]) for line in lines(file)] == [
        (1_700_000_000.0, "started"),
        (1_700_000_005.0, "committed"),
        (1_700_000_005.0, "save_failed"),
        (1_700_000_005.0, "save_skipped"),
        (1_700_000_005.0, "ended"),
    ]
    assert lines(file)[1]["blocked_secs"] == 0.5
    assert lines(file)[-1] == {"at": 1_700_000_005.0, "event": "ended", "how": "stopped", "reason": "SIGTERM"}


@pytest.mark.parametrize(("hours", "written"), [(0.5, 11), (2.5, 4), (500, 2)])
def test_a_long_start_writes_fewer_lines_of_progress(tmp_path: Path, hours: float, written: int) -> None:
    clock = Clock()
    history = History(str(tmp_path), Storage(), at_once, clock=clock)
    clock.now += 3600 * hours
    for step in range(11):
        history.progress(step, step)
        clock.now += 1
    assert len(lines(Path(history.path))) == written


def test_a_clock_that_is_set_meanwhile_puts_nothing_out_of_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = History(str(tmp_path), Storage(), at_once)
    history.write("started")
    began = time.time()
    for there in (began - 3600, began + 86400):
        monkeypatch.setattr(time, "time", lambda there=there: there)
        history.write("progress", step=1)
    at = [line["at"] for line in lines(Path(history.path))]
    assert at == sorted(at)
    assert at[-1] - at[0] < 3600


def test_a_line_is_in_the_file_before_write_returns(tmp_path: Path) -> None:
    history = History(str(tmp_path), Storage(), at_once)
    for number in range(3):
        history.write("started", start=number)
        assert len(lines(Path(history.path))) == number + 1


def test_progress_is_written_at_most_once_an_interval_and_at_the_end(tmp_path: Path) -> None:
    clock = Clock()
    history = History(str(tmp_path), Storage(), at_once, progress_secs=1.0, clock=clock)
    for step in range(1, 31):
        history.progress(step, 2 * step)
        clock.now += 0.1
    history.close("finished")
    written = [(line["step"], line["batch"]) for line in lines(Path(history.path)) if line["event"] == "progress"]
    assert len(written) <= 5
    assert written[0] == (1, 2)
    assert written[-1] == (30, 60)


def test_a_clock_that_is_set_back_does_not_silence_progress(tmp_path: Path) -> None:
    clock = Clock()
    history = History(str(tmp_path), Storage(), at_once, progress_secs=1.0, clock=clock)
    history.progress(1, 1)
    clock.now -= 3600
    history.progress(2, 2)
    assert [line["step"] for line in lines(Path(history.path))] == [1, 2]


def test_after_the_end_nothing_is_written(tmp_path: Path) -> None:
    history = History(str(tmp_path), Storage(), at_once)
    history.close("finished")
    history.write("started")
    history.close("failed")
    assert [line["event"] for line in lines(Path(history.path))] == ["ended"]


def test_an_object_has_all_lines_after_each_commit() -> None:
    later: list[Callable[[], None]] = []
    history = History("memory://history/run", Storage(), later.append)
    fs = fsspec.filesystem("memory")
    history.write("started", start=1)
    assert not fs.exists(history.path)
    history.note(committed("memory://history/run/step=00000010.ckpt", 10))
    assert not fs.exists(history.path)  # not in the thread that commits, which may be the main one
    later.pop()()
    assert [json.loads(line)["event"] for line in fs.cat_file(history.path).splitlines()] == ["started", "committed"]
    history.close("finished")
    assert len(fs.cat_file(history.path).splitlines()) == 3
    assert read("memory://history/run", Storage()).starts[0].how == "finished"


def test_a_file_that_cannot_be_written_is_said_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / DIRECTORY).write_text("a file where the directory should be")
    history = History(str(tmp_path), Storage(), at_once)
    with caplog.at_level(logging.WARNING):
        history.write("started")
        history.progress(1, 1)
        history.close("finished")
    assert len(caplog.records) == 1
    assert history.path in caplog.text


def test_a_store_that_fails_is_said_once_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Storage):
        calls = 0

        def put(self, path: str, data: bytes) -> None:
            self.calls += 1
            raise ConnectionError("gone")

    storage = Failing()
    history = History("memory://history/failing", storage, at_once)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            history.note(committed("x", step))
        history.close("finished")
    assert storage.calls == 1
    assert len(caplog.records) == 1


def test_lines_of_two_threads_do_not_mix(tmp_path: Path) -> None:
    import threading

    history = History(str(tmp_path), Storage(), at_once)
    threads = [
        threading.Thread(target=lambda: [history.write("progress", step=1, batch=1, text="x" * 200) for _ in range(50)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines(Path(history.path))) == 200
    assert os.path.getsize(history.path) == sum(len(json.dumps(line)) + 1 for line in lines(Path(history.path)))
