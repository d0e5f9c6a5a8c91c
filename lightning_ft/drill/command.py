"""The user's command, run once: watched until it ends by itself, is killed at its kill point, or takes too long."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals by which a user, a scheduler or a terminal that is closed ends a program."""

_MARK = "LIGHTNING_FT_DRILL_RUN"
# Between two looks at whether it has ended: a kill is noticed by the processes themselves, so nothing waits for this.
_LOOK_SECS = 0.2
# Of what a run has printed, which may be more than fits into memory.
_TAIL_BYTES = 1 << 20
# For ranks that end a little after the first one; what is left then was forgotten by the script.
_OTHERS_SECS = 2.0


class CannotStartError(Exception):
    """The command could not be started at all; one line says why."""


@dataclass(frozen=True)
class Ended:
    """How one start of the command ended."""

    code: int | None
    """Of its first process; None if it was ended from here, because it took too long."""
    killed: bool
    """Whether the kill point was reached."""
    output: Path
    """Everything it printed."""

    def tail(self, lines: int = 40) -> str:
        """The end of what it printed; of lines that were written over, such as progress bars, the last state."""
        with self.output.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        printed = (line.rstrip("\r") for line in text.split("\n"))
        return "\n".join([line.rpartition("\r")[2] for line in printed if line.strip()][-lines:])


def run(
    command: Sequence[str],
    environment: dict[str, str],
    output: Path,
    killed: Path,
    timeout_secs: float,
    watch: Callable[[], None],
) -> Ended:
    """`command` has run, and no process of it is left, whoever of them started whom.

    Blocks on: the command.

    Args:
        command: Program and arguments.
        environment: What to add to that of this process.
        output: File for what it prints.
        killed: Is there as soon as the command has reached its kill point; then all of it is killed, at once.
        timeout_secs: After which it is killed as well.
        watch: Called a few times a second.

    Raises:
        CannotStartError: There is no such program, or it cannot be run; or this system has no /proc.
    """
    if sys.platform != "linux":
        raise CannotStartError("a drill needs Linux: the processes of a run are found in /proc, by their environment")
    mark = secrets.token_hex(8)
    deadline = time.monotonic() + timeout_secs
    with output.open("wb") as file:
        try:
            process = subprocess.Popen(  # noqa: S603 - the user's own command
                command,
                env={**os.environ, **environment, _MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            hint = f" (if that is a script: python {command[0]})" if command[0].endswith(".py") else ""
            raise CannotStartError(f"{command[0]} cannot be started: {error.strerror}{hint}") from error
        try:
            code = _wait(process, killed, deadline, watch)
            if code == 0:
                _wait_for_others(mark, killed)
        finally:
            with undisturbed():
                _kill_all(mark)
                process.wait()
    return Ended(code, killed.exists(), output)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that ask this process to end are ignored: whoever is impatient must not keep it from cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield  # which no signal interrupts
        return
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in ENDS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _wait(process: subprocess.Popen[bytes], killed: Path, deadline: float, watch: Callable[[], None]) -> int | None:
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_LOOK_SECS)
        if killed.exists():
            return -signal.SIGKILL
        watch()
    return None


def _wait_for_others(mark: str, killed: Path) -> None:
    deadline = time.monotonic() + _OTHERS_SECS
    while time.monotonic() < deadline and not killed.exists() and _family(mark):
        time.sleep(_LOOK_SECS)


def _kill_all(mark: str) -> None:
    """No process with `mark` in its environment is left, nor what these have started."""
    while pids := _family(mark):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_SECS / 10)  # the kernel ends them in its own time, and some had just started others


def _family(mark: str) -> set[int]:
    """Processes with `mark` in their environment, and their descendants.

    Neither alone is enough: workers of a launcher are in sessions of their own and may outlive it; and a process may
    be given another environment, or write its title over the one it has.
    """
    parents = {pid: _parent(pid) for pid in _processes()}
    family = {pid for pid in parents if _has_mark(pid, mark)}
    while children := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= children
    return family


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]


def _parent(pid: int) -> int:
    try:
        # The name of the program, in parentheses, may contain anything.
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:  # gone
        return 0


def _has_mark(pid: int, mark: str) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or somebody else's
        return False
    return f"{_MARK}={mark}".encode() in environ.split(b"\0")
