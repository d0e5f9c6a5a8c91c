"""The directories of one fit: what they hold when it starts, and what happens in them after a save.

With one directory, a checkpoint that is committed is followed by the rotation. With a local one in front::

    thread    what happens                                        on disk afterwards
    --------  --------------------------------------------------  --------------------------------------------------
    writer    the save, to the local directory                    the checkpoint there
    writer    if it is due in the other: the upload is asked for  the same; it stays until the upload is over
    writer    local rotation                                      what the local policy keeps, and what waits for that
    uploads   the upload                                          the checkpoint in both
    uploads   rotation of the other directory                     what its policy keeps
    writer    local rotation again                                what the local policy keeps
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

from lightning_ft import _names
from lightning_ft._disk.lock import DirectoryLock
from lightning_ft._fit import local_tier
from lightning_ft._fit.local_tier import LocalTier
from lightning_ft._ranks.dist import Ranks
from lightning_ft._ranks.same_directory import require_same_directory
from lightning_ft._restart.starts import StartCounter
from lightning_ft.discovery import list_checkpoints, start_of, verify
from lightning_ft.errors import CheckpointError
from lightning_ft.events import Committed, Event
from lightning_ft.manifest import CheckpointInfo, Manifest
from lightning_ft.plugin import FaultTolerantCheckpointIO
from lightning_ft.retention import Retention
from lightning_ft.rotation import Trust, rotate
from lightning_ft.storage import Storage

_log = logging.getLogger(__name__)


class Tiers:
    """Where one fit saves.

    Args:
        dirpath: Directory or URL of the run.
        retention: What stays in it.
        local: The directory in front of it, if there is one.
        plugin: Our plugin; None if the user gave another one, which then has one directory.
        give_up_after: See `_restart.starts.StartCounter`.
    """

    def __init__(
        self,
        dirpath: str,
        retention: Retention,
        local: LocalTier | None,
        plugin: FaultTolerantCheckpointIO | None,
        give_up_after: int | None = None,
    ) -> None:
        self.dirpath = dirpath
        self.local = local
        self._retention = retention
        self._plugin = plugin
        self._options = plugin.storage_options if plugin is not None else None
        self._locks: list[DirectoryLock] = []
        self._names: set[str] = set()
        self._pinned = ""
        self._commits = 0
        self._durable: deque[Committed] = deque()
        self._newest: tuple[str, Manifest] | None = None  # of the local directory; only the writer thread looks
        # A full read back is the only way to know a checkpoint better than its listing does.
        read = plugin is not None and plugin.verify_after_write == "full"
        storages = {dirpath: Storage(self._options)} if plugin is not None else {}
        if local is not None:
            storages[local.dirpath] = Storage()
        self.starts = StartCounter(storages, give_up_after)
        self.begun_from: Manifest | None = None
        """Of the checkpoint that `start_from` was told; None too if it has none. Rank 0 knows it."""
        self._trust = Trust(self._options) if read else None
        self._local_trust = Trust(None) if read else None

    @property
    def first(self) -> str:
        """The directory that a save is written to."""
        return self.dirpath if self.local is None else self.local.dirpath

    def note(self, event: Event) -> None:
        """What is a checkpoint of the run that is durable now is kept until it is taken. Thread: main or writer."""
        if not isinstance(event, Committed) or not self.has(event.path):
            return
        dirpath, name = _names.split(event.path)
        if _names.parse_checkpoint_name(name):  # not what another callback saves there
            self._commits += dirpath == self.first
            self._durable.append(event)

    def take_durable(self) -> list[Committed]:
        """Checkpoints of the run that have become durable and were not taken yet, in order. Thread: main."""
        return [self._durable.popleft() for _ in range(len(self._durable))]

    def has(self, path: str) -> bool:
        """Whether `path` is in one of the directories."""
        dirpath = _names.split(path)[0]
        return dirpath == self.dirpath or (self.local is not None and dirpath == self.local.dirpath)

    @property
    def two(self) -> bool:
        """Whether there is a local directory in front of the other."""
        return self.local is not None

    def is_local(self, path: str) -> bool:
        """Whether `path` is in the local directory in front of the other."""
        return self.local is not None and _names.split(path)[0] == self.local.dirpath

    def open(self, ranks: Ranks) -> tuple[int, str]:
        """The directories are there, ours until `close`, and empty of what a crash left; every rank sees the main one.

        Ranks: all. On disk after: the directories. Returns the ordinal of this start, and the id of the run if it is a
        new one.

        Raises:
            ConfigurationError: A directory cannot be written, or holds checkpoints of something else, or is another
                one on another rank.
            DirectoryInUseError: Another live run writes into one.
        """
        try:
            self._names, start, run_id = ranks.decide(self._open)
            require_same_directory(ranks, self.dirpath, self._options)
        except BaseException:
            self.close()  # nobody closes a session that was never made
            raise
        return start, run_id

    def _open(self) -> tuple[set[str], int, str]:
        self._open_one(self.dirpath, Storage(self._options))
        if self.local is not None:
            self._open_one(self.local.dirpath, Storage())
            local_tier.claim(self.local.dirpath, self.dirpath)
        names, start = start_of(self.dirpath, self._options)
        if self.local is not None:
            local_names, local_start = start_of(self.local.dirpath)
            names, start = names | local_names, max(start, local_start)
        self.starts.open(names)
        return names, start, uuid.uuid4().hex

    def _open_one(self, dirpath: str, storage: Storage) -> None:
        storage.probe(dirpath)
        lock = DirectoryLock(dirpath)
        lock.acquire()
        self._locks.append(lock)
        storage.remove_leftovers(dirpath)

    def note_damaged(self, infos: Iterable[CheckpointInfo]) -> None:
        """These were read, and are not what was written: rotations neither count nor delete them. Ranks: zero."""
        if self._plugin is not None:
            self.starts.note_damaged(info for info in infos if self.has(info.path))

    def start_from(self, path: str) -> None:
        """The fit is about to be started from `path`, which "last" has chosen. Ranks: zero."""
        if self._plugin is None or not self.has(path):
            return
        info = verify(path, "listed", None if self.is_local(path) else self._options)
        self.begun_from = info.manifest
        if info.manifest is not None:
            self.starts.begin(info.manifest.generation, info.path)

    def close(self) -> None:
        """The directories are free for others."""
        locks, self._locks = self._locks, []
        for lock in locks:
            lock.release()

    def infos(self) -> list[CheckpointInfo]:
        """Everything in the directories. Ranks: zero."""
        local = [] if self.local is None else list_checkpoints(self.local.dirpath)
        return [*list_checkpoints(self.dirpath, self._options), *local]

    def new_path(self, step: int) -> str:
        """Where to save: a name that is in neither directory, since no checkpoint is ever written over. Ranks: all."""
        name = _names.next_name(step, self._names)
        self._names.add(name)
        return _names.join(self.first, name)

    def keep_predecessors(self) -> None:
        """Of the newest checkpoint nobody knows yet whether a finite loss comes of it: the one before stays with it."""
        self._retention = _two_at_least(self._retention)
        if self.local is not None:
            self.local = replace(self.local, retention=_two_at_least(self.local.retention))

    def pin(self, path: str) -> None:
        """The checkpoint `path`, from which training goes on, stays until two newer ones are there."""
        self._pinned, self._commits = _names.split(path)[1], 0

    def _pins(self, dirpath: str) -> frozenset[str]:
        return frozenset([_names.join(dirpath, self._pinned)] if self._pinned and self._commits < 2 else [])

    def figures(self, committed: Committed) -> Mapping[str, float | int]:
        """What loggers are told of a save: of an upload, what is not in the figures of the save before it."""
        if self.local is None or self.is_local(committed.path):
            return committed.metrics
        figures = committed.metrics
        return {f"upload_{name}": figures[name] for name in ("write_secs", "total_secs", "bytes_per_sec")}

    # -- after a save --------------------------------------------------------------------------------------------

    def on_commit(self, path: str, run_id: str, *, upload: bool) -> Callable[[Manifest], None]:
        """What follows when the save to `path`, of run `run_id`, has committed.

        Args:
            path: What `new_path` returned.
            run_id: The run.
            upload: Whether it is due in `dirpath` too, if it was written locally.
        """
        if self.local is None:
            return partial(self._after_only, path, run_id)
        return partial(self._after_local, path, run_id, upload)

    def upload(self, path: str, run_id: str) -> None:
        """The local checkpoint `path`, which was saved before or is being saved, will be in `dirpath`, if it is not.

        Ranks: zero. Thread: main. Blocks on: nothing. If `path` is not there when its turn comes, because its save has
        failed, nothing happens: that failure was reported.
        """
        assert self._plugin is not None
        self._plugin.writer.then(path, partial(self._upload_if_there, path, run_id))

    def _upload_if_there(self, path: str, run_id: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            manifest, _ = Storage().read_manifest(path)
            if manifest is not None and not self._is_uploaded(path, manifest):
                self._ask_for_upload(path, run_id, manifest)

    def _is_uploaded(self, path: str, manifest: Manifest) -> bool:
        """Whether `dirpath` has the name of the local checkpoint `path`, which is then not written over."""
        target = _names.join(self.dirpath, _names.split(path)[1])
        try:
            there, _ = Storage(self._options).read_manifest(target)
        except FileNotFoundError:
            return False
        except CheckpointError:
            there = None
        if there is None or there.generation != manifest.generation:
            _log.warning("%s is not uploaded: %s is another checkpoint, or damaged", path, target)
        return True

    def _after_only(self, path: str, run_id: str, manifest: Manifest) -> None:
        self.starts.progress()
        self._rotate(path, run_id, manifest)

    def _rotate(self, path: str, run_id: str, manifest: Manifest) -> None:
        """The directory of the run holds what its policy keeps."""
        given_up = self.starts.given_up
        removed = rotate(
            self.dirpath,
            path,
            run_id,
            self._retention,
            self._options,
            manifest,
            pinned=self._pins(self.dirpath),
            given_up=given_up,
            trust=self._trust,
            damaged=self.starts.damaged_in(self.dirpath),
        )
        if given_up:
            self.starts.forget(removed)

    def _after_local(self, path: str, run_id: str, upload: bool, manifest: Manifest) -> None:
        self._newest = path, manifest
        self.starts.progress()
        if upload:
            self._ask_for_upload(path, run_id, manifest)
        self._rotate_local(run_id)

    def _ask_for_upload(self, path: str, run_id: str, manifest: Manifest) -> None:
        assert self._plugin is not None
        target = _names.join(self.dirpath, _names.split(path)[1])
        self._plugin.uploads.upload(path, target, manifest, partial(self._after_upload, target, run_id))

    def _after_upload(self, path: str, run_id: str, manifest: Manifest) -> None:
        self._rotate(path, run_id, manifest)
        assert self._plugin is not None
        # What waited for this upload may go. In the other thread, which alone removes local files.
        self._plugin.writer.then(path, partial(self._rotate_local, run_id, path))

    def _rotate_local(self, run_id: str, uploaded: str | None = None) -> None:
        """The local directory holds what its policy keeps and what is still to be uploaded. Thread: writer."""
        assert self._plugin is not None
        assert self.local is not None
        if self._newest is None or self._plugin.writer.last_save_failed:
            return
        newest, manifest = self._newest
        done = set() if uploaded is None else {_names.join(self.local.dirpath, _names.split(uploaded)[1])}
        rotate(
            self.local.dirpath, newest, run_id, self.local.retention, None, manifest,
            pinned=(self._plugin.uploads.sources - done) | self._pins(self.local.dirpath),
            given_up=self.starts.given_up, trust=self._local_trust,
            damaged=self.starts.damaged_in(self.local.dirpath),
        )  # fmt: skip


def _two_at_least(retention: Retention) -> Retention:
    return retention if retention.keep_last != 1 else replace(retention, keep_last=2)
