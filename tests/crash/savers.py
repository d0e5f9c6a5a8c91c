"""Ways to save a checkpoint and then remove the one before it: ours and others, each with its own judge."""

from __future__ import annotations

import mmap
import os
import stat
import struct
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.plugins.io import TorchCheckpointIO

import lightning_ft as ft
from lightning_ft import events, rotation
from lightning_ft._disk import direct as _direct
from lightning_ft._disk import sink
from lightning_ft._names import checkpoint_name
from lightning_ft.plugin import SaveOptions
from lightning_ft.retention import Retention
from lightning_ft.storage import Storage
from tests import directories
from tests.crash.harness import RUN_ID, checkpoint

NUMBERS = 40_000  # of each of two tensors: a file takes several writes of `BUFFER_BYTES`
BUFFER_BYTES = 64 << 10

State = Literal["good", "absent", "torn"]


class Progress:
    """Numbers that a process leaves behind for its parent without a system call: what it has reported as durable."""

    def __init__(self, path: str) -> None:
        with open(path, "a+b") as file:
            file.truncate(4)
            self._memory = mmap.mmap(file.fileno(), 4)

    @property
    def step(self) -> int:
        """The newest step that was reported."""
        return int(struct.unpack_from("I", self._memory)[0])

    @step.setter
    def step(self, step: int) -> None:
        struct.pack_into("I", self._memory, 0, step)


@dataclass(frozen=True)
class Saver:
    """`way` saves checkpoint 2 in `dirpath`, reports it, and removes checkpoint 1, which is there."""

    way: str
    dirpath: str
    progress: str

    def __call__(self, step: int = 2) -> None:
        torch.set_num_threads(1)
        WAYS[self.way].save(self.dirpath, step, Progress(self.progress))

    def prepare(self) -> None:
        """Checkpoint 1 is there."""
        self(1)

    def warm_up(self) -> None:
        """See `powercut.Job`."""
        with tempfile.TemporaryDirectory() as place:
            elsewhere = Saver(self.way, f"{place}/run", f"{place}/progress")
            Path(elsewhere.dirpath).mkdir()
            elsewhere(1)
            elsewhere(2)


@dataclass(frozen=True)
class Way:
    """One row of the table.

    Args:
        title: In the table.
        save: Given the directory, the step and where to report it.
        name: Of the checkpoint of a step.
        load: The tensors of the checkpoint at a path, or an error.
        marker: The file in a directory without which its readers see no checkpoint.
    """

    title: str
    save: Callable[[str, int, Progress], None]
    name: Callable[[int], str]
    load: Callable[[Path], dict[str, Any]]
    marker: str = ""

    def state(self, dirpath: Path, step: int) -> State:
        """Of checkpoint `step`: good if it can be loaded and every number is the one saved."""
        path = dirpath / self.name(step)
        if not (path / self.marker).exists():
            return "absent"
        wanted = weights(step)
        try:
            found = self.load(path)
        except Exception:  # of zipfile, pickle, torch: whatever a broken file makes of them
            return "torn"
        return "good" if all(torch.equal(found[name], wanted[name]) for name in wanted) else "torn"


def weights(step: int) -> dict[str, torch.Tensor]:
    """The tensors of checkpoint `step`."""
    tensors: dict[str, torch.Tensor] = checkpoint(step, NUMBERS)["state_dict"]
    return tensors


# -- ours --------------------------------------------------------------------------------------------------------


def _ours(direct: bool, dirpath: str, step: int, progress: Progress) -> None:
    sink.BUFFER_BYTES, sink.CHUNK_BYTES = BUFFER_BYTES // 4, BUFFER_BYTES // 2
    _direct.BUFFERS = _direct.DiskBuffers(BUFFER_BYTES, 3)
    if not direct:
        _direct.DiskStream._go_direct = lambda self: None  # type: ignore[method-assign]

    def report(event: events.Event) -> None:
        if isinstance(event, events.Committed):
            progress.step = event.step

    events.observe(report)
    plugin = ft.FaultTolerantCheckpointIO()
    path = f"{dirpath}/{checkpoint_name(step)}"
    rotate = partial(rotation.rotate, dirpath, path, RUN_ID, Retention(1), None)
    plugin.save_checkpoint(checkpoint(step, NUMBERS), path, SaveOptions(rotate))
    plugin.teardown()


def _ours_in_a_new_directory(dirpath: str, step: int, progress: Progress) -> None:
    _ours(True, dirpath if step == 1 else f"{dirpath}/new/1", step, progress)


def _name_in_a_new_directory(step: int) -> str:
    return checkpoint_name(step) if step == 1 else f"new/1/{checkpoint_name(step)}"


def _ours_without(sync: str, dirpath: str, step: int, progress: Progress) -> None:
    """Wrong: files, or directories, are not synced."""
    fsync = os.fsync

    def fsync_the_other(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) != (sync == "directory"):
            fsync(descriptor)

    os.fsync = fsync_the_other  # type: ignore[assignment]
    try:
        _ours(False, dirpath, step, progress)
    finally:
        os.fsync = fsync


