"""Signals of this process: noted for whoever asks later, passed on to whoever handled them before, and nothing else.

A handler runs between any two bytecodes of the main thread, also in the middle of a step, so it does no more than
set a flag. There is one handler per signal however many guards there are::

    note(...)        a guard is made        signals are noted, from now on
    Noting(...)      a fit begins           ... until it is closed
    linger()         the process leaves     they do nothing any more, until it has left
    suspended()      a test begins          they mean what they mean without us, until it is over

While nobody asks for a signal, the handler of it that may still be installed behaves as if it were not there.
Children that are forked have the handlers of before.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass
class Arrival:
    """A signal has arrived."""

    first_at: float
    """By the clock of `time.monotonic`."""
    count: int = 1
    deferred_exits: int = 0
    """How often another handler of it wanted to end the process at once."""


class _Noted:
    """The handler of one signal.

    Attributes:
        arrival: What came while somebody asked for it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.arrival: Arrival | None = None
        # Who had the signal when we took it, each time we did, as `signal.getsignal` says. A later one may pass the
        # signal on to us, whom it had found: then the one before it is meant.
        self._before: list[Any] = []
        self._level = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._level == 0 and self._before and frame is sys._getframe(1):
            # Not passed on to us: it arrives once more while the last of the others is at work.
            self._level = 1
            try:
                return self._handle(number, frame)
            finally:
                self._level = 0
        return self._handle(number, frame)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != _pid or not _asked_for(number):
            self._as_if_absent(frame)
            return
        arrival = self.arrival
        if arrival is None:
            arrival = self.arrival = Arrival(time.monotonic())
        else:
            arrival.count += 1
        if number == signal.SIGINT:
            self._interrupt(frame)
            return
        if not _noting:
            _tell_children_that_train(number, frame)
        try:
            self._pass_on(frame)
        except SystemExit:
            arrival.deferred_exits += 1  # the process is about to end anyway, once the state is saved

    def _interrupt(self, frame: FrameType | None) -> None:
        assert self.arrival is not None
        if self.arrival.count > 1:
            signal.default_int_handler(self.number, frame)
        with suppress(OSError):  # `train.py | tee log`: the same Ctrl-C has ended who was to be told
            os.write(2, b"\nCtrl-C: saving after this step, then stopping; once more stops at once, without saving\n")

    def _pass_on(self, frame: FrameType | None) -> bool:
        if self._level == 0:
            return False
        handler = self._before[self._level - 1]
        if not callable(handler):
            return handler is signal.SIG_IGN
        self._level -= 1
        try:
            handler(self.number, frame)
        finally:
            self._level += 1
        return True

    def _as_if_absent(self, frame: FrameType | None) -> None:
        if not self._pass_on(frame):
            signal.signal(self.number, signal.SIG_DFL)
            os.kill(os.getpid(), self.number)

    def install(self) -> None:
        """Signals come here, and then to whoever had them. Thread: main."""
        present: Any = signal.getsignal(self.number)
        if present is not self:
            self._before.append(present)
            self._level = len(self._before)
            signal.signal(self.number, self)

    def remove(self) -> None:
        """They go where they went before, unless somebody else has taken them meanwhile. Thread: main."""
        present: Any = signal.getsignal(self.number)
        if present is self:
            before = self._before.pop() if self._before else None
            self._level = len(self._before)
            signal.signal(self.number, signal.SIG_DFL if before is None else before)


