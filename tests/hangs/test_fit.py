"""Trainings that hang end with the exit code within their limits; slow ones do not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import lightning_ft as ft
from lightning_ft._hang import headway, watch
from lightning_ft._watcher.page import Cell, Phase
from tests import ranks
from tests.hangs import trainings
from tests.trainer import runs
from tests.trainer.runs import Line, fit, trainer


def said(root: Path, rank: int = 0) -> str:
    return (root / f"{rank}.stderr").read_text()


def overdue(text: str, what: str, limit_secs: int) -> bool:
    """Whether that is what was found, by its own limit. How long after that depends on the machine."""
    found = re.search(rf"hang: {what} for (?P<secs>\S+) s on rank \d \(limit {limit_secs}\.0 s\)", text)
    return found is not None and float(found["secs"]) >= limit_secs


@pytest.mark.parametrize("what", ["the_lock_is_never_released", "c_code_keeps_the_interpreter"])
def test_k3_a_hanging_step_ends_the_run_and_the_next_start_goes_on(tmp_path: Path, what: str) -> None:
    dirpath = str(tmp_path / "checkpoints")
    (outcome,) = ranks.run(trainings.hang, tmp_path / "first", dirpath, what, world_size=1)
    assert outcome.exit_code == 78
    assert overdue(said(tmp_path / "first"), "no step was completed", 3)
    assert "5 steps completed, before the loss of batch 6" in said(tmp_path / "first")
    assert f"in {what}" in said(tmp_path / "first")
    headline, _, rest = said(tmp_path / "first").partition("lightning_ft: hang: ")[2].partition("\n")
    assert re.search(rf"; rank 0 is at \S*ways\.py:[0-9]+ in {what}$", headline)
    first = rest.partition("Python stacks of rank 0")[2].split("0x")[1]
    assert f"in {what}" in first
    # What was being written is there, if the interpreter was free to write it; nothing is saved for the hang.
    names = ["step=00000002.ckpt", "step=00000004.ckpt"]
    assert runs.names(dirpath) == names[: 2 if what == "the_lock_is_never_released" else len(runs.names(dirpath))]
    (last,) = ranks.run(trainings.hang, tmp_path / "again", dirpath, "nothing", world_size=1)
    assert (last.exit_code, last.value) == (0, 12)


def test_a_hanging_validation_ends_the_run(tmp_path: Path) -> None:
    arguments = str(tmp_path / "checkpoints"), "the_lock_is_never_released", "validation"
    (outcome,) = ranks.run(trainings.hang, tmp_path, *arguments, world_size=1)
    assert outcome.exit_code == 78
    assert overdue(said(tmp_path), "the validation has not gone on", 4)


def test_a_slow_start_validation_and_end_of_an_epoch_are_no_hang(tmp_path: Path) -> None:
    (outcome,) = ranks.run(trainings.slow, tmp_path, str(tmp_path / "checkpoints"), world_size=1)
    assert outcome.exit_code == 0, outcome.error
    assert outcome.value == (8, True)
    assert "hang:" not in said(tmp_path)


def test_k4_a_hang_on_the_way_to_the_position_in_the_data(tmp_path: Path) -> None:
    dirpath = str(tmp_path / "checkpoints")
    (first,) = ranks.run(trainings.stream, tmp_path / "first", dirpath, False, world_size=1)
    assert (first.exit_code, first.value) == (0, 4)
    (again,) = ranks.run(trainings.stream, tmp_path / "again", dirpath, True, world_size=1)
    assert again.exit_code == 78
    assert "the start has not gone on" in said(tmp_path / "again")
    assert "in _replay" in said(tmp_path / "again")


def test_k4_reaching_the_position_in_the_data_is_progress(tmp_path: Path) -> None:
    def start(max_steps: int, **kwargs: Any) -> int:
        heard: list[int] = []
        callback = ft.FaultTolerantCheckpoint(tmp_path, **kwargs)
        data = trainings.DataLoader(trainings.Stream(False), batch_size=4)
        stop = headway.listen(lambda: heard.append(1))
        try:
            trainer(callback, max_steps=max_steps).fit(Line(), data, ckpt_path="last")
        finally:
            stop()
        return len(heard)

    saves_nothing = {"every_n_train_steps": 100, "save_on_train_end": False}
    start(2, every_n_train_steps=2)
    two = start(2, **saves_nothing)
    start(4, every_n_train_steps=2)
    assert start(4, **saves_nothing) == two + 2, "each batch that is fetched again is one piece"


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["it_is_stopped", "c_code_keeps_the_interpreter"])
def test_the_late_rank_of_two_is_named_and_both_end(tmp_path: Path, what: str) -> None:
    dirpath = str(tmp_path / "checkpoints")
    outcomes = ranks.run(trainings.hang, tmp_path, dirpath, what, "train", 1)
    assert [outcome.exit_code for outcome in outcomes] == [78, 78]
    for rank in (0, 1):
        assert "late: rank 1\n" in said(tmp_path, rank)
        assert "rank 0 (" in said(tmp_path, rank)
    if what == "it_is_stopped":
        assert "stopped in do_signal_stop" in said(tmp_path, 0)
    else:
        assert f"in {what}" in said(tmp_path, 1)


@pytest.mark.distributed
def test_a_rank_that_waits_for_the_save_of_another_does_not_hang(tmp_path: Path) -> None:
    dirpath = str(tmp_path / "checkpoints")
    assert ranks.values(trainings.slow_save, tmp_path, dirpath) == [5, 5]
    assert "step=00000005.ckpt" in runs.names(dirpath)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("absent", "startup_secs"),
    [
        pytest.param(0, [6, 6, 6], id="the one with the store"),
        pytest.param(1, [6, 6, 6], id="another"),
        pytest.param(1, [6, 6, 600], id="the one with the store ends the others before it ends"),
        pytest.param(1, [600, 6, 6], id="another asks for the end of all"),
    ],
)
def test_a_rank_that_does_not_come_to_the_process_group_is_named(
    tmp_path: Path, absent: int, startup_secs: list[float]
) -> None:
    dirpath = str(tmp_path / "checkpoints")
    outcomes = ranks.run(trainings.one_is_absent, tmp_path, dirpath, absent, startup_secs, world_size=3)
    here = sorted({0, 1, 2} - {absent})
    assert [outcome.exit_code for outcome in outcomes] == [0 if rank == absent else 78 for rank in range(3)]
    for rank in here:
        assert f"late: rank {absent}: not come to the process group" in said(tmp_path, rank)
        hung = re.search(r"hang: the start has not gone on for \S+ s on rank (\d) ", said(tmp_path, rank))
        assert hung
        assert startup_secs[int(hung[1])] == 6
        if absent != 0:  # else there is nothing over which they could meet
            assert all(f"rank {other} (" in said(tmp_path, rank) for other in here)


def unlink_when_said(block: Path, root: Path) -> None:
    """The file system goes on when the watcher has said that it can do nothing more."""
    deadline = time.monotonic() + ranks.WITHIN_SECS - 20  # who is blocked cannot even be killed
    while time.monotonic() < deadline and block.exists():
        if (root / "0.stderr").exists() and "takes effect when the kernel lets it" in said(root):
            block.unlink()
        time.sleep(0.05)
    block.unlink(missing_ok=True)


@pytest.mark.needs("root", "fuse", "fusermount3", "mfusepy")
def test_a_file_system_that_blocks_in_a_save_is_noticed(tmp_path: Path) -> None:
    backing, mount, rules, block = (tmp_path / name for name in ("backing", "mount", "rules", "block"))
    backing.mkdir()
    mount.mkdir()
    block.touch()
    rules.write_text(json.dumps([{"op": "fsync", "path": "*step=00000004*", "while": str(block)}]))
    command = [sys.executable, "-m", "tests.crash.faultfs", str(backing), str(mount), str(rules)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as server:
        while not os.path.ismount(mount):
            with pytest.raises(subprocess.TimeoutExpired):  # it ends only if it could not be mounted
                server.wait(0.02)
        released = threading.Thread(target=unlink_when_said, args=(block, tmp_path / "run"))
        released.start()
        try:
            (outcome,) = ranks.run(trainings.save, tmp_path / "run", str(mount / "checkpoints"), world_size=1)
        finally:
            block.unlink(missing_ok=True)
            released.join()
            subprocess.run(["fusermount3", "-u", str(mount)], check=True)
    assert outcome.exit_code == 78
    # Two see it at the same time: who waits for it in the end, and who looks at what is written in the background.
    assert overdue(said(tmp_path / "run"), "(a save has not gone on|training has waited for a save)", 3)
    assert "in a wait that the kernel does not interrupt in " in said(tmp_path / "run")
    assert "waiting for it" not in said(tmp_path / "run"), "a save that hangs is not waited for"
    assert runs.names(backing / "checkpoints") == ["step=00000002.ckpt"]


@pytest.mark.parametrize("kwargs", [{"fast_dev_run": True}, {}])
def test_what_is_no_fit_is_not_watched(tmp_path: Path, kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    runs.first_run(tmp_path, max_steps=2)

    def start(*args: Any) -> None:
        raise AssertionError("it is watched")

    monkeypatch.setattr(watch, "Watching", start)
    training = trainer(ft.FaultTolerantCheckpoint(tmp_path, guards=[ft.HangGuard()]), **kwargs)
    if kwargs:
        fit(training)
    else:
        training.validate(Line(), runs.s.loader(), ckpt_path="last", verbose=False)


class Fails(Line):
    def training_step(self, *args: Any) -> Any:
        raise ZeroDivisionError


def test_a_fit_that_fails_is_watched_no_longer(tmp_path: Path) -> None:
    watchers = []
    with pytest.raises(ZeroDivisionError):
        fit(trainer(ft.FaultTolerantCheckpoint(tmp_path, guards=[ft.HangGuard()]), Noting(watchers)), Fails())
    assert len(watchers) == 1
    assert not Path(f"/proc/{watchers[0]}").exists()
    assert watch._armed is None


class Noting(runs.Callback):
    """Which process watches."""

    def __init__(self, watchers: list[int]) -> None:
        self.watchers = watchers

    def on_train_start(self, *args: Any) -> None:
        assert watch._armed is not None
        self.watchers.append(watch._armed.watching.pid)


def test_two_fits_have_a_watcher_each(tmp_path: Path) -> None:
    watchers: list[int] = []
    for max_steps in (2, 4):
        callback = ft.FaultTolerantCheckpoint(tmp_path, guards=[ft.HangGuard()])
        fit(trainer(callback, Noting(watchers), max_steps=max_steps), ckpt_path="last")
    assert len(set(watchers)) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in watchers)


class Phases(runs.Callback):
    """What the watcher takes the hooks of others for."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Phase]] = []

    def _note(self, hook: str) -> None:
        assert watch._armed is not None
        self.seen.append((hook, Phase(watch._armed.cells[Cell.PHASE])))

    def on_train_batch_end(self, *args: Any) -> None:
        self._note("step")

    def on_train_end(self, *args: Any) -> None:
        self._note("end")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._note("teardown")


