"""The training's side: starts its watcher, tells it its place among the ranks, and releases it."""

from __future__ import annotations

import array
import contextlib
import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lightning_ft._watcher.leave import Exit
from lightning_ft._watcher.limits import Limits
from lightning_ft._watcher.page import Page
from lightning_ft._watcher.process import IGNORED, RELEASE
from lightning_ft.errors import ConfigurationError

_RUN = "import sys; sys.path.append(sys.argv.pop()); from lightning_ft._watcher.main import main; main()"
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_RELEASE_SECS = 5.0


class Watching:
    """This process is being watched, until `close`.

    Thread: main. Starts one small process, which imports nothing but the standard library and is gone soon after this
    one, whatever ends it.

    Args:
        limits: What is too long.
        exit_code: With which this process ends when it hangs.

    Attributes:
        page: Where this process says how far it is.

    Raises:
        ConfigurationError: The process cannot be started here.
    """

    def __init__(self, limits: Limits, exit_code: int) -> None:
        if not sys.platform.startswith("linux"):
            raise ConfigurationError(f"HangGuard: works on Linux only, and this is {sys.platform}")
        self.page = Page()
        self._pid = os.getpid()
        leaving = Exit.of_this_process(exit_code)
        self._stacks_signal = _free_signal()
        self._stacks_fd = os.memfd_create("lightning_ft_stacks")
        faulthandler.register(self._stacks_signal, file=self._stacks_fd, all_threads=True)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        order = {
            "pid": self._pid,
            "page_fd": self.page.fd,
            "control_fd": theirs.fileno(),
            "stacks_fd": self._stacks_fd,
            "stacks_signal": self._stacks_signal,
            "exit_fd": leaving.fd,
            "exit_code": exit_code,
            "limits": asdict(limits),
        }
        fds = [self.page.fd, theirs.fileno(), self._stacks_fd] + ([] if leaving.fd is None else [leaving.fd])
        # Blocked until the watcher ignores them: it is not to die of what comes before.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            # No site-packages: whatever starts itself with every Python there would slow this down, or hang it.
            self._process = subprocess.Popen(  # noqa: S603 - this very program
                [sys.executable, "-I", "-S", "-c", _RUN, json.dumps(order), _ROOT],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=fds, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._stop_listening()
            raise ConfigurationError(f"HangGuard: its watcher, a process of {sys.executable}, cannot start") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            theirs.close()

    @property
    def pid(self) -> int:
        """Of the watcher."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the watcher is there."""
        return self._process.poll() is None

    def take_place(self, place: Mapping[str, Any], listener: socket.socket | None = None) -> None:
        """The watcher knows which rank it watches and how to reach the others; `listener`, rank 0's, is its own now.

        Thread: any. May be repeated, with the same place.

        Args:
            place: `rank`; `world_size`, `token`, and of the watcher of rank 0 `host` and `port`, as soon as they are
                known; `absent`, the ranks for which this one waits, as long as not all of them have met.
            listener: Of rank 0, see `peers.listen`.
        """
        fds = (
            [] if listener is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener.fileno()]))]
        )
        with contextlib.suppress(OSError):  # a watcher that has died is found by `alive`; or nobody watches any more
            self._control.sendmsg([json.dumps(place).encode()], fds)
        if listener is not None:
            listener.close()

    def close(self) -> None:
        """Nobody watches this process any more, and the watcher is gone. May be repeated."""
        if self._process.returncode is None and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._control.send(RELEASE)
            try:
                self._process.wait(_RELEASE_SECS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._stop_listening()

    def _stop_listening(self) -> None:
        self._control.close()
        faulthandler.unregister(self._stacks_signal)
        os.close(self._stacks_fd)


def _free_signal() -> int:
    """A real-time signal that nobody handles."""
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if signal.getsignal(number) == signal.SIG_DFL:
            return number
    raise ConfigurationError("HangGuard: every real-time signal has a handler already; one is needed")
