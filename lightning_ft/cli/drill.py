"""`lightning-ft drill`: the proof, on the user's own script, that a restart is exact."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lightning_ft.cli.exits import Code, Failure, reported
from lightning_ft.cli.options import AsJson
from lightning_ft.cli.output import Output

if TYPE_CHECKING:
    from lightning_ft.drill.verdict import Outcome


def add_to(app: typer.Typer) -> None:
    """`app` has the command."""
    app.command(
        "drill",
        short_help="Kill a script, restart it, and compare every number",
        epilog=EPILOG,
        context_settings={"allow_interspersed_args": False},
    )(drill)


EPILOG = """\b
What happens: the command runs once to its end, once until it is killed with
SIGKILL, and once more; if these differ, once more to its end. Its trainers are
told to write into a scratch directory (checkpoints, root directory,
Lightning's CSV and TensorBoard logs); everything else the script does as
always, with an empty standard input. It needs room for the checkpoints of one
run: TMPDIR says where, or --keep. Compared, bit for bit, after every batch and
on every rank: batches, results, weights, optimizer and scheduler state,
learning rates, random state, callbacks, what was logged; of every validation
and epoch too; and the weights after the fit.

\b
Verdicts:
  PASS               every number is that of the uninterrupted run
  LOST WORK          so it is, but a durable checkpoint was not continued from
  SILENT DIVERGENCE  the restart went on with other numbers; headed NOT
                     REPEATABLE where two uninterrupted runs differ already
  HARD FAILURE       a run failed, was refused its checkpoint, hung, or was
                     never killed; or nothing was there to restart from

\b
Where it is killed: by default after a batch in the second epoch, once a save of
that epoch is durable; with one epoch, in the middle. A script that saves by the
clock, and not in time, is told to save four times. --kill-at-step waits until a
checkpoint is durable, too. --kill-at takes an event of a save: SaveStarted,
AttemptOpened, DataWritten, DataSynced, Renamed, Committed, DeleteStarted,
DeleteHidden, Deleted; Renamed:2 is the second in that process, Renamed@1 that
of rank 1.

\b
Examples:
  lightning-ft drill -- python train.py --config small.yaml
  lightning-ft drill --steps 40 --kill-at-step 25 -- python train.py
  lightning-ft drill --sweep -- torchrun --nproc-per-node 2 train.py
  lightning-ft drill --kill-at Renamed:2 --json -- python train.py

\b
JSON:
  verdict, repeatable, drilled, batches, world_size, validations, trials:
  [kill_at, killed, verdict, reason, cause, output, resumed_batch,
  durable_batch, replayed, differ_from], not_covered: [text]

\b
Exit code: 0 for PASS; 7 if two uninterrupted runs differ, which says nothing
of restarts; 1 for any other verdict; 3 if the command cannot be started; 130 if
interrupted (Ctrl-C, SIGTERM, SIGHUP). All: lightning-ft --help
"""


@reported("drill")
def drill(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="The script, as you start it; behind two dashes.")
    ],
    kill_at_step: Annotated[
        int | None, typer.Option(metavar="N", help="Kill when batch N is trained. Default: in the second epoch.")
    ] = None,
    kill_at: Annotated[
        str | None,
        typer.Option(
            metavar="EVENT", help="Kill at an event of a save: Renamed, DataSynced:2, Committed@1 (of rank 1)."
        ),
    ] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Kill at every event of a save, one trial each.")] = False,
    steps: Annotated[int | None, typer.Option(metavar="K", help="End training after K optimizer steps.")] = None,
    atol: Annotated[
        float | None, typer.Option(metavar="X", help="Numbers may be so far apart. Default: not at all.")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Of each run.")] = 3600.0,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Scratch directory, which stays. Default: a temporary one.")
    ] = None,
    as_json: AsJson = False,
) -> Code:
    """Prove that a script, killed anywhere and started again, gives the numbers it would have given."""
    from lightning_ft.drill.command import CannotStartError
    from lightning_ft.drill.engine import drill as run_drill
    from lightning_ft.drill.runs import Drill
    from lightning_ft.drill.verdict import Verdict

    if sum((kill_at_step is not None, kill_at is not None, sweep)) > 1:
        raise typer.BadParameter("give one of --kill-at-step, --kill-at and --sweep", param_hint="--kill-at")
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise typer.BadParameter(f"{keep} is not an empty directory", param_hint="--keep")
    point = kill_at_step if kill_at_step is not None else kill_at
    with _ended_as_by_ctrl_c(), _scratch(keep) as scratch, _progress(as_json) as say:
        try:
            plan = Drill(tuple(command), scratch, point, sweep, steps, atol, timeout, keep is not None)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        try:
            outcome = run_drill(plan, say)
        except CannotStartError as error:
            raise Failure(str(error), Code.NOTHING) from error
    output = Output(as_json)
    output.document("drill", **outcome.document())
    output.line(outcome.summary())
    for trial in outcome.trials:
        output.line()
        styles = iter(["green" if trial.verdict is Verdict.PASS else "bold red"])
        for text in trial.text():
            output.line(text, next(styles, ""))
    output.line()
    output.line("Not covered:", "dim")
    for text in outcome.not_covered:
        output.line(f"  {text}", "dim")
    return _code(outcome)


def _code(outcome: Outcome) -> Code:
    from lightning_ft.drill.verdict import Verdict

    if outcome.verdict is Verdict.SILENT_DIVERGENCE and not outcome.repeatable:
        return Code.NOT_REPEATABLE
    return Code.FINE if outcome.verdict is Verdict.PASS else Code.BAD


@contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """A job that is cancelled or a terminal that is closed ends the runs too: they are in sessions of their own."""
    from lightning_ft.drill.command import ENDS

    ends = [sign for sign in ENDS if signal.getsignal(sign) is not signal.SIG_IGN]  # as under nohup
    before = [(sign, signal.signal(sign, signal.default_int_handler)) for sign in ends]
    try:
        yield
    finally:
        for sign, handler in before:
            signal.signal(sign, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _scratch(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    from lightning_ft.drill.command import undisturbed

    made = tempfile.TemporaryDirectory(prefix="lightning-ft-drill-")
    try:
        yield Path(made.name)
    finally:
        with undisturbed():
            made.cleanup()


@contextmanager
def _progress(as_json: bool) -> Iterator[Callable[[str, int], None]]:
    """What is going on is on stderr: in place on a terminal, else a line when something new begins."""
    console = Console(stderr=True, highlight=False, markup=False)
    if console.is_terminal and not as_json:
        with console.status("starting") as status:
            yield lambda title, batches: status.update(f"{title}: batch {batches}")
        return
    begun: list[str] = []

    def say(title: str, batches: int) -> None:
        if not begun or begun[-1] != title:
            begun.append(title)
            print(f"run {len(begun)}: {title}", file=sys.stderr)

    yield say