@pytest.mark.parametrize("others", [(), (ft.PreemptionGuard,), (ft.PreemptionGuard, ft.DivergenceGuard)])
def test_the_first_step_is_part_of_the_start_and_no_end_is_a_step(tmp_path: Path, others: Any) -> None:
    """What ranks agree on before and after training is no step."""
    phases = Phases()
    saver = ft.FaultTolerantCheckpoint(tmp_path, guards=[ft.HangGuard(), *(guard() for guard in others)])
    fit(trainer(saver, phases, max_steps=3))
    assert phases.seen == [
        ("step", Phase.STARTUP), ("step", Phase.STEP), ("step", Phase.STEP), ("end", Phase.BETWEEN),
        ("teardown", Phase.BETWEEN),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["step_timeout", "startup_timeout", "validation_timeout", "save_timeout"])
@pytest.mark.parametrize("value", [timedelta(0), timedelta(seconds=-1), 5, "5"])
def test_an_impossible_limit_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ft.ConfigurationError, match=name):
        ft.HangGuard(**{name: value})


def test_the_start_has_a_limit() -> None:
    with pytest.raises(ft.ConfigurationError, match="startup_timeout"):
        ft.HangGuard(startup_timeout=None)  # type: ignore[arg-type]


_FORKED = """
import os, sys
sys.path.insert(0, os.getcwd())
from tests.hangs import trainings
from tests.trainer import scenarios as s
class Late(trainings.Hanging):
    def on_train_batch_start(self, *args):
        if self.global_rank == 1:
            super().on_train_batch_start(*args)
guard = trainings.ft.HangGuard(step_timeout=trainings.secs(3), startup_timeout=trainings.secs(60))
training = trainings.trainer(sys.argv[1], guard, devices=2, strategy="ddp_fork")
training.fit(Late("c_code_keeps_the_interpreter"), s.loader(shuffle=True), ckpt_path="last")
"""


