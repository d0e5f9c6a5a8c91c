"""A checkpoint on its way into an S3 store: parts in parallel, published whole or not at all by one last request."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import time
import zlib
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_ft._attempt import Attempt
from lightning_ft._names import parse_checkpoint_name, split
from lightning_ft._store_errors import is_refusal, is_transient
from lightning_ft.errors import CheckpointError, SaveError, StorageError
from lightning_ft.events import DataSynced, emit
from lightning_ft.manifest import Manifest, parse_tail

if TYPE_CHECKING:
    from lightning_ft._s3 import S3Store

_log = logging.getLogger(__name__)

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


class S3Attempt(Attempt):
    """An upload straight to the final key.

    Below one part it is one PUT. Every part carries a checksum that the store compares before it takes the part, and
    the store's answer is compared again here: the memory may have changed on the way.

    A checkpoint of a run never takes the place of another one: the store is asked to refuse that, where it was seen to
    do so, and is looked at before, where it was not. If a refusal, or a lost answer, leaves open whether the
    object is this one, it is read back: generation and digest of its manifest tell.

    Memory: `PARTS_AT_ONCE` + 1 parts, larger than `PART_BYTES` only above 70 GiB; and what asyncio copies of a part
    that the network does not take at once.

    Args:
        store: Where it goes.
        path: The final name.
        expected_bytes: About so many will be written.
    """

    def __init__(self, store: S3Store, path: str, expected_bytes: int | None) -> None:
        super().__init__(path, path)
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
        with self._own_error():
            self._with_checksum = store.takes_checksums()

    @property
    def held_parts(self) -> int:
        """How many parts are in memory."""
        return len(self._on_their_way) + len(self._idle) + 1

    def _write_all(self, view: memoryview) -> None:
        assert not self._over, "written after commit or abort"
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

    def _complete(self) -> None:
        if self._upload_id is None:
            return
        self._send()
        while self._on_their_way:
            self._settle()

    def _publish(self, total_bytes: int) -> None:
        assert self.manifest is not None
        name = split(self.path)[1]
        # Other callbacks may write over their own files, and mean to.
        exclusive = self.manifest.boundary != "none" and parse_checkpoint_name(name) is not None
        with self._own_error():
            refuses = exclusive and self._store.refuses_existing(self.path)
            there = None
            if exclusive and not refuses:
                # Nothing keeps another one from coming between this look and the request below.
                there = self._found()
                if there is not None and not self._is_this(there):
                    raise self._taken()
            if there is None:
                etag = self._put_object(refuses)
                self._over = True
                self._verify(etag)
        emit(DataSynced(self.path, self.attempt))

    def _put_object(self, refuses: bool) -> str:
        """The object is there, all of it: the commit. Returns its ETag, "" if the answer to that was lost."""
        condition = {"IfNoneMatch": "*"} if refuses else {}
        try:
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
        except Exception as error:
            refused = is_refusal(error) or is_refusal(error.__cause__ or error)
            # A finished upload is no longer known: the request was repeated after its first answer was lost.
            lost = is_transient(error) or (isinstance(error, FileNotFoundError) and self._upload_id is not None)
            if not refused and not lost:
                raise
            there = self._found()
            if there is not None and self._is_this(there):
                _log.info("%s is there, although the store answered: %s", self.path, error)
                return ""
            if refused:
                raise self._taken() from error
            raise
        return _plain(answer.get("ETag"))

    def _found(self) -> Manifest | str | None:
        """The manifest of what is under the name now, or what is wrong with it; None: nothing is there."""
        try:
            tail, size_bytes = self._store.tail(self.path)
            return parse_tail(tail, size_bytes, self.path) or "it has no manifest"
        except FileNotFoundError:
            return None
        except CheckpointError as error:
            return str(error)

    def _is_this(self, found: Manifest | str) -> bool:
        assert self.manifest is not None
        # Another attempt at the same save has other timings in its manifest, and the same bytes.
        return isinstance(found, Manifest) and (found.generation, found.digest, found.size_bytes) == (
            self.manifest.generation,
            self.manifest.digest,
            self.manifest.size_bytes,
        )

    def _taken(self) -> SaveError:
        return SaveError(
            f"{self.path}: there is another checkpoint of this name, which was not touched; does another run write "
            "into this directory?",
            self.path,
        )

    def _verify(self, etag: str) -> None:
        """What a reader finds under the name now is this checkpoint, as far as its end and its ETag tell."""
        tail, size_bytes, found_etag = self._store.tail_and_etag(self.path)
        try:
            found: Manifest | str = parse_tail(tail, size_bytes, self.path) or "it has no manifest"
        except CheckpointError as error:
            found = str(error)
        found_etag = _plain(found_etag)
        # Some stores give an ETag of another kind later.
        comparable = any(kind.fullmatch(etag) and kind.fullmatch(found_etag) for kind in (_MD5, _MD5_OF_PARTS))
        if self._is_this(found) and not (comparable and etag != found_etag):
            return
        if isinstance(found, Manifest) and not self._is_this(found):
            raise self._taken()  # It came after this one, and is somebody's.
        problem = found if isinstance(found, str) else f"ETag {found_etag} and not {etag}"
        self._store.request(self.path, "delete_object", **self._place)
        raise StorageError(f"{self.path}: the store holds something else than was uploaded: {problem}", self.path, True)

    def abort(self) -> None:
        on_their_way, self._on_their_way = self._on_their_way, deque()
        for part in on_their_way:
            part.future.cancel()
        self._over = True
        upload_id, self._upload_id = self._upload_id, None
        if upload_id is not None:
            self._store.abort_upload(self.path, upload_id)


def _plain(etag: object) -> str:
    return str(etag or "").strip('"').lower()


def _crc32(body: bytearray | bytes) -> str:
    """As S3 writes it."""
    return base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()
