"""`lightning-ft drill`: the proof, on the user's own script, that a restart is exact."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lightning_ft.cli.exits import Code, Failure, reported
from lightning_ft.cli.options import AsJson
from lightning_ft.cli.output import Output


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
SIGKILL, and once more. Its trainer is told to write into a scratch directory
(checkpoints, root directory, loggers of Lightning); everything else it does as
always. Compared, bit for bit, on every rank: batches, losses, weights,
optimizer and scheduler state, learning rates, random state, validations,
metrics, callbacks.

\b
Verdicts:
  PASS               every number is that of the uninterrupted run
  LOST WORK          so it is, but a durable checkpoint was not continued from
  SILENT DIVERGENCE  the restart went on with other numbers
  HARD FAILURE       a run failed, hung, or was never killed

\b
Examples:
  lightning-ft drill -- python train.py --config small.yaml
  lightning-ft drill --steps 40 --kill-at-step 25 -- python train.py
  lightning-ft drill --sweep -- torchrun --nproc-per-node 2 train.py
  lightning-ft drill --kill-at Renamed:2 --json -- python train.py

\b
JSON:
  verdict, drilled, batches, world_size, validations, trials: [kill_at,
  verdict, reason, cause, resumed_batch, durable_batch, replayed],
  not_covered: [sentence]

\b
Exit code: 0 for PASS; 1 for any other verdict. All: lightning-ft --help
"""


@reported("drill")
def drill(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="The script, as you start it; behind two dashes.")
    ],
    kill_at_step: Annotated[
        int | None, typer.Option(metavar="N", help="Kill when batch N is trained. Default: in the middle.")
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
    from lightning_ft.drill.engine import Drill
    from lightning_ft.drill.engine import drill as run_drill
    from lightning_ft.drill.verdict import Verdict

    if sum((kill_at_step is not None, kill_at is not None, sweep)) > 1:
        raise typer.BadParameter("give one of --kill-at-step, --kill-at and --sweep", param_hint="--kill-at")
    if steps is not None and steps < 1:
        raise typer.BadParameter(f"{steps}: at least 1", param_hint="--steps")
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise typer.BadParameter(f"{keep} is not empty", param_hint="--keep")
    with _scratch(keep) as scratch, _progress(as_json) as say:
        try:
            plan = Drill(
                tuple(command),
                scratch,
                kill_at_step if kill_at_step is not None else kill_at,
                sweep,
                steps,
                atol,
                timeout,
            )
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--kill-at") from error
        try:
            outcome = run_drill(plan, say)
        except FileNotFoundError as error:
            if error.filename != command[0]:
                raise
            raise Failure(f"COMMAND: there is no program {command[0]}", Code.NOTHING) from error
    output = Output(as_json)
    output.document("drill", **outcome.document())
    ranks = "1 rank" if outcome.world_size == 1 else f"{outcome.world_size} ranks"
    output.line(f"{outcome.batches} batches, {outcome.validations} validation batches, {ranks}")
    for trial in outcome.trials:
        output.line()
        style = "green" if trial.verdict is Verdict.PASS else "bold red"
        output.line(
            f"{trial.verdict.value}: killed at {trial.kill_at}{_resumed(trial.resumed_batch, trial.replayed)}", style
        )
        for text in filter(None, (trial.reason, f"Likely: {trial.cause}" if trial.cause else "")):
            output.line(f"  {text}" if "\n" not in text else text)
    output.line()
    output.line("Not covered:", "dim")
    for text in outcome.not_covered:
        output.line(f"  {text}", "dim")
    return Code.FINE if outcome.verdict is Verdict.PASS else Code.BAD


def _resumed(batch: int | None, replayed: int) -> str:
    if batch is None:
        return ""
    return f", went on after batch {batch}, {replayed} trained twice"


@contextmanager
def _scratch(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="lightning-ft-drill-") as made:
        yield Path(made)


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
