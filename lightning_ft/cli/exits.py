"""Exit codes, and the way from an exception to one line on stderr and one of them."""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable
from enum import IntEnum
from typing import ParamSpec

import typer

from lightning_ft.cli.output import printable
from lightning_ft.errors import (
    CheckpointError,
    ConfigurationError,
    DirectoryInUseError,
    FaultToleranceError,
    NoUsableCheckpointError,
    StorageError,
)


class Code(IntEnum):
    """What an exit code says; scripts rely on the numbers."""

    FINE = 0
    BAD = 1
    USAGE = 2
    NOTHING = 3
    IN_USE = 4
    STORAGE = 5
    NOT_INSTALLED = 6
    NOT_REPEATABLE = 7
    BUG = 70
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141


EXIT_CODES = """\b
Exit codes:
  0    fine
  1    something is not good: a checkpoint is broken, none can be used, two
       differ, a drill did not pass, or you answered no
  2    the command line is wrong; nothing was done
  3    there is nothing: no such file or directory, no checkpoint in it, or
       the command of a drill cannot be started
  4    the directory is in use by a running training; nothing was deleted
  5    the storage refused or did not answer
  6    this command needs a package that is not installed
  7    a drill shows nothing: two uninterrupted runs of the script differ
  70   a bug of lightning-ft
  130  interrupted (Ctrl-C)
  141  the reader of the output has gone (| head)
"""


class Failure(Exception):
    """A command cannot do what was asked; one line says why."""

    def __init__(self, message: str, code: Code) -> None:
        super().__init__(message)
        self.code = code


P = ParamSpec("P")


def reported(name: str) -> Callable[[Callable[P, Code]], Callable[P, None]]:
    """Of the command `name`: it ends in an exit code, and what it raises in one line on stderr."""

    def decorate(command: Callable[P, Code]) -> Callable[P, None]:
        @functools.wraps(command)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
            raise typer.Exit(int(_code(name, lambda: command(*args, **kwargs), bool(kwargs.get("as_json")))))

        return wrapped

    return decorate


def _code(name: str, command: Callable[[], Code], as_json: bool) -> Code:
    try:
        code = command()
        sys.stdout.flush()
    except (typer.Exit, typer.BadParameter):
        raise
    except KeyboardInterrupt:
        return Code.INTERRUPTED
    except BrokenPipeError:
        return Code.OUTPUT_CLOSED
    except Exception as error:
        code = code_of(error)
        say_failure(message_of(error), code, as_json, name)
        if code is Code.BUG:
            traceback.print_exception(error)
    return code


def code_of(error: Exception) -> Code:
    """The exit code that says best what `error` is."""
    table: list[tuple[type[Exception] | tuple[type[Exception], ...], Code]] = [
        (DirectoryInUseError, Code.IN_USE),
        (ConfigurationError, Code.USAGE),
        (StorageError, Code.STORAGE),
        ((NoUsableCheckpointError, CheckpointError, FaultToleranceError), Code.BAD),
        (FileNotFoundError, Code.NOTHING),
        (ImportError, Code.NOT_INSTALLED),
        (OSError, Code.STORAGE),
    ]
    if isinstance(error, Failure):
        return error.code
    for kinds, code in table:
        if isinstance(error, kinds):
            return code
    # Clients of object stores raise classes of their own; what Python itself raises is a mistake in this program.
    return Code.BUG if type(error).__module__ == "builtins" else Code.STORAGE


def message_of(error: Exception) -> str:
    """One line."""
    if isinstance(error, (Failure, FaultToleranceError)):
        return " ".join(str(error).split("\n"))
    if isinstance(error, FileNotFoundError):
        return f"there is no {error.filename or error} any more"
    return " ".join(f"{type(error).__name__}: {error}".split("\n"))


def say_failure(message: str, code: Code, as_json: bool, command: str) -> None:
    """The line is on stderr, and with ``--json`` a document on stdout, so that there always is one."""
    name = " ".join(["lightning-ft", *command.split()])
    print(f"{name}: {printable(message)}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": {"message": message, "exit_code": int(code)}}, indent=2))
