"""A store that many processes see, made of a local directory, which writes down who has read how much of what."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

LOG = "counted.reads"
"""Beside the directory of a URL ``counted:///dir/run``: what was read of files in it."""


class Counted(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Knows no coroutines; of every range that is read, a line is written."""

    protocol = "counted"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inner = LocalFileSystem(auto_mkdir=True)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("counted://").strip("/")

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        assert mode == "wb", "reads go through cat_file"
        return self.inner.open(path, mode)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        path = self._strip_protocol(path)
        data: bytes = self.inner.cat_file(path, start, end)
        line = json.dumps([os.getpid(), os.environ.get("LOCAL_RANK", "0"), path, len(data)])
        fd = os.open(Path(path).parent.parent / LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(fd, f"{line}\n".encode())
        finally:
            os.close(fd)
        return data

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.inner.info(self._strip_protocol(path))
        return found

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self.inner.ls(self._strip_protocol(path), detail)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        self.inner.pipe_file(self._strip_protocol(path), value)

    def rm_file(self, path: str) -> None:
        self.inner.rm_file(self._strip_protocol(path))

    def rm(self, path: str, recursive: bool = False, **options: Any) -> None:
        self.inner.rm(self._strip_protocol(path), recursive)


fsspec.register_implementation("counted", Counted, clobber=True)


def read_bytes(directory: Path, name: str) -> Counter[tuple[int, str]]:
    """How many bytes of the file `name` each process, by id and rank, has read in a run below `directory`."""
    counted: Counter[tuple[int, str]] = Counter()
    for line in (directory / LOG).read_text().splitlines():
        pid, rank, path, size_bytes = json.loads(line)
        if os.path.basename(path) == name:
            counted[pid, rank] += size_bytes
    return counted
