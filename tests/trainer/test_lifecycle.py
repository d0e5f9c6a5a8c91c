"""Fits after fits, fits that end badly, arguments that cannot be right, and what is left when a fit is over."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_ft as ft
from lightning_ft import events
from lightning_ft._disk import lock as _lock
from lightning_ft._fit import guarding, session
from tests.ranks import WITHIN_SECS
from tests.trainer import runs
from tests.trainer import scenarios as s
from tests.trainer.runs import Line, fit, trainer

ROOT = Path(__file__).parents[2]


def ours(dirpath: Any = None, **kwargs: Any) -> ft.FaultTolerantCheckpoint:
    return ft.FaultTolerantCheckpoint(dirpath, **{"every_n_train_steps": 2, **kwargs})


# -- one fit after another ---------------------------------------------------------------------------------------


def test_fit_validate_fit(tmp_path: Path) -> None:
    the_trainer, model = trainer(ours(tmp_path), max_epochs=1), Line()
    the_trainer.fit(model, s.loader(shuffle=True), s.val_loader())
    the_trainer.validate(model, s.val_loader(), verbose=False)
    assert runs.good(tmp_path)[0] == "step=00000008.ckpt"
    the_trainer.fit_loop.max_epochs = 3
    the_trainer.fit(model, s.loader(shuffle=True), s.val_loader())
    assert [step[1] for step in model.steps] == list(range(24))
    # It is one run: rotated as one, and none of its fits saves at once because of steps of the one before.
    assert runs.good(tmp_path) == [f"step=000000{step}.ckpt" for step in (24, 22, 20)]


def test_fit_and_fit_saves_when_due(tmp_path: Path) -> None:
    callback = ours(tmp_path, every_n_train_steps=3, keep_last=-1, save_on_train_end=False)
    the_trainer, model = trainer(callback, max_epochs=1), Line()
    for epochs in (1, 2):
        the_trainer.fit_loop.max_epochs = epochs
        the_trainer.fit(model, s.loader(shuffle=True))
    assert runs.names(tmp_path) == [f"step=000000{step:02d}.ckpt" for step in (3, 6, 9, 12, 15)]
    assert len({info.manifest.run_id for info in ft.list_checkpoints(str(tmp_path)) if info.manifest}) == 1


def test_ctrl_c_while_the_last_write_is_waited_for_leaves_nothing_to_the_next_fit(tmp_path: Path) -> None:
    """In a notebook the process goes on, with this callback and this trainer."""
    callback, closed, disarmed = ours(tmp_path), [], []
    close, disarm = session.Session.close, guarding.disarm

    def interrupted(closing: session.Session) -> None:
        close(closing)
        closed.append(callback._session is closing)  # it may be told of what is written meanwhile
        raise KeyboardInterrupt

    the_trainer = trainer(callback, max_epochs=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.Session, "close", interrupted)
        patch.setattr(guarding, "disarm", lambda: disarmed.append(disarm()))
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            the_trainer.fit(Line(), s.loader(shuffle=True))
    assert (closed, len(disarmed) > 0) == ([True], True)
    assert callback._session is None
    assert callback._ranks is None
    assert callback._forget_names is None
    assert "load_model_state_dict" not in vars(the_trainer.strategy)
    trainer(callback, max_epochs=2).fit(Line(), s.loader(shuffle=True), ckpt_path="last")
    assert runs.good(tmp_path)[0] == "step=00000016.ckpt"


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("in __str__")


def test_an_exception_that_has_no_text_is_raised_as_it_is(tmp_path: Path) -> None:
    def fail(*args: Any) -> None:
        raise Speechless

    with pytest.raises(Speechless):
        fit(trainer(LambdaCallback(on_train_batch_end=fail), ours(tmp_path)))
    assert "Speechless (its text cannot be made)" in next(tmp_path.glob("ft_events/*.jsonl")).read_text()


def test_fit_after_an_exception(tmp_path: Path) -> None:
    """The same trainer, the same callback: it continues where the last checkpoint is."""
    crash = runs.CrashAt(5)
    the_trainer, model = trainer(crash, ours(tmp_path)), Line()
    with pytest.raises(RuntimeError, match="own crash"):
        the_trainer.fit(model, s.loader(shuffle=True))
    crash.step = -1
    again = Line()
    the_trainer.fit(again, s.loader(shuffle=True), ckpt_path="last")
    assert [step[1] for step in again.steps] == [4, 5, 6, 7]
    assert runs.good(tmp_path)[0] == "step=00000008.ckpt"


@pytest.mark.parametrize("users_first", [True, False])
def test_users_save_on_exception(users_first: bool, tmp_path: Path) -> None:
    """Made while the run falls: whole, and the error that ended the run is the one that is raised."""
    users = ModelCheckpoint(tmp_path / "users", save_on_exception=True)
    callbacks = [users, ours(tmp_path / "ours")]
    with pytest.raises(RuntimeError, match="own crash"):
        fit(trainer(runs.CrashAt(5), *(callbacks if users_first else callbacks[::-1])))
    (name,) = runs.good(tmp_path / "users")
    assert torch.load(tmp_path / "users" / name, weights_only=True)["global_step"] == 5
    assert runs.good(tmp_path / "ours")[0] == "step=00000004.ckpt"
    again = fit(trainer(users, ours(tmp_path / "ours")), ckpt_path="last")
    assert [step[1] for step in again.steps] == [4, 5, 6, 7]


def test_three_trainers_one_callback(tmp_path: Path) -> None:
    callback = ours(tmp_path)
    for epochs in (1, 2, 3):
        model = fit(trainer(callback, max_epochs=epochs), ckpt_path="last")
        assert model.epochs == [epochs - 1]


@pytest.mark.parametrize("which", ["last", "best"])
@pytest.mark.parametrize("users_first", [True, False])
def test_test_from(which: str, users_first: bool, tmp_path: Path) -> None:
    """`best` is the user's `ModelCheckpoint`, `last` is ours, in whatever order they were given."""

    class Tested(Line):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("weight", self.layer.weight.flatten()[0])

    best = ModelCheckpoint(tmp_path / "best", monitor="loss", every_n_train_steps=1)
    callbacks = [best, ours(tmp_path / "ours")]
    the_trainer = trainer(*(callbacks if users_first else callbacks[::-1]))
    model = Tested()
    the_trainer.fit(model, s.loader(shuffle=True))
    (result,) = the_trainer.test(Tested(), s.val_loader(), ckpt_path=which, verbose=False)
    path = best.best_model_path if which == "best" else str(tmp_path / "ours/step=00000008.ckpt")
    assert result["weight"] == torch.load(path, weights_only=True)["state_dict"]["layer.weight"].flatten()[0]
    # Nothing of the choice is left for the next fit.
    fresh = Tested()
    the_trainer.fit_loop.max_epochs = 2
    the_trainer.fit(fresh, s.loader(shuffle=True), ckpt_path=tmp_path / "ours/step=00000008.ckpt")
    assert fresh.epochs == [1]


