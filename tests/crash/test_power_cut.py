"""SIGKILL and power cuts at every system call of a save and its rotation, on disks that lose what was not synced."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path

import pytest

import lightning_ft as ft
from lightning_ft._names import parse_leftover
from tests.crash import matrix, savers
from tests.crash.powercut import CUTS, FILE_SYSTEMS, Point

pytestmark = pytest.mark.needs("root", "loop", "strace", "mkfs.ext4", "mkfs.xfs")


def what_is_wrong(dirpath: Path) -> str:
    """What our directories must never show, beyond that checkpoints are whole: discovery agrees, nothing strange."""
    names = set(os.listdir(dirpath))
    shown = {name for name in names if not parse_leftover(name)}
    broken = [name for name in shown if ft.verify(str(dirpath / name)).problem is not None]
    if broken:
        return f"not whole under their final names: {broken}"
    good = ft.last_good(str(dirpath))
    if good is None or good.name != max(shown):
        return f"{good and good.name} is taken from {shown}"
    return "" if len(names - shown) <= 1 else f"more than one leftover: {names - shown}"


def some(number: int, seed: str, found: list[Point]) -> Sequence[Point]:
    return random.Random(seed).sample(found, number)


def nothing_is_lost(found: list[matrix.Outcome]) -> None:
    assert [o for o in found if o.torn or o.nothing_left or o.lost or o.wrong] == []
    # That both ends of the run were seen.
    assert {o.reported for o in found} == {True, False}
    assert {(o.old, o.new) for o in found} >= {("good", "absent"), ("absent", "good")}


@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
def test_some_crashes(file_system: str) -> None:
    """Before a few of the calls that change something, with and without direct I/O, and after the last."""
    for way in savers.OURS:
        choose = partial(some, 5, f"{way} on {file_system}")
        found = list(matrix.crashes(way, file_system, choose, only_changing=True, check=what_is_wrong))
        assert [o for o in found if o.torn or o.nothing_left or o.lost or o.wrong] == []


@pytest.mark.slow
@pytest.mark.parametrize("way", savers.OURS)
@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
def test_every_crash(file_system: str, way: str) -> None:
    found = list(matrix.crashes(way, file_system, check=what_is_wrong))
    assert len(found) >= 2 * len(CUTS) * 30, "fewer system calls than a save with rotation needs"
    nothing_is_lost(found)


@pytest.mark.slow
@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
def test_every_crash_of_a_first_save(file_system: str) -> None:
    """Into a directory that is not there, in one that is not there: a checkpoint is no safer than its directories."""
    found = list(matrix.crashes("new_directory", file_system, only_changing=True))
    assert [o for o in found if o.torn or o.lost or o.old != "good"] == []
    assert {(o.reported, o.new) for o in found} >= {(False, "absent"), (True, "good")}


@pytest.mark.slow
@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
@pytest.mark.parametrize("way", savers.OTHERS)
def test_the_disk_loses_what_others_do_not_sync(way: str, file_system: str) -> None:
    """After their last call they are judged like us: a disk that lost nothing would prove nothing."""
    found = list(matrix.crashes(way, file_system, partial(some, 0, "")))
    assert [o for o in found if not o.cut and (o.torn or o.lost)] == []
    assert [o for o in found if o.lost]


@pytest.mark.slow
def test_the_table_of_the_documentation() -> None:
    command = [sys.executable, "-m", "tests.crash.compare", "--way", "fsspec", "--file-system", "ext4"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()
    assert len(printed) == 3
    name, killed, cut, nothing, lost = printed[2].strip("| ").split(" | ")
    assert "LocalFileSystem" in name
    for counts in (killed, cut, nothing, lost):
        count, of = (int(number) for number in counts.split(" of "))
        assert 0 < count <= of


@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
@pytest.mark.parametrize("missing", savers.BREAKAGES)
def test_the_disk_loses_what_we_do_not_sync(missing: str, file_system: str) -> None:
    """Our own saver without one of its syncs is caught on the real disk."""
    found = list(matrix.crashes(missing, file_system, partial(some, 0, ""), check=what_is_wrong))
    assert [o for o in found if o.torn or o.nothing_left or o.lost or o.wrong]


@pytest.mark.parametrize("file_system", FILE_SYSTEMS)
def test_a_manifest_before_the_last_shard_is_caught(file_system: str) -> None:
    """Everything is synced, in the wrong order: a crash between the two leaves half a checkpoint under its name."""
    choose = itemgetter(slice(-12, None))
    found = list(matrix.crashes("manifest_before_a_shard", file_system, choose, only_changing=True))
    assert [o for o in found if o.torn]
    assert not [o for o in found if o.point is None and o.torn]
