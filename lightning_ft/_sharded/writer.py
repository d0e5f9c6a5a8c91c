"""A checkpoint in a directory, written by all ranks: each its own file, rank 0 what holds them together.

The writer threads of all ranks run `torch.distributed.checkpoint.save` together, on a group that only they use::

    step                     ranks  afterwards
    -----------------------  -----  ------------------------------------------------------------------------------
    `create_local_plan`      all    every rank's copy of the state is complete, and rank 0 has opened the attempt;
                                    or nobody writes
    `write_data`             all    the rank's file is durable in the attempt, was read back if that is asked for,
                                    and the copy it was made of is known to have been good
    `finish`                 zero   every part of the plan is in one of the files; `.metadata` and `meta.pt` are in
                                    the attempt, durable; the directory has its manifest and its name

DCP gathers after each of the first two, so a rank that fails there fails the save on all ranks, before anything is
visible; every rank then raises the same error.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo  # by this name in every `.metadata` there is
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from lightning_ft import events
from lightning_ft._copying.staging import SnapshotError, SnapshotWithdrawnError
from lightning_ft._disk.directory import DirectoryAttempt, FileAttempt
from lightning_ft._saving import serialise
from lightning_ft._saving.read_back import read_back_directory, read_back_file, take_away
from lightning_ft._saving.task import SaveTask, Snapshot, Target
from lightning_ft._saving.times import SaveTimes
from lightning_ft._sharded.plan import Part
from lightning_ft._sharded.sharding import Agreed, WriterGroup
from lightning_ft.errors import RankFailure, SaveError
from lightning_ft.manifest import METADATA, REST, FileRecord, Manifest

_log = logging.getLogger(__name__)

_DCP_VERSION = "1.0.0"  # of the layout of files that is written here


@dataclass(frozen=True)
class Written:
    """What a rank tells rank 0 of its file; None for all if it had nothing to write."""

    name: str
    record: FileRecord | None
    places: list[tuple[int, int]]
    """Of each part of its plan: offset and length in the file, in bytes."""


@dataclass(frozen=True)
class ShardedSave(SaveTask):
    """A checkpoint in a directory. Every rank has one of these for it, in the same place of its queue.

    Of the snapshot of each rank, ``"items"`` and ``"optimizer_states"`` hold tensors, and ``"objects"`` other values,
    each under the number of its part in `parts`; ``"checkpoint"``, of rank 0, is what becomes `meta.pt`.
    """

    parts: tuple[Part, ...] = ()
    """What this rank writes."""
    everyone: tuple[tuple[Part, ...], ...] = ()
    """Rank 0: what each rank writes."""
    metadata: Metadata | None = None
    """Rank 0: that of the whole checkpoint, without the places of its parts."""
    group: WriterGroup | None = None
    """Where the writer threads of all ranks meet; None if there is one rank."""
    rank: int = 0

    @property
    def speaks(self) -> bool:
        return self.rank == 0

    def write(self, target: Target, times: SaveTimes) -> Manifest:
        """The checkpoint is durable under its name, and read back if that is asked for: on all ranks, or on none.

        Ranks: all. Thread: writer. Blocks on: the slowest rank's file; of a rank that is dead, on nothing; of one
        that hangs, on the timeout of the group.

        Raises:
            SnapshotError: The copy of some rank was not good, and another one will be taken by all.
            RankFailure: A rank failed; the same on all of them.
            SaveError: Another rank cannot be reached any more.
        """
        part = _Save(self, target, times)
        try:
            self._together(part)
        except CheckpointException as error:
            raise _agreed(error) from None
        except Exception as error:
            if part.committed is None:
                raise
            # Rank 0: the others do not hear of it, and will end with that. On disk it is.
            _log.warning("%s is committed, and other ranks cannot be told: %s", self.path, error)
        finally:
            part.end()
        return part.committed or self.manifest

    def read_back(self, target: Target, manifest: Manifest) -> bool:
        """False: every rank reads its file before anybody commits, where a difference fails the save on all ranks."""
        return False

    def _together(self, part: _Save) -> None:
        planner, writer = _Planner(part), _Writer(part)
        if self.group is None:
            planner.create_local_plan()
            writer.finish(Metadata({}), [writer.write_data(SavePlan([]), planner).value()])
            return
        with self.group.used() as process_group:
            save({}, storage_writer=writer, planner=planner, process_group=process_group)


def sharded_save(
    agreed: Agreed, snapshot: Snapshot, on_commit: Callable[[Manifest], None] | None, asked_at: float
) -> ShardedSave:
    """This rank's part of the save that was agreed on."""
    return ShardedSave(
        agreed.path, snapshot, agreed.manifest, on_commit if agreed.rank == 0 else None, False, asked_at,
        agreed.parts, agreed.everyone, agreed.metadata, agreed.group, agreed.rank,
    )  # fmt: skip


