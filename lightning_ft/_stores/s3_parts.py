"""An object on its way into an S3 store: parts in parallel, published whole or not at all by one last request."""

from __future__ import annotations

import base64
import hashlib
import re
import time
import zlib
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_ft._disk.sink import Sink
from lightning_ft.errors import SaveError, StorageError

if TYPE_CHECKING:
    from lightning_ft._stores.s3 import S3Store

# Of one part; S3 takes at least 5 MiB, but for the last, and at most 10,000 parts.
PART_BYTES = 8 << 20
MOST_PARTS = 9_000
# Parts on their way while the next one is filled.
PARTS_AT_ONCE = 4

_MD5 = re.compile(r"[0-9a-f]{32}")
_MD5_OF_PARTS = re.compile(r"[0-9a-f]{32}-[0-9]+")


@dataclass(frozen=True)
class _Part:
    """One part on its way."""

    number: int
    body: bytearray | bytes
    checksum: str
    future: Future[Any]
    started: float
    """By `time.monotonic`."""


class S3Parts(Sink):
    """An upload straight to the final key.

    Below one part it is one PUT. Every part carries a checksum that the store compares before it takes the part, and
    the store's answer is compared again here: the memory may have changed on the way.

    Memory: `PARTS_AT_ONCE` + 1 parts, larger than `PART_BYTES` only above 70 GiB; and what asyncio copies of a part
    that the network does not take at once.

    Args:
        store: Where it goes.
        path: The final name.
        expected_bytes: About so many will be written.
    """

    def __init__(self, store: S3Store, path: str, expected_bytes: int | None) -> None:
        self.path = path
        self._store = store
        self._place = store.place(path)
        self._part_bytes = max(PART_BYTES, -(-(expected_bytes or 0) // MOST_PARTS))
        self._part = bytearray(self._part_bytes)
        self._filled_bytes = 0
        self._idle: list[bytearray] = []
        self._on_their_way: deque[_Part] = deque()
        self._parts: list[dict[str, Any]] = []
        self._upload_id: str | None = None
        self._over = False
        self._with_checksum = store.takes_checksums()

    @property
    def held_parts(self) -> int:
        """How many parts are in memory."""
        return len(self._on_their_way) + len(self._idle) + 1

    @property
    def unfinished(self) -> bool:
        """Whether there is an upload that the store knows."""
        return self._upload_id is not None

    def append(self, view: memoryview) -> None:
        assert not self._over, "written after the end"
        while view.nbytes:
            if self._filled_bytes == self._part_bytes:
                self._send()
            count = min(view.nbytes, self._part_bytes - self._filled_bytes)
            self._part[self._filled_bytes : self._filled_bytes + count] = view[:count]
            self._filled_bytes += count
            view = view[count:]

    # -- parts ---------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """The part that was filled is on its way, and another one can be filled. Blocks on: the oldest part."""
        if self._upload_id is None:
            algorithm = {"ChecksumAlgorithm": "CRC32"} if self._with_checksum else {}
            answer = self._store.request(self.path, "create_multipart_upload", **self._place, **algorithm)
            self._upload_id = str(answer["UploadId"])
        if len(self._on_their_way) >= PARTS_AT_ONCE:
            self._settle()
        number = len(self._parts) + len(self._on_their_way) + 1
        body = self._filled()
        checksum = _crc32(body)
        arguments = {"PartNumber": number, "UploadId": self._upload_id, **self._upload(body, checksum)}
        future = self._store.calls.start(lambda: self._store.fs._call_s3("upload_part", **arguments))
        self._on_their_way.append(_Part(number, body, checksum, future, time.monotonic()))
        self._part = self._idle.pop() if self._idle else bytearray(self._part_bytes)
        self._filled_bytes = 0

    def _filled(self) -> bytearray | bytes:
        if self._filled_bytes == self._part_bytes:
            return self._part
        return bytes(memoryview(self._part)[: self._filled_bytes])  # the last part, or all there is

    def _upload(self, body: bytearray | bytes, checksum: str) -> dict[str, Any]:
        return {**self._place, "Body": body, **({"ChecksumCRC32": checksum} if self._with_checksum else {})}

    def _settle(self) -> None:
        """The oldest part has arrived as it was sent."""
        part = self._on_their_way.popleft()
        answer = self._store.calls.finish(part.future, self.path, part.started)
        self._compare(part.body, part.checksum, answer, f"part {part.number}")
        checksum = {"ChecksumCRC32": part.checksum} if answer.get("ChecksumCRC32") else {}
        self._parts.append({"PartNumber": part.number, "ETag": answer["ETag"], **checksum})
        if isinstance(part.body, bytearray):
            self._idle.append(part.body)

    def _compare(self, body: bytearray | bytes, checksum: str, answer: Any, what: str) -> None:
        """The store says that it holds what was sent, as far as it says anything."""
        etag = _plain(answer.get("ETag"))
        if stored := answer.get("ChecksumCRC32"):
            sent = checksum
        elif (
            _MD5.fullmatch(etag)
            and not answer.get("SSECustomerAlgorithm")
            and "kms" not in str(answer.get("ServerSideEncryption", ""))
        ):
            stored, sent = etag, hashlib.md5(body, usedforsecurity=False).hexdigest()
        else:
            return
        if stored != sent:
            message = f"{self.path}: the store holds another {what} than was sent: {stored}, not {sent}"
            raise StorageError(message, self.path, transient=True)

    # -- the end -------------------------------------------------------------------------------------------------

    def complete(self) -> None:
        if self._upload_id is None:
            return
        self._send()
        while self._on_their_way:
            self._settle()

    def put(self, condition: dict[str, str]) -> str:
        """The object is there, all of it; returns its ETag. `complete` has returned."""
        if self._upload_id is None:
            body = self._filled()
            checksum = _crc32(body)
            answer = self._store.request(self.path, "put_object", **self._upload(body, checksum), **condition)
            self._compare(body, checksum, answer, "object")
        else:
            answer = self._store.request(
                self.path, "complete_multipart_upload", **self._place, **condition,
                UploadId=self._upload_id, MultipartUpload={"Parts": self._parts},
            )  # fmt: skip
            self._upload_id = None
        self._over = True
        return _plain(answer.get("ETag"))

    def publish(self, total_bytes: int) -> None:
        """The object is there, in place of one that was, and has the size and the ETag that it should have.

        If the answer to the last request is lost, this fails, whether the object is there or not.
        """
        etag = self.put({})
        info = self._store.info(self.path)
        if int(info["size"]) == total_bytes and not differ(etag, str(info.get("ETag", ""))):
            return
        self._store.request(self.path, "delete_object", **self._place)
        raise SaveError(
            f"{self.path}: {total_bytes} bytes with ETag {etag} were uploaded, the store holds {info['size']} with"
            f" {_plain(info.get('ETag'))}",
            self.path,
        )

    def discard(self) -> None:
        on_their_way, self._on_their_way = self._on_their_way, deque()
        for part in on_their_way:
            part.future.cancel()
        self._over = True
        upload_id, self._upload_id = self._upload_id, None
        if upload_id is not None:
            self._store.abort_upload(self.path, upload_id)


def differ(etag: str, other: str) -> bool:
    """Whether two ETags are of different objects; some stores give one of another kind later, which tells nothing."""
    etag, other = _plain(etag), _plain(other)
    return etag != other and any(kind.fullmatch(etag) and kind.fullmatch(other) for kind in (_MD5, _MD5_OF_PARTS))


def _plain(etag: object) -> str:
    return str(etag or "").strip('"').lower()


def _crc32(body: bytearray | bytes) -> str:
    """As S3 writes it."""
    return base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()
