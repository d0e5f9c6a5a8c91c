"""The crash model of `model`, over checkpoints that are directories: commits of two ranks, rotation, and restarts."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lightning_ft import discovery
from lightning_ft._disk.directory import DirectoryAttempt, LocalDirectoryAttempt
from lightning_ft._disk.disk_file import DiskFile
from lightning_ft._names import checkpoint_name
from lightning_ft.manifest import FileRecord
from lightning_ft.storage import Storage
from tests import directories
from tests.crash.model import Disk, Operation, Reported, State
from tests.crash.recorded_os import Recording

PATH = ("runs", "1")
KEEP = 2
STEPS = 6
Tree = Mapping[str, bytes | dict[str, bytes]]

pytestmark = pytest.mark.usefixtures("small_buffers")


def contents(step: int, rank: int) -> dict[str, bytes]:
    """What a rank writes: some blocks, so that they can be torn."""
    shard = {f"__{rank}_0.distcp": f"step {step} rank {rank} ".encode() * 60}
    return shard if rank else {**shard, ".metadata": b"table %d" % step, "meta.pt": b"rest %d" % step}


def save(storage: Storage, path: str, step: int) -> None:
    """Two ranks' files, one commit."""
    generation = uuid.uuid4().hex
    ranks = [storage.open_directory(path, generation[:16], leads=not rank) for rank in range(2)]
    records: dict[str, FileRecord] = {}
    for rank in (1, 0):
        records |= directories.write(ranks[rank], contents(step, rank))
    ranks[1].close()
    ranks[0].commit(directories.manifest(records, step, generation))


def run(dirpath: str, log: list[Operation], first: int = 1) -> None:
    """Saves with rotation, each reported after its commit."""
    storage = Storage()
    storage.remove_leftovers(dirpath)
    for step in range(first, first + STEPS):
        save(storage, f"{dirpath}/{checkpoint_name(step)}", step)
        log.append(Reported(step))
        if step > KEEP:
            storage.remove(f"{dirpath}/{checkpoint_name(step - KEEP)}")


@dataclass
class Found:
    """What the states after all prefixes of a log are worth."""

    states: int = 0
    violations: list[str] = field(default_factory=list)
    seen: set[Any] = field(default_factory=set)


def explore(recording: Recording, place: Path, enough: int) -> Found:
    """Every state that a crash may leave is shown to discovery, once, up to so many violations."""
    found = Found()
    state = State(Disk())
    for number, operation in enumerate(recording.log):
        state.apply(operation)
        for disk in state.crashed(number):
            tree = disk.tree(PATH, recording.directories)
            key = (repr(sorted((tree or {}).items(), key=str)), len(state.reported))
            if key in found.seen:
                continue
            found.seen.add(key)
            found.states += 1
            wrong = judge(tree or {}, state.reported, place / str(found.states))
            if wrong:
                found.violations.append(f"after operation {number}, {str(operation)[:100]}: {wrong}")
                if len(found.violations) == enough:
                    return found
    return found


def judge(tree: Tree, reported: list[int], shown: Path) -> str:
    """What is wrong with what discovery makes of a directory of these files; empty: nothing."""
    lay_out(tree, shown)
    selection = discovery.select(str(shown))
    infos = [info for info in discovery.list_checkpoints(str(shown)) if info.manifest is not None]
    good = {info.manifest.step for info in infos if info.manifest and discovery.verify(info.path).problem is None}
    newest = max(reported, default=0)
    chosen = selection.chosen
    if chosen is None:
        return f"step {newest} was reported, and nothing is taken" if reported else ""
    assert chosen.manifest is not None
    step = chosen.manifest.step
    expected = {**contents(step, 0), **contents(step, 1)}
    files = {name: (Path(chosen.path) / name).read_bytes() for name in expected}
    if files != expected:
        return f"{chosen.name} is taken, and is not whole"
    if step < newest:
        return f"step {newest} was reported, and {step} is taken"
    if len(good) < min(KEEP, len(reported)):
        return f"{sorted(good)} are good of {len(reported)} reported"
    return ""


def lay_out(tree: Tree, place: Path) -> None:
    place.mkdir(parents=True)
    for name, content in tree.items():
        if isinstance(content, bytes):
            (place / name).write_bytes(content)
            continue
        (place / name).mkdir()
        for file, data in content.items():
            (place / name / file).write_bytes(data)


def explored(tmp_path: Path, break_it: Callable[[], None] = lambda: None, enough: int = 50) -> Found:
    (tmp_path / "root").mkdir()
    recording = Recording(str(tmp_path / "root"))
    with recording.recording():
        break_it()  # above the layer: what is left out is left out of the log
        run(str(tmp_path.joinpath("root", *PATH)), recording.log)
    return explore(recording, tmp_path / "shown", enough)


def test_no_crash_loses_a_directory(tmp_path: Path) -> None:
    found = explored(tmp_path)
    print(f"{found.states} states, {len(found.violations)} violations")
    assert found.violations == []
    assert found.states > 1000


def _manifest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory has its name and its manifest before the last shard is there."""
    commit = LocalDirectoryAttempt.commit

    def early(self: DirectoryAttempt, manifest: Any) -> Any:
        last = f"{self.attempt}/__0_0.distcp"
        with open(last, "rb") as file:
            data = file.read()
        monkeypatch.setattr(
            LocalDirectoryAttempt, "_sizes", lambda self: {n: r.size_bytes for n, r in manifest.files.items()}
        )
        os.unlink(last)
        written = commit(self, manifest)
        shard = DiskFile(f"{self.path}/__0_0.distcp")
        shard.append(memoryview(data))
        shard.complete()
        shard.publish(len(data))
        return written

    monkeypatch.setattr(LocalDirectoryAttempt, "commit", early)


def _unsynced_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = DiskFile.publish

    def unsynced(self: DiskFile, total_bytes: int) -> None:
        if not self.path.endswith(".distcp"):
            return publish(self, total_bytes)
        self._close()
        self._published = True
        return None

    monkeypatch.setattr(DiskFile, "publish", unsynced)


def _unsynced_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the files are not durable when the directory gets its own."""
    from lightning_ft._disk import directory

    sync_dir = directory.sync_dir
    monkeypatch.setattr(directory, "sync_dir", lambda path: None if path.endswith(".attempt") else sync_dir(path))


@pytest.mark.parametrize("broken", [_manifest_first, _unsynced_shards, _unsynced_attempt])
def test_the_model_catches_a_commit_that_is_wrong(
    broken: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = explored(tmp_path, lambda: broken(monkeypatch), enough=1)
    assert found.violations
