from __future__ import annotations

import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from lightning_ft._history.event_file import DIRECTORY
from lightning_ft._history.timeline import read, start_of_lines
from lightning_ft.storage import Storage

Line = tuple[float, str, dict[str, Any]]


def write(root: Path, name: str, lines: list[Line], tail: str = "") -> None:
    directory = root / DIRECTORY
    directory.mkdir(exist_ok=True)
    text = "".join(json.dumps({"at": at, "event": event, **more}) + "\n" for at, event, more in lines)
    (directory / f"{name}.jsonl").write_text(text + tail)


def started(at: float, start: int = 1) -> Line:
    return (at, "started", {"world_size": 2, "start": start})


def training(at: float, step: int, run_id: str = "run") -> Line:
    return (at, "training", {"run_id": run_id, "step": step, "batch": step})


def progress(at: float, step: int) -> Line:
    return (at, "progress", {"step": step, "batch": step})


def committed(at: float, step: int, blocked_secs: float) -> Line:
    return (at, "committed", {"path": f"step={step:08d}.ckpt", "step": step, "blocked_secs": blocked_secs,
                              "write_secs": 1.0, "total_secs": 1.5, "size_bytes": 1000})  # fmt: skip


def three_kills(root: Path) -> None:
    """Four starts; the figures in the test below are worked out from these lines by hand."""
    write(root, "1", [started(0), training(10, 0), progress(11, 1), progress(20, 10), committed(21, 10, 0.5),
                      progress(30, 20), progress(35, 25)])  # fmt: skip
    write(root, "2", [started(45), training(50, 10), progress(60, 20), committed(61, 20, 1.0), progress(70, 30)])
    write(root, "3", [started(75)])  # killed before its first step
    write(root, "4", [started(80), training(86, 20), progress(96, 30), progress(106, 40), committed(106, 40, 2.0),
                      (106, "ended", {"how": "finished"})])  # fmt: skip


def test_three_kills_by_hand(tmp_path: Path) -> None:
    three_kills(tmp_path)
    timeline = read(str(tmp_path), Storage())
    first, second, third, fourth = timeline.accounts
    assert timeline.restarts == 3
    assert timeline.failures == 3
    # The second start went on from step 10, so 15 of 25 steps were lost, since the line at 20 s; then 10 s were down.
    assert (first.startup_secs, first.lost_steps, first.lost_secs, first.down_secs) == (10, 15, 15, 10)
    assert (first.useful_secs, first.stalled_secs) == (10, 0.5)  # the save committed after that line is not counted
    # The third start never trained: the fourth went on from step 20.
    assert (second.startup_secs, second.lost_steps, second.lost_secs, second.down_secs) == (5, 10, 10, 5)
    assert second.useful_secs == 10
    assert (third.startup_secs, third.useful_secs, third.lost_steps, third.down_secs) == (0, 0, 0, 5)
    assert (fourth.startup_secs, fourth.useful_secs, fourth.lost_steps, fourth.down_secs) == (6, 18, 0, 0)
    assert timeline.lost_steps == 25
    assert timeline.elapsed_secs == 106
    assert timeline.running_secs == 35 + 25 + 0 + 26
    assert timeline.goodput == pytest.approx((10 + 10 + 0 + 18) / 106)
    assert [save.step for save in timeline.saves] == [10, 20, 40]


def test_the_last_start_may_be_running(tmp_path: Path) -> None:
    write(tmp_path, "1", [started(0), training(2, 0), progress(12, 10)])
    timeline = read(str(tmp_path), Storage())
    assert timeline.starts[0].how is None
    assert (timeline.restarts, timeline.failures, timeline.lost_steps) == (0, 0, 0)
    assert timeline.goodput == pytest.approx(10 / 12)


@pytest.mark.parametrize(("how", "failures"), [("finished", 0), ("stopped", 0), ("failed", 1)])
def test_who_was_asked_to_stop_has_not_failed(tmp_path: Path, how: str, failures: int) -> None:
    write(tmp_path, "1", [started(0), training(1, 0), progress(2, 1), (3, "ended", {"how": how, "reason": "so"})])
    write(tmp_path, "2", [started(4), training(5, 1), progress(6, 2)])
    timeline = read(str(tmp_path), Storage())
    assert timeline.failures == failures
    assert timeline.starts[0].reason == "so"


