"""A process that is watched and does what its first argument says: everything but a training."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable

from lightning_ft._watcher import peers
from lightning_ft._watcher.limits import Limits
from lightning_ft._watcher.page import Cell, Phase
from lightning_ft._watcher.start import Watching
from tests.hangs.ways import c_code_keeps_the_interpreter, it_is_stopped, the_lock_is_never_released  # noqa: F401 - by name

CODE = 78
FOREVER = 10_000


def a_regular_expression_explodes() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def a_builtin_never_returns() -> None:
    sum(range(10**15))


def it_sleeps() -> None:
    time.sleep(FOREVER)


def it_ends() -> None:
    sys.exit(3)


def it_leaves() -> None:
    os._exit(4)


def it_is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def it_crashes() -> None:
    ctypes.string_at(0)


def it_becomes_another_program() -> None:
    os.execv(  # noqa: S606
        sys.executable, [sys.executable, "-c", "import time; time.sleep(1.5); raise SystemExit(5)"]
    )


def workers_live_on() -> None:
    for _ in range(2):
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def workers_hang_too() -> None:
    for _ in range(2):
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    the_lock_is_never_released()


def steps_are_made(watching: Watching) -> None:
    cells = watching.page.cells
    cells[Cell.PHASE] = Phase.STEP
    until = time.monotonic() + 4
    while time.monotonic() < until:
        cells[Cell.PROGRESS] += 1
        cells[Cell.STEPS] += 1
        time.sleep(0.02)


def nobody_watches_any_more(watching: Watching) -> None:
    watching.close()
    assert not watching.alive
    time.sleep(2.5)


def a_save_is_written(watching: Watching) -> None:
    cells = watching.page.cells
    cells[Cell.SAVES_BEGUN] = 1

    def write() -> None:
        more = 10
        while more:  # until the watcher, which has seen the save by then, asks for the stacks, and a second longer
            cells[Cell.SAVE_PROGRESS] += 1
            time.sleep(0.1)
            more -= os.fstat(watching._stacks_fd).st_size > 0
        print("written", flush=True)
        cells[Cell.SAVES_OVER] = 1

    threading.Thread(target=write, daemon=True).start()
    the_lock_is_never_released()


def main() -> None:
    what, *more = sys.argv[1:]
    # Two ranks hang in a step, and have to find each other before that.
    watching = Watching(Limits(startup_secs=60.0 if len(more) == 2 else 1.0, step_secs=2.0), CODE)
    print(watching.pid, os.getpid(), flush=True)
    if more:
        _take_place(watching, int(more[0]), more[1], [int(rank) for rank in more[2:]])
    function: Callable[..., None] = globals()[what]
    function(*([watching] if function.__code__.co_argcount else []))


def _go_on_until(watching: Watching, happened: Callable[[], bool]) -> None:
    while not happened():
        watching.page.cells[Cell.PROGRESS] += 1
        time.sleep(0.01)


def _met(port: int) -> bool:
    """Whether the other rank's watcher has a connection to that of rank 0, which listens on `port`."""
    with open("/proc/net/tcp") as file:
        found = [line.split()[1:4] for line in file]
    return any(local.endswith(f":{port:04X}") and state == "01" for local, _, state in found)


def _take_place(watching: Watching, rank: int, path: str, absent: list[int]) -> None:
    """One of two ranks, which have met; or of four, which wait for `absent` yet."""
    if rank == 0:
        listener = peers.listen("127.0.0.1")
        port, world_size = listener.getsockname()[1], 4 if absent else 2
        place = {"host": "127.0.0.1", "port": port, "token": "secret", "world_size": world_size}
        with open(path + ".new", "w") as file:
            json.dump(place, file)
        os.rename(path + ".new", path)
    else:
        listener = None
        _go_on_until(watching, lambda: os.path.exists(path))
        with open(path) as file:
            place = json.load(file)
    if absent:
        watching.take_place({**place, "rank": rank, "absent": absent}, listener)
        print("listens", flush=True)
        return
    watching.take_place({**place, "rank": rank}, listener)
    watching.take_place({"rank": rank, "absent": [1 - rank]})  # which was on its way for long, and is not so any more
    _go_on_until(watching, lambda: _met(place["port"]))
    open(f"{path}.{rank}", "w").close()
    _go_on_until(watching, lambda: os.path.exists(f"{path}.{1 - rank}"))  # seen by both, of which one may end at once
    print("met", flush=True)
    watching.page.cells[Cell.PHASE] = Phase.STEP
    watching.page.cells[Cell.POSITION] = 11


if __name__ == "__main__":
    main()