def _tell_children_that_train(number: int, frame: FrameType | None) -> None:
    """If this process only waits for ranks that it has spawned, the signal was meant for them."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.multiprocessing.spawn" and frame.f_code.co_name == "join":
            for process in frame.f_locals["self"].processes:
                if process.exitcode is None:
                    os.kill(process.pid, number)
            return
        frame = frame.f_back


_pid = os.getpid()
_noted: dict[int, _Noted] = {}
_waiting: list[tuple[weakref.ref[Any], frozenset[int]]] = []
_noting: list[Noting] = []
_suspensions = 0


def _asked_for(number: int) -> bool:
    if any(number in fit.numbers for fit in _noting):
        return True
    return not _suspensions and any(number in numbers and ref() is not None for ref, numbers in _waiting)


def in_main_thread() -> bool:
    """Whether handlers can be installed here: Python lets only the main thread do that."""
    return threading.current_thread() is threading.main_thread()


def note(numbers: Collection[int], owner: object) -> bool:
    """Signals that arrive from now on are noted, as long as `owner` lives and until its first fit is over.

    Returns:
        Whether that is so: not if this is another thread than the main one.
    """
    _close_lingering()
    _forget_owner(owner)
    _waiting.append((weakref.ref(owner, _owner_is_gone), frozenset(numbers)))
    return _install(numbers)


def _owner_is_gone(ref: weakref.ref[Any]) -> None:
    """Thread: any."""
    if not sys.is_finalizing():
        numbers = [number for other, own in _waiting if other is ref for number in own]
        _waiting[:] = [(other, own) for other, own in _waiting if other is not ref]
        _give_back(numbers, dealt_with=False)


def _give_back(numbers: Collection[int], *, dealt_with: bool) -> None:
    unasked = [number for number in numbers if number in _noted and not _asked_for(number)]
    arrived = [number for number in unasked if _noted[number].arrival is not None]
    for number in unasked:
        _noted[number].arrival = None
    if in_main_thread():
        for number in unasked:
            _noted[number].remove()
        for number in arrived if not dealt_with else ():
            signal.raise_signal(number)


def _forget_owner(owner: object) -> None:
    _waiting[:] = [(ref, own) for ref, own in _waiting if ref() is not None and ref() is not owner]


def _install(numbers: Collection[int]) -> bool:
    if in_main_thread():
        for number in numbers:
            _noted.setdefault(number, _Noted(number)).install()
    return all(is_ours(signal.getsignal(number)) for number in numbers)


def is_ours(handler: object) -> bool:
    """Whether `handler` is one of this module."""
    return isinstance(handler, _Noted)


class Noting:
    """Signals are noted for one fit, until `close`.

    Thread: main, for handlers to be installed; in another one, those that are installed already do their work.

    Args:
        numbers: Of the signals.
        owner: Who may have asked for them by `note` before: what has arrived since then has arrived.
    """

    def __init__(self, numbers: Collection[int], owner: object) -> None:
        _close_lingering()
        self.numbers = set(numbers)
        self.lingers = False
        self._owner = owner
        _install(numbers)
        _noting.append(self)

    def add(self, number: int) -> None:
        """The signal is noted, too, from now on."""
        self.numbers.add(number)
        _install([number])

    def retake(self) -> None:
        """They come here first again, and then to whoever was put in our place. Thread: main, else nothing happens."""
        _install(self.numbers)

    def arrivals(self) -> dict[int, Arrival]:
        """What has arrived, by number."""
        return {n: noted.arrival for n in self.numbers if (noted := _noted.get(n)) and noted.arrival is not None}

    def forget(self, number: int) -> None:
        """What has arrived of this signal is dealt with."""
        if number in _noted:
            _noted[number].arrival = None

    @property
    def deferred_exits(self) -> int:
        """How often somebody else's handler wanted to end the process at once."""
        return sum(arrival.deferred_exits for arrival in self.arrivals().values())

    def linger(self) -> None:
        """The process is about to leave, with a code that says what became of it: no signal changes that any more.

        Until `close`, in case it does not leave, or until the next fit or guard, before which it obviously has not.
        """
        self.lingers = True
        if signal.SIGINT in self.numbers:  # by hand, and somebody is waiting
            self.numbers.remove(signal.SIGINT)
            _give_back([signal.SIGINT], dealt_with=True)

    def close(self, *, dealt_with: bool) -> None:
        """Signals are what they were before, unless another fit or another guard asks for them.

        Those that have arrived, and were not dealt with, arrive again.
        """
        if self not in _noting:
            return
        _noting.remove(self)
        _forget_owner(self._owner)
        if dealt_with:
            for number in self.arrivals():
                self.forget(number)
        _give_back(self.numbers, dealt_with=dealt_with)


def _close_lingering() -> None:
    for noting in [fit for fit in _noting if fit.lingers]:
        noting.close(dealt_with=True)


def _at_exit() -> None:
    """The interpreter gives signals that are handled in Python back to the system before its own end, but not these."""
    for number in {number for fit in _noting if fit.lingers for number in fit.numbers}:
        signal.signal(number, signal.SIG_IGN)


# Programs that are started by what is registered later, and so called earlier, do not inherit that.
atexit.register(_at_exit)


def suspend() -> Callable[[], None]:
    """Signals mean what they mean without us, also those that have arrived, until the returned function is called.

    Those of a fit at work are noted all the same.
    """
    global _suspensions
    _close_lingering()
    _suspensions += 1
    for number, noted in _noted.items():
        if noted.arrival is not None and not _asked_for(number):
            noted.arrival = None
            signal.raise_signal(number)
    resumed = False

    def resume() -> None:
        global _suspensions
        nonlocal resumed
        if not resumed:
            _suspensions -= 1
            resumed = True

    return resume


def number_of(name: object) -> int:
    """The number of the signal that is called `name`, or has that number.

    Raises:
        ValueError: There is none, or it cannot be handled; says why.
    """
    if isinstance(name, str):
        found = getattr(signal, name, None)
        if not isinstance(found, signal.Signals):
            raise ValueError(f"{name!r} is no signal of this system ({sys.platform})")
        name = found
    if isinstance(name, bool) or not isinstance(name, int) or name not in signal.valid_signals():
        raise ValueError(f"{name!r} is no signal of this system ({sys.platform})")
    if name in (getattr(signal, "SIGKILL", None), getattr(signal, "SIGSTOP", None)):
        raise ValueError(f"{signal.Signals(name).name} cannot be handled by a process")
    return int(name)


def name_of(number: int) -> str:
    """As ``SIGTERM``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # one of the real-time signals between the first and the last has no name


def _in_child() -> None:
    """Ours are gone before anything else runs: a forked child is no rank."""
    _waiting.clear()
    _noting.clear()
    for noted in _noted.values():
        noted.arrival = None
        noted.remove()
    _noted.clear()
    global _pid
    _pid = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
