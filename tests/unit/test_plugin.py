from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lightning_ft import FaultTolerantCheckpoint, discovery, events
from lightning_ft._copying.staging import Stager
from lightning_ft._disk.lock import DirectoryLock
from lightning_ft.errors import ConfigurationError, CorruptCheckpointError, SaveError
from lightning_ft.manifest import Manifest
from lightning_ft.plugin import FaultTolerantCheckpointIO, SaveOptions
from lightning_ft.storage import Attempt, Storage

WAIT_SECS = 30


@pytest.fixture
def plugin() -> Iterator[FaultTolerantCheckpointIO]:
    plugin = FaultTolerantCheckpointIO()
    yield plugin
    plugin.on_error = "warn"
    plugin.teardown()


def state(**more: Any) -> dict[str, Any]:
    return {"global_step": 7, "epoch": 2, "state_dict": {"w": torch.arange(4.0)}, **more}


def of_a_run(**more: Any) -> dict[str, Any]:
    return state(lightning_ft={"run_id": "r", "generation": "g" * 32, "step": 7}, **more)


def saved(plugin: FaultTolerantCheckpointIO, path: Path, checkpoint: dict[str, Any] | None = None) -> Path:
    plugin.save_checkpoint(checkpoint or state(), path)
    if isinstance(plugin._writers.storage, FailingStorage):
        plugin._writers.storage.returned.set()
    plugin.drain()
    if isinstance(plugin._writers.storage, FailingStorage):
        plugin._writers.storage.returned.clear()
    return path


def good(path: Path) -> bool:
    return discovery.verify(str(path)).problem is None


class FailingStorage(Storage):
    """As many attempts fail as there are errors left, in the background not before the save has returned."""

    def __init__(self, errors: int = 0) -> None:
        super().__init__()
        self.errors = errors
        self.returned = threading.Event()

    def open_attempt(self, path: str, expected_bytes: int | None = None) -> Attempt:
        if self.errors:
            if threading.current_thread() is not threading.main_thread():
                assert self.returned.wait(WAIT_SECS)
            self.errors -= 1
            raise PermissionError("denied")
        return super().open_attempt(path, expected_bytes)


def failing(errors: int, **options: Any) -> FaultTolerantCheckpointIO:
    plugin = FaultTolerantCheckpointIO(**options)
    plugin._writers.storage = FailingStorage(errors)
    return plugin


# -- arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("async_save", 1, "True, False"),
        ("async_save", None, "True, False"),
        ("staging", "later", "'overlap', 'blocking'"),
        ("staging", None, "'overlap', 'blocking'"),
        ("when_busy", "fail", "'wait', 'newest', 'skip'"),
        ("verify", "none", "'full', 'size', 'off'"),
        ("verify", True, "'full', 'size', 'off'"),
        ("on_error", "ignore", "'raise', 'warn'"),
        ("retries", -1, "at least 0"),
        ("retries", 1.0, "at least 0"),
        ("retries", True, "at least 0"),
        ("retries", None, "at least 0"),
        ("storage_options", [("key", 1)], "a dictionary or None"),
        ("storage_options", "anon", "a dictionary or None"),
    ],
)
def test_an_impossible_argument_is_refused_with_name_value_and_reason(name: str, value: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        FaultTolerantCheckpointIO(**{name: value})
    assert str(refused.value).startswith(f"{name}={value!r}: must be ")
    assert reason in str(refused.value)
    assert isinstance(refused.value, ValueError)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"async_save": False, "staging": "blocking", "when_busy": "skip", "verify": "off", "on_error": "warn"},
        {"retries": 0, "storage_options": {}, "verify": "size"},
    ],
)
def test_possible_arguments_are_attributes(arguments: dict[str, Any]) -> None:
    plugin = FaultTolerantCheckpointIO(**arguments)
    assert {name: getattr(plugin, name) for name in arguments} == arguments


@pytest.mark.parametrize("options", [{}, {"key": 1}, [], "s3"])
def test_storage_options_of_a_save_are_refused(plugin: FaultTolerantCheckpointIO, tmp_path: Path, options: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"give them to FaultTolerantCheckpointIO\(storage_options="):
        plugin.save_checkpoint(state(), tmp_path / "a.ckpt", storage_options=options)
    assert os.listdir(tmp_path) == []


