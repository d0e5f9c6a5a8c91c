"""In the place of the threads that copy: everything is copied as late as anybody allows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Asked(Future[Any]):
    """A job that is done when the main thread asks for its result, and no sooner; other threads wait for that."""

    def __init__(self, job: Callable[..., Any], arguments: Any) -> None:
        super().__init__()
        self._job: Any = (job, arguments)

    def _run(self) -> None:
        if threading.current_thread() is not threading.main_thread() or self._job is None:
            return
        job, self._job = self._job, None
        try:
            self.set_result(job[0](*job[1]))
        except BaseException as error:
            self.set_exception(error)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._run()
        return super().exception(timeout)

    def result(self, timeout: float | None = None) -> Any:
        self._run()
        return super().result(timeout)


class LastMoment:
    """In the place of the stager's threads: copies as late as anybody allows."""

    def __init__(self) -> None:
        self.jobs: list[Asked] = []

    def submit(self, job: Callable[..., Any], *arguments: Any) -> Asked:
        self.jobs.append(Asked(job, arguments))
        return self.jobs[-1]

    @property
    def left(self) -> int:
        """Jobs nobody has asked for."""
        return sum(not job.done() for job in self.jobs)

    def shutdown(self) -> None:
        assert not self.left
