"""What is wrong with a run that was to end by itself, and what is likely behind it."""

from __future__ import annotations

import re
import signal

from lightning_ft import errors, exit_codes
from lightning_ft.drill.command import Ended
from lightning_ft.drill.runs import Run
from lightning_ft.drill.verdict import Trial, Verdict

# Of a run that is to be explained by a line: enough for the hint of a program that was called in a wrong way.
_FEW_LINES = 5
# Of a traceback with its notes, and what others print after it.
_LINES_OF_ERRORS = 400
# An error of this package at the end of a traceback, on any rank; its notes and further lines are indented.
_OURS = re.compile(r"^(?:\[\w+\]:\s*)?lightning_ft\.errors\.(\w+): (.+(?:\n[ \t]+(?![ \t]|File ).+)*)", re.MULTILINE)


def problem(ended: Ended, of: Run, timeout_secs: float, who: str) -> Trial | None:
    """A hard failure with its reason and cause; None: nothing is wrong.

    What the run printed is quoted only where the cause is not known.

    Args:
        ended: How it ended.
        of: What it left.
        timeout_secs: What it had.
        who: The run in words.
    """
    if ended.code is None:
        reason = f"{who} did not end within {timeout_secs:g} s"
        return failed(reason, "it hangs, or --timeout is too short", ended.tail())
    if ended.code != 0:
        if found := _error_of_ours(ended):
            name, message = found
            refused = issubclass(getattr(errors, name), (errors.RestoreError, errors.CheckpointError))
            how = "was refused its checkpoint" if refused else f"ended {_in_words(ended.code)}"
            return failed(f"{who} {how} ({name})", _why_ended(message) or message)
        return failed(f"{who} ended {_in_words(ended.code)}", _why_ended(ended.tail()), ended.tail())
    if not of.traces():
        reason = f"{who} trained nothing with a FaultTolerantCheckpoint"
        cause = "no Trainer of the script has that callback, or none of them fits"
        return failed(reason, cause, ended.tail(_FEW_LINES))
    return None


def failed(reason: str, cause: str, output: str = "") -> Trial:
    """A hard failure."""
    return Trial(None, Verdict.HARD_FAILURE, reason=reason, cause=cause, output=output)


def _error_of_ours(ended: Ended) -> tuple[str, str] | None:
    """The class and the message of the error of this package that ended the run; None if it was none."""
    found = [
        (name, " ".join(message.split()))
        for name, message in _OURS.findall(ended.tail(_LINES_OF_ERRORS))
        if issubclass(getattr(errors, name, object), errors.FaultToleranceError)
    ]
    # What ranks say of each other is no cause.
    causes = [(name, message) for name, message in found if not issubclass(getattr(errors, name), errors.RankFailure)]
    return next(reversed(causes or found), None)


_OF_AN_OUTPUT = {
    r"FileNotFoundError: .*\.ckpt": "its trainers write elsewhere in a drill: ask a callback for its files "
    "(best_model_path, dirpath), not by name",
    r"No space left on device": "there is no room for the checkpoints of a run: TMPDIR, or --keep, says where else",
}


def _why_ended(tail: str) -> str:
    """What of a drill may be behind it; empty if that is not known."""
    return next((cause for pattern, cause in _OF_AN_OUTPUT.items() if re.search(pattern, tail)), "")


def _in_words(code: int) -> str:
    if code < 0:
        named = -code in list(signal.Signals)  # not all of those for real time are
        return f"by {signal.Signals(-code).name}" if named else f"by signal {-code}"
    names = [name for name, value in vars(exit_codes).items() if name.isupper() and value == code]
    return f"with exit code {code}" + (f" ({names[0]}, see lightning_ft.exit_codes)" if names else "")