class _Save:
    """One rank's part in one save, while it is being written. Thread: writer."""

    def __init__(self, task: ShardedSave, target: Target, times: SaveTimes) -> None:
        self.committed: Manifest | None = None
        self._task = task
        self._target = target
        self._times = times
        self._checkpoint: dict[str, Any] = {}
        self._attempt: DirectoryAttempt | None = None

    def wait(self) -> None:
        """The copy of this rank's state is complete; on rank 0, there is a place for files."""
        with self._portable():
            self._checkpoint = self._task.snapshot.wait()
            self._times.write_begins()
            if self._task.speaks:
                events.emit(events.SaveStarted(self._task.path, self._task.manifest.step))
                self._attempt = self._open()  # now: what others have written into it, it alone clears away

    def write(self) -> Written:
        """This rank's file is durable in the attempt."""
        with self._portable():
            task = self._task
            name = f"__{task.rank}_0.distcp"
            written = Written(name, None, [])
            if task.parts:
                attempt = self._attempt = self._attempt or self._open()
                places: list[tuple[int, int]] = []

                def parts(file: FileAttempt) -> None:
                    places.clear()  # of a try before this one
                    self._write_parts(file, places)

                record = self._write_file(attempt, name, parts, task.snapshot.size_bytes)
                written = Written(name, record, places)
            # As late as can be: see `Staged.check`. Rank 0 commits when it has heard that every rank has come to here.
            task.snapshot.check()
            return written

    def finish(self, results: list[Written]) -> None:
        """The checkpoint is committed. Ranks: zero."""
        with self._portable():
            task, attempt = self._task, self._attempt
            assert attempt is not None
            assert task.metadata is not None
            metadata = replace(
                task.metadata,
                storage_data=_places(task.everyone, results),
                storage_meta=StorageMeta(checkpoint_id=task.path, save_id=task.manifest.generation),
            )
            if hasattr(metadata, "version"):
                metadata.version = _DCP_VERSION
            files = {written.name: written.record for written in results if written.record is not None}
            files[METADATA] = self._write_file(attempt, METADATA, lambda f: pickle.dump(metadata, f))
            rest, reductions = self._checkpoint["checkpoint"], task.snapshot.reductions
            files[REST] = self._write_file(attempt, REST, lambda f: serialise.save(rest, f, reductions))
            size_bytes = sum(record.size_bytes for record in files.values())
            manifest = replace(
                task.manifest,
                files=files,
                metrics=self._times.metrics(size_bytes),
            )
            manifest = attempt.commit(manifest)
            self._read_back(manifest)
            self.committed = manifest

    def end(self) -> None:
        """Nothing is held any more; unless it was committed, nothing of the checkpoint is left by this rank."""
        self._checkpoint = {}
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        try:
            if self._task.speaks and self.committed is None:
                attempt.abort()
            else:
                attempt.close()
        except Exception as error:  # stores have errors of their own classes
            _log.warning("%s: could not clean up %s: %s", self._task.path, attempt.attempt, error)

    # -- files ---------------------------------------------------------------------------------------------------

    def _open(self) -> DirectoryAttempt:
        task = self._task
        token = task.manifest.generation[:16]
        return self._target.retrying()(self._target.storage.open_directory, task.path, token, leads=task.speaks)

    def _write_file(
        self,
        attempt: DirectoryAttempt,
        name: str,
        write: Callable[[Any], object],
        expected_bytes: int | None = None,
    ) -> FileRecord:
        def once() -> FileRecord:
            with attempt.open_file(name, expected_bytes) as file:
                write(file)
                return file.finish()

        record = self._target.retrying()(once)
        depth = self._target.verify_after_write
        if depth is not None:
            self._target.retrying()(read_back_file, self._target.storage, attempt.attempt, name, record, depth)
        return record

    def _write_parts(self, file: FileAttempt, places: list[tuple[int, int]]) -> None:
        tensors = {**self._checkpoint["items"], **self._checkpoint["optimizer_states"]}
        objects = self._checkpoint["objects"]
        reductions = self._task.snapshot.reductions
        for number in range(len(self._task.parts)):
            offset = file.tell()
            # A value that is no tensor is a file of `torch.save`, too.
            serialise.save(tensors[number] if number in tensors else objects[number], file, reductions)
            places.append((offset, file.tell() - offset))

    def _read_back(self, manifest: Manifest) -> None:
        if self._target.verify_after_write is None:
            return
        path = self._task.path
        try:
            self._target.retrying()(read_back_directory, self._target.storage, path, manifest)
        except Exception as error:
            raise take_away(self._target.storage, path, error) from error

    @contextlib.contextmanager
    def _portable(self) -> Iterator[None]:
        """What is raised is understood by every rank, whatever it has installed."""
        try:
            yield
        except (SnapshotError, SnapshotWithdrawnError):
            raise
        except Exception as error:
            raise RankFailure(self._task.rank, f"{type(error).__name__}: {error}") from error


