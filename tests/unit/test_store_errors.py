from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from lightning_ft._stores.errors import is_bad_range, is_refusal, is_transient, translated
from lightning_ft.errors import ConfigurationError, CorruptCheckpointError, SaveError, StorageError


def of(module: str, name: str, *bases: type, base: type = Exception) -> Exception:
    """An error of a client that need not be installed."""
    return type(name, bases or (base,), {"__module__": module})("what it says")


def answered(status: int, code: str, kind: type[OSError] = OSError, number: int = errno.EIO) -> OSError:
    """As s3fs raises it: an OSError of its choice, and botocore's error as the cause."""
    error = kind(number, code) if kind is OSError else kind(code)
    cause: Any = of("botocore.exceptions", "ClientError")
    cause.response = {"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": code}}
    error.__cause__ = cause
    return error


class HTTPClientError(Exception):
    __module__ = "botocore.exceptions"


PASSING = [
    OSError(errno.EBUSY, "busy"),
    OSError(errno.ESTALE, "stale"),
    ConnectionResetError(),
    TimeoutError(),
    asyncio.TimeoutError(),
    of("aiohttp.client_exceptions", "ClientPayloadError"),
    of("urllib3.exceptions", "ReadTimeoutError"),
    of("botocore.exceptions", "EndpointConnectionError", type("ConnectionError", (Exception,), {})),
    of("botocore.exceptions", "ReadTimeoutError", HTTPClientError),
    answered(503, "SlowDown", number=errno.EBUSY),
    answered(500, "InternalError"),
    answered(400, "BadDigest", number=errno.EINVAL),
    answered(400, "RequestTimeout"),
    answered(409, "ConditionalRequestConflict"),
    StorageError("busy", "s3://a", transient=True),
]
LASTING = [
    OSError(errno.ENOSPC, "full"),
    OSError(errno.EIO, "broken"),
    FileNotFoundError("a"),
    answered(403, "AccessDenied", PermissionError),
    answered(403, "ExpiredToken", PermissionError),
    answered(400, "InvalidPart", number=errno.EINVAL),
    answered(412, "PreconditionFailed", number=errno.EINVAL),
    of("botocore.exceptions", "NoCredentialsError"),
    of("botocore.exceptions", "ParamValidationError"),
    StorageError("replaced", "s3://a"),
    SaveError("taken"),
    CorruptCheckpointError("a", "truncated"),
    ValueError("a mistake of ours"),
]


@pytest.mark.parametrize("error", PASSING, ids=lambda e: f"{type(e).__name__}-{e}")
def test_what_may_pass(error: Exception) -> None:
    assert is_transient(error)
    ours = translated(error, "s3://a")
    assert isinstance(ours, StorageError)
    assert ours.transient
    assert is_transient(ours)
    assert "s3://a" in str(ours) or ours is error


@pytest.mark.parametrize("error", LASTING, ids=lambda e: f"{type(e).__name__}-{e}")
def test_what_does_not(error: Exception) -> None:
    assert not is_transient(error)
    assert not is_transient(translated(error, "s3://a"))


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyboardInterrupt()], ids=repr)
def test_what_was_cancelled_is_not_tried_again(error: BaseException) -> None:
    assert not is_transient(error)


def test_answers_and_our_own_errors_keep_their_class() -> None:
    for error in (FileNotFoundError("a"), PermissionError("a"), SaveError("a"), ValueError("a mistake of ours")):
        assert translated(error, "s3://a") is error
    assert isinstance(translated(OSError(errno.EIO, "broken"), "s3://a"), StorageError)
    found = translated(of("botocore.exceptions", "NoCredentialsError"), "s3://a")
    assert isinstance(found, ConfigurationError)
    assert "storage_options" in str(found)


def test_a_refused_condition_is_known_in_every_dress() -> None:
    assert is_refusal(FileExistsError("a"))
    assert is_refusal(answered(412, "PreconditionFailed", number=errno.EINVAL))
    assert not is_refusal(answered(400, "InvalidPart", number=errno.EINVAL))
    assert not is_refusal(OSError(errno.EINVAL, "a"))


def test_a_range_that_is_not_there() -> None:
    assert is_bad_range(answered(416, "InvalidRange"))
    assert not is_bad_range(answered(404, "NoSuchKey"))