# -- nothing is left ---------------------------------------------------------------------------------------------


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def open_files() -> set[str]:
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # the descriptor of the listing itself
            continue
    return {path for path in found if path.startswith("/") and not path.startswith(("/dev", "/proc"))}


def attributes(the_trainer: L.Trainer) -> dict[str, set[str]]:
    """The attributes of every object of a trainer on which something could have been hooked."""
    fit_loop = the_trainer.fit_loop
    parts = {
        "trainer": the_trainer,
        "fit loop": fit_loop,
        "epoch loop": fit_loop.epoch_loop,
        "validation loop": fit_loop.epoch_loop.val_loop,
        "strategy": the_trainer.strategy,
        "connector": the_trainer._checkpoint_connector,
        "logger": the_trainer.loggers[0] if the_trainer.loggers else None,
    }
    return {name: set(vars(part)) for name, part in parts.items() if part is not None}


@pytest.fixture
def watched() -> Iterator[None]:
    """Around the whole test: threads, processes, files, handlers, observers and locks are as they were."""

    def state() -> dict[str, Any]:
        gc.collect()
        return {
            "threads": {t.name for t in threading.enumerate()},
            "children": children(),
            "open files": open_files(),
            "handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
            "observers": events._observers,
            "locks": dict(_lock._held),
        }

    before = state()
    yield
    after = state()
    for name, was in before.items():
        assert after[name] == was, name


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("fails", ["a watch", "what follows"])
def test_nothing_is_left_of_a_fit_that_cannot_begin(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {"plugins": [runs.GatedTorchIO(lambda path: None)]}
    if fails == "what follows":
        arguments = {}
        monkeypatch.setattr(session, "Exceptions", Path.readlink)  # raises for whatever it gets
    guards = [ft.PreemptionGuard(), ft.DivergenceGuard(action="rollback")]
    worker = torch.utils.data._utils.worker._worker_loop
    the_trainer = trainer(ours(tmp_path, guards=guards), **arguments)
    with pytest.raises(ft.ConfigurationError if arguments else TypeError):
        the_trainer.fit(Line(), s.loader())
    assert torch.utils.data._utils.worker._worker_loop is worker
    assert "_register_signal" not in vars(the_trainer._signal_connector)


ENDS = {
    "well": None,
    "exception": RuntimeError,
    "keyboard interrupt": KeyboardInterrupt,
    "system exit": SystemExit,
}


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ENDS)
def test_nothing_is_left_when_a_fit_ends(how: str, workers: int, tmp_path: Path) -> None:
    error = ENDS[how]
    ends = runs.CrashAt(5 if error is not None else -1, error or RuntimeError)
    the_trainer = trainer(ends, ours(tmp_path), runs.every_step(tmp_path / "best"), val_check_interval=2)
    plain = trainer(runs.CrashAt(-1), runs.every_step(tmp_path / "plain"), val_check_interval=2)
    fit(plain, val=s.val_loader())
    before = attributes(the_trainer)
    raised: BaseException | None = None
    try:
        fit(the_trainer, data=s.loader(workers, shuffle=True), val=s.val_loader())
    except BaseException as caught:
        raised = caught.with_traceback(None)  # it would hold the loader's workers
    # Lightning makes of a Ctrl-C an exit of the program.
    assert raised is None if error is None else isinstance(raised, (error, SystemExit))
    # What plain Lightning leaves is Lightning's own.
    lightnings = attributes(plain)
    new = {name: names - before[name] - lightnings[name] for name, names in attributes(the_trainer).items()}
    assert new == {name: set() for name in new}
    # The directory is free again, and whole.
    lock = _lock.DirectoryLock(str(tmp_path))
    lock.acquire()
    lock.release()
    assert len(runs.good(tmp_path)) == len(runs.names(tmp_path)) > 0


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("wrong", ["directory", "checkpoint", "strategy"])
def test_nothing_is_left_when_a_fit_does_not_begin(wrong: str, tmp_path: Path) -> None:
    place: Path = tmp_path / "run"
    runs.first_run(place)
    if wrong == "directory":
        (tmp_path / "file").write_text("")
        place = tmp_path / "file"
    the_trainer = trainer(ours(place, strict=True), max_epochs=2)
    before = attributes(the_trainer)
    model = Line(changed=True) if wrong == "checkpoint" else Line()
    if wrong == "strategy":
        the_trainer.strategy.__class__ = Bypassing
    with pytest.raises(ft.FaultToleranceError):
        fit(the_trainer, model, ckpt_path=runs_last(place) if wrong == "checkpoint" else None)
    assert model.steps == []
    new = {name: names - before[name] for name, names in attributes(the_trainer).items()}
    assert not {name for names in new.values() for name in names} & {
        "setup_data", "on_advance_start", "on_run_start", "on_advance_end", "process_dataloader", "resume_start",
        "num_sanity_val_steps", "load_optimizer_state_dict",
    }  # fmt: skip


