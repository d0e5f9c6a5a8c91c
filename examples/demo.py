"""Shows that a killed and restarted training is the same training: what `make demo` runs.

Runs the training of digits.py in a temporary directory: once uninterrupted; once more, killed with SIGKILL in the
middle of an epoch; then the same command again, killed again; and again, to its end. Then compares every
number that both runs left behind. Exits with 1 if one differs or is missing.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

SCRIPT = Path(__file__).with_name("demo_run.py")
# An epoch has 45 batches and is validated after 22 and 44 of them; every 10 steps a checkpoint is saved. Both
# kills are in the middle of an epoch and between two saves, so that some steps must be trained again.
KILL_AT_STEPS = (57, 116)
TIMEOUT_SECS = 120

Line: TypeAlias = dict[str, Any]
Key: TypeAlias = tuple[str, int]


class DemoError(Exception):
    """The demo could not show what it is for."""


@dataclass(frozen=True)
class Run:
    """What one training left behind: the lines of its trace, one list per process that was started."""

    attempts: list[list[Line]]

    def last(self) -> dict[Key, Line]:
        """Return every line by what it is about, the newest where a step was trained twice."""
        return {_key(line): line for attempt in self.attempts for line in attempt}


def main() -> int:
    """Run, compare, print."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lightning-ft-demo-") as scratch:
        try:
            whole = train(Path(scratch, "uninterrupted"), kill_at_steps=())
            killed = train(Path(scratch, "killed"), kill_at_steps=KILL_AT_STEPS)
            require_resumed(killed)
        except DemoError as error:
            print(f"\nFAILED: {error}")
            return 1
    differences = compare(whole, killed)
    print_table(whole, killed, [key for key, _ in differences])
    print()
    return print_verdict(whole, killed, differences, time.monotonic() - started)


def train(directory: Path, kill_at_steps: tuple[int, ...]) -> Run:
    """Run the training to its end, one process per kill and a last one that is left alone."""
    directory.mkdir()
    trace = directory / "trace.jsonl"
    command = [
        sys.executable,
        str(SCRIPT),
        "--dirpath",
        str(directory / "checkpoints"),
        "--trace",
        str(trace),
    ]
    attempts: list[list[Line]] = []
    seen = 0
    for kill_at_step in (*kill_at_steps, None):
        what = f"run '{directory.name}', start {len(attempts) + 1}"
        kill = [] if kill_at_step is None else ["--kill-at-step", str(kill_at_step)]
        print(
            f"{what}{'' if kill_at_step is None else f', SIGKILL after step {kill_at_step}'} ... ",
            end="",
            flush=True,
        )
        log = directory / f"output-{len(attempts) + 1}.txt"
        began = time.monotonic()
        code = run_to_end([*command, *kill], log)
        print(f"{time.monotonic() - began:.1f} s, return code {code}")
        expected = 0 if kill_at_step is None else -signal.SIGKILL
        if code != expected:
            output = log.read_text(errors="replace")[-4000:]
            raise DemoError(f"{what} ended with return code {code}, not {expected}. Its output:\n{output}")
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
        attempts.append(lines[seen:])
        seen = len(lines)
        if kill_at_step is not None and (not attempts[-1] or attempts[-1][-1]["step"] != kill_at_step):
            raise DemoError(f"{what} was killed, but not after step {kill_at_step}")
    return Run(attempts)


def run_to_end(command: list[str], log: Path) -> int:
    """Run a command and return its code; nothing that it started is alive afterwards."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Its own process group: a SIGKILL leaves the DataLoader's workers behind, they are ended below.
            start_new_session=True,
        )
        try:
            return process.wait(timeout=TIMEOUT_SECS)
        except subprocess.TimeoutExpired as error:
            raise DemoError(f"no end after {TIMEOUT_SECS} s: {' '.join(command)}") from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def require_resumed(run: Run) -> None:
    """Refuse a proof that proves nothing: a fresh start with the same seed gives the same numbers too."""
    for before, after in zip(run.attempts, run.attempts[1:], strict=False):
        killed_after = before[-1]["step"]
        first = after[0]["step"]
        if not 1 < first <= killed_after + 1:
            raise DemoError(f"killed after step {killed_after}, but the restart began with step {first}")


def compare(whole: Run, killed: Run) -> list[tuple[Key, str]]:
    """Return what differs, in the order of the training: the line's key, and the names of the values."""
    expected = whole.last()
    found: dict[Key, list[str]] = {}
    # Every attempt counts: steps trained twice must be right both times.
    for line in (line for attempt in killed.attempts for line in attempt):
        key = _key(line)
        names = [name for name in line if line[name] != expected.get(key, {}).get(name)]
        if names:
            found.setdefault(key, []).extend(names)
    for key in expected.keys() - killed.last().keys():
        found[key] = ["missing"]
    # And in the same order, with no validation more or less than there was.
    order = list(expected)
    for attempt in killed.attempts:
        keys = [_key(line) for line in attempt]
        begin = order.index(keys[0]) if keys[0] in order else 0
        for key, wanted in zip(keys, order[begin:], strict=False):
            if key != wanted:
                found.setdefault(key, []).append(f"comes where {wanted[0]} at step {wanted[1]} should be")
                break
    return sorted(((key, ", ".join(dict.fromkeys(names))) for key, names in found.items()), key=lambda d: d[0][1])


