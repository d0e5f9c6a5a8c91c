"""Ways to hang, for a bare process and for a training alike. The stack that is said names the function."""

from __future__ import annotations

import ctypes
import os
import signal
import threading


def the_lock_is_never_released() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def c_code_keeps_the_interpreter() -> None:
    # A lock of C's own: no signal wakes it, as one would wake a sleep.
    libc, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)


def it_is_stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
