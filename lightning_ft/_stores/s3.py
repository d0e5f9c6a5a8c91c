"""Stores that speak S3, through the calls below s3fs: one request where a file interface takes several.

s3fs brings credentials, sessions, endpoints and the event loop. It does not verify what it reads, keeps listings, and
publishes a file in one thread, part after part. Its `_call_s3` is private; a version without it is used like any other
file system of fsspec (see `Storage`).
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

from lightning_ft._disk.attempt import Attempt
from lightning_ft._disk.sink import Sink
from lightning_ft._names import SUFFIX, split
from lightning_ft._stores.errors import is_bad_range, is_refusal, is_transient
from lightning_ft._stores.objects import TAILS_AT_ONCE, Entry, ObjectStore
from lightning_ft._stores.ranged_file import RangedFile
from lightning_ft._stores.s3_parts import S3Parts
from lightning_ft._stores.s3_upload import Publication, S3Attempt
from lightning_ft.errors import CheckpointError, StorageError
from lightning_ft.manifest import TAIL_BYTES, Manifest, parse_directory

_log = logging.getLogger(__name__)

# An upload into a directory of ours that was begun so long ago, by the store's own clock, and is not finished was
# left by a killed process: none takes longer, and a younger one may be of another living process.
LEFTOVER_AGE = timedelta(hours=1)

_TOTAL = re.compile(r"bytes (?:[0-9]+-[0-9]+|\*)/([0-9]+)")

# Whether a store refuses to create what exists, by endpoint and bucket: tried out at the start of every fit.
_refuses: dict[tuple[str, str], bool] = {}


class S3Store(ObjectStore):
    """Objects of one S3 account and endpoint."""

    def __init__(self, fs: Any, deadline_secs: float) -> None:
        super().__init__(fs, deadline_secs)
        fs.retries = 1  # Calls are repeated by `Calls`: two layers multiply.

    def place(self, path: str) -> dict[str, str]:
        """Bucket and key of `path`, as the calls want them."""
        bucket, key, _ = self.fs.split_path(path)
        return {"Bucket": bucket, "Key": key}

    def request(self, path: str, method: str, **kwargs: Any) -> Any:
        """The store's answer. Blocks on: the store, until the deadline."""
        return self.calls.finish(self.calls.start(lambda: self.fs._call_s3(method, **kwargs)), path)

    # -- reading -------------------------------------------------------------------------------------------------

    def entries(self, dirpath: str) -> list[Entry]:
        """What is in `dirpath`, in any order; none if it does not exist. One request per 1,000."""
        bucket, key, _ = self.fs.split_path(dirpath)
        prefix = f"{key.rstrip('/')}/" if key else ""
        found: list[Entry] = []
        try:
            for page in self._pages(dirpath, Bucket=bucket, Prefix=prefix, Delimiter="/"):
                objects = [(item["Key"], item.get("ETag", "")) for item in page.get("Contents", [])]
                objects += [(item["Prefix"].rstrip("/"), "") for item in page.get("CommonPrefixes", [])]
                # Some stores list a placeholder object of the directory itself.
                found += [Entry(name, etag) for key, etag in objects if (name := key[len(prefix) :])]
        except FileNotFoundError:  # the bucket
            return []
        return found

    def _pages(self, path: str, **arguments: Any) -> Iterator[Any]:
        while True:
            page = self.request(path, "list_objects_v2", **arguments)
            yield page
            if not page.get("IsTruncated"):
                return
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def info(self, path: str) -> dict[str, Any]:
        """Type, size and ETag of `path`."""
        found: dict[str, Any] = self.calls.call(path, "info", path, refresh=True)
        return found

    def tail(self, path: str) -> tuple[bytes, int]:
        """The last bytes of `path`, all that can hold a manifest, and the size of the file: one request."""
        data, size_bytes, _ = self.tail_and_etag(path)
        return data, size_bytes

    def tail_and_etag(self, path: str) -> tuple[bytes, int, str]:
        """As `tail`, and the ETag."""
        return self._finish_tail(path, self._start_tail(path))

    def tails(self, paths: Iterable[str]) -> Iterator[tuple[str, tuple[bytes, int] | Exception]]:
        """For each path what `tail` returns or raises, in order; several requests are on their way at once."""
        coming: deque[tuple[str, Any]] = deque()
        left = iter(paths)
        try:
            while True:
                while len(coming) < TAILS_AT_ONCE and (path := next(left, None)) is not None:
                    coming.append((path, self._start_tail(path)))
                if not coming:
                    return
                path, future = coming.popleft()
                try:
                    data, size_bytes, _ = self._finish_tail(path, future)
                    yield path, (data, size_bytes)
                except Exception as error:
                    yield path, error
        finally:
            for _, future in coming:
                future.cancel()

    def _start_tail(self, path: str) -> Any:
        place = self.place(path)

        async def get() -> tuple[bytes, int, str] | None:
            answer = await self.fs._call_s3("get_object", **place, Range=f"bytes=-{TAIL_BYTES}")
            body = answer["Body"]
            try:
                size_bytes = int(answer["ContentLength"])
                if total := _TOTAL.fullmatch(answer.get("ContentRange") or ""):
                    size_bytes = int(total[1])
                elif size_bytes > TAIL_BYTES:
                    return None  # This store knows no such range, and has begun to send everything.
                return await body.read(), size_bytes, str(answer.get("ETag", ""))
            finally:
                body.close()

        return self.calls.start(get)

    def _finish_tail(self, path: str, future: Any) -> tuple[bytes, int, str]:
        try:
            found: tuple[bytes, int, str] | None = self.calls.finish(future, path)
        except FileNotFoundError:
            if self.info(path)["type"] == "directory":
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path) from None
            raise
        except StorageError as error:
            # An empty object has no last byte; and some stores refuse to give more of a small object than there is.
            if not is_bad_range(error.__cause__ or error):
                raise
            found = None
        if found is None:
            return *super().tail(path), str(self.info(path).get("ETag", ""))
        expected_bytes = min(found[1], TAIL_BYTES)
        if len(found[0]) != expected_bytes:
            raise StorageError(f"{path}: {len(found[0])} bytes came of {expected_bytes}", path, transient=True)
        return found

    def sizes(self, path: str) -> dict[str, int]:
        """Name and size in bytes of every file in the directory `path`; none if it does not exist."""
        bucket, key, _ = self.fs.split_path(path)
        pages = self._pages(path, Bucket=bucket, Prefix=f"{key}/", Delimiter="/")
        try:
            found = [(item["Key"][len(key) + 1 :], item["Size"]) for page in pages for item in page.get("Contents", [])]
        except FileNotFoundError:  # the bucket
            return {}
        return {name: int(size_bytes) for name, size_bytes in found if name}

    def open_read(self, path: str) -> RangedFile:
        """The bytes of `path` as it is now: an object that takes its place is not read in its stead."""
        info = self.info(path)
        if info["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        place, etag = self.place(path), info.get("ETag")

        def fetch(begin: int, end: int) -> Any:
            async def get() -> bytes:
                same = {"IfMatch": etag} if etag else {}
                answer = await self.fs._call_s3("get_object", **place, Range=f"bytes={begin}-{end - 1}", **same)
                body = answer["Body"]
                try:
                    if answer.get("ETag", etag) != etag:  # of a store that ignores the condition
                        raise StorageError(f"{path}: was replaced while it was read", path)
                    data: bytes = await body.read()
                    return data
                finally:
                    body.close()

            return self.calls.start(get)

        def finish(coming: Any) -> bytes:
            try:
                data: bytes = self.calls.finish(coming, path)
            except Exception as error:
                if is_refusal(error.__cause__ or error):
                    raise StorageError(f"{path}: was replaced while it was read", path) from error
                raise
            return data

        return RangedFile(path, int(info["size"]), fetch, finish, lambda coming: coming.cancel())

    # -- writing -------------------------------------------------------------------------------------------------

    def open_attempt(self, path: str, expected_bytes: int | None) -> Attempt:
        """A checkpoint can be written; nothing is visible."""
        return S3Attempt(self, path, expected_bytes)

    def open_sink(self, path: str, expected_bytes: int | None = None) -> Sink:
        """An object can be written; nothing is visible."""
        return S3Parts(self, path, expected_bytes)

    def remove_file(self, path: str) -> None:
        """The object `path` is gone."""
        self.request(path, "delete_object", **self.place(path))

    def put(self, path: str, data: bytes) -> None:
        """The small object `path` is `data`."""
        self.request(path, "put_object", **self.place(path), Body=data)

    def make_directory(self, path: str) -> None:
        """There is nothing to make: an object has its name, and no place."""

    def create_manifest(self, path: str, sealed: bytes, manifest: Manifest) -> None:
        """The manifest of a directory is there, whole: the commit. Raises what `Publication.publish` raises."""
        parts = S3Parts(self, path, len(sealed))
        try:
            parts.append(memoryview(sealed))
            parts.complete()
            publication = Publication(self, path, parts, manifest, partial(self._look, path))
            publication.publish(manifest.is_exclusive(split(path)[0]))
        finally:
            parts.discard()

    def _look(self, path: str) -> tuple[Manifest | str, str]:
        """What the object `path` says as the manifest of a directory, or what is wrong with it, and its ETag."""
        etag = str(self.info(path).get("ETag", ""))
        try:
            return parse_directory(self.calls.call(path, "cat_file", path), split(path)[0]), etag
        except CheckpointError as error:
            return str(error), etag

    def remove_tree(self, path: str) -> None:
        """Nothing of `path` is left."""
        place = self.place(path)
        bucket, key = place["Bucket"], place["Key"]
        pages = self._pages(path, Bucket=bucket, Prefix=f"{key}/")
        keys = [item["Key"] for page in pages for item in page.get("Contents", [])]
        # One by one: not every store knows the request that takes many, and its answer hides single failures.
        # Then the directories, which stores that keep their objects in files have, and show while they are empty.
        folders = {each[:end] for each in keys for end in range(len(key) + 1, len(each)) if each[end - 1] == "/"}
        for each in (*keys, *sorted(folders, key=len, reverse=True), f"{key}/", key):
            self.request(path, "delete_object", Bucket=bucket, Key=each)

    def remove_uploads(self, dirpath: str) -> list[str]:
        """Uploads to checkpoints in `dirpath`, or to files of one, begun `LEFTOVER_AGE` ago or earlier, are gone."""
        bucket, key, _ = self.fs.split_path(dirpath)
        prefix = f"{key.rstrip('/')}/" if key else ""
        arguments: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
        removed: list[str] = []
        while True:
            try:
                page = self.request(dirpath, "list_multipart_uploads", **arguments)
            except (FileNotFoundError, PermissionError, StorageError) as error:
                if is_transient(error):
                    raise
                # A right of its own, which a training need not have, and a request that not every store knows. Such
                # uploads cost money and do no harm.
                _log.info("%s: unfinished uploads cannot be listed: %s", dirpath, error)
                return removed
            # The store's own clock, as for the times below: ours may be another.
            date = page["ResponseMetadata"]["HTTPHeaders"].get("date")
            now = parsedate_to_datetime(date) if date else datetime.now(timezone.utc)
            for upload in page.get("Uploads", []):
                name = upload["Key"][len(prefix) :]
                checkpoint, _, file = name.partition("/")
                ours = upload["Key"].startswith(prefix) and checkpoint.endswith(SUFFIX) and "/" not in file
                if ours and now - upload["Initiated"] >= LEFTOVER_AGE:
                    self.abort_upload(f"{dirpath}/{name}", upload["UploadId"])
                    removed.append(f"{dirpath}/{name}")
            if not page.get("IsTruncated"):
                return removed
            arguments["KeyMarker"], arguments["UploadIdMarker"] = page["NextKeyMarker"], page["NextUploadIdMarker"]

    def abort_upload(self, path: str, upload_id: str) -> None:
        """The upload and its parts are gone; it may have been so before."""
        try:
            self.request(path, "abort_multipart_upload", **self.place(path), UploadId=upload_id)
        except FileNotFoundError:
            return

    def probe(self, path: str) -> None:
        """A file at `path` was written and deleted, and it is known whether one that exists would be refused."""
        place = self.place(path)
        refuses = False
        try:
            self.request(path, "put_object", **place, Body=b"probe", IfNoneMatch="*")
            try:
                self.request(path, "put_object", **place, Body=b"probe", IfNoneMatch="*")
            except Exception as error:
                refuses = is_refusal(error.__cause__ or error) or is_refusal(error)
                if not refuses:
                    raise
        except FileExistsError:
            refuses = True
        except StorageError as error:
            if is_refusal(error.__cause__ or error):
                refuses = True  # the answer to the first was lost, and what repeated it has found the object
            elif is_transient(error):
                raise
            else:  # the condition is unknown here; or nothing can be written, and this says so
                self.request(path, "put_object", **place, Body=b"probe")
        self.request(path, "delete_object", **place)
        known = _refuses.get(self._where(path))
        _refuses[self._where(path)] = refuses
        if not refuses and known is not False:
            _log.warning(
                "%s: this store ignores conditional writes, so two runs that write into one directory at the same "
                "moment would not be noticed; give every run a directory of its own",
                split(path)[0],
            )

    def takes_checksums(self) -> bool:
        """Whether requests carry checksums, as they do unless the configuration of botocore says otherwise."""
        config = self._client().meta.config
        return getattr(config, "request_checksum_calculation", None) != "when_required"

    def refuses_existing(self, path: str) -> bool:
        """Whether the store was seen to refuse the creation of an object that exists."""
        return _refuses.get(self._where(path), False)

    def _where(self, path: str) -> tuple[str, str]:
        return str(self._client().meta.endpoint_url), self.place(path)["Bucket"]

    def _client(self) -> Any:
        if self.fs._s3 is None:
            self.calls.finish(self.calls.start(self.fs.set_session), "s3")
        return self.fs._s3
