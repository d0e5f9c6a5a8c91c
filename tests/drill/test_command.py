"""One run of a command: nothing of it is left, however it ends. And the program around it."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_ft.cli.drill import _ended_as_by_ctrl_c
from lightning_ft.drill import command as commands
from lightning_ft.drill.command import CannotStartError, Ended, run
from tests.cli.conftest import environment, program

# Processes as a launcher starts them: in sessions of their own, some by others, and deaf to signals.
FAMILY = """
import os, subprocess, sys, time
mark = sys.argv[1]
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({!r}, 'w').close(); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child.format(mark + "-1")], start_new_session=True)
code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child.format(mark + '-2')!r}])"
subprocess.run([sys.executable, "-c", code], start_new_session=True)
while not (os.path.exists(mark + "-1") and os.path.exists(mark + "-2")):
    time.sleep(0.01)
"""


def call(code: str, tmp_path: Path, timeout_secs: float = 60.0) -> Ended:
    command = [sys.executable, "-c", FAMILY + code, str(tmp_path / "child")]
    return run(command, {}, tmp_path / "output", tmp_path / "killed", timeout_secs, lambda: None)


def left(tmp_path: Path) -> list[str]:
    """Command lines of processes that have `tmp_path` in them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(tmp_path) in line:
                found.append(line)
    return found


@pytest.mark.parametrize(
    ("code", "ended"),
    [
        ("print('done')", (0, False)),
        ("print('done'); sys.exit(3)", (3, False)),
        # The process that reached its kill point need not be the first one, which goes on.
        ("print('done', flush=True); open(mark[:-5] + 'killed', 'w'); time.sleep(600)", (-signal.SIGKILL, True)),
    ],
)
def test_no_process_of_a_command_is_left(code: str, ended: tuple[int, bool], tmp_path: Path) -> None:
    result = call(code, tmp_path)
    assert (result.code, result.killed) == ended
    assert result.tail() == "done"
    assert left(tmp_path) == []


def test_a_process_with_another_environment_is_not_left_either(tmp_path: Path) -> None:
    code = (
        "child = 'import time; open({!r}, \\'w\\').close(); time.sleep(600)'.format(mark + '-3')\n"
        "subprocess.Popen([sys.executable, '-c', child], env={}, start_new_session=True)\n"
        "while not os.path.exists(mark + '-3'): time.sleep(0.01)\n"
        "open(mark[:-5] + 'killed', 'w'); time.sleep(600)"
    )
    assert call(code, tmp_path).killed
    assert left(tmp_path) == []


def test_a_rank_that_ends_after_the_first_one_is_waited_for(tmp_path: Path) -> None:
    other = "import select, sys; select.select([int(sys.argv[1])], [], []); print(1)"  # when the first one has ended
    code = (
        "import os, subprocess, sys; first = os.pidfd_open(os.getpid()); "
        f"subprocess.Popen([sys.executable, '-c', {other!r}, str(first)], pass_fds=[first])"
    )
    ended = run([sys.executable, "-c", code], {}, tmp_path / "output", tmp_path / "killed", 60.0, lambda: None)
    assert (ended.code, ended.tail()) == (0, "1")


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    result = call("time.sleep(600)", tmp_path, timeout_secs=5.0)
    assert (result.code, result.killed) == (None, False)
    assert left(tmp_path) == []


def test_the_end_of_the_output_is_not_filled_by_progress_bars(tmp_path: Path) -> None:
    (tmp_path / "output").write_bytes(
        b"begin\nError: x\r\n\n" + b"".join(b"\r%d%%" % n for n in range(100)) + b"\n\xff"
    )
    assert Ended(1, False, tmp_path / "output").tail() == "begin\nError: x\n99%\n\ufffd"
    assert Ended(1, False, tmp_path / "output").tail(lines=1) == "\ufffd"


