"""A job that is queued again, and whose directory has another name at every start, would train from zero each time.

With a date or a version in the name it finds nothing, and a directory that is empty is a fresh start. But what it has
trained before is there to be found, in a directory whose name differs in nothing but digits: its event files say of
which job they are. Nothing less is certain. A job may also be queued again before any start of it has come as far as
training; and it may train several models, one after another or at the same time, each in a directory of its own.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_ft._history import event_file
from lightning_ft._names import is_local, join, normalise, split
from lightning_ft._preemption import slurm
from lightning_ft.errors import ConfigurationError

_DEEP = 4
"""So many names, from the last one on, may have digits that change: ``outputs/<date>/<time>/checkpoints``."""
_MOST = 1000
"""So many directories are looked into, those of the newest starts first."""
_TAIL_BYTES = 4096


def refuse_new_directory(dirpath: str, environment: Mapping[str, str] = os.environ) -> None:
    """`dirpath`, in which nothing is, is no other name for a directory in which this job was in the middle of a run.

    Local directories only: to search a store may take minutes. Blocks on: listing the directories beside `dirpath`.

    Raises:
        ConfigurationError: It is, and names that directory.
    """
    job, restarts = slurm.job_id(environment), slurm.restarts(environment)
    if job is None or restarts == 0 or not is_local(dirpath):
        return
    dirpath = normalise(dirpath)
    of_this_job = [found for found in _starts_beside(dirpath) if found[1].get("job") == job]
    if any(where == dirpath or first.get("job_restarts", 0) >= restarts for where, first, _ in of_this_job):
        return  # names are the same at every start: it was here before, or has found a training beside it again
    for before, _, last in of_this_job:
        if last.get("how") != "finished":
            raise ConfigurationError(
                f"dirpath={dirpath!r}: there is nothing in it, and before it was queued again this SLURM job "
                f"({job}) has trained in {before}, not to the end. Give a directory whose name is the same at "
                "every start, without a date or a version: each start would begin anew. If this one is meant to, "
                f"export {slurm.RESTARTS}=0"
            )


def _starts_beside(dirpath: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Directories of that name but for its digits; of each the first and the last line of its newest event file."""
    pattern, alike = _with_any_digits(dirpath, glob.escape, "*"), _with_any_digits(dirpath, re.escape, "[0-9]+")
    if pattern == glob.escape(dirpath):
        return
    files = glob.iglob(join(join(pattern, event_file.DIRECTORY), f"*{event_file.SUFFIX}"))
    seen: set[str] = set()
    for file in sorted(files, key=lambda file: split(file)[1], reverse=True):
        directory = split(split(file)[0])[0]
        if directory in seen or not re.fullmatch(alike, directory):
            continue
        seen.add(directory)
        if len(seen) > _MOST:
            return
        yield directory, *_ends(file)


def _with_any_digits(dirpath: str, escape: Callable[[str], str], digits: str) -> str:
    """A pattern for `dirpath`, with whatever `digits` stands for in its last names."""
    parts = dirpath.split("/")
    fixed, free = parts[:-_DEEP], parts[-_DEEP:]
    return "/".join([*map(escape, fixed), *(re.sub("[0-9]+", digits, escape(part)) for part in free)])


def _ends(file: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its first and its last line, empty where they are something else."""
    try:
        with open(file, "rb") as lines:
            first = lines.readline()
            lines.seek(max(0, os.fstat(lines.fileno()).st_size - _TAIL_BYTES))
            last = lines.read().splitlines()[-1:]
    except OSError:  # it is gone
        return {}, {}
    return _parsed(first), _parsed(b"".join(last))


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError:  # a kill may have cut it off
        return {}
    return values if isinstance(values, dict) else {}