# -- saving and loading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("async_save", [True, False])
@pytest.mark.parametrize("as_path", [str, Path])
def test_what_is_saved_is_loaded(tmp_path: Path, async_save: bool, as_path: Callable[[Path], Any]) -> None:
    plugin = FaultTolerantCheckpointIO(async_save=async_save)
    path = tmp_path / "new" / "a.ckpt"
    checkpoint = state()
    plugin.save_checkpoint(checkpoint, as_path(path))
    checkpoint["state_dict"]["w"].zero_()
    if not async_save:
        assert good(path)
    loaded = plugin.load_checkpoint(as_path(path))
    assert good(path)
    assert loaded["state_dict"]["w"].tolist() == [0, 1, 2, 3]
    assert TorchCheckpointIO().load_checkpoint(path)["global_step"] == 7
    plugin.remove_checkpoint(as_path(path))
    plugin.teardown()
    assert os.listdir(path.parent) == []


def test_the_manifest_says_what_the_checkpoint_says(plugin: FaultTolerantCheckpointIO, tmp_path: Path) -> None:
    saved(plugin, tmp_path / "a.ckpt")
    manifest = discovery.verify(str(tmp_path / "a.ckpt")).manifest
    assert manifest is not None
    assert (manifest.step, manifest.batch, manifest.epoch, manifest.reason, manifest.boundary) == (
        7,
        7,
        2,
        "user",
        "none",
    )
    assert (manifest.run_id, manifest.start, manifest.parent) == ("", 0, None)
    assert {"torch", "python", "lightning", "lightning_ft"} <= set(manifest.versions)
    saved(plugin, tmp_path / "b.ckpt")
    other = discovery.verify(str(tmp_path / "b.ckpt")).manifest
    assert other is not None
    assert other.generation != manifest.generation


def test_our_callback_is_told_of_the_commit(plugin: FaultTolerantCheckpointIO, tmp_path: Path) -> None:
    told: list[Manifest] = []
    plugin.save_checkpoint(of_a_run(), tmp_path / "a.ckpt", storage_options=SaveOptions(told.append))
    plugin.drain()
    assert [(m.run_id, m.generation, m.step) for m in told] == [("r", "g" * 32, 7)]


