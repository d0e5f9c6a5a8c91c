"""When something counts as hanging, on a page that is filled by hand and a clock that is turned by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_ft._watcher.limits import CEILING_SECS, FACTOR, FLOOR_SECS, MOST_TICKS, Limits, Overdue, Vigil
from lightning_ft._watcher.page import Cell, Page, Phase, Seen

NOTHING = Seen(Phase.STARTUP, 0, 0, 0, 0, 0, 0)


class Watched:
    """A vigil, the page that it sees, and the clock."""

    def __init__(self, limits: Limits) -> None:
        self.now = 1000.0
        self.seen = NOTHING
        self.limits = limits
        self.vigil = Vigil(limits, self.now, self.seen)

    def run(self, secs: float, *, paused: bool = False) -> Overdue | None:
        """So much time passes, and nothing happens in it."""
        until = self.now + secs
        while self.now < until:
            self.now = min(until, self.now + self.limits.tick_secs)
            overdue = self.vigil.look(self.now, self.seen, paused=paused)
            if overdue is not None:
                return overdue
        return None

    def change(self, **values: int | Phase) -> Overdue | None:
        """The page says something else."""
        self.seen = replace(self.seen, **values)  # type: ignore[arg-type]
        return self.vigil.look(self.now, self.seen)

    def progress(self, phase: Phase | None = None) -> None:
        assert self.change(progress=self.seen.progress + 1, phase=phase or self.seen.phase) is None


@pytest.mark.parametrize(
    ("phase", "limits"),
    [
        (Phase.STARTUP, Limits(20.0)),
        (Phase.STEP, Limits(1000.0, step_secs=20.0)),
        (Phase.VALIDATION, Limits(1000.0, validation_secs=20.0)),
        (Phase.BETWEEN, Limits(1000.0, validation_secs=20.0)),
        (Phase.SAVE, Limits(1000.0, save_secs=20.0)),
    ],
)
def test_k3_each_phase_has_its_own_limit(phase: Phase, limits: Limits) -> None:
    run = Watched(limits)
    run.change(phase=phase)
    assert run.run(19) is None
    overdue = run.run(3)
    assert overdue is not None
    assert overdue.limit_secs == 20


def test_k4_watched_from_the_start_and_progress_extends_it() -> None:
    run = Watched(Limits(20.0))
    for _ in range(10):  # a fast-forward that gets on
        assert run.run(15) is None
        run.progress()
    assert run.run(25) is not None


def test_a_validation_slower_than_a_step_is_no_hang() -> None:
    run = Watched(Limits(100.0, step_secs=2.0, validation_secs=50.0))
    run.progress(Phase.STEP)
    run.progress(Phase.VALIDATION)
    for _ in range(5):
        assert run.run(40) is None
        run.progress()
    run.progress(Phase.STEP)
    assert run.run(3) is not None


def test_limits_are_learned_from_the_slowest_and_bounded() -> None:
    run = Watched(Limits(1800.0))
    assert run.vigil.limit_secs(Phase.STEP) == 1800, "before the first step everything may take as long as a start"
    assert run.run(60) is None
    run.progress(Phase.STEP)
    assert run.vigil.limit_secs(Phase.STEP) == pytest.approx(FACTOR * 60), "the first step counts: it compiles"
    for _ in range(5):
        assert run.run(1) is None
        run.progress()
    assert run.vigil.limit_secs(Phase.STEP) == pytest.approx(FACTOR * 60), "the slowest counts, not the last"
    assert run.vigil.limit_secs(Phase.VALIDATION) == 1800, "nothing is known of another phase"


@pytest.mark.parametrize(
    ("slowest", "limit"),
    [(0.01, FLOOR_SECS), (100.0, 1000.0), (1000.0, CEILING_SECS), (2500.0, 5000.0)],
)
def test_a_learned_limit_has_a_floor_and_a_ceiling(slowest: float, limit: float) -> None:
    run = Watched(Limits(10_000.0))
    assert run.run(slowest) is None
    run.progress(Phase.STEP)
    assert run.vigil.limit_secs(Phase.STEP) == pytest.approx(limit, abs=0.1)


def test_time_in_which_the_watcher_did_not_run_does_not_count() -> None:
    """A suspended job, a laptop asleep, a clock that jumps: for the watcher it is one long tick."""
    run = Watched(Limits(100.0, step_secs=20.0))
    run.progress(Phase.STEP)
    for _ in range(3):
        run.now += 3600
        assert run.vigil.look(run.now, run.seen) is None
    counted = 3 * MOST_TICKS * run.limits.tick_secs
    assert run.run(20 - counted - 1) is None
    assert run.run(3) is not None


def test_time_in_a_debugger_does_not_count() -> None:
    run = Watched(Limits(100.0, step_secs=20.0))
    run.progress(Phase.STEP)
    assert run.run(500, paused=True) is None
    assert run.run(25) is not None


def test_a_save_in_the_background_that_does_not_go_on_is_a_hang_though_steps_are_made() -> None:
    run = Watched(Limits(100.0, step_secs=20.0, save_secs=30.0))
    run.progress(Phase.STEP)
    run.change(saves_begun=1)
    overdue = None
    for _ in range(10):
        overdue = overdue or run.run(5)
        run.seen = replace(run.seen, progress=run.seen.progress + 1)
    assert overdue is not None
    assert overdue.in_save


def test_a_save_that_is_written_slowly_is_no_hang_and_neither_is_waiting_for_it() -> None:
    run = Watched(Limits(100.0, step_secs=20.0, save_secs=30.0))
    run.progress(Phase.STEP)
    run.change(saves_begun=1)
    run.progress(Phase.SAVE)
    for _ in range(10):
        assert run.run(25) is None
        assert run.change(save_progress=run.seen.save_progress + 1) is None
    run.change(saves_over=1)
    run.progress(Phase.STEP)
    assert run.run(25) is not None


def test_no_save_no_limit_for_it() -> None:
    run = Watched(Limits(100.0, save_secs=1.0))
    run.progress(Phase.STEP)
    assert run.run(50) is None


def test_the_page_is_what_was_written_on_it() -> None:
    page = Page()
    page.cells[Cell.STEPS] = 7
    page.cells[Cell.PHASE] = Phase.VALIDATION
    there = Page(page.fd)
    assert there.look() == Seen(Phase.VALIDATION, 0, 7, 0, 0, 0, 0)


@pytest.mark.parametrize(("smallest", "tick"), [(0.05, 0.02), (2.0, 0.2), (3600.0, 1.0)])
def test_how_often_to_look(smallest: float, tick: float) -> None:
    assert Limits(7200.0, step_secs=smallest).tick_secs == pytest.approx(tick)


def test_a_wait_for_another_rank_does_not_make_the_limit_longer() -> None:
    run = Watched(Limits(2000.0))
    run.progress(Phase.STEP)
    for _ in range(3):
        assert run.run(10) is None
        run.progress()
    assert run.run(FLOOR_SECS + 700) is not None, "which is asked whether another one has gone on, and waits"
    assert run.run(FLOOR_SECS) is not None
    run.progress()
    overdue = run.run(FLOOR_SECS + 10)
    assert overdue is not None
    assert overdue.limit_secs == FLOOR_SECS
