"""A function called in a process of its own: no allocator, thread pool or open file is left from the one before."""

from __future__ import annotations

import logging
import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

# Forked from a server that has imported all this and has done nothing else, so that a process costs no import.
_PRELOADED = [f"tests.benchmarks.{name}" for name in ("training", "memory", "restart", "limits", "idle")]
_TIMEOUT_SECS = 300.0


def call(function: Callable[..., Any], *args: Any) -> Any:
    """What `function(*args)` returned in a fresh process; dirty pages of whoever ran before are on disk.

    Raises:
        RuntimeError: It raised (the message holds its traceback), or died, or took too long.
    """
    os.sync()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, args))
    process.start()
    sender.close()
    name = f"{function.__module__}.{function.__qualname__}"
    try:
        if not receiver.poll(_TIMEOUT_SECS):
            raise RuntimeError(f"{name}: no answer within {_TIMEOUT_SECS:.0f} s")
        answer, error = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"{name}: its process ended with exit code {process.exitcode}") from None
    finally:
        receiver.close()
        if process.is_alive():
            process.join(10)
        if process.is_alive():
            process.kill()
        process.join()
    if error is not None:
        raise RuntimeError(f"{name}{args} failed in its process:\n{error}")
    return answer


def _answer(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    silence()
    try:
        answer, error = function(*args), None
    except BaseException:
        answer, error = None, traceback.format_exc()
    sender.send((answer, error))
    sender.close()


def silence() -> None:
    """Lightning's advice is not printed: a table follows."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
