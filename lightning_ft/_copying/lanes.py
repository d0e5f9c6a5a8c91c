"""Where copies are made beside training: threads for host memory, a stream of its own for each device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

_log = logging.getLogger(__name__)


class Lanes:
    """Threads and streams, each made when it is first needed, and kept until `close`.

    Thread: main.
    """

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, Any] = {}

    def submit(self, copy: Callable[..., None], *arguments: Any) -> Future[None]:
        """`copy` runs in another thread; where no thread can be started, it has run in this one."""
        try:
            return self._executor().submit(copy, *arguments)
        except RuntimeError as error:  # a limit of processes; or the interpreter ends, and may want to save
            _log.debug("copied without a further thread: %s", error)
        # It may be queued all the same. With the threads it is over, or never begins: later the memory is another's.
        self._end_threads()
        copy(*arguments)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def stream(self, device: torch.device) -> Any:
        """A stream of `device` for copies alone."""
        if device not in self._streams:
            self._streams[device] = torch.Stream(device=device)
        return self._streams[device]

    def close(self) -> None:
        """No thread is left. Blocks on: copies under way."""
        self._end_threads()
        self._streams.clear()

    def _executor(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(max(2, torch.get_num_threads()), "lightning-ft-staging")
        return self._threads

    def _end_threads(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()
