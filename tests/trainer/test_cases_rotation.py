"""Which file is kept and which is taken: rotation, "last", and the user's own `ModelCheckpoint` beside ours."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_ft as ft
from lightning_ft import discovery, events
from lightning_ft._names import parse_leftover
from lightning_ft.errors import ConfigurationError
from lightning_ft.storage import Storage
from lightning_ft.testing import assert_resume_exact
from tests.trainer import runs
from tests.trainer import scenarios as s
from tests.trainer.runs import Line, fit, trainer


@pytest.fixture
def memory() -> Iterator[str]:
    with runs.memory() as url:
        yield url


# -- D1, D2: deleting behind the writer --------------------------------------------------------------------------


class Counting:
    """Counts the good files of a directory at every event, whichever thread it comes from, once one is committed."""

    def __init__(self, dirpath: Path) -> None:
        self.dirpath = dirpath
        self.committed = 0
        self.counts: list[tuple[int, int]] = []

    def __call__(self, event: events.Event) -> None:
        self.committed += isinstance(event, events.Committed) and Path(event.path).parent == self.dirpath
        self.look()

    def look(self, *args: Any) -> None:
        committed = self.committed
        if committed:
            # From the main thread, one look may list the old file and verify it when only the new one is there. What
            # is wrong stays wrong: the writer stands still for most of the time.
            self.counts.append((committed, max(len(runs.good(self.dirpath)) for _ in range(3))))

    def never_below(self, keep: int) -> None:
        low = [(committed, count) for committed, count in self.counts if count < min(committed, keep)]
        assert not low, f"(committed, good files): {low}"


def paced(ratio: str, slow: runs.Slow, plugin: ft.FaultTolerantCheckpointIO) -> runs.Each:
    """Before every batch the writer has finished, has come one save on, or has not moved."""

    def pace(trainer: L.Trainer) -> None:
        if ratio == "slow steps":
            plugin.drain()
        elif ratio == "equal":
            slow.let_one()

    return runs.Each(pace)


@pytest.mark.parametrize("ratio", ["slow steps", "equal", "fast steps"])
def test_d1_d2_users_model_checkpoint(ratio: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's callback has a good file at every instant from the first one on, and one in the end."""
    slow, count = runs.Slow(monkeypatch), Counting(tmp_path)
    plugin = ft.FaultTolerantCheckpointIO()
    with runs.observing(slow, count):
        fit(trainer(paced(ratio, slow, plugin), runs.Each(count.look), runs.every_step(tmp_path), plugins=[plugin]))
    count.never_below(1)
    assert count.committed == 8
    assert slow.stood > 0 or ratio == "slow steps"
    assert runs.good(tmp_path) == ["epoch=0-step=8.ckpt"] == os.listdir(tmp_path)


