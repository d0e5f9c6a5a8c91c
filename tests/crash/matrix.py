"""Every system call of a save with its rotation, times SIGKILL and power cuts: what is there afterwards."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.crash.powercut import CUTS, Disk, Point, kill_at, points
from tests.crash.savers import WAYS, Progress, Saver, State


@dataclass(frozen=True)
class Outcome:
    """What was found after one crash.

    Args:
        point: Before which the process was killed, None: after its last call.
        cut: What had been written back before the power cut, one of `CUTS`; "": only the process died.
        old: Checkpoint 1, which the run removes after it has saved checkpoint 2.
        new: Checkpoint 2.
        reported: Whether the run had said that checkpoint 2 is durable.
        wrong: What else is wrong there, if anything is.
    """

    point: Point | None
    cut: str
    old: State
    new: State
    reported: bool
    wrong: str = ""

    @property
    def torn(self) -> bool:
        """Whether there is a checkpoint, by its name, that is none."""
        return "torn" in (self.old, self.new)

    @property
    def nothing_left(self) -> bool:
        """Whether neither checkpoint is good."""
        return "good" not in (self.old, self.new)

    @property
    def lost(self) -> bool:
        """Whether what had been reported as durable is not there."""
        return self.reported and self.new != "good"


class Place:
    """A directory with checkpoint 1 on a disk whose power can be cut, and a saver of checkpoint 2."""

    def __init__(self, disk: Disk, way: str, template: Path) -> None:
        self._disk = disk
        self._template = template
        self.way = WAYS[way]
        self.dirpath = disk.path / "run"
        self._progress = Progress(str(template / "progress"))
        self.saver = Saver(way, str(self.dirpath), str(template / "progress"))
        made = template / "run"
        made.mkdir()
        _in_fresh_process(Saver(way, str(made), str(template / "progress")).prepare)
        self.reset()

    def reset(self) -> None:
        """As before the run, and durable."""
        for path in self._disk.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
        shutil.copytree(self._template / "run", self.dirpath)
        (self._disk.path / "tmp").mkdir()
        self._disk.sync()
        self._progress.step = 1

    def crash(self, point: Point | None, cut: str, check: Callable[[Path], str]) -> Iterator[Outcome]:
        """Two outcomes: after the process was killed, and after the power cut that followed at once."""
        self.reset()
        code = kill_at(self.saver, point)
        assert code == (0 if point is None else -9), f"killed at {point}: exit code {code}"
        yield self._look(point, "", check)
        self._disk.cut(cut)
        yield self._look(point, cut, check)

    def _look(self, point: Point | None, cut: str, check: Callable[[Path], str]) -> Outcome:
        old, new = (self.way.state(self.dirpath, step) for step in (1, 2))
        return Outcome(point, cut, old, new, self._progress.step == 2, check(self.dirpath))


@contextlib.contextmanager
def place(way: str, file_system: str) -> Iterator[Place]:
    """A `Place` on a disk of its own."""
    with tempfile.TemporaryDirectory() as template, Disk(file_system) as disk:
        yield Place(disk, way, Path(template))


def crashes(
    way: str,
    file_system: str,
    choose: Callable[[list[Point]], Sequence[Point]] = lambda found: found,
    cuts: Sequence[str] = tuple(CUTS),
    only_changing: bool = False,
    check: Callable[[Path], str] = lambda dirpath: "",
) -> Iterator[Outcome]:
    """All outcomes of `way` on `file_system`.

    Args:
        way: One of `WAYS`.
        file_system: One of `FILE_SYSTEMS`.
        choose: Some of the points; the end of the run is always one.
        cuts: Which power cuts.
        only_changing: See `powercut.points`.
        check: What is wrong in a directory, "" if nothing is.
    """
    with place(way, file_system) as here:
        found = points(here.saver, here.dirpath.parent, only_changing)
        for point in [*choose(found), None]:
            for cut in cuts:
                yield from here.crash(point, cut, check)


def _in_fresh_process(job: Callable[[], None]) -> None:
    import multiprocessing

    process = multiprocessing.get_context("forkserver").Process(target=job)
    process.start()
    process.join()
    assert process.exitcode == 0, f"{job}: exit code {process.exitcode}"