def _ours_sharded(early_manifest: bool, dirpath: str, step: int, progress: Progress) -> None:
    """The files of two ranks, one commit, and rotation. With `early_manifest` wrong: the last shard comes after it."""
    sink.BUFFER_BYTES, sink.CHUNK_BYTES = BUFFER_BYTES // 4, BUFFER_BYTES // 2
    _direct.BUFFERS = _direct.DiskBuffers(BUFFER_BYTES, 3)
    storage, generation = Storage(), uuid.uuid4().hex
    path = f"{dirpath}/{checkpoint_name(step)}"
    ranks = [storage.open_directory(path, generation[:16], leads=not rank) for rank in range(2)]
    records = {}
    for number, (name, tensor) in enumerate(weights(step).items()):
        with ranks[number % 2].open_file(f"__{number % 2}_{number}.distcp") as file:
            torch.save({name: tensor}, file)
            records[file.name] = file.finish()
    records |= directories.write(ranks[0], {".metadata": b"table", "meta.pt": b"rest"})
    ranks[1].close()
    late = f"{path}/{min(records)}"
    if early_manifest:
        data = Path(ranks[0].attempt, min(records)).read_bytes()
        os.truncate(f"{ranks[0].attempt}/{min(records)}", 0)
        ranks[0]._sizes = lambda: {name: record.size_bytes for name, record in records.items()}  # type: ignore[method-assign]
    ranks[0].commit(directories.manifest(records, step, generation))
    if early_manifest:
        with open(late, "wb") as raw:
            raw.write(data)
            raw.flush()
            os.fsync(raw.fileno())
    progress.step = step
    if step > 1:
        storage.remove(f"{dirpath}/{checkpoint_name(step - 1)}")


def _load_sharded(path: Path) -> dict[str, Any]:
    info = ft.verify(str(path))
    if info.problem is not None:
        raise ValueError(info.problem)
    loaded: dict[str, Any] = {}
    for shard in sorted(path.glob("*.distcp")):
        loaded |= torch.load(shard, weights_only=True)
    return loaded


def _load_ours(path: Path) -> dict[str, Any]:
    info = ft.verify(str(path))
    if info.problem is not None:
        raise ValueError(info.problem)
    return _load_file(path)


# -- others, as they are used ------------------------------------------------------------------------------------


def _load_file(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, weights_only=True)["state_dict"]
    return loaded


def _lightning(dirpath: str, step: int, progress: Progress) -> None:
    """What `ModelCheckpoint(save_top_k=1)` does with the plugin of Lightning."""
    plugin = TorchCheckpointIO()
    plugin.save_checkpoint(checkpoint(step, NUMBERS), f"{dirpath}/{checkpoint_name(step)}")
    progress.step = step
    if step > 1:
        plugin.remove_checkpoint(f"{dirpath}/{checkpoint_name(step - 1)}")


def _lightning_same_disk(dirpath: str, step: int, progress: Progress) -> None:
    """The system's temporary directory, in which fsspec's transactions write, is on the disk of the checkpoints."""
    place = Path(dirpath).parent / "tmp"
    place.mkdir(exist_ok=True)
    tempfile.tempdir = str(place)
    _lightning(dirpath, step, progress)


def _fsspec(dirpath: str, step: int, progress: Progress) -> None:
    fs = LocalFileSystem()
    with fs.open(f"{dirpath}/{checkpoint_name(step)}", "wb") as file:
        torch.save(checkpoint(step, NUMBERS), file)
    progress.step = step
    if step > 1:
        fs.rm(f"{dirpath}/{checkpoint_name(step - 1)}")


def _dcp(dirpath: str, step: int, progress: Progress) -> None:
    """What Lightning's strategies for sharded models do, and then `ModelCheckpoint(save_top_k=1)`."""
    import torch.distributed.checkpoint as dcp

    writer = dcp.FileSystemWriter(f"{dirpath}/step={step}")
    dcp.save({"state_dict": weights(step)}, storage_writer=writer, no_dist=True)
    progress.step = step
    if step > 1:
        TorchCheckpointIO().remove_checkpoint(f"{dirpath}/step={step - 1}")


def _load_dcp(path: Path) -> dict[str, Any]:
    import torch.distributed.checkpoint as dcp

    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights(1).items()}
    try:
        dcp.load({"state_dict": found}, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    except dcp.api.CheckpointException as error:  # a BaseException
        raise ValueError(str(error)) from error
    return found


WAYS: dict[str, Way] = {
    "direct": Way("`lightning_ft`", partial(_ours, True), checkpoint_name, _load_ours),
    "cached": Way("`lightning_ft`, no direct I/O", partial(_ours, False), checkpoint_name, _load_ours),
    "sharded": Way(
        "`lightning_ft`, sharded (two ranks)", partial(_ours_sharded, False), checkpoint_name, _load_sharded
    ),
    "lightning": Way("Lightning's own plugin", _lightning, checkpoint_name, _load_file),
    "lightning_same_disk": Way(
        "the same, `TMPDIR` on the same disk", _lightning_same_disk, checkpoint_name, _load_file
    ),
    "fsspec": Way("`torch.save` into fsspec's `LocalFileSystem`", _fsspec, checkpoint_name, _load_file),
    "dcp": Way("DCP's `FileSystemWriter`", _dcp, "step={}".format, _load_dcp, ".metadata"),
    "new_directory": Way("", _ours_in_a_new_directory, _name_in_a_new_directory, _load_ours),
    "no_file_sync": Way("", partial(_ours_without, "file"), checkpoint_name, _load_ours),
    "no_directory_sync": Way("", partial(_ours_without, "directory"), checkpoint_name, _load_ours),
    "manifest_before_a_shard": Way("", partial(_ours_sharded, True), checkpoint_name, _load_sharded),
}
OURS = ("direct", "cached", "sharded")
OTHERS = ("lightning", "lightning_same_disk", "fsspec", "dcp")
BREAKAGES = ("no_file_sync", "no_directory_sync")