def test_start_up_begins_with_the_process(tmp_path: Path) -> None:
    """Imports take longer than all that the fit does before its first batch."""
    write(tmp_path, "1", [started(0), training(1, 0), progress(10, 9)])
    write(tmp_path, "2", [(20, "started", {"start": 2, "process_at": 13}), training(21, 9), progress(30, 18)])
    # What cannot be is not believed.
    write(tmp_path, "3", [(40, "started", {"start": 3, "process_at": 99}), training(41, 18), progress(42, 19)])
    first, second, third = read(str(tmp_path), Storage()).accounts
    assert (first.down_secs, second.startup_secs, third.startup_secs) == (3, 8, 1)


def test_a_run_that_has_finished_is_not_down_and_finding_it_so_is_no_restart(tmp_path: Path) -> None:
    write(tmp_path, "1", [started(0), training(1, 0), progress(5, 9)])
    write(tmp_path, "2", [started(7, 2), training(8, 9), progress(9, 10), (10, "ended", {"how": "finished"})])
    write(tmp_path, "3", [started(1000, 3), (1005, "ended", {"how": "finished"})])
    write(tmp_path, "4", [started(2000, 4), (2005, "ended", {"how": "finished"})])
    timeline = read(str(tmp_path), Storage())
    assert (timeline.restarts, [account.down_secs for account in timeline.accounts]) == (1, [2, 0, 0, 0])
    assert (timeline.elapsed_secs, timeline.running_secs) == (10, 8)
    assert [account.startup_secs for account in timeline.accounts] == [1, 1, 0, 0]


def test_a_finished_run_that_is_trained_on_has_lost_nothing(tmp_path: Path) -> None:
    write(tmp_path, "1", [started(0), training(1, 0), progress(5, 9), (6, "ended", {"how": "finished"})])
    write(tmp_path, "2", [started(7), training(8, 4), progress(9, 5)])
    assert read(str(tmp_path), Storage()).lost_steps == 0


def test_another_run_in_the_directory_is_not_of_this_one(tmp_path: Path) -> None:
    write(tmp_path, "1", [started(0), training(1, 0, "old"), progress(5, 9), committed(6, 9, 0.1)])
    write(tmp_path, "2", [started(10), training(11, 0, "new"), progress(15, 9)])
    assert [start.run_id for start in read(str(tmp_path), Storage()).starts] == ["new"]


def test_starts_of_another_run_that_have_saved_nothing_are_not_of_this_one_either(tmp_path: Path) -> None:
    """Nor is the time down that has passed since then."""
    write(tmp_path, "1", [started(0), (2, "ended", {"how": "failed", "reason": "a typing error"})])
    write(tmp_path, "2", [started(10), training(11, 0, "old"), progress(15, 9), committed(16, 9, 0.1)])
    write(tmp_path, "3", [started(20, 2), training(21, 9, "old"), progress(25, 12)])
    write(tmp_path, "4", [started(9000), (9001, "ended", {"how": "failed", "reason": "another one"})])
    write(tmp_path, "5", [started(9010), training(9011, 0, "new"), progress(9020, 9), committed(9020, 9, 0.0)])
    timeline = read(str(tmp_path), Storage())
    assert [start.began_at for start in timeline.starts] == [9000, 9010]
    assert (timeline.failures, timeline.elapsed_secs, timeline.goodput) == (1, 20, 9 / 20)


def test_who_was_killed_before_the_first_save_has_lost_all(tmp_path: Path) -> None:
    write(tmp_path, "1", [started(0), training(1, 0, "begun"), progress(5, 9)])
    write(tmp_path, "2", [started(10), training(11, 0, "begun again"), progress(15, 4)])
    timeline = read(str(tmp_path), Storage())
    assert (timeline.restarts, timeline.lost_steps) == (1, 9)
    assert timeline.goodput == pytest.approx(4 / 15)


def test_what_a_kill_cut_short_and_what_is_not_known_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, "1", [started(0), training(1, 0), (2, "invented_later", {"x": 1})], tail='{"at": 3, "event": "prog')
    write(tmp_path, "2", [], tail="not json\n[1]\n{}\n")
    (tmp_path / DIRECTORY / "notes.txt").write_text("not ours")
    (start,) = read(str(tmp_path), Storage()).starts
    assert start.ended_at == 2
    assert start_of_lines("x", []) is None


