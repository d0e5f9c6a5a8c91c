"""What the kernel tells of a process, asks of it, and does to it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from dataclasses import dataclass

_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in a wait that the kernel does not interrupt",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "a zombie",
    "X": "dead",
    "I": "idle",
}
STOPPED = "stopped"
DEBUGGED = "stopped by a debugger"
# Sent to whole jobs and terminals; the watcher ends with what it watches, and until then that is being saved, perhaps.
RELEASE = b"release"
"""What the training says when it need not be watched any more."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_POLL_SECS = 0.05
_QUIET_SECS = 0.2


@dataclass(frozen=True)
class State:
    """What /proc says of the main thread of a process, in words; empty where it says nothing."""

    state: str
    waits_in: str = ""
    """Name of the kernel function in which it waits."""
    system_call: str = ""
    """Its number and arguments."""

    def __str__(self) -> str:
        where = f" in {self.waits_in}" if self.waits_in else ""
        call = f" (system call {self.system_call})" if self.system_call else ""
        return f"{self.state}{where}{call}"


class Watched:
    """The process `pid`, a parent of this one: no other one that has its number later.

    Args:
        pid: Its number.
        stacks_fd: Where it writes its stacks on `stacks_signal`.
        stacks_signal: A number.
        exit_fd: Where a byte makes it leave; None: only SIGKILL does.

    Attributes:
        fd: A descriptor that can be read when it has ended; None on a kernel without.
    """

    def __init__(self, pid: int, stacks_fd: int, stacks_signal: int, exit_fd: int | None) -> None:
        self.pid = pid
        self._stacks_fd = stacks_fd
        self._stacks_signal = stacks_signal
        self._exit_fd = exit_fd
        self.fd: int | None = None
        with contextlib.suppress(OSError):  # a kernel before 5.3, or a container that forbids it
            self.fd = os.pidfd_open(pid)

    @property
    def ended(self) -> bool:
        """Whether it is no more, or a zombie."""
        if os.getppid() != self.pid:
            return True  # its children are given to another process when it ends
        if self.fd is None:
            return _stat(self.pid)[:1] in ("Z", "X", "")
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(0))

    def wait(self, secs: float) -> bool:
        """Whether it ended within `secs`."""
        deadline = time.monotonic() + secs
        while not self.ended:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(_POLL_SECS, left))
        return True

    @property
    def debugged(self) -> bool:
        """Whether a debugger holds it."""
        return _stat(self.pid)[:1] == "t"

    def state(self) -> State:
        """What its main thread does; while it is ending, the thread that keeps it from that."""
        letter, thread = _stat(self.pid)[:1], self.pid
        if letter == "Z":
            uninterrupted = [other for other in _threads(self.pid) if _stat(f"{self.pid}/task/{other}")[:1] == "D"]
            letter, thread = ("D", uninterrupted[0]) if uninterrupted else (letter, thread)
        waits_in = _read(f"/proc/{self.pid}/task/{thread}/wchan")
        call = _read(f"/proc/{self.pid}/task/{thread}/syscall").strip()
        # Numbers with an address space layout of their own: the first four arguments tell enough.
        call = "" if call in ("", "running") else " ".join(call.split()[:5])
        return State(_STATES.get(letter, letter or "gone"), "" if waits_in == "0" else waits_in, call)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.fd is not None:
                signal.pidfd_send_signal(self.fd, number)
            elif os.getppid() == self.pid:
                os.kill(self.pid, number)

    def stacks(self, within_secs: float) -> str:
        """The Python stacks of all its threads, as its C signal handler writes them; empty if it does not.

        Blocks on: it, for `within_secs` at most. It need not be able to run Python, but it must be able to run.
        """
        begin = os.fstat(self._stacks_fd).st_size
        self._send(self._stacks_signal)
        written = self._written(begin, within_secs / 2)
        if written == begin:
            # The main thread, which the kernel asks first, may wait in it: any other one does as well.
            for thread in _threads(self.pid):
                _send_to_thread(self.pid, thread, self._stacks_signal)
            written = self._written(begin, within_secs / 2)
        return os.pread(self._stacks_fd, written - begin, begin).decode(errors="replace")

    def _written(self, begin: int, within_secs: float) -> int:
        deadline = time.monotonic() + within_secs
        size, since = begin, time.monotonic()
        while time.monotonic() < deadline and not self.ended:
            time.sleep(_POLL_SECS)
            now = os.fstat(self._stacks_fd).st_size
            if now != size:
                size, since = now, time.monotonic()
            elif size > begin and time.monotonic() - since > _QUIET_SECS:
                break  # the handler marks no end
        return size

    def end(self, patience_secs: float, exit_code: int) -> str:
        """It has left, with `exit_code`, which it knows, or else by SIGKILL; returns what was done, in words.

        Blocks on: it; after SIGKILL no longer than `patience_secs`, which a wait in the kernel may outlast.
        """
        if self._exit_fd is not None:
            os.write(self._exit_fd, b"x")
            self._send(signal.SIGCONT)
            if self.wait(patience_secs):
                return f"it has left with exit code {exit_code}"
        self._send(signal.SIGKILL)
        if self.wait(patience_secs):
            return "it had to be killed (SIGKILL)"
        return f"SIGKILL was sent, and takes effect when the kernel lets it: {self.state()}"


def _threads(pid: int) -> list[int]:
    """All but the main one."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid]
    except OSError:
        return []


def _send_to_thread(pid: int, thread: int, number: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "tgkill"):  # glibc has it since 2.30
        libc.tgkill(pid, thread, number)


def _stat(pid: int | str) -> str:
    """What follows the name in /proc/PID/stat: a letter for the state, and numbers."""
    return _read(f"/proc/{pid}/stat").rpartition(") ")[2]


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""  # it has ended, or this is not for us to see


@dataclass(frozen=True)
class Worker:
    """A process that the watched one has forked: a worker of a data loader, usually."""

    pid: int
    started: str
    """In ticks since the machine started: no other process with this number has the same."""

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return _started(self.pid) == self.started and _stat(self.pid)[:1] != "Z"

    def kill(self) -> None:
        """It is told to end, if it is still the one it was."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _started(pid: int) -> str:
    fields = _stat(pid).split()
    return fields[19] if len(fields) > 19 else ""


def workers_of(pid: int) -> list[Worker]:
    """Descendants of `pid` that run its own program, or are workers that `multiprocessing` has spawned for it.

    A worker that hangs does not see that its parent is gone. Programs that the training has started (a logger's
    service, say) are left alone: they end as they do after any other end.
    """
    own = _read(f"/proc/{pid}/cmdline")
    parents = {int(name): _stat(int(name)).split()[1:2] for name in os.listdir("/proc") if name.isdigit()}
    found: list[Worker] = []
    descendants = {pid}
    grown = True
    while grown:
        more = {p for p, parent in parents.items() if parent and int(parent[0]) in descendants} - descendants
        descendants |= more
        grown = bool(more)
    for each in sorted(descendants - {pid, os.getpid()}):
        command = _read(f"/proc/{each}/cmdline")
        if (command == own and own) or "from multiprocessing.spawn import spawn_main" in command:
            found.append(Worker(each, _started(each)))
    return found
