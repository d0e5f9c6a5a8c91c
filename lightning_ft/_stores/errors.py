"""What the errors of stores mean: the one place that says whether trying again may help."""

from __future__ import annotations

import asyncio
import errno

from lightning_ft.errors import ConfigurationError, FaultToleranceError, StorageError

# Errors of a busy or briefly absent store; a full disk or a missing permission is not going to mend itself.
_TRANSIENT = frozenset({errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET})

# Clients of stores, whose own errors are no OSErrors: a lost connection, a response cut short, a time-out.
_CLIENTS = frozenset({"aiohttp", "asyncio", "requests", "urllib3"})
# botocore raises the same kind for what is wrong with the arguments or the credentials, so these by name. Not by
# class: it need not be installed.
_CONNECTIONS = frozenset({"HTTPClientError", "ConnectionError", "IncompleteReadError", "ResponseParserError"})

_BUSY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_BUSY_CODES = frozenset(
    {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "OperationAborted", "Throttling"}
    # Damaged on the way there: the store has refused it.
    | {"BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "ConditionalRequestConflict"}
)
# The answer to a question, and no failure of the store.
_ANSWERS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed a little later."""
    if not isinstance(error, Exception):
        return False  # It was cancelled.
    if isinstance(error, StorageError):
        return error.transient
    if isinstance(error, (FaultToleranceError, *_ANSWERS)):
        return False
    code, status = _response(error)
    if status is not None:
        return status in _BUSY_STATUS or code in _BUSY_CODES
    if isinstance(error, OSError):
        return isinstance(error, (ConnectionError, TimeoutError)) or error.errno in _TRANSIENT
    if isinstance(error, asyncio.TimeoutError):  # no OSError before Python 3.11
        return True
    package = type(error).__module__.partition(".")[0]
    if package == "botocore":
        return any(kind.__name__ in _CONNECTIONS for kind in type(error).__mro__)
    return package in _CLIENTS


def is_refusal(error: BaseException) -> bool:
    """Whether a conditional write was refused because of what is there already."""
    # s3fs makes a FileExistsError of it only where the store names the condition, as few do.
    code, status = _response(error)
    return isinstance(error, FileExistsError) or status == 412 or code == "PreconditionFailed"


def is_bad_range(error: BaseException) -> bool:
    """Whether a range was asked for that the object does not have."""
    code, status = _response(error)
    return status == 416 or code == "InvalidRange"


def translated(error: Exception, path: str) -> Exception:
    """What is raised in place of `error`: itself if it is an answer, ours, or no doing of the store.

    To be raised ``from error``.
    """
    if isinstance(error, (FaultToleranceError, *_ANSWERS)):
        return error
    package = type(error).__module__.partition(".")[0]
    transient = is_transient(error)
    if not transient and not isinstance(error, OSError) and package != "botocore":
        return error
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        return ConfigurationError(
            f"{path}: {error}; give storage_options (key, secret, profile) or the store's own configuration"
        )
    return StorageError(f"{path}: {type(error).__name__}: {error}", path, transient)


def _response(error: BaseException) -> tuple[str, int | None]:
    """Error code and HTTP status of the answer behind `error`; "" and None if there was none."""
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict):  # of botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return str(response.get("Error", {}).get("Code", "")), status
    for name in ("status_code", "status", "code"):  # of azure, aiohttp, gcsfs
        value = getattr(error, name, None)
        if isinstance(value, int) and 400 <= value < 600:
            return "", value
    return "", None