def runs_last(place: Path) -> str:
    return ft.list_checkpoints(str(place))[0].path


# -- one directory, one writer -----------------------------------------------------------------------------------


def _hold(dirpath: str, pipe: Any) -> None:
    """A training that stands at its second batch until it is told to go on."""

    def stand(the_trainer: L.Trainer) -> None:
        if the_trainer.global_step == 3:
            pipe.send("training")
            pipe.recv()

    fit(trainer(runs.Each(stand), ours(dirpath)))


def test_two_processes_one_directory(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=_hold, args=(str(tmp_path), there))
    process.start()
    try:
        assert here.poll(WITHIN_SECS)
        here.recv()
        model = Line()
        with pytest.raises(ft.DirectoryInUseError, match=f"is in use by process {process.pid} on "):
            fit(trainer(ours(tmp_path)), model, ckpt_path="last")
        assert model.steps == []
        here.send("go on")
    finally:
        process.join(WITHIN_SECS)
        process.kill()
    # The second one has disturbed nothing.
    assert process.exitcode == 0
    assert runs.good(tmp_path)[0] == "step=00000008.ckpt"
    assert fit(trainer(ours(tmp_path)), ckpt_path="last").steps == []


def test_two_trainers_of_one_process(tmp_path: Path) -> None:
    seen: list[BaseException] = []

    def second(the_trainer: L.Trainer) -> None:
        if the_trainer.global_step == 3:
            with pytest.raises(ft.DirectoryInUseError, match="another trainer of this process") as caught:
                fit(trainer(ours(tmp_path)))
            seen.append(caught.value)

    fit(trainer(runs.Each(second), ours(tmp_path)))
    assert len(seen) == 1
    assert runs.good(tmp_path)[0] == "step=00000008.ckpt"