def test_loading_waits_for_what_was_submitted(
    plugin: FaultTolerantCheckpointIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    storage = Storage()
    opening = storage.open_attempt

    def open_attempt(path: str, expected_bytes: int | None = None) -> Attempt:
        assert gate.wait(WAIT_SECS)
        return opening(path, expected_bytes)

    draining = plugin.writer.drain

    def drain(timeout_secs: float | None = None) -> bool:
        gate.set()
        return draining(timeout_secs)

    monkeypatch.setattr(plugin.writer, "_storage", storage)
    monkeypatch.setattr(storage, "open_attempt", open_attempt)
    monkeypatch.setattr(plugin.writer, "drain", drain)
    plugin.save_checkpoint(state(), tmp_path / "a.ckpt")
    assert plugin.load_checkpoint(tmp_path / "a.ckpt")["global_step"] == 7


def test_a_missing_file_is_not_found(plugin: FaultTolerantCheckpointIO, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"checkpoint not found: .*/a.ckpt"):
        plugin.load_checkpoint(tmp_path / "a.ckpt")


def test_a_url_works_like_a_path(plugin: FaultTolerantCheckpointIO) -> None:
    url = "memory://bucket/run/a.ckpt"
    plugin.save_checkpoint(state(), url)
    assert plugin.load_checkpoint(url)["state_dict"]["w"].tolist() == [0, 1, 2, 3]
    plugin.remove_checkpoint(url)
    plugin.drain()
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(url)


def test_a_plugin_that_has_saved_can_be_pickled(plugin: FaultTolerantCheckpointIO, tmp_path: Path) -> None:
    saved(plugin, tmp_path / "a.ckpt")
    other = pickle.loads(pickle.dumps(plugin))
    other.remove_checkpoint(saved(other, tmp_path / "b.ckpt"))
    other.teardown()
    assert os.listdir(tmp_path) == ["a.ckpt"]


# -- verification ------------------------------------------------------------------------------------------------


class SideEffect:
    """Unpickling it makes a file, so that it can be seen whether anything was unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return open, (self.path, "w")

    def __deepcopy__(self, memo: Any) -> SideEffect:
        return self


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def cut(path: Path, at: float) -> None:
    path.write_bytes(path.read_bytes()[: int(at * path.stat().st_size)])


def extend(path: Path, at: float) -> None:
    path.write_bytes(path.read_bytes() + b"\0" * int(at))


def test_the_side_effect_shows_when_a_file_is_unpickled(plugin: FaultTolerantCheckpointIO, tmp_path: Path) -> None:
    path = saved(plugin, tmp_path / "a.ckpt", state(evil=SideEffect(tmp_path / "unpickled")))
    assert not (tmp_path / "unpickled").exists()
    plugin.load_checkpoint(path, weights_only=False)["evil"].close()
    assert (tmp_path / "unpickled").exists()


@pytest.mark.parametrize(
    ("damage", "at"),
    [
        *((flip, at) for at in (0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1)),
        *((cut, at) for at in (0, 0.2, 0.5, 0.99)),
        (extend, 1),
        (extend, 1000),
    ],
)
def test_a_damaged_file_is_refused_before_anything_is_unpickled(
    plugin: FaultTolerantCheckpointIO, tmp_path: Path, damage: Callable[[Path, float], None], at: float
) -> None:
    path = saved(plugin, tmp_path / "a.ckpt", state(evil=SideEffect(tmp_path / "unpickled")))
    damage(path, at)
    with pytest.raises(CorruptCheckpointError, match=str(path)):
        plugin.load_checkpoint(path, weights_only=False)
    assert not (tmp_path / "unpickled").exists()


def _flip_a_weight(path: Path) -> None:
    data = path.read_bytes()
    at = data.index(torch.arange(4.0).numpy().tobytes())
    path.write_bytes(data[: at + 7] + bytes([data[at + 7] ^ 1]) + data[at + 8 :])


@pytest.mark.parametrize(("verify", "noticed"), [("full", True), ("size", False), ("off", False)])
def test_how_deep_a_file_is_verified(tmp_path: Path, verify: Any, noticed: bool) -> None:
    plugin = FaultTolerantCheckpointIO(verify=verify)
    path = saved(plugin, tmp_path / "a.ckpt")
    plugin.teardown()
    _flip_a_weight(path)
    if noticed:
        with pytest.raises(CorruptCheckpointError, match="digest does not match"):
            plugin.load_checkpoint(path)
    else:
        assert plugin.load_checkpoint(path)["state_dict"]["w"].tolist() != [0, 1, 2, 3]


def test_a_file_verified_a_moment_ago_is_hashed_once_and_the_next_time_again(
    plugin: FaultTolerantCheckpointIO, tmp_path: Path
) -> None:
    path = saved(plugin, tmp_path / "a.ckpt")
    _flip_a_weight(path)
    plugin.mark_verified(str(path))
    plugin.load_checkpoint(path)
    with pytest.raises(CorruptCheckpointError):
        plugin.load_checkpoint(path)


def test_a_file_of_plain_lightning_is_loaded_with_a_word(
    plugin: FaultTolerantCheckpointIO, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    TorchCheckpointIO().save_checkpoint(state(), tmp_path / "a.ckpt")
    assert plugin.load_checkpoint(tmp_path / "a.ckpt")["global_step"] == 7
    assert "a.ckpt has no manifest (plain Lightning wrote it?): loaded without verification" in caplog.text


def test_a_state_and_a_manifest_of_different_saves_are_refused(
    plugin: FaultTolerantCheckpointIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(plugin, tmp_path / "a.ckpt", of_a_run())
    real = plugin._loading._verify

    def other(path: str) -> Any:
        manifest = real(path)
        assert manifest is not None
        return replace(manifest, generation="0" * 32)

    monkeypatch.setattr(plugin._loading, "_verify", other)
    with pytest.raises(CorruptCheckpointError, match="of different saves"):
        plugin.load_checkpoint(path)


# -- weights_only ------------------------------------------------------------------------------------------------


def test_a_state_that_weights_only_would_refuse_is_a_failed_save_with_its_key_path(tmp_path: Path) -> None:
    plugin = FaultTolerantCheckpointIO()
    plugin._rule.required = True
    with pytest.raises(SaveError, match=r"checkpoint\['hyper_parameters'\]\['dir'\] is a pathlib.PosixPath"):
        plugin.save_checkpoint(state(hyper_parameters={"dir": Path("x")}), tmp_path / "a.ckpt")
    saved(plugin, tmp_path / "b.ckpt", state(hyper_parameters={"dir": "x"}))
    plugin.teardown()
    assert os.listdir(tmp_path) == ["b.ckpt"]


def test_alone_the_plugin_saves_it_and_says_so_once(
    plugin: FaultTolerantCheckpointIO, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "ab":
        saved(plugin, tmp_path / f"{name}.ckpt", state(dir=Path("x")))
    assert caplog.text.count("checkpoint['dir'] is a pathlib.PosixPath") == 1
    assert plugin.load_checkpoint(tmp_path / "b.ckpt", weights_only=False)["dir"] == Path("x")
    with pytest.raises(pickle.UnpicklingError):
        plugin.load_checkpoint(tmp_path / "b.ckpt", weights_only=True)


# -- removing ----------------------------------------------------------------------------------------------------


@pytest.fixture
def skipped() -> Iterator[list[tuple[str, str]]]:
    found: list[tuple[str, str]] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.DeleteSkipped):
            found.append((os.path.basename(event.path), event.reason))

    stop = events.observe(note)
    yield found
    stop()


def test_the_checkpoint_resumed_from_is_not_removed(
    plugin: FaultTolerantCheckpointIO, tmp_path: Path, skipped: list[tuple[str, str]]
) -> None:
    for name in "ab":
        saved(plugin, tmp_path / f"{name}.ckpt", of_a_run())
    plugin.load_checkpoint(tmp_path / "a.ckpt")
    for name in "ab":
        plugin.remove_checkpoint(tmp_path / f"{name}.ckpt")
    plugin.drain()
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert skipped == [("a.ckpt", "this run was resumed from it")]


def test_nothing_is_removed_from_a_directory_this_run_has_not_saved_into(
    plugin: FaultTolerantCheckpointIO, tmp_path: Path, skipped: list[tuple[str, str]]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.ckpt").write_bytes(b"precious")
    saved(plugin, tmp_path / "mine" / "a.ckpt")
    plugin.remove_checkpoint(other / "a.ckpt")
    plugin.remove_checkpoint(tmp_path / "mine" / ".." / "other" / "a.ckpt")
    plugin.drain()
    assert (other / "a.ckpt").read_bytes() == b"precious"
    assert [name for name, _ in skipped] == ["a.ckpt", "a.ckpt"]


# -- failures ----------------------------------------------------------------------------------------------------


def test_a_failure_is_raised_by_the_next_save(tmp_path: Path) -> None:
    plugin = failing(1)
    saved(plugin, tmp_path / "a.ckpt")
    with pytest.raises(SaveError, match=r"a\.ckpt.*PermissionError: denied"):
        plugin.save_checkpoint(state(), tmp_path / "b.ckpt")
    saved(plugin, tmp_path / "c.ckpt")
    plugin.teardown()
    assert os.listdir(tmp_path) == ["c.ckpt"]


def test_without_a_background_the_save_itself_raises(tmp_path: Path) -> None:
    plugin = failing(1, async_save=False)
    with pytest.raises(SaveError, match=r"a\.ckpt.*PermissionError: denied"):
        plugin.save_checkpoint(state(), tmp_path / "a.ckpt")
    plugin.teardown()


def test_a_failure_nobody_heard_of_is_raised_at_teardown_and_the_plugin_works_again(tmp_path: Path) -> None:
    plugin = failing(1)
    saved(plugin, tmp_path / "a.ckpt")
    with pytest.raises(SaveError, match="denied"):
        plugin.teardown()
    assert plugin.writer.failures_in_a_row == 0
    saved(plugin, tmp_path / "b.ckpt")
    plugin.teardown()
    plugin.teardown()


def test_at_teardown_a_failure_does_not_hide_the_error_that_ended_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = failing(1)
    saved(plugin, tmp_path / "a.ckpt")

    def run() -> None:
        try:
            raise KeyError("the run")
        except KeyError:
            plugin.teardown()
            raise

    with pytest.raises(KeyError, match="the run"):
        run()
    assert "denied" in caplog.text


def test_with_warn_the_third_failure_in_a_row_is_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plugin = failing(5, on_error="warn")
    for name in "abc":
        saved(plugin, tmp_path / f"{name}.ckpt")
    assert "a.ckpt" in caplog.text
    assert "b.ckpt" in caplog.text
    with pytest.raises(SaveError, match=r"c\.ckpt"):
        plugin.save_checkpoint(state(), tmp_path / "d.ckpt")
    plugin.teardown()


def test_with_warn_failures_that_are_not_in_a_row_never_raise(tmp_path: Path) -> None:
    plugin = failing(0, on_error="warn")
    assert isinstance(plugin._writers.storage, FailingStorage)
    for n in range(8):
        plugin._writers.storage.errors = n % 2
        saved(plugin, tmp_path / f"{n}.ckpt")
    plugin.teardown()
    assert sorted(os.listdir(tmp_path)) == ["0.ckpt", "2.ckpt", "4.ckpt", "6.ckpt"]


def test_a_state_that_cannot_be_copied_is_a_failed_save(tmp_path: Path) -> None:
    plugin = FaultTolerantCheckpointIO()
    with pytest.raises(SaveError, match="TypeError"):
        plugin.save_checkpoint(state(lock=threading.Lock()), tmp_path / "a.ckpt")
    plugin.teardown()
    assert os.listdir(tmp_path) == []


def test_while_a_callback_reports_the_plugin_raises_nothing(tmp_path: Path) -> None:
    plugin = failing(1)
    plugin.reports_failures = False
    saved(plugin, tmp_path / "a.ckpt")
    saved(plugin, tmp_path / "b.ckpt")
    assert plugin.writer.take_failure() is not None
    plugin.teardown()


# -- with nothing but a ModelCheckpoint --------------------------------------------------------------------------


class Improving(BoringModel):
    """Its metric falls with every epoch, so that every epoch has the best checkpoint so far."""

    def on_train_epoch_end(self) -> None:
        self.log("score", float(-self.current_epoch))


class OneBehind(Callback):
    """What an epoch asked to save is written in the next one: what it asked to remove must still be there then."""

    def __init__(self, dirpath: Path) -> None:
        self.dirpath = dirpath
        self.go = threading.Semaphore(0)
        self.complete: list[int] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.count()  # nothing was let on yet; later the writer may change what is listed while it is looked at
        if trainer.current_epoch:
            self.go.release()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.go.release()

    def count(self, event: events.Event | None = None) -> None:
        if event is None or isinstance(event, (events.Committed, events.DeleteHidden, events.Deleted)):
            self.complete.append(sum(good(p) for p in self.dirpath.glob("*.ckpt")))


class GatedStorage(Storage):
    def __init__(self, behind: OneBehind) -> None:
        super().__init__()
        self.behind = behind

    def open_attempt(self, path: str, expected_bytes: int | None = None) -> Attempt:
        assert self.behind.go.acquire(timeout=WAIT_SECS)
        return super().open_attempt(path, expected_bytes)


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_model_checkpoint_alone_never_has_less_than_it_should(tmp_path: Path, top_k: int) -> None:
    behind = OneBehind(tmp_path)
    plugin = FaultTolerantCheckpointIO()
    plugin._writers.storage = GatedStorage(behind)
    checkpoint = ModelCheckpoint(tmp_path, "e{epoch}", monitor="score", save_top_k=top_k, auto_insert_metric_name=False)
    trainer = L.Trainer(
        max_epochs=5,
        limit_train_batches=1,
        limit_val_batches=0,
        accelerator="cpu",
        plugins=[plugin],
        callbacks=[checkpoint, behind],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    stop = events.observe(behind.count)
    try:
        trainer.fit(Improving())
    finally:
        stop()
    assert behind.complete[0] == 0
    since_first = behind.complete[behind.complete.index(1) :]
    assert (min(since_first), max(since_first)) == (1, top_k + 1)
    assert min(since_first[since_first.index(top_k) :]) == top_k
    assert sorted(os.listdir(tmp_path)) == [f"e{n}.ckpt" for n in range(5 - top_k, 5)]
    assert all(good(p) for p in tmp_path.iterdir())
    assert checkpoint.best_model_path == str(tmp_path / "e4.ckpt")


@pytest.mark.parametrize("end", ["drain", "teardown"])
def test_a_device_that_broke_does_not_cost_the_saves_before(
    end: str, plugin: FaultTolerantCheckpointIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("device-side assert")

    path = tmp_path / "a.ckpt"
    plugin.save_checkpoint(state(), path)
    writer = plugin.writer
    with monkeypatch.context() as patch:
        patch.setattr(Stager, "finish", fail)
        with pytest.raises(RuntimeError, match="device-side assert"):
            getattr(plugin, end)()
    assert writer.saves == (1, 1)
    assert good(path)


def test_a_fit_that_a_broken_device_ends_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every later question to the device fails, too, also where the fit is given up."""
    hooks = _global_optimizer_pre_hooks
    plugin = FaultTolerantCheckpointIO()

    def broken(*args: Any) -> None:
        raise RuntimeError("device-side assert")

    class Breaks(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            if args[-1] == 2:
                assert hooks
                monkeypatch.setattr(Stager, "finish", broken)

    callback = FaultTolerantCheckpoint(tmp_path, every_n_train_steps=1)
    trainer = L.Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[plugin], callbacks=[callback, Breaks()], default_root_dir=tmp_path,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="device-side assert"):
        trainer.fit(BoringModel())
    assert not hooks
    monkeypatch.undo()
    plugin.teardown()  # Lightning does not come to that
    lock = DirectoryLock(str(tmp_path))
    lock.acquire()
    lock.release()
    assert len([info for info in discovery.list_checkpoints(str(tmp_path)) if info.problem is None]) == 2