def test_of_a_million_lines_little_is_kept() -> None:
    """The next start reads them beside a training that needs its memory."""
    count = 20_000
    first = [b'{"at": 0, "event": "started"}', b'{"at": 0, "event": "training"}']
    more = (b'{"at": %d.5, "event": "progress", "step": %d, "batch": %d}' % (n, n, n) for n in range(count))
    tracemalloc.start()
    try:
        start = start_of_lines("x", itertools.chain(first, more))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert start is not None
    assert start.last_step == count - 1
    assert peak_bytes < 200 * count


@pytest.mark.parametrize(
    "line",
    [
        '{"at": null, "event": "progress", "step": 9}',
        '{"at": NaN, "event": "progress", "step": 9}',
        '{"at": 1e400, "event": "progress", "step": 9}',
        '{"at": true, "event": "progress", "step": 9}',
        '{"at": 5, "event": "progress", "step": null}',
        '{"at": 5, "event": "progress", "step": "9"}',
        '{"at": 5, "event": "committed", "step": 9, "blocked_secs": [0.1]}',
        '{"at": 5, "event": "training", "step": {}}',
        '{"at": 5, "event": "started", "world_size": "two"}',
        '{"at": 5, "event": ["progress"], "step": 9}',
    ],
)
def test_a_damaged_line_is_passed_over(tmp_path: Path, line: str) -> None:
    write(tmp_path, "1", [started(0), training(1, 0), progress(2, 1)], tail=line + "\n\x00\xff\n")
    timeline = read(str(tmp_path), Storage())
    assert (timeline.elapsed_secs, timeline.starts[0].last_step, timeline.saves) == (2, 1, [])


def test_what_a_start_went_back_from_is_lost(tmp_path: Path) -> None:
    """Trained to step 20, back to 10, trained to 30, back to 25; killed at 40, and the next one goes on from 30."""
    write(tmp_path, "1", [started(0), training(5, 0), progress(15, 10), committed(16, 10, 1.0), progress(25, 20),
                          committed(26, 20, 2.0), (30, "resumed", {"path": "x", "step": 10}), progress(40, 20),
                          progress(45, 25), progress(50, 30), (52, "resumed", {"path": "y", "step": 25}),
                          progress(60, 30), committed(61, 30, 4.0), progress(70, 40)])  # fmt: skip
    write(tmp_path, "2", [started(80), training(90, 30), progress(95, 35), (95, "ended", {"how": "finished"})])
    timeline = read(str(tmp_path), Storage())
    first, second = timeline.accounts
    assert (first.lost_steps, second.lost_steps) == (10 + 5 + 10, 0)
    # From 15 to 30, from 45 to 52, and from 60 to the end; of the stalls none is between 5 and 60 and not lost.
    assert (first.lost_secs, first.survived_at, first.stalled_secs) == (15 + 7 + 10, 60, 7.0)
    assert first.useful_secs == (60 - 5) - 15 - 7
    assert timeline.goodput == pytest.approx((33 + 5) / 95)


def test_clocks_that_disagree_put_nothing_out_of_order(tmp_path: Path) -> None:
    """The second start was on a machine whose clock is an hour behind."""
    write(tmp_path, "2", [started(10_000, 1), training(10_010, 0), committed(10_020, 10, 0.0), progress(10_030, 20)])
    write(
        tmp_path,
        "1",
        [started(6_400, 2), training(6_410, 10), progress(6_440, 40), (6_440, "ended", {"how": "finished"})],
    )
    timeline = read(str(tmp_path), Storage())
    assert [(start.ordinal, start.how) for start in timeline.starts] == [(1, None), (2, "finished")]
    assert [account.down_secs for account in timeline.accounts] == [0, 0]
    assert (timeline.lost_steps, timeline.elapsed_secs) == (10, 30 + 40)
    assert timeline.goodput == pytest.approx((0 + 30) / 70)


def test_without_event_files_there_is_no_start(tmp_path: Path) -> None:
    timeline = read(str(tmp_path), Storage())
    assert (timeline.starts, timeline.goodput, timeline.elapsed_secs, timeline.restarts) == ((), None, 0.0, 0)
