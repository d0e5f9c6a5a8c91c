"""An object store in memory that takes objects in parts and publishes them whole, and logs what it does."""

from __future__ import annotations

import io
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from lightning_ft import discovery, verify
from tests.crash.model import ROOT, Names, Operation, Sync, Write

PART_BYTES = 4096


class PartedStore(AbstractFileSystem):  # type: ignore[misc]
    """``parted://...``: one store per process; listings are fresh, and an object that is there can be read.

    A request that was made and not answered may have been carried out or not: in the terms of the model, its change of
    names is not synced. Parts of an upload that is not complete are nowhere.
    """

    protocol = "parted"
    cachable = False
    objects: ClassVar[dict[str, bytes]] = {}
    log: ClassVar[list[Operation]] = []
    shows_parts: ClassVar[bool] = False
    """A wrong protocol: each part is published when it arrives."""
    _inodes: ClassVar[int] = 0

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        found = {key: data for key, data in self.objects.items() if key.startswith(path + "/") or key == path}
        if not found:
            raise FileNotFoundError(path)
        if not detail:
            return sorted(found)
        return [{"name": key, "size": len(data), "type": "file"} for key, data in sorted(found.items())]

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        if mode == "rb":
            return io.BytesIO(self.objects[path])
        return _Upload(self, path, mode, block_size=PART_BYTES)

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        del self.objects[path]
        self.log += [Names((((ROOT, _name(path)), None),)), Sync(ROOT)]

    def publish(self, path: str, parts: list[bytes]) -> None:
        """The object is there, whole."""
        self.objects[path] = b"".join(parts)
        PartedStore._inodes += 1
        offset = 0
        for part in parts:
            self.log.append(Write(self._inodes, offset, part))
            offset += len(part)
        self.log += [Sync(self._inodes), Names((((ROOT, _name(path)), self._inodes),)), Sync(ROOT)]


class _Upload(AbstractBufferedFile):  # type: ignore[misc]
    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts.append(self.buffer.getvalue())
        if final or self.fs.shows_parts:
            self.fs.publish(self.path, self.parts)
        return True

    def discard(self) -> None:
        self.parts = []


def _name(path: str) -> str:
    return path.rpartition("/")[2]


class Shop:
    """Shows a directory of objects to discovery; see `explore.Shop`."""

    URL = "parted://shown"

    def is_good(self, data: bytes) -> bool:
        self._show({"step=00000001.ckpt": data})
        return verify(f"{self.URL}/step=00000001.ckpt").problem is None

    def choose(self, files: dict[str, bytes]) -> str | None:
        self._show(files)
        chosen = discovery.select(self.URL).chosen
        return None if chosen is None else chosen.name

    def _show(self, files: dict[str, bytes]) -> None:
        PartedStore.objects = {f"shown/{name}": data for name, data in files.items()}


fsspec.register_implementation("parted", PartedStore, clobber=True)
