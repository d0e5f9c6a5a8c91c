"""Signals of a process: noted, passed on, given back. In child processes, since a test must not end pytest's own."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

from lightning_ft._preemption import signals

PREAMBLE = """
import os, signal, sys, threading
from lightning_ft._preemption import signals as s
TERM, USR1 = signal.SIGTERM, signal.SIGUSR1
class Owner: pass
def me(number): os.kill(os.getpid(), number)
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(script), *arguments],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def says(script: str) -> list[str]:
    done = run(script)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout.split()


def test_a_noted_signal_sets_a_flag_and_nothing_else() -> None:
    assert says("""
        owner = Owner()
        assert s.note([TERM, USR1], owner)
        me(TERM); me(TERM)
        noting = s.Noting([TERM, USR1], owner)
        print(*[(int(n), a.count) for n, a in noting.arrivals().items()])
    """) == ["(15,", "2)"]


def test_without_an_owner_a_signal_means_what_it_meant() -> None:
    done = run("s.note([TERM], Owner()); me(TERM); print('alive')")
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")


def test_after_the_fit_a_signal_means_what_it_meant() -> None:
    script = """
        owner = Owner()
        s.note([TERM], owner)
        noting = s.Noting([TERM], owner)
        me(TERM)
        noting.close(dealt_with=True)
        assert signal.getsignal(TERM) is signal.SIG_DFL
        print('alive', flush=True)
        me(TERM)
        print('not any more')
    """
    done = run(script)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "alive\n")


def test_a_process_that_leaves_does_not_die_of_a_signal_before_it_has_left() -> None:
    done = run("""
        class Last:
            def __del__(self, kill=os.kill, pid=os.getpid()):
                kill(pid, TERM)  # the interpreter has given its handlers back by now
        last = Last()
        noting = s.Noting([TERM], owner := Owner())
        noting.linger()
        me(TERM)
        import atexit
        atexit.register(me, TERM)
        sys.exit(75)
    """)
    assert (done.returncode, done.stderr) == (75, "")


@pytest.mark.parametrize("goes_on", ["s.note([USR1], other := Owner())", "s.Noting([USR1], Owner())", "s.suspend()"])
def test_a_process_that_has_not_left_after_all_hears_signals_again(goes_on: str) -> None:
    assert says(f"""
        signal.signal(TERM, lambda *_: print('theirs'))
        noting = s.Noting([TERM], owner := Owner())
        ours = signal.getsignal(TERM)
        noting.linger()
        assert signal.getsignal(TERM) is ours
        {goes_on}
        assert signal.getsignal(TERM) is not ours
        me(TERM)
    """) == ["theirs"]


def test_a_process_that_leaves_can_be_stopped_by_hand() -> None:
    assert says("""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what is started in the background
        noting = s.Noting([], owner := Owner())
        noting.add(signal.SIGINT)
        me(signal.SIGINT)
        noting.linger()
        try:
            me(signal.SIGINT)
        except KeyboardInterrupt:
            print('now')
    """) == ["now"]


def test_what_nobody_dealt_with_arrives_again() -> None:
    assert says("""
        signal.signal(TERM, lambda *_: print('theirs'))
        owner = Owner()
        s.note([TERM], owner)
        noting = s.Noting([TERM], owner)
        me(TERM)
        noting.close(dealt_with=False)
    """) == ["theirs", "theirs"]


def test_a_second_fit_notes_again_and_hears_nothing_of_the_first() -> None:
    assert says("""
        owner = Owner()
        s.note([TERM], owner)
        first = s.Noting([TERM], owner)
        me(TERM)
        first.close(dealt_with=True)
        second = s.Noting([TERM], owner)
        print(len(second.arrivals()))
        me(TERM)
        print(len(second.arrivals()))
        second.close(dealt_with=True)
    """) == ["0", "1"]


def test_two_owners_the_second_goes_on_noting() -> None:
    assert says("""
        one, other = Owner(), Owner()
        s.note([TERM], one); s.note([TERM], other)
        s.Noting([TERM], one).close(dealt_with=True)
        me(TERM)
        print(len(s.Noting([TERM], other).arrivals()))
    """) == ["1"]


def test_handlers_from_before_and_after_are_called_once_each_and_given_back() -> None:
    assert says("""
        def early(*_): print('early')
        signal.signal(TERM, early)
        owner = Owner()
        s.note([TERM], owner)
        ours = signal.getsignal(TERM)
        def late(number, frame):
            print('late')
            ours(number, frame)
        signal.signal(TERM, late)
        noting = s.Noting([TERM], owner)
        noting.retake()
        me(TERM)
        print(len(noting.arrivals()))
        noting.close(dealt_with=True)
        assert signal.getsignal(TERM) is late
        me(TERM)
    """) == ["late", "early", "1", "late", "early"]