def _places(everyone: tuple[tuple[Part, ...], ...], results: list[Written]) -> dict[Any, Any]:
    """Where each part of the plan is.

    Raises:
        SaveError: A part is in no file.
    """
    places = {}
    for rank, (parts, written) in enumerate(zip(everyone, results, strict=True)):
        size_bytes = written.record.size_bytes if written.record is not None else 0
        lengths = [length for _, length in written.places]
        if len(lengths) != len(parts) or sum(lengths) != size_bytes or not all(lengths):
            raise SaveError(
                f"rank {rank} was to write {len(parts)} parts, and its file of {size_bytes} bytes has {len(lengths)}"
                f" with {sum(lengths)} bytes"
            )
        for part, (offset, length) in zip(parts, written.places, strict=True):
            places[part.item.index] = _StorageInfo(written.name, offset, length)
    return places


def _agreed(error: CheckpointException) -> Exception:
    """The one error that every rank raises for it."""
    failures = [failure[0] for _, failure in sorted(error.failures.items())]
    for failure in failures:
        if not isinstance(failure, (SnapshotError, SnapshotWithdrawnError)):
            return cast(Exception, failure)
    return cast(Exception, failures[0])


class _Planner(SavePlanner):
    """Lets DCP find out whether every rank is ready; what each one writes is known already."""

    def __init__(self, save: _Save) -> None:
        self._save = save

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        self._save.wait()
        return SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})  # what is returned here goes to all ranks in the end

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: Any) -> Any:
        raise NotImplementedError("a rank writes its parts by itself")


class _Writer(StorageWriter):
    """The files, by way of our storage."""

    def __init__(self, save: _Save) -> None:
        self._save = save

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        written: Future[Any] = Future()
        written.set_result(self._save.write())
        return written

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        self._save.finish(results)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
