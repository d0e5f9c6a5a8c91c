"""The pytest fixture `lightning_ft_drill`, a plugin of pytest wherever this package is installed.

Imported by every pytest run of the environment: so it imports nothing that takes time, until the fixture is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from lightning_ft.drill.verdict import Outcome


class DrillFixture(Protocol):
    """The type of the fixture."""

    def __call__(
        self,
        command: Sequence[str],
        *,
        kill_at: int | str | None = None,
        sweep: bool = False,
        steps: int | None = None,
        atol: float | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> Outcome:
        """`command`, killed and started again, gives every number of an uninterrupted run; if not, the test fails.

        What `lightning-ft drill` does, with the same options. Blocks on: three to four runs of the command.

        Args:
            command: Program and arguments: ``[sys.executable, "train.py", "--config", "small.yaml"]``.
            kill_at: A batch number, or an event of the save protocol (`events.KILL_POINTS`); default: a batch in
                the second epoch, or else in the middle, once a checkpoint is durable.
            sweep: Kill at every event of a save, one after another.
            steps: End training after so many optimizer steps; default: where the script ends.
            atol: How far numbers may be apart; default: not at all.
            timeout: Of each run.

        Returns:
            What was compared, and what was not covered.

        Raises:
            ValueError: An option has a value it cannot have.
        """


@pytest.fixture
def lightning_ft_drill(tmp_path_factory: pytest.TempPathFactory) -> DrillFixture:
    """Fails the test unless a training script that is killed and restarted gives the numbers of one that is not."""

    def call(
        command: Sequence[str],
        *,
        kill_at: int | str | None = None,
        sweep: bool = False,
        steps: int | None = None,
        atol: float | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> Outcome:
        from lightning_ft.drill.command import CannotStartError
        from lightning_ft.drill.engine import drill
        from lightning_ft.drill.runs import Drill
        from lightning_ft.drill.verdict import Verdict

        if isinstance(command, str):
            raise ValueError(f"command={command!r}: give a list of the program and its arguments")
        scratch = tmp_path_factory.mktemp("lightning-ft-drill")
        parts = tuple(map(str, command))
        plan = Drill(parts, scratch, kill_at, sweep, steps, atol, timeout.total_seconds())
        try:
            outcome = drill(plan, lambda title, batches: None)
        except CannotStartError as error:
            pytest.fail(str(error), pytrace=False)
        if outcome.verdict is not Verdict.PASS:
            lines = [f"lightning-ft drill: {' '.join(parts)}", outcome.summary()]
            lines += [line for trial in outcome.trials if trial.verdict is not Verdict.PASS for line in trial.text()]
            pytest.fail("\n".join([*lines, f"What each run printed: {scratch}"]), pytrace=False)
        return outcome

    return call
