"""The command line: what an operator asks about a directory of checkpoints, and what may be done about it.

One module per command, each a thin layer: it asks the package's functions, and says the answer to a person or, with
``--json``, to a program. Nothing here decides which checkpoint is good, newest, or to be deleted.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from lightning_ft.__about__ import __version__

__all__ = ["main", "run"]

# Of the extra `cli`; `lightning_ft.cli.exits` has the other codes, and is checked to agree.
_NOT_INSTALLED = 6
_INTERRUPTED = 130
_OUTPUT_CLOSED = 141


def main() -> None:
    """The process has ended, with the exit code of the command in `sys.argv`."""
    # Started with a closed one, as some schedulers do: there is nobody to tell, and the exit code says it all.
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    if sys.stderr is None:  # `print` would take stdout instead
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        code = _OUTPUT_CLOSED
    except KeyboardInterrupt:
        code = _INTERRUPTED
    if code == _OUTPUT_CLOSED:
        # What is left in the buffer would be tried once more at exit, and complained about.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if code == _INTERRUPTED:
        # Without waiting for threads that read from a storage that does not answer, which `sys.exit` would do.
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(args: Sequence[str]) -> int:
    """The command was run and has said all that it has to say; returns the exit code."""
    try:
        from lightning_ft.cli.app import invoke
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich", "click", "shellingham"):
            raise
        if list(args) == ["--version"]:  # which who reports that something is missing should be able to say
            print(f"lightning-ft {__version__}")
            return 0
        print(f"lightning-ft: {error.name} is missing: pip install 'lightning-ft[cli]'", file=sys.stderr)
        return _NOT_INSTALLED
    return invoke(args)