@pytest.mark.distributed
def test_ranks_that_lightning_forks_know_which_they_are(tmp_path: Path) -> None:
    """Before the process group is there, each of them takes itself for rank 0."""
    command = [sys.executable, "-c", _FORKED, str(tmp_path / "checkpoints")]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=False)
    assert done.returncode == 78, done.stderr
    assert done.stderr.count("late: rank 1\n") == 2
    assert "its watcher does not answer" not in done.stderr


_ELASTIC = """
import os, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
from tests.hangs import trainings
from tests.trainer import scenarios as s
first = not os.path.exists(sys.argv[2])
hangs = first and os.environ["RANK"] == "1"
guard = trainings.ft.HangGuard(step_timeout=trainings.secs(4), startup_timeout=trainings.secs(90))
training = trainings.trainer(sys.argv[1], guard, devices=2)
class Noting(trainings.Hanging):
    def on_train_batch_start(self, batch, batch_idx):
        if hangs and self.global_step == 5:
            Path(sys.argv[2]).touch()
        super().on_train_batch_start(batch, batch_idx)
training.fit(Noting("c_code_keeps_the_interpreter" if hangs else "nothing"), s.loader(shuffle=True), ckpt_path="last")
if os.environ["RANK"] == "0":
    print("finished at", training.global_step, "after", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_torchrun_starts_a_run_again_that_hung(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_ELASTIC)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1",
        str(script), str(tmp_path / "checkpoints"), str(tmp_path / "hung"),
    ]  # fmt: skip
    # Without this, restarts with gloo hang in torch 2.13 themselves (pytorch issue 135712).
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert "finished at 12 after 1" in done.stdout
    assert "late: rank 1\n" in done.stderr
    assert "exitcode  : 78" in done.stderr or "exitcode: 78" in done.stderr, "what the launcher sees"
