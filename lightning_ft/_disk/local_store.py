"""For local paths what `ObjectStore` is for URLs: by the operating system's own calls, and durable when it counts."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from typing import BinaryIO, cast

from lightning_ft._disk.attempt import LocalAttempt
from lightning_ft._disk.directory import LocalDirectoryAttempt
from lightning_ft._disk.disk_file import hold, local_sizes, make_dirs, remove_local, sync_dir
from lightning_ft._disk.threaded_file import ThreadedFile
from lightning_ft._names import attempt_name, deleted_name, join, parse_leftover, probe_name, split
from lightning_ft._stores.objects import Entry
from lightning_ft.events import DeleteHidden, emit
from lightning_ft.manifest import TAIL_BYTES

_log = logging.getLogger(__name__)


class LocalStore:
    """Files of this machine, or of what is mounted there.

    They do not pass through `fsspec`, whose local transactions go through the system's temporary directory, move
    without fsync, and keep their state on an instance shared by all threads.
    """

    # -- reading -------------------------------------------------------------------------------------------------

    def entries(self, dirpath: str) -> list[Entry]:
        """What is in `dirpath`; raises FileNotFoundError if it does not exist."""
        return [Entry(name, "") for name in os.listdir(dirpath)]

    def exists(self, path: str) -> bool:
        """Whether there is something at `path`; a file system that does not answer raises and is not "no"."""
        try:
            os.stat(path)  # `os.path.exists` turns some errors into False
        except FileNotFoundError:
            return False
        return True

    def is_unfinished(self, path: str) -> bool:
        """What is unfinished has a hidden name here."""
        return False

    def is_file(self, path: str) -> bool:
        """Whether `path` is one file, and no directory."""
        return os.path.isfile(path)

    def size(self, path: str) -> int:
        """Size in bytes of the file `path`."""
        return os.stat(path).st_size

    def sizes(self, path: str) -> dict[str, int]:
        """Name and size in bytes of every file in the directory `path`."""
        return local_sizes(path)

    def tail(self, path: str) -> tuple[bytes, int]:
        """The last bytes of `path`, all that can hold a manifest, and the size of the file."""
        if not stat.S_ISREG(mode := os.stat(path).st_mode) and not stat.S_ISDIR(mode):
            raise OSError(errno.EINVAL, "neither a file nor a directory", path)  # to open a pipe may take for ever
        with open(path, "rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            file.seek(max(0, size_bytes - TAIL_BYTES))
            return file.read(TAIL_BYTES), size_bytes

    def tails(self, paths: Iterable[str]) -> Iterator[tuple[str, tuple[bytes, int] | Exception]]:
        """For each path what `tail` returns or raises, in order."""
        for path in paths:
            try:
                yield path, self.tail(path)
            except OSError as error:
                yield path, error

    def open_read(self, path: str) -> BinaryIO:
        """The bytes of `path`, to be closed by the caller; large reads use several threads."""
        return cast(BinaryIO, ThreadedFile(path))

    # -- writing -------------------------------------------------------------------------------------------------

    def open_attempt(self, path: str, expected_bytes: int | None) -> LocalAttempt:
        """A checkpoint can be written, under a hidden name."""
        return LocalAttempt(path, expected_bytes)

    def open_directory(self, path: str, token: str, leads: bool) -> LocalDirectoryAttempt:
        """Files of a checkpoint directory can be written, in a hidden one."""
        return LocalDirectoryAttempt(path, token)

    def remove(self, path: str) -> None:
        """Nothing of `path`, a file or a directory, is left; raises FileNotFoundError if there was nothing."""
        dirpath, name = split(path)
        hidden = join(dirpath, deleted_name(name, secrets.token_hex(8)))
        os.rename(path, hidden)
        sync_dir(dirpath)
        emit(DeleteHidden(path))
        remove_local(hidden)

    def put(self, path: str, data: bytes) -> None:
        """The file `path`, new, holds `data`, durably; its name may not be durable yet."""
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def replace(self, path: str, data: bytes) -> None:
        """The file `path` holds `data`, durably; at every moment there is the one before, or this one."""
        dirpath, name = split(path)
        attempt = join(dirpath, attempt_name(name, secrets.token_hex(8)))
        self.put(attempt, data)
        os.replace(attempt, path)
        sync_dir(dirpath)

    def remove_file(self, path: str) -> None:
        """The file `path` is gone; raises FileNotFoundError if there was none."""
        os.unlink(path)

    def remove_leftover(self, path: str, unfinished: str | None) -> None:
        """What a killed process left under the hidden name `path` is gone."""
        remove_local(path)

    def remove_abandoned(self, dirpath: str) -> list[str]:
        """Attempts in `dirpath` that no living process holds are gone, as far as we may; returns their paths."""
        removed = []
        for name in sorted(os.listdir(dirpath)):
            leftover = parse_leftover(name)
            if leftover is None or leftover.kind != "attempt":
                continue
            path = join(dirpath, name)
            try:
                if _removed_if_abandoned(path):
                    removed.append(path)
            except FileNotFoundError:
                pass  # committed or cleared away by another process since it was listed
            except OSError as error:  # another user's, say: no reason not to train
                _log.warning("%s: left by a save that was killed, and cannot be removed: %s", path, error)
        return removed

    def remove_uploads(self, dirpath: str) -> list[str]:
        """There are none here."""
        return []

    def probe(self, path: str) -> None:
        """The directory of `path` exists, and a file in it was written, renamed and deleted."""
        dirpath = split(path)[0]
        renamed = join(dirpath, probe_name(secrets.token_hex(8)))
        make_dirs(dirpath)
        self.put(path, b"probe")
        os.replace(path, renamed)
        sync_dir(dirpath)
        os.unlink(renamed)


def _removed_if_abandoned(path: str) -> bool:
    """Whether no living process held the attempt `path`, which is gone then."""
    # A lock by way of NFS needs write access, which a directory does not give: there it stays.
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY if os.path.isdir(path) else os.O_RDWR)
    try:
        if not hold(fd):
            return False
        remove_local(path)
    finally:
        os.close(fd)
    return True