@pytest.mark.parametrize("ratio", ["slow steps", "equal", "fast steps"])
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_d1_d2_ours(keep: int, ratio: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, count = runs.Slow(monkeypatch), Counting(tmp_path)
    plugin = ft.FaultTolerantCheckpointIO()
    ours = ft.FaultTolerantCheckpoint(tmp_path, every_n_train_steps=1, keep_last=keep, guards=())
    with runs.observing(slow, count):
        fit(trainer(paced(ratio, slow, plugin), runs.Each(count.look), ours, plugins=[plugin]))
    count.never_below(keep)
    assert count.committed == 8
    assert runs.good(tmp_path) == [f"step={step:08d}.ckpt" for step in range(8, 8 - keep, -1)]


def test_d1_d2_both_callbacks_in_one_directory(tmp_path: Path) -> None:
    """Neither counts, or deletes, what the other one made."""
    ours = ft.FaultTolerantCheckpoint(tmp_path, every_n_train_steps=1, keep_last=2)
    fit(trainer(runs.every_step(tmp_path), ours))
    assert runs.names(tmp_path) == ["epoch=0-step=8.ckpt", "step=00000007.ckpt", "step=00000008.ckpt"]
    assert len(runs.good(tmp_path)) == 3


def test_d1_plain_lightning_has_none_for_a_while(tmp_path: Path) -> None:
    """Shows that the above can fail: a save here is written when the deletion that follows it has happened."""
    deleted, counts = threading.Event(), []

    class IO(runs.GatedTorchIO):
        def remove_checkpoint(self, path: Any) -> None:
            super().remove_checkpoint(path)
            counts.append(len(os.listdir(tmp_path)))
            deleted.set()

    first: list[str] = []

    def gate(path: str) -> None:
        if first:
            assert deleted.wait(runs.WAIT_SECS)
            deleted.clear()
        first.append(path)

    plugin = AsyncCheckpointIO(IO(gate))
    written = runs.Each(lambda _: plugin._executor and plugin._executor.submit(lambda: None).result())
    fit(trainer(written, runs.every_step(tmp_path), plugins=[plugin]))
    assert counts == [0] * 7


def test_d2_plain_lightning_leaves_all_of_them(tmp_path: Path) -> None:
    all_steps = threading.Event()

    class Open(L.Callback):
        def on_train_end(self, *args: Any) -> None:
            all_steps.set()

    plugin = AsyncCheckpointIO(runs.GatedTorchIO(lambda _: all_steps.wait(runs.WAIT_SECS)))
    fit(trainer(runs.every_step(tmp_path), Open(), plugins=[plugin]))
    assert len(os.listdir(tmp_path)) == 8


# -- D3: the checkpoint resumed from -----------------------------------------------------------------------------


def keeps_what_it_came_from(first: str, second: str, plugins: Callable[[], list[Any]]) -> bool:
    """Whether the file a second run was resumed from is there after it; both runs keep one file."""
    fit(trainer(runs.every_step(first), max_steps=4, plugins=plugins()))
    (path,) = [f"{first}/{Path(str(name)).name}" for name in fsspec.filesystem("memory").ls(first, detail=False)]
    fit(trainer(runs.every_step(second), plugins=plugins()), ckpt_path=path)
    return bool(fsspec.filesystem("memory").exists(path))


def test_d3_users_model_checkpoint(memory: str) -> None:
    assert keeps_what_it_came_from(f"{memory}/run1", f"{memory}/run2", lambda: [ft.FaultTolerantCheckpointIO()])


def test_d3_plain_lightning_deletes_it(memory: str) -> None:
    assert not keeps_what_it_came_from(f"{memory}/run1", f"{memory}/run2", list)


@pytest.mark.parametrize("local", [False, True])
def test_d3_ours(local: bool, memory: str, tmp_path: Path) -> None:
    base = str(tmp_path) if local else memory
    runs.first_run(f"{base}/run1", keep_last=2)
    before = ft.list_checkpoints(f"{base}/run1")
    ours = ft.FaultTolerantCheckpoint(f"{base}/run2", every_n_train_steps=1, keep_last=1, guards=())
    model = fit(trainer(ours), ckpt_path=before[-1].path)
    assert model.steps[0][1:3] == (4, 4)
    assert ft.list_checkpoints(f"{base}/run1") == before
    assert runs.good(f"{base}/run2") == ["step=00000008.ckpt"]


def test_d3_same_directory(tmp_path: Path) -> None:
    """Resumed from its own oldest one: it stays until newer ones of this run are good."""
    runs.first_run(tmp_path, keep_last=1, guards=())
    resumed_from = ft.list_checkpoints(str(tmp_path))[0].path
    there: list[bool] = []

    def look(event: events.Event) -> None:
        if isinstance(event, events.DataSynced):
            there.append(os.path.exists(resumed_from))

    ours = ft.FaultTolerantCheckpoint(tmp_path, every_n_train_steps=1, keep_last=1, guards=())
    with runs.observing(look):
        fit(trainer(ours), ckpt_path="last")
    assert there == [True, False]
    assert runs.good(tmp_path) == ["step=00000008.ckpt"]


# -- D5: leftovers of a killed save ------------------------------------------------------------------------------


def test_d5_killed_while_saving(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two newest files, one of them half written, and a half-written attempt: no hand is needed."""
    runs.first_run(tmp_path, max_steps=6)
    shutil.copy(tmp_path / "step=00000006.ckpt", tmp_path / "step=00000007.ckpt")
    runs.damage(tmp_path / "step=00000007.ckpt", 0.5)
    attempt = tmp_path / f".step=00000008.ckpt.{'0' * 16}.attempt"
    attempt.write_bytes(b"half")
    with runs.recorded() as seen:
        model = fit(trainer(ft.FaultTolerantCheckpoint(tmp_path, every_n_train_steps=1)), ckpt_path="last")
    assert model.steps[0][1] == 6
    assert "passed over" in caplog.text
    assert "step=00000007.ckpt" in caplog.text
    assert [e.path for e in seen if isinstance(e, events.LeftoverRemoved)] == [str(attempt)]
    assert not [name for name in os.listdir(tmp_path) if parse_leftover(name)]
    # What cannot be read is never deleted nor written over: step 7 of this run has another name.
    assert {"step=00000007-v1.ckpt", "step=00000008.ckpt"} <= set(runs.good(tmp_path))


def test_d5_another_process_starts_at_the_same_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its test write is seen and gone again before the one that holds the directory has cleared it away."""
    listdir, ghost = os.listdir, f".lightning_ft.probe.{'0' * 16}"

    def listed(path: Any = ".") -> list[str]:
        return listdir(path) + ([ghost] if str(path) == str(tmp_path) else [])

    monkeypatch.setattr(os, "listdir", listed)
    fit(trainer(ft.FaultTolerantCheckpoint(tmp_path, every_n_train_steps=4)))
    assert runs.good(tmp_path) == ["step=00000008.ckpt", "step=00000004.ckpt"]


def test_d5_leftovers_in_the_directory_of_the_users_callback(tmp_path: Path) -> None:
    """A kill while a `ModelCheckpoint` beside us saved: its attempt would take up space for ever."""
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / f".epoch=0-step=3.ckpt.{'0' * 16}.attempt").write_bytes(b"half")
    fit(trainer(runs.every_step(tmp_path / "best"), ft.FaultTolerantCheckpoint(tmp_path / "ours")))
    assert os.listdir(tmp_path / "best") == ["epoch=0-step=8.ckpt"]


def test_d5_what_another_run_is_writing_stays(tmp_path: Path) -> None:
    """Two runs may share the directory of their best: nobody holds it as a whole."""
    with Storage().open_attempt(str(tmp_path / "best" / "other.ckpt")) as attempt:
        fit(trainer(runs.every_step(tmp_path / "best"), ft.FaultTolerantCheckpoint(tmp_path / "ours")))
        assert set(os.listdir(tmp_path / "best")) == {"epoch=0-step=8.ckpt", Path(attempt.attempt).name}


def test_d5_a_second_run_in_a_used_directory(tmp_path: Path) -> None:
    """A fresh run where another one has been: its checkpoints are the ones taken from then on."""
    runs.first_run(tmp_path, max_steps=6)
    runs.first_run(tmp_path, max_steps=4)
    model = fit(trainer(ft.FaultTolerantCheckpoint(tmp_path, every_n_train_steps=1)), ckpt_path="last")
    assert model.steps[0][1] == 4


# -- D6: "last" with the defaults --------------------------------------------------------------------------------


def test_d6_last_works_without_a_flag(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(epochs: int) -> Line:
        ours = ft.FaultTolerantCheckpoint()
        return fit(trainer(ours, max_epochs=epochs, default_root_dir=tmp_path), ckpt_path="last")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run(1).epochs == [0]
    assert not [w for w in caught if "no last checkpoint" in str(w.message)]
    assert "training starts from the beginning" in caplog.text
    caplog.clear()
    assert run(2).epochs == [1]
    assert "from the beginning" not in caplog.text
    assert run(2).steps == []


def test_d6_plain_lightning_starts_from_zero(tmp_path: Path) -> None:
    for epochs in (1, 2):
        plain = trainer(ModelCheckpoint(), max_epochs=epochs, default_root_dir=tmp_path)
        with pytest.warns(UserWarning, match="no last checkpoint available"):
            model = fit(plain, ckpt_path="last")
    assert model.epochs == [0, 1]


# -- I5: a job that is queued again, with another directory ------------------------------------------------------


@pytest.fixture
def queued_again(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """The job is in its start of that number, from 0 on."""
    job = str(10**6 + secrets.randbelow(10**9))  # what earlier tests have left lies in directories of other digits

    def queue(restarts: int) -> None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))

    return queue


def started(dirpath: Path, *callbacks: Any, max_steps: int = 4) -> Line:
    ours = ft.FaultTolerantCheckpoint(dirpath, every_n_train_steps=2)
    return fit(trainer(*callbacks, ours, max_steps=max_steps), ckpt_path="last")


class Fails(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            raise ZeroDivisionError


def failed(dirpath: Path) -> None:
    """In the middle of a run."""
    with pytest.raises(ZeroDivisionError):
        started(dirpath, Fails())


@pytest.mark.parametrize("name", ["run-{}", "2026-11-{}/checkpoints", "out.d/{}/v{}/ckpts"])
def test_i5_a_directory_with_the_date_in_its_name(
    name: str, tmp_path: Path, queued_again: Callable[[int], None]
) -> None:
    queued_again(0)
    failed(tmp_path / name.format(29, 0))
    queued_again(1)
    new = tmp_path / name.format(30, 1)
    with pytest.raises(ConfigurationError, match=r"30.*SLURM job .* has trained in .*29.*SLURM_RESTART_COUNT=0"):
        started(new)
    assert not new.exists()
    assert started(tmp_path / name.format(29, 0)).steps[0][1] == 2, "that of the first start is as good as ever"


def test_i5_what_else_a_job_that_is_queued_again_may_find(
    tmp_path: Path, queued_again: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    queued_again(1)
    assert started(tmp_path / "early-1").steps, "it was queued again before it has trained"
    queued_again(0)
    started(tmp_path / "fold-1")
    failed(tmp_path / "fold-2")
    queued_again(1)
    started(tmp_path / "fold-2")
    assert len(started(tmp_path / "fold-3").steps) == 4, "one of several trainings, the others are over"
    failed(tmp_path / "fold-4")
    assert len(started(tmp_path / "fold-5").steps) == 4, "the one before has failed in this very start"
    queued_again(2)
    monkeypatch.setenv("SLURM_JOB_ID", "1" + os.environ["SLURM_JOB_ID"])
    assert len(started(tmp_path / "fold-6").steps) == 4, "those were another job's"


def test_i5_trainings_that_run_at_the_same_time_in_one_job(tmp_path: Path, queued_again: Callable[[int], None]) -> None:
    queued_again(0)
    failed(tmp_path / "seed-1")
    with pytest.raises(ZeroDivisionError):
        fit(trainer(Fails(), ft.FaultTolerantCheckpoint(tmp_path / "seed-2")), ckpt_path="last")
    queued_again(1)
    assert len(started(tmp_path / "seed-2").steps) == 4, "it has been here before, and had saved nothing"
    assert len(started(tmp_path / "seed-3").steps) == 4, "this start has found one of them again"


def test_i5_a_name_that_differs_in_more_than_digits(tmp_path: Path, queued_again: Callable[[int], None]) -> None:
    queued_again(0)
    failed(tmp_path / "seed-best")
    queued_again(1)
    assert len(started(tmp_path / "seed-1").steps) == 4


def test_i5_plain_lightning_starts_from_zero(tmp_path: Path, queued_again: Callable[[int], None]) -> None:
    for restarts in (0, 1):
        queued_again(restarts)
        saves = ModelCheckpoint(tmp_path / f"run-{restarts}", every_n_train_steps=1, save_last=True)
        assert len(fit(trainer(saves, max_steps=2), ckpt_path="last").steps) == 2


# -- D8: paths of every kind -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "memory through pathlib", "file", "Path", "relative"])
def test_d8_last_from(kind: str, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dirpath: Any = {
        "memory": f"{memory}/run",
        "memory through pathlib": Path(f"{memory}/run"),
        "file": f"file://{tmp_path}/run",
        "Path": tmp_path / "run",
        "relative": "run",
    }[kind]
    runs.first_run(dirpath)
    model = fit(trainer(ft.FaultTolerantCheckpoint(dirpath)), ckpt_path="last")
    assert [step[1] for step in model.steps] == [6, 7]
    assert os.listdir(tmp_path) == ([] if "memory" in kind else ["run"])


# -- D9: no pointer to get wrong ---------------------------------------------------------------------------------


def test_d9_the_newest_is_a_file_of_its_own(tmp_path: Path) -> None:
    runs.first_run(tmp_path)
    assert not [entry for entry in os.scandir(tmp_path) if entry.is_symlink()]
    assert set(os.listdir(tmp_path)) == {".lightning_ft.lock", "ft_events", *runs.names(tmp_path)}


@pytest.mark.parametrize("link", ["itself", "the oldest", "nowhere"])
def test_d9_links_and_moves_change_nothing(link: str, tmp_path: Path) -> None:
    runs.first_run(tmp_path / "here")
    os.unlink(tmp_path / "here/.lightning_ft.lock")
    target = {"itself": "last.ckpt", "the oldest": "step=00000002.ckpt", "nowhere": "gone.ckpt"}[link]
    (tmp_path / "here/last.ckpt").symlink_to(target)
    os.rename(tmp_path / "here", tmp_path / "moved")
    # The times of all files are wrong, as after a copy.
    for number, name in enumerate(runs.names(tmp_path / "moved")):
        if not (tmp_path / "moved" / name).is_symlink():
            os.utime(tmp_path / "moved" / name, (1000 - number, 1000 - number))
    model = fit(trainer(ft.FaultTolerantCheckpoint(tmp_path / "moved")), ckpt_path="last")
    assert [step[1] for step in model.steps] == [6, 7]
    assert (tmp_path / "moved/last.ckpt").is_symlink()


# -- D10: one decision for all ranks -----------------------------------------------------------------------------


def blind_on_rank_1(dirpath: str) -> L.Trainer:
    """Rank 1 sees an empty directory, as on a network disk that is behind."""
    if os.environ.get("LOCAL_RANK") == "1":
        listdir = os.listdir
        os.listdir = lambda path=".": [] if str(path) == dirpath else listdir(path)  # type: ignore[assignment]
    return s.ddp(dirpath)


@pytest.mark.distributed
def test_d10_rank_1_sees_another_directory(tmp_path: Path) -> None:
    make_data = partial(s.shuffled, 0)
    compared = assert_resume_exact(blind_on_rank_1, s.Net, make_data, kill_at=3, steps=6, world_size=2, root=tmp_path)
    assert compared.steps == 6


# -- D11: keep the newest N --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 5, -1])
def test_d11_keep_by_number(keep: int, tmp_path: Path) -> None:
    ours = ft.FaultTolerantCheckpoint(tmp_path, every_n_train_steps=1, keep_last=keep, guards=())
    fit(trainer(ours))
    first = 1 if keep == -1 else 9 - keep
    assert runs.names(tmp_path) == [f"step={step:08d}.ckpt" for step in range(first, 9)]


def test_d11_multiples_stay(tmp_path: Path) -> None:
    runs.first_run(tmp_path, max_steps=7, every_n_train_steps=1, keep_last=1, guards=(), keep_every_n_train_steps=3)
    assert runs.names(tmp_path) == [f"step=0000000{step}.ckpt" for step in (3, 6, 7)]


def test_d11_already_gone_is_fine(tmp_path: Path) -> None:
    """Somebody deletes the oldest at the moment when the rotation is about to."""

    def meddle(event: events.Event) -> None:
        if isinstance(event, events.DeleteStarted):
            os.unlink(event.path)

    ours = ft.FaultTolerantCheckpoint(tmp_path, every_n_train_steps=1, keep_last=1, guards=())
    with runs.observing(meddle), runs.recorded() as seen:
        fit(trainer(ours))
    assert [e.reason for e in seen if isinstance(e, events.DeleteSkipped)] == ["already gone"] * 7
    assert runs.good(tmp_path) == ["step=00000008.ckpt"]


def test_d11_plain_lightning_cannot(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="save_top_k=3"):
        ModelCheckpoint(tmp_path, save_top_k=3, monitor=None)


# -- D12: name, metric and weights belong together ---------------------------------------------------------------


def score(weights: dict[str, torch.Tensor]) -> float:
    model = Line()
    model.load_state_dict(weights)
    (result,) = trainer().validate(model, s.DataLoader(Fixed(), batch_size=3), verbose=False)
    return result["val"]


class Fixed(s.Numbers):
    """Without random draws, so that the same weights have the same score."""

    def __init__(self) -> None:
        super().__init__(6)

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([float(i)]), torch.tensor([1.0, i / 6, -0.5])


def test_d12_best(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path / "best", monitor="val", filename="{step}-{val:.6f}", save_top_k=-1)
    ours = ft.FaultTolerantCheckpoint(tmp_path / "ours", every_n_train_steps=4, keep_last=-1)
    model = fit(trainer(best, ours, val_check_interval=4), val=s.DataLoader(Fixed(), batch_size=3))
    assert model.validated_at[-2:] == [4, 8]
    files = sorted((tmp_path / "best").iterdir())
    assert len(files) == 2
    for path in files:
        saved = torch.load(path, weights_only=True)
        state = saved["callbacks"][best.state_key]
        assert path.name == f"step={saved['global_step']}-val={float(state['current_score']):.6f}.ckpt"
        assert score(saved["state_dict"]) == float(state["current_score"])
    # Due at the same step as the validation, ours comes after it: the score of that step is in it.
    for step in (4, 8):
        saved = torch.load(tmp_path / f"ours/step={step:08d}.ckpt", weights_only=True)
        state = saved["callbacks"][best.state_key]
        assert Path(state["last_model_path"] or state["best_model_path"]).parent == tmp_path / "best"
        assert float(state["current_score"]) == score(saved["state_dict"])


# -- D15: present and unusable -----------------------------------------------------------------------------------


def test_d15_none_usable_is_an_error_with_the_reasons(tmp_path: Path) -> None:
    runs.first_run(tmp_path, keep_last=2)
    runs.damage(tmp_path / "step=00000004.ckpt", 0.9)
    data = bytearray((tmp_path / "step=00000006.ckpt").read_bytes())
    data[len(data) // 3] ^= 1
    (tmp_path / "step=00000006.ckpt").write_bytes(data)
    model = Line()
    with pytest.raises(ft.NoUsableCheckpointError) as caught:
        fit(trainer(ft.FaultTolerantCheckpoint(tmp_path)), model, ckpt_path="last")
    assert model.steps == []
    assert [Path(path).name for path, _ in caught.value.reasons] == ["step=00000004.ckpt", "step=00000006.ckpt"]
    for reason in ("truncated or not a zip archive", "its digest does not match", "move these files away"):
        assert reason in str(caught.value)
    assert len(runs.names(tmp_path)) == 2


def test_d15_explicit_path_missing(tmp_path: Path) -> None:
    runs.first_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="step=00000099"):
        fit(trainer(ft.FaultTolerantCheckpoint(tmp_path)), ckpt_path=tmp_path / "step=00000099.ckpt")


# -- D16: a fixed path in the job script -------------------------------------------------------------------------


def test_d16_start_from_another_run_and_prefer_own_newer_ones(tmp_path: Path) -> None:
    """The same two lines at every start: the given file first, what came of it later, nothing when all is done."""
    runs.first_run(tmp_path / "pretrained")
    given = ft.list_checkpoints(str(tmp_path / "pretrained"))[0].path

    def job(max_steps: int) -> list[int]:
        own = ft.last_good(str(tmp_path / "run"))
        ours = ft.FaultTolerantCheckpoint(tmp_path / "run", every_n_train_steps=1)
        model = fit(trainer(ours, max_epochs=2, max_steps=max_steps), ckpt_path="last" if own else given)
        return [step[1] for step in model.steps]

    assert job(8) == [6, 7]
    assert job(10) == [8, 9]
    assert job(10) == []


def test_d16_the_fixed_path_alone_goes_back_every_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the user asked for is done, as a branch of its own: the progress made before is not overwritten."""
    runs.first_run(tmp_path, keep_last=-1)
    for _ in range(2):
        ours = ft.FaultTolerantCheckpoint(tmp_path, every_n_train_steps=1)
        model = fit(trainer(ours, max_steps=6), ckpt_path=tmp_path / "step=00000004.ckpt")
        assert [step[1] for step in model.steps] == [4, 5]
    assert runs.names(tmp_path) == [
        "step=00000002.ckpt", "step=00000004.ckpt", "step=00000005-v1.ckpt", "step=00000005.ckpt",
        "step=00000006-v1.ckpt", "step=00000006-v2.ckpt", "step=00000006.ckpt",
    ]  # fmt: skip


def test_d16_looking_while_a_run_rotates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that asks for the newest one, while a living run replaces it by a newer one, gets the newer one."""
    runs.first_run(tmp_path / "a", keep_last=1, guards=())
    runs.first_run(tmp_path / "b", keep_last=1, guards=(), max_steps=7)
    examine = discovery._examine

    def rotated_before(storage: Any, path: str) -> Any:
        if (tmp_path / "b/step=00000007.ckpt").exists():
            os.rename(tmp_path / "b/step=00000007.ckpt", tmp_path / "a/step=00000007.ckpt")
            os.unlink(tmp_path / "a/step=00000006.ckpt")
        return examine(storage, path)

    monkeypatch.setattr(discovery, "_examine", rotated_before)
    found = ft.last_good(str(tmp_path / "a"))
    assert found is not None
    assert found.name == "step=00000007.ckpt"
