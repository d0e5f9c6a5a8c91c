"""The program `lightning-ft`: its commands, and how it is called."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from lightning_ft.__about__ import __version__
from lightning_ft.cli import consolidate, diff, drill, list_, prune, report, show, verify
from lightning_ft.cli.exits import EXIT_CODES, Code, Failure, say_failure

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    # Plain help: it is read on any terminal, piped, and searched; boxes make all of that harder.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"lightning-ft {__version__}")
        raise typer.Exit


HELP = """Look at checkpoints, and after them: on local disks and in object stores.

\b
What is there, and what would a restart take?
  lightning-ft list runs/1
Is any of it damaged, and where?
  lightning-ft verify runs/1
What is in this file?
  lightning-ft show runs/1/step=00001000.ckpt
The disk is full. What can go?
  lightning-ft prune runs/1 --keep-last 2 --dry-run
What did its restarts cost, and should it save more often?
  lightning-ft report runs/1
Does a restart of my own script give the same numbers?
  lightning-ft drill -- python train.py

Any path or fsspec URL will do (s3://bucket/run1). list, verify, prune, show and report need neither torch nor
Lightning: they work on a login node, and where the training environment is what broke. COMMAND --help has examples.
"""


@app.callback(help=HELP, epilog=EXIT_CODES)
def _program(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """`--help` of the program is `HELP`."""


for _module in (list_, verify, show, diff, prune, consolidate, report, drill):
    _module.add_to(app)


def invoke(args: Sequence[str]) -> int:
    """The command was run; what is wrong with its arguments is said in one line. Returns the exit code."""
    try:
        code = app(args=list(args), prog_name="lightning-ft", standalone_mode=False)
    except Failure as failure:
        say_failure(str(failure), failure.code, "--json" in args, "")
        return int(failure.code)
    except typer.Abort:
        return int(Code.INTERRUPTED)
    except SystemExit:  # how typer ends where it cannot print the help
        return int(Code.OUTPUT_CLOSED)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "lightning-ft"
        if not args:
            print(error.format_message(), file=sys.stderr)  # the help
            return int(Code.USAGE)
        message = " ".join(error.format_message().split("\n"))
        say_failure(f"{message} ({command} --help)", Code.USAGE, "--json" in args, command.partition(" ")[2])
        return int(Code.USAGE)
    sys.stdout.flush()
    return code if isinstance(code, int) else 0