def print_table(whole: Run, killed: Run, different: list[Key]) -> None:
    """Print both runs side by side: all rows near a kill, the first ones that differ, and a few others."""
    expected, actual = whole.last(), killed.last()
    keys = sorted((key for key in expected.keys() | actual.keys() if key[0] == "batch"), key=lambda key: key[1])
    notes = _notes(killed)
    shown = {keys[0], keys[1], keys[-1], *[key for key in different if key[0] == "batch"][:5]}
    for step in notes:
        shown.update(("batch", near) for near in range(step - 1, step + 3))

    left, right = "uninterrupted", "killed and restarted"
    print(f"\n{'':4} {'':2} | {left:38} | {right:38} |")
    columns = f"{'samples':>11} {'digest':6} {'loss':9} {'weights':9}"
    print(f"{'step':4} {'ep':2} | {columns} | {columns} |")
    print(f"{'-' * 8}+{'-' * 40}+{'-' * 40}+{'-' * 20}")
    hidden: list[Key] = []
    for key in keys:
        if key not in shown:
            hidden.append(key)
            continue
        _print_hidden(hidden, different)
        hidden = []
        mark = "DIFFERENT; " if key in different else ""
        epoch = (expected.get(key) or actual[key])["epoch"]
        cells = f"{_cells(expected.get(key))} | {_cells(actual.get(key))}"
        print(f"{key[1]:4} {epoch:2} | {cells} | {mark}{notes.get(key[1], '')}".rstrip("; "))
    _print_hidden(hidden, different)

    print()
    for kind, name in (("validation", "accuracy"), ("epoch", "mean_loss")):
        for key in sorted((key for key in expected.keys() | actual.keys() if key[0] == kind), key=lambda key: key[1]):
            a, b = (float.fromhex(run[key][name]) if key in run else float("nan") for run in (expected, actual))
            equal = "equal" if key not in different else "DIFFERENT"
            print(f"after step {key[1]:3}  {kind + ' ' + name:20} {a:<20.16f} {b:<20.16f} {equal}")


def print_verdict(whole: Run, killed: Run, differences: list[tuple[Key, str]], secs: float) -> int:
    """Print the last line and return the exit code."""
    expected, actual = whole.last(), killed.last()
    if not any(kind == "end" for kind, _ in expected) or not any(kind == "end" for kind, _ in actual):
        print("FAILED: a run did not reach its end")
        return 1
    if differences:
        (kind, step), names = differences[0]
        print(f"DIFFERENT: {len(differences)} of {len(expected)} lines; first: {kind} at step {step}: {names}")
        return 1
    count = {kind: sum(key[0] == kind for key in expected) for kind in ("batch", "validation", "epoch")}
    print(
        f"IDENTICAL bit for bit: {count['batch']} steps (ids, loss, learning rate, weights), "
        f"{count['validation']} validations, {count['epoch']} epoch means, final weights;\n"
        f"{len(killed.attempts) - 1} SIGKILLs, {len(_replayed(killed))} steps trained again, {secs:.0f} s"
    )
    return 0


def _replayed(run: Run) -> set[int]:
    steps = [line["step"] for attempt in run.attempts for line in attempt if line["kind"] == "batch"]
    return {step for step, times in Counter(steps).items() if times > 1}


def _notes(run: Run) -> dict[int, str]:
    """Return what is to be said about a step: that a kill followed, that it was trained again."""
    notes = dict.fromkeys(_replayed(run), "trained again")
    for attempt in run.attempts[:-1]:
        step = attempt[-1]["step"]
        notes[step] = f"SIGKILL after it; {notes[step]}" if step in notes else "SIGKILL after it"
    return notes


def _key(line: Line) -> Key:
    return line["kind"], line["step"]


def _cells(line: Line | None) -> str:
    if line is None:
        return f"{'missing':38}"
    ids = ",".join(str(number) for number in line["ids"][:2])
    digest = xxhash.xxh3_64_hexdigest(repr(line["ids"]).encode())[:6]
    return f"{ids:>9}.. {digest} {float.fromhex(line['loss']):<9.7f} {line['weights'][:9]:9}"


def _print_hidden(hidden: list[Key], different: list[Key]) -> None:
    if hidden:
        wrong = sum(key in different for key in hidden)
        print(f"     ... | {len(hidden)} more steps, {f'{wrong} of them DIFFERENT' if wrong else 'all equal'}")


if __name__ == "__main__":
    sys.exit(main())