def test_of_an_output_without_end_the_end_is_read(tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as file:
        file.truncate(1 << 40)  # a sparse file: no memory has room for it
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe end\n")
    assert Ended(1, False, tmp_path / "output").tail(lines=1) == "the end"


def test_a_program_that_is_not_there_or_no_program_is_named(tmp_path: Path) -> None:
    for command in (["no-such-program"], [str(tmp_path)]):
        with pytest.raises(CannotStartError, match=f"{re.escape(command[0])} cannot be started: "):
            run(command, {}, tmp_path / "output", tmp_path / "killed", 5.0, lambda: None)


def test_what_is_no_training_is_a_hard_failure() -> None:
    answer = program("drill", "--", "echo", "hello")
    assert answer.code == 1
    assert "HARD FAILURE: before anything was killed" in answer.out
    assert "the uninterrupted run trained nothing with a FaultTolerantCheckpoint" in answer.out
    assert "  | hello\n" in answer.out
    assert answer.err == "run 1: uninterrupted\n"


def test_a_script_without_its_interpreter_is_told_how_to_be_started(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    for name in (str(tmp_path / "train.py"), "train.py"):
        with pytest.raises(CannotStartError, match=rf"{re.escape(name)} cannot be started: .* script: python .*"):
            run([name], {}, tmp_path / "output", tmp_path / "killed", 5.0, lambda: None)


def test_on_a_terminal_it_shows_what_runs_and_how_far_it_is() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "lightning_ft", "drill", "--", "sleep", "0.5"]
    drill = subprocess.Popen(
        command, env=environment(TERM="xterm"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal ends
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    out, _ = drill.communicate(timeout=60)
    assert (drill.returncode, b"HARD FAILURE" in out) == (1, True)
    assert b"uninterrupted: batch 0" in shown
    assert b"run 1:" not in shown


def test_a_second_ctrl_c_does_not_keep_it_from_ending_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first() -> None:
        if (tmp_path / "child").exists():
            raise KeyboardInterrupt

    def after_the_second(mark: str) -> None:
        for number in commands.ENDS:
            signal.raise_signal(number)
        kill_all(mark)

    kill_all = commands._kill_all
    monkeypatch.setattr(commands, "_kill_all", after_the_second)
    before = [signal.getsignal(number) for number in commands.ENDS]
    code = [sys.executable, "-c", FAMILY + "open(mark, 'w'); time.sleep(600)", str(tmp_path / "child")]
    with pytest.raises(KeyboardInterrupt):
        run(code, {}, tmp_path / "output", tmp_path / "killed", 60.0, first)
    assert left(tmp_path) == []
    assert [signal.getsignal(number) for number in commands.ENDS] == before


def test_a_handler_that_python_does_not_know_is_left_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a program that has installed one before it began Python."""

    def install(number: int, handler: Any) -> Any:
        before = real(number, handler)
        return None if handler is signal.default_int_handler else before

    real = signal.signal
    before = {number: signal.getsignal(number) for number in commands.ENDS}
    monkeypatch.setattr(signal, "signal", install)
    try:
        with _ended_as_by_ctrl_c():
            pass
        assert {signal.getsignal(number) for number in commands.ENDS} <= {signal.SIG_DFL, signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            real(number, handler)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP], ids=["cancelled", "terminal closed"])
def test_a_drill_that_is_ended_leaves_no_process(how: signal.Signals, tmp_path: Path) -> None:
    code = FAMILY + "open(mark, 'w'); time.sleep(600)"
    command = [sys.executable, "-m", "lightning_ft", "drill", "--", sys.executable, "-c", code, str(tmp_path / "child")]
    drill = subprocess.Popen(
        command, env=environment(TMPDIR=str(tmp_path)), stdin=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # whatever started the tests ignores
    )  # fmt: skip
    while not (tmp_path / "child").exists():
        assert drill.poll() is None
        time.sleep(0.05)
    drill.send_signal(how)
    assert drill.wait(60) == 130
    assert left(tmp_path) == []
    assert not list(tmp_path.glob("lightning-ft-drill-*"))
