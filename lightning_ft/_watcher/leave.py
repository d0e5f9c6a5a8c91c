"""A process can be made to leave with an exit code from outside, whatever its threads are stuck in.

A hanging process cannot be asked: what holds the interpreter never returns to it. But the C library can read a byte in
a thread of its own, and call a function when it is there (POSIX asynchronous I/O, ``SIGEV_THREAD``). The function is
``_exit``, its argument the code. No Python runs for it, and no handlers: nothing is flushed, and nothing can block.

Linux. A process that is stopped leaves when it is continued; one that waits in the kernel, when the kernel returns.
"""

from __future__ import annotations

import ctypes
import os

_SIGEV_THREAD = 2


class _Sigevent(ctypes.Structure):
    """``struct sigevent`` of Linux, of 64 bytes."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_byte * (64 - 3 * ctypes.sizeof(ctypes.c_void_p) - 2 * ctypes.sizeof(ctypes.c_int))),
    )


class _Aiocb(ctypes.Structure):
    """``struct aiocb``, as far as C libraries agree on it, and room for what each of them keeps behind that."""

    _fields_ = (
        ("fildes", ctypes.c_int),
        ("opcode", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("size_bytes", ctypes.c_size_t),
        ("sigevent", _Sigevent),
        ("rest", ctypes.c_byte * 512),
    )


_exits: dict[int, Exit] = {}


class Exit:
    """A byte written to `fd` ends this process with `code`, at once.

    Thread: any. It cannot be taken back: one is made for each process and code (`of_this_process`).

    Attributes:
        fd: Where to write; None if the C library has not what this needs.
    """

    def __init__(self, code: int) -> None:
        # Both ends stay open here: were the watcher the only one to write, its end would end the training, too.
        self._read_fd, write_fd = os.pipe()
        self.fd: int | None = write_fd
        self._buffer = ctypes.create_string_buffer(1)
        self._request = _Aiocb()
        self._request.fildes = self._read_fd
        self._request.buffer = ctypes.addressof(self._buffer)
        self._request.size_bytes = 1
        libc = ctypes.CDLL(None, use_errno=True)
        event = self._request.sigevent
        event.notify, event.value = _SIGEV_THREAD, code
        event.function = ctypes.cast(libc._exit, ctypes.c_void_p)
        if not hasattr(libc, "aio_read") or libc.aio_read(ctypes.byref(self._request)) != 0:
            self.fd = None
            os.close(self._read_fd)
            os.close(write_fd)

    @staticmethod
    def of_this_process(code: int) -> Exit:
        """The one of this process; a process that was forked has none yet."""
        if os.getpid() not in _exits:
            _exits.clear()
            _exits[os.getpid()] = Exit(code)
        return _exits[os.getpid()]