def test_a_handler_from_before_may_be_interrupted_by_the_same_signal() -> None:
    """Nobody asks for signals (a test runs, say), and the user's own handler takes its time."""
    assert says("""
        depth = 0
        def theirs(*_):
            global depth
            depth += 1
            print('theirs', depth)
            if depth == 1:
                me(TERM)
            depth -= 1
        signal.signal(TERM, theirs)
        s.note([TERM], owner := Owner())
        s.suspend()
        me(TERM)
        print('alive')
    """) == ["theirs", "1", "theirs", "2", "alive"]


def test_another_handlers_exit_waits_for_the_save() -> None:
    assert says("""
        signal.signal(TERM, lambda *_: sys.exit(3))
        owner = Owner()
        s.note([TERM], owner)
        noting = s.Noting([TERM], owner)
        me(TERM)
        print(len(noting.arrivals()), noting.deferred_exits)
        noting.close(dealt_with=True)
    """) == ["1", "1"]


def test_an_ignored_signal_stays_ignored_afterwards() -> None:
    assert says("""
        signal.signal(TERM, signal.SIG_IGN)
        owner = Owner()
        s.note([TERM], owner)
        noting = s.Noting([TERM], owner)
        me(TERM)
        noting.close(dealt_with=True)
        me(TERM)
        print('alive')
    """) == ["alive"]


@pytest.mark.parametrize("thread", ["main", "other"])
def test_a_forked_child_dies_of_the_signal_without_a_word(thread: str) -> None:
    done = run(
        """
        owner = Owner()
        s.note([TERM], owner)
        s.Noting([TERM], owner)
        def fork():
            child = os.fork()
            if child == 0:
                me(TERM)
                os._exit(0)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if sys.argv[1] == 'main':
            fork()
        else:
            thread = threading.Thread(target=fork); thread.start(); thread.join()
        me(TERM)
        print('alive')
        """,
        thread,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["-15", "alive"], "")


def test_a_forked_child_has_the_users_handler() -> None:
    assert says("""
        signal.signal(TERM, lambda *_: print('theirs', flush=True))
        owner = Owner()
        s.note([TERM], owner)
        child = os.fork()
        if child == 0:
            me(TERM)
            os._exit(0)
        os.waitpid(child, 0)
    """) == ["theirs"]


def test_only_the_main_thread_can_note() -> None:
    assert says("""
        owner, noted = Owner(), []
        thread = threading.Thread(target=lambda: noted.append(s.note([TERM], owner)))
        thread.start(); thread.join()
        print(noted, signal.getsignal(TERM) is signal.SIG_DFL)
    """) == ["[False]", "True"]


def test_suspended_a_signal_means_what_it_meant_also_one_that_came_before() -> None:
    script = """
        owner = Owner()
        s.note([TERM], owner)
        resume = s.suspend()
        resume()
        me(TERM)
        print('noted', flush=True)
        s.suspend()
        print('not any more')
    """
    done = run(script)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "noted\n")


def test_an_exit_that_had_to_wait_is_forgotten_with_its_signal() -> None:
    assert says("""
        signal.signal(TERM, lambda number, frame: sys.exit(1))
        noting = s.Noting([TERM], owner := Owner())
        me(TERM)
        print(noting.deferred_exits)
        noting.forget(TERM)
        print(noting.deferred_exits)
        noting.close(dealt_with=True)
    """) == ["1", "0"]


def test_the_first_interrupt_is_noted_and_the_second_is_one() -> None:
    assert says("""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what is started in the background
        owner = Owner()
        noting = s.Noting([], owner)
        noting.add(signal.SIGINT)
        me(signal.SIGINT)
        print(len(noting.arrivals()))
        try:
            me(signal.SIGINT)
        except KeyboardInterrupt:
            print('now')
        noting.close(dealt_with=True)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    """) == ["1", "now"]


def test_an_interrupt_is_noted_though_nobody_can_be_told() -> None:
    """``train.py 2>&1 | tee log``: Ctrl-C goes to both, and what reads the pipe is gone first."""
    assert says("""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by what is started in the background
        noting = s.Noting([], owner := Owner())
        noting.add(signal.SIGINT)
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 2)
        me(signal.SIGINT)
        print(len(noting.arrivals()))
    """) == ["1"]


@pytest.mark.parametrize(
    ("name", "number"), [("SIGTERM", 15), (signal.SIGTERM, 15), (15, 15), (signal.SIGRTMIN + 1, signal.SIGRTMIN + 1)]
)
def test_signals_by_name_and_number(name: object, number: int) -> None:
    assert signals.number_of(name) == number


@pytest.mark.parametrize("name", ["TERM", "SIG_DFL", "SIGKILL", signal.SIGSTOP, 0, 9999, True, 1.0, None])
def test_what_is_no_signal_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match=r"is no signal|cannot be handled"):
        signals.number_of(name)


def test_names() -> None:
    assert signals.name_of(15) == "SIGTERM"
    assert signals.name_of(signal.SIGRTMIN + 1) == f"signal {signal.SIGRTMIN + 1}"
