"""The report of a run that was really killed, against its event files, worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest

import lightning_ft as ft
from lightning_ft._history import event_file
from lightning_ft._history.chronicle import Chronicle
from lightning_ft._history.timeline import read
from lightning_ft.storage import Storage
from lightning_ft.testing import assert_resume_exact
from tests.guards import diverging
from tests.trainer import scenarios as s


def test_an_interrupt_is_no_failure(tmp_path: Path) -> None:
    """Neither is it one of the machine's, nor does it leave a colon behind which nothing comes."""
    stop = SimpleNamespace(reason="SIGINT on rank 0")
    ends = [
        (KeyboardInterrupt(), None, ("stopped", "Ctrl-C")),
        (KeyboardInterrupt(), stop, ("stopped", "at once, by a second Ctrl-C (SIGINT on rank 0)")),
        (ValueError(), None, ("failed", "ValueError")),
        (ValueError("x: "), None, ("failed", "ValueError: x")),
    ]
    plugin = SimpleNamespace(storage_options=None)
    for number, (error, asked, expected) in enumerate(ends):
        ranks = SimpleNamespace(world_size=1)
        fit = SimpleNamespace(dirpath=str(tmp_path / str(number)), ranks=ranks, stop=lambda asked=asked: asked)
        chronicle = Chronicle(fit, plugin, 1)  # type: ignore[arg-type]
        chronicle.failed(error)
        chronicle.close()
        last = json.loads(Path(chronicle.path).read_text().splitlines()[-1])
        assert (last["how"], last["reason"]) == expected


def make_trainer(dirpath: str) -> L.Trainer:
    event_file.PROGRESS_SECS = 0.0  # a line per step, in this fresh process
    return s.trainer(dirpath)


def test_three_kills_are_three_restarts_and_the_steps_that_were_trained_twice(tmp_path: Path) -> None:
    result = assert_resume_exact(make_trainer, s.Net, s.shuffled, kill_at=[5, 10, 14], root=tmp_path)
    timeline = read(result.dirpath, Storage())
    assert (timeline.restarts, timeline.failures) == (3, 3)
    files = sorted((Path(result.dirpath) / event_file.DIRECTORY).iterdir())
    starts = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert [[r["event"] for r in start].count("ended") for start in starts] == [0, 0, 0, 1]
    first_steps = [next(r["step"] for r in start if r["event"] == "training") for start in starts]
    last_steps = [max(r["step"] for r in start if r["event"] == "progress") for start in starts]
    lost = [last - first for last, first in zip(last_steps, first_steps[1:], strict=False)]
    assert [account.lost_steps for account in timeline.accounts] == [*lost, 0]
    # Each kill came after a batch was trained, and before the end of its step was written down.
    assert result.replayed == sum(lost) + 3
    useful = 0.0
    for start, first_of_next in zip(starts, [*first_steps[1:], None], strict=True):
        begin = next(r["at"] for r in start if r["event"] == "training")
        counted = [
            r["at"] for r in start
            if r["event"] == "progress" and (first_of_next is None or r["step"] <= first_of_next)
        ]  # fmt: skip
        end = max([begin, *counted])
        stalls = [r["blocked_secs"] for r in start if r["event"] == "committed" and r["at"] <= end]
        useful += max(0.0, end - begin - sum(stalls))
    # From the beginning of the first process, a while before its first line.
    began = [start[0]["process_at"] for start in starts]
    assert all(process_at < start[0]["at"] for process_at, start in zip(began, starts, strict=True))
    assert timeline.goodput == pytest.approx(useful / (starts[-1][-1]["at"] - began[0]))


def test_what_a_rollback_undoes_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_file, "PROGRESS_SECS", 0.0)
    guards = [ft.DivergenceGuard(action="rollback")]
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ft.FaultTolerantCheckpoint(tmp_path, every_n_train_steps=3, guards=guards)],
    )  # fmt: skip
    trainer.fit(diverging.Net(at=(6,)), s.shuffled()[0])  # whose sixth batch is bad: back to step 3, without it
    (account,) = read(str(tmp_path), Storage()).accounts
    (back,) = read(str(tmp_path), Storage()).starts[0].went_back
    assert (back.step, back.lost_steps, account.lost_steps) == (3, 2, 2)
    assert account.lost_secs >= back.at - back.lost_from > 0
