"""Calls into a file system of fsspec: each ends at a deadline, and what it raises is ours.

The clients' own retries multiply: a store that is down keeps one call of s3fs for minutes, one that takes everything
and never answers for longer.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import tenacity
from fsspec.implementations.memory import MemoryFileSystem

from lightning_ft._stores.errors import is_transient, translated
from lightning_ft.errors import StorageError

_log = logging.getLogger(__name__)

# Of one call, so that a part of an upload is sent again and not the whole checkpoint.
TRIES = 6
LONGEST_WAIT_SECS = 5.0

_jitter = random.Random()  # noqa: S311 - its own: the global one belongs to the training


def _say(retry: tenacity.RetryCallState) -> None:
    error = retry.outcome.exception() if retry.outcome is not None else None
    _log.info(
        "a request to the store has failed and is repeated in %.1f s (%d of %d): %s: %s",
        retry.upcoming_sleep, retry.attempt_number, TRIES - 1, type(error).__name__, error,
    )  # fmt: skip


class _Failure:
    """How a call has ended, if it has failed."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Calls:
    """The calls into one file system.

    Thread: any; an interrupt ends the wait.

    Args:
        fs: The file system.
        deadline_secs: How long one call may take, its repetitions included.
    """

    def __init__(self, fs: Any, deadline_secs: float) -> None:
        self.fs = fs
        self.deadline_secs = deadline_secs
        # Its calls run in the event loop of a thread that fsspec keeps for all of them.
        self.asynchronous = bool(getattr(fs, "async_impl", False)) and not getattr(fs, "asynchronous", False)

    def call(self, path: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """What ``fs.method(...)`` returns. Blocks on: the store, until the deadline.

        Raises:
            StorageError: It failed, or there was no answer in time. What is missing or forbidden keeps its class.
        """
        if self.asynchronous:
            bound = getattr(self.fs, f"_{method}")
            return self.finish(self.start(lambda: bound(*args, **kwargs)), path)
        return self.run(path, lambda: getattr(self.fs, method)(*args, **kwargs))

    def run(self, path: str, function: Callable[[], Any]) -> Any:
        """What `function`, which knows no deadline, returns; after the deadline it is left to itself."""
        future = self.start_thread(function)
        return self.finish(future, path)

    def start(self, begin: Callable[[], Awaitable[Any]]) -> Future[Any]:
        """The coroutine that `begin` makes runs in fsspec's loop, again if it fails in a way that may pass."""

        async def repeated() -> Any:
            async for attempt in tenacity.AsyncRetrying(
                retry=tenacity.retry_if_exception(is_transient),
                stop=tenacity.stop_after_attempt(TRIES),
                wait=lambda state: min(LONGEST_WAIT_SECS, 0.1 * 3.0**state.attempt_number) * _jitter.uniform(0.5, 1.0),
                before_sleep=_say,
                reraise=True,
            ):
                with attempt:
                    return await begin()
            raise AssertionError("unreachable: the last attempt returns or raises")

        async def outcome() -> Any:
            # The deadline here and not only where somebody waits, so that a request nobody waits for ends, too. Its
            # error is handed over and not raised: asyncio would print what nobody asks for.
            try:
                return await asyncio.wait_for(repeated(), self.deadline_secs)
            except Exception as error:
                return _Failure(error)

        return asyncio.run_coroutine_threadsafe(outcome(), self.fs.loop)

    def start_thread(self, function: Callable[[], Any]) -> Future[Any]:
        """`function` runs in a thread of its own, or, where that makes no sense, has run."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # From here on nobody can take it back.

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # whatever it is: it is raised where the result is waited for
                future.set_result(_Failure(error))

        if isinstance(self.fs, MemoryFileSystem):
            work()
            return future
        # A daemon: what never answers must not keep the interpreter from ending.
        thread = threading.Thread(target=work, name="store-call", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python 3.12 starts no thread while the interpreter ends: without a deadline, then
            work()
        return future

    def finish(self, future: Future[Any], path: str, waited_from: float | None = None) -> Any:
        """The result of a call that was started. Blocks on: the store.

        Args:
            future: What `start` returned.
            path: For messages.
            waited_from: When the deadline began to run, by `time.monotonic`; None: now.
        """
        started = time.monotonic() if waited_from is None else waited_from
        try:
            outcome = future.result(max(0.0, started + self.deadline_secs - time.monotonic()))
            if isinstance(outcome, _Failure):
                raise outcome.error
            return outcome
        except Exception as error:
            # A store that answered that it was too slow has a message.
            if isinstance(error, (FutureTimeoutError, asyncio.TimeoutError, TimeoutError)) and not error.args:
                raise self._too_late(path) from error
            ours = translated(error, path)
            if ours is error:
                raise
            raise ours from error
        finally:
            future.cancel()  # Does nothing to one that is done.

    def _too_late(self, path: str) -> StorageError:
        return StorageError(
            f"{path}: no answer from the store within {self.deadline_secs:g} s"
            " (storage_options={'deadline_secs': ...} changes that)",
            path,
            transient=True,
        )
