"""Errors of network file systems: at close, of one path, of a directory that cannot be synced, writes cut short."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lightning_ft as ft
from lightning_ft._names import checkpoint_name
from tests.crash.faults import Run, check_failure, check_next_save, contents, two_saved

pytestmark = [pytest.mark.needs("root", "fuse", "fusermount3", "mfusepy"), pytest.mark.usefixtures("small_buffers")]

Setter = Callable[..., None]


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Setter]]:
    """A directory of the faulty file system, and what sets its rules."""
    place = tmp_path_factory.mktemp("faultfs")
    backing, mount, rules = place / "backing", place / "mount", place / "rules"
    backing.mkdir()
    mount.mkdir()

    def set_rules(*wanted: dict[str, Any]) -> None:
        (place / "new").write_text(json.dumps(wanted))
        os.replace(place / "new", rules)

    set_rules()
    command = [sys.executable, "-m", "tests.crash.faultfs", str(backing), str(mount), str(rules)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as server:
        while not os.path.ismount(mount):
            with pytest.raises(subprocess.TimeoutExpired):  # it ends only if it could not be mounted
                server.wait(0.02)
        try:
            yield mount, set_rules
        finally:
            subprocess.run(["fusermount3", "-u", str(mount)], check=True)


@pytest.fixture
def here(mounted: tuple[Path, Setter], request: pytest.FixtureRequest) -> Iterator[tuple[Path, Setter]]:
    """A new directory in it."""
    mount, set_rules = mounted
    yield mount / request.node.name.replace("/", "_"), set_rules
    set_rules()


def rule(op: str, error: int, path: str = "*.attempt", **more: int) -> dict[str, Any]:
    return {"op": op, "errno": error, "path": path, **more}


@pytest.mark.parametrize(
    "wanted",
    [
        rule("flush", errno.EDQUOT),
        rule("flush", errno.ENOSPC),
        rule("flush", errno.EIO),
        rule("write", errno.ENOSPC, after=2),
        rule("write", errno.EDQUOT),
        rule("fsync", errno.EIO),
        rule("rename", errno.ESTALE, "*.ckpt"),
        rule("create", errno.EDQUOT),
        rule("fsyncdir", errno.EIO, "*"),
    ],
    ids=lambda wanted: f"{wanted['op']}-{errno.errorcode[wanted['errno']]}",
)
def test_an_operation_fails_until_it_no_longer_does(wanted: dict[str, Any], here: tuple[Path, Setter]) -> None:
    dirpath, set_rules = here
    before = two_saved(dirpath)
    set_rules(wanted)
    failures = Run(str(dirpath), "", (3,)).save()
    check_failure(dirpath, before, failures, os.strerror(wanted["errno"]))
    set_rules()
    check_next_save(dirpath)


@pytest.mark.parametrize(
    "wanted",
    [
        rule("fsyncdir", errno.EINVAL, "*"),  # no such thing here: there is nothing to wait for
        {"op": "write", "short": 5000},
        {"op": "write", "short": 4096, "times": 3},
    ],
    ids=["no sync of directories", "short writes", "some short writes"],
)
def test_an_odd_file_system_is_no_fault(wanted: dict[str, Any], here: tuple[Path, Setter]) -> None:
    dirpath, set_rules = here
    before = two_saved(dirpath)
    set_rules(wanted)
    assert Run(str(dirpath), "", (3,)).save() == {}
    assert ft.verify(str(dirpath / checkpoint_name(3))).problem is None
    after = contents(dirpath)
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize("op", ["write", "flush", "rename"])
def test_a_stale_handle_is_tried_again(op: str, here: tuple[Path, Setter]) -> None:
    dirpath, set_rules = here
    two_saved(dirpath)
    set_rules(rule(op, errno.ESTALE, "*", times=1))
    assert Run(str(dirpath), "", (3,), retries=1).save() == {}
    assert sorted(contents(dirpath)) == [checkpoint_name(step) for step in (1, 2, 3)]


def test_an_older_checkpoint_that_cannot_be_removed_stays(here: tuple[Path, Setter]) -> None:
    """After its name was hidden: the data is cleared away by the next start."""
    dirpath, set_rules = here
    before = two_saved(dirpath)
    set_rules(rule("unlink", errno.EBUSY, "*.deleted"))
    plugin = ft.FaultTolerantCheckpointIO()
    plugin._own_directories.add(str(dirpath))
    plugin.remove_checkpoint(str(dirpath / checkpoint_name(1)))
    plugin.teardown()
    assert checkpoint_name(1) not in contents(dirpath)
    assert len(contents(dirpath)) == 2
    set_rules()
    ft.storage.Storage().remove_leftovers(str(dirpath))
    assert contents(dirpath) == {name: data for name, data in before.items() if name != checkpoint_name(1)}
