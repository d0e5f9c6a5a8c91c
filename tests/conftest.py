"""For all tests: what some of them need of the machine, and that each of them leaves nothing behind."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import subprocess
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest
import tenacity.nap

from lightning_ft import events, testing
from tests.stores.fixtures import chaos, poor_s3, proxy, rclone, s3, seaweed
from tests.stores.seaweed import program

# Known here to all tests, so that every worker starts one server and not one per directory.
__all__ = ["chaos", "poor_s3", "proxy", "rclone", "s3", "seaweed"]

ENDS_WITHIN_SECS = 3.0
"""No thread that has been told to end takes so long; one that is left takes longer."""


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of what a shell starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line(
        "markers",
        "needs(what, ...): skipped where the machine lacks root, mount, loop (devices), fuse, Python.h, s3fs or a "
        "tool; with CI=true that fails",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Fresh processes are forked from one server, whichever test asks first; without this it would import nothing."""
    forkserver.set_forkserver_preload(testing.PRELOADED)


def pytest_runtest_setup(item: pytest.Item) -> None:
    missing = [what for mark in item.iter_markers("needs") for what in mark.args if not _has(what)]
    if not missing:
        return
    reason = f"needs {', '.join(missing)}"
    if os.environ.get("CI", "").lower() in ("1", "true"):
        # A machine that cannot run them would otherwise make them pass for ever.
        pytest.fail(f"{reason}, and nothing is skipped with CI=true", pytrace=False)
    pytest.skip(reason)


@functools.cache
def _has(what: str) -> bool:
    if what == "root":
        return os.geteuid() == 0
    if what == "mount":
        return _can_mount()
    if what == "loop":
        return _can_mount() and subprocess.run(["losetup", "-f"], capture_output=True, check=False).returncode == 0
    if what == "fuse":
        return os.path.exists("/dev/fuse") and _can_mount()
    if what in ("jsonargparse", "kubernetes_validate", "mfusepy", "s3fs", "transformers"):
        return importlib.util.find_spec(what) is not None
    if what == "/dev/shm":
        return os.path.isdir(what) and os.statvfs(what).f_files > 0
    if what == "Python.h":
        return os.path.exists(os.path.join(sysconfig.get_path("include"), what))
    return program(what) is not None


def _can_mount() -> bool:
    """Whether a small tmpfs can be mounted: root inside a container often cannot."""
    with tempfile.TemporaryDirectory() as place:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False
        )
        if mounted.returncode == 0:
            subprocess.run(["umount", place], check=True)
        return mounted.returncode == 0


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """No thread of ours and no observer outlives the test that made it."""
    observers, threads = set(events._observers), set(_our_threads())
    yield
    made = [t for t in _our_threads() if t not in threads]
    for thread in made:
        thread.join(ENDS_WITHIN_SECS)  # one that nobody waits for may be about to end
    left = [t.name for t in made if t.is_alive()]
    registered = [o for o in events._observers if o not in observers]
    # The next tests are not to suffer for it.
    events._observers = tuple(o for o in events._observers if o in observers)
    assert not left, f"threads left running: {left}"
    assert not registered, f"observers left registered: {registered}"


def _our_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("lightning-ft")]


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nothing waits between two tries; the seconds for which it would have."""
    found: list[float] = []
    monkeypatch.setattr(tenacity.nap.time, "sleep", found.append)
    return found