def test_two_instances_in_one_trainer(tmp_path: Path) -> None:
    """Lightning itself refuses two callbacks of one state; whoever is first, nothing is trained."""
    model = Line()
    with pytest.raises(
        (ft.ConfigurationError, RuntimeError),
        match=r"more than one stateful callback|one FaultTol",
    ):
        fit(trainer(ours(tmp_path / "a"), ours(tmp_path / "b")), model)
    assert model.steps == []


def _as_nobody(dirpath: str, results: Any) -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    model = Line()
    try:
        fit(trainer(ours(dirpath), default_root_dir="/tmp"), model)
        results.send(("trained", ""))
    except Exception as error:
        results.send((type(error).__name__, f"{error} {len(model.steps)} steps"))


@pytest.mark.needs("root")
@pytest.mark.parametrize("place", ["directory", "parent"])
def test_directory_not_writable(place: str) -> None:
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        os.chmod(made, 0o755)  # noqa: S103 - to be seen by the other user
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_as_nobody, args=(made if place == "directory" else f"{made}/run", send))
        process.start()
        assert receive.poll(WITHIN_SECS)
        kind, message = receive.recv()
        process.join(WITHIN_SECS)
    assert kind == "ConfigurationError"
    assert f"checkpoints cannot be written to {made}" in message
    assert "Permission denied" in message
    assert message.endswith("0 steps")


# -- arguments ---------------------------------------------------------------------------------------------------

