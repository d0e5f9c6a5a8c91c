"""Runs with a local directory in front of another one: where a restart goes on from, and what it does not touch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.plugins.io import TorchCheckpointIO

import lightning_ft as ft
from lightning_ft import _names, events
from lightning_ft._names import checkpoint_name
from lightning_ft.errors import ConfigurationError, NoUsableCheckpointError
from tests.trainer import runs
from tests.trainer import scenarios as s
from tests.trainer.runs import fit, trainer
from tests.trainer.tiers import Place

pytestmark = pytest.mark.usefixtures("naps")


def crashed(place: Place, at: int = 6, **kwargs: Any) -> None:
    """A run that ends in an exception: the newest state is in the local directory alone."""
    with pytest.raises(RuntimeError, match="own crash"):
        place.run(runs.CrashAt(at), max_steps=8, **kwargs)


def break_it(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_g7_from_the_newest_of_both(place: Place) -> None:
    crashed(place)
    assert (place.steps(place.local), place.steps(place.remote)) == ([5, 6], [4])
    with runs.recorded() as seen:
        module = place.run(max_steps=8)
    assert [e.path for e in seen if isinstance(e, events.Resumed)] == [str(place.local / checkpoint_name(6))]
    assert [step[1] for step in module.steps] == [6, 7]
    assert place.steps(place.local) == [7, 8]


@pytest.mark.parametrize("lost", ["local", "local broken", "remote", "remote broken", "local 6 broken"])
def test_from_the_other_copy(lost: str, place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.run()
    (place.local / checkpoint_name(5)).unlink()
    assert place.same(6)
    if lost in ("local", "remote"):
        shutil.rmtree(getattr(place, lost))
    elif lost == "local 6 broken":
        break_it(place.local / checkpoint_name(6))
    else:
        for path in getattr(place, lost.split()[0]).glob("*.ckpt"):
            break_it(path)
    with runs.recorded() as seen:
        place.run(max_steps=8)
    resumed = next(Path(e.path) for e in seen if isinstance(e, events.Resumed))
    assert resumed == (place.remote if "local" in lost else place.local) / checkpoint_name(6)
    if lost.startswith("local") and "broken" in lost:
        assert f"passed over {place.local / checkpoint_name(6)}: data is damaged" in caplog.text
    assert place.same(8)


def test_what_the_run_goes_on_from_is_uploaded_if_it_was_not(place: Place) -> None:
    """Its upload was cut off, or it was not due there: after a restart it is in both at once."""
    crashed(place)
    uploaded: list[int] = []

    def look(event: events.Event) -> None:
        if isinstance(event, events.UploadStarted):
            uploaded.append(event.step)

    with runs.observing(look):
        place.run(max_steps=8)
        assert uploaded == [6, 8]
        # Also if nothing is left to train: a run that was killed when its last upload was under way.
        (place.remote / checkpoint_name(8)).unlink()
        place.run(max_steps=8)
        assert uploaded == [6, 8, 8]
        assert place.same(8)
        place.run(max_steps=8)
    assert uploaded == [6, 8, 8]


def test_names_are_free_in_both(place: Place) -> None:
    """A second run in the same directories does not write over anything, here or there."""
    place.run()
    before = {p: p.read_bytes() for p in (*place.local.glob("*.ckpt"), *place.remote.glob("*.ckpt"))}
    place.run(ckpt_path=None)
    assert all(p.read_bytes() == data for p, data in before.items())
    assert (place.local / checkpoint_name(6, 1)).exists()
    assert (place.remote / checkpoint_name(6, 1)).exists()
    assert ft.list_checkpoints(str(place.local))[0].manifest.start == 2  # type: ignore[union-attr]


def test_another_dirpath_does_not_continue_the_run_of_the_first(place: Place, tmp_path: Path) -> None:
    crashed(place)
    place.remote = tmp_path / "elsewhere"
    for ckpt_path in ("last", None):
        with pytest.raises(ConfigurationError, match=r"local_dirpath=.*holds checkpoints that were saved for dirpath="):
            place.run(ckpt_path=ckpt_path)


def test_nor_validates_its_weights(place: Place, tmp_path: Path) -> None:
    crashed(place)
    place.remote = tmp_path / "elsewhere"
    with pytest.raises(ConfigurationError, match="holds checkpoints that were saved for dirpath="):
        trainer(place.ours()).validate(runs.Line(), s.val_loader(), ckpt_path="last")


def test_only_unusable_ones_in_both(place: Place) -> None:
    place.run()
    for path in (*place.local.glob("*.ckpt"), *place.remote.glob("*.ckpt")):
        break_it(path)
    with pytest.raises(NoUsableCheckpointError) as caught:
        place.run()
    assert len(caught.value.reasons) == 4


def test_a_path_of_either_directory_continues_the_run(place: Place) -> None:
    place.run()
    run_id = ft.list_checkpoints(str(place.local))[0].manifest.run_id  # type: ignore[union-attr]
    for dirpath, last in ((place.local, 7), (place.remote, 8)):
        place.run(max_steps=last, ckpt_path=str(dirpath / checkpoint_name(last - 1)), every_n_train_steps=100)
        newest = ft.list_checkpoints(str(place.remote))[0].manifest
        assert newest is not None
        assert (newest.step, newest.run_id) == (last, run_id)


def test_an_older_path_begins_a_branch_that_supersedes(place: Place) -> None:
    place.run()
    place.run(max_steps=5, ckpt_path=str(place.remote / checkpoint_name(4)))
    assert place.run(max_steps=8).steps[0][1] == 5


def test_the_directories_are_locked_and_free_again(place: Place) -> None:
    def second(trainer: Any) -> None:
        if trainer.global_step == 2:
            with pytest.raises(ft.DirectoryInUseError, match=str(place.local)):
                fit(runs.trainer(ft.FaultTolerantCheckpoint(place.local), max_steps=1))

    place.run(runs.Each(second))
    place.run(max_steps=7)


def test_leftovers_of_both_are_removed(place: Place) -> None:
    crashed(place)
    left = [d / _names.attempt_name("a.ckpt", "0" * 16) for d in (place.local, place.remote)]
    for path in left:
        path.write_bytes(b"half")
    place.run(max_steps=8)
    assert not any(path.exists() for path in left)


def test_another_plugin_cannot_have_two(place: Place) -> None:
    class Foreign(TorchCheckpointIO):
        pass

    with pytest.raises(ConfigurationError, match=r"local_dirpath=.*only FaultTolerantCheckpointIO copies"):
        place.run(io=Foreign(), ckpt_path=None)


def test_the_default_dirpath_is_no_local_one(tmp_path: Path) -> None:
    ours = ft.FaultTolerantCheckpoint(local_dirpath=tmp_path / "checkpoints")
    with pytest.raises(ConfigurationError, match="is dirpath"):
        fit(trainer(ours, default_root_dir=tmp_path))


@pytest.mark.parametrize("damaged", [False, True])
def test_an_upload_never_writes_over_another_checkpoint(
    damaged: bool, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Another machine has got as far as this one, and the store has its file of that name."""
    crashed(place)
    other = place.remote / checkpoint_name(6)
    shutil.copy(place.remote / checkpoint_name(4), other)
    if damaged:
        other.write_bytes(other.read_bytes()[:-1])
    before = other.read_bytes()
    place.run(max_steps=8, keep_last=-1)
    assert other.read_bytes() == before
    assert f"{place.local / checkpoint_name(6)} is not uploaded: {other} is another" in caplog.text
    assert place.same(8)