WRONG = [
    ("dirpath", 3), ("dirpath", ""), ("dirpath", ["a"]), ("dirpath", b"a"),
    ("every_n_train_steps", 0), ("every_n_train_steps", -1), ("every_n_train_steps", 2.0),
    ("every_n_train_steps", "2"), ("every_n_train_steps", True),
    ("every_n_epochs", 0), ("every_n_epochs", 1.5), ("every_n_epochs", False),
    ("train_time_interval", 60), ("train_time_interval", "1h"), ("train_time_interval", timedelta(0)),
    ("keep_last", 0), ("keep_last", -2), ("keep_last", None), ("keep_last", 1.0), ("keep_last", True),
    ("keep_every_n_train_steps", 0), ("keep_every_n_train_steps", "5"), ("keep_every_n_train_steps", True),
    ("save_on_train_end", 1), ("save_on_train_end", None), ("save_on_train_end", "yes"),
    ("guards", "preemption"), ("guards", ["nobody"]), ("guards", 3),
    ("seed_workers", 0), ("seed_workers", "no"),
    ("strict", None), ("strict", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG, ids=repr)
def test_wrong_arguments_of_the_callback(name: str, value: Any) -> None:
    """Refused where they are written: the message names the field and the value, and says why."""
    with pytest.raises(ft.ConfigurationError) as caught:
        ft.FaultTolerantCheckpoint(**{name: value})
    message = str(caught.value)
    assert name in message
    shown = value[0] if name == "guards" and isinstance(value, list) else value
    assert repr(shown) in message or str(shown) in message
    assert len(message) > len(name) + len(repr(value)) + 10


WRONG_OF_THE_PLUGIN = [
    ("async_save", 1), ("async_save", None), ("staging", "later"), ("staging", True), ("when_busy", "drop"),
    ("when_busy", None), ("verify", "none"), ("verify", True), ("on_error", "ignore"), ("on_error", 0),
    ("retries", -1), ("retries", 1.5), ("retries", True), ("retries", None), ("storage_options", "key=1"),
    ("storage_options", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG_OF_THE_PLUGIN, ids=repr)
def test_wrong_arguments_of_the_plugin(name: str, value: Any) -> None:
    with pytest.raises(ft.ConfigurationError, match=f"{name}={value!r}: must be "):
        ft.FaultTolerantCheckpointIO(**{name: value})


def test_a_password_in_a_url_is_refused_and_not_shown() -> None:
    with pytest.raises(ft.ConfigurationError, match=r"dirpath='ftp://me:\*\*\*@host/run': a password") as caught:
        ft.FaultTolerantCheckpoint("ftp://me:secret@host/run")
    assert "secret" not in str(caught.value)


def test_an_argument_that_is_not_there() -> None:
    with pytest.raises(TypeError, match="save_top_k"):
        ft.FaultTolerantCheckpoint("runs", save_top_k=3)
    with pytest.raises(TypeError, match="positional"):
        ft.FaultTolerantCheckpoint("runs", 100)


# -- what is around us -------------------------------------------------------------------------------------------


class Bypassing(SingleDeviceStrategy):
    """Writes by itself, as sharded strategies do."""

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        torch.save(checkpoint, filepath)


def test_a_strategy_that_bypasses_the_plugin(tmp_path: Path) -> None:
    model = Line()
    with pytest.raises(ft.ConfigurationError, match="strategy Bypassing writes checkpoints past the checkpoint plugin"):
        fit(trainer(ours(tmp_path), strategy=Bypassing(torch.device("cpu")), accelerator="auto"), model)
    assert model.steps == []


class Foreign(TorchCheckpointIO):
    """Somebody else's plugin."""


def test_a_foreign_plugin(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on, and it is said what is then not promised."""
    model = fit(trainer(ours(tmp_path), plugins=[Foreign()]))
    assert len(model.steps) == 8
    (warning,) = {r.message for r in caplog.records if "Foreign" in r.message}
    for lacking in ("not verified", 'not found by ckpt_path="last"', "not rotated", "atomic only if"):
        assert lacking in warning
    assert len(list(tmp_path.glob("step=*.ckpt"))) == 4
    # Its files can be continued from by hand.
    again = fit(trainer(ours(tmp_path), plugins=[Foreign()]), ckpt_path=tmp_path / "step=00000004.ckpt")
    assert [step[1] for step in again.steps] == [4, 5, 6, 7]


@pytest.mark.parametrize("ckpt_path", [None, "last"])
def test_fast_dev_run(ckpt_path: str | None, tmp_path: Path) -> None:
    """One batch to try the code out: nothing is written."""
    model = fit(trainer(ours(tmp_path), fast_dev_run=1), ckpt_path=ckpt_path)
    assert len(model.steps) == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("flag", ["enable_checkpointing", "barebones"])
def test_a_trainer_without_checkpoints(flag: str, tmp_path: Path) -> None:
    """Lightning's own error, as for its `ModelCheckpoint`: the two contradict each other."""
    flags = {"enable_checkpointing": False} if flag == "enable_checkpointing" else {"barebones": True}
    with pytest.raises((MisconfigurationException, ValueError), match=r"checkpoint|barebones"):
        L.Trainer(accelerator="cpu", callbacks=[ours(tmp_path)], **flags)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_do_nothing(stage: str, tmp_path: Path) -> None:
    class All(Line):
        test_step = Line.validation_step

        def predict_step(self, batch: Any) -> Any:
            return self.layer(batch[1])

    place = tmp_path / "run"
    getattr(trainer(ours(place)), stage)(All(), s.val_loader())
    assert not place.exists()


# -- layers 0 to 2 -----------------------------------------------------------------------------------------------


def imported(modules: str) -> set[str]:
    """Top-level packages that `python -X importtime` saw."""
    code = f"import {modules}"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.partition(".")[0] for line in lines}


def test_looking_at_checkpoints_imports_no_framework() -> None:
    lower = ("errors", "events", "manifest", "storage", "_disk.lock", "discovery", "retention", "rotation", "triggers")
    found = imported(", ".join(f"lightning_ft.{name}" for name in lower))
    assert "xxhash" in found
    assert not found & {"torch", "lightning", "pytorch_lightning", "torchmetrics"}
    assert {"torch", "lightning"} <= imported("lightning_ft.plugin")


def test_the_callback_needs_no_place_in_the_list(tmp_path: Path) -> None:
    """State of callbacks that come after it in the list is in the checkpoint all the same."""
    ema = s.Ema()
    fit(trainer(ours(tmp_path), ema), s.Net())
    saved = torch.load(runs_last(tmp_path), weights_only=True)["callbacks"]
    (state,) = [value for key, value in saved.items() if "Ema" in key]
    assert all(torch.equal(value, state[name]) for name, value in ema.average.items())
