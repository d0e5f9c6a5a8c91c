"""Workers of loaders, signalled as schedulers, launchers and terminals do it: the whole group at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import util
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling, worker
from torchdata.stateful_dataloader import StatefulDataLoader, stateful_dataloader

from lightning_ft._preemption.loader_workers import shield

NUMBERS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Signalled(Dataset[torch.Tensor]):
    """Item 2 comes after all the signals have come to the worker, from another process than its parent."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 2:
            worker = os.getpid()
            child = os.fork()
            if child == 0:
                for number in (*NUMBERS, signal.SIGINT):
                    os.kill(worker, number)
                os._exit(0)
            os.waitpid(child, 0)
        return torch.tensor(i)


def signal_from_elsewhere(number: int = signal.SIGTERM) -> None:
    """This process gets it from another one than its parent."""
    own, child = os.getpid(), os.fork()
    if child == 0:
        os.kill(own, number)
        os._exit(0)
    os.waitpid(child, 0)


class SignalledAtStart(Signalled):
    """The signals come before the worker has run anything of torch's: when it is forked, or is given the dataset."""

    def __init__(self) -> None:
        self.pickled = True  # what has no attribute has no state to be set
        util.register_after_fork(self, lambda dataset: dataset.start())

    def start(self) -> None:
        for number in (*NUMBERS, signal.SIGINT):
            signal_from_elsewhere(number)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.start()


@pytest.fixture
def shielded() -> Iterator[None]:
    stop = shield(NUMBERS)
    yield
    stop()


LOADERS: list[Any] = [DataLoader, StatefulDataLoader]


@pytest.mark.usefixtures("shielded")
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_outlive_signals(loader: Any, method: str) -> None:
    made = loader(Signalled(), batch_size=None, num_workers=1, multiprocessing_context=method)
    assert [int(item) for item in made] == [0, 1, 2, 3]


@pytest.mark.usefixtures("shielded")
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_outlive_signals_that_come_while_they_start(loader: Any, method: str) -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    made = loader(SignalledAtStart(), batch_size=None, num_workers=2, multiprocessing_context=method)
    assert [int(item) for item in made] == [0, 1, 2, 3]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == blocked


@pytest.mark.usefixtures("shielded")
@pytest.mark.parametrize("loader", LOADERS)
def test_but_not_their_parents_own(loader: Any) -> None:
    iterator = iter(loader(Signalled(), batch_size=None, num_workers=1))
    base = getattr(iterator, "_iterator", iterator)
    (process,) = base._workers
    signal_handling._remove_worker_pids(id(base))  # its end would be an error
    process.terminate()
    process.join(30)
    assert process.exitcode == -signal.SIGKILL
    base._worker_pids_set = False


UNSHIELDED = """
import signal
from torch.utils.data import DataLoader
from tests.unit.test_loader_workers import Signalled

items = iter(DataLoader(Signalled(), batch_size=None, num_workers=1))
(worker,) = items._workers
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
try:
    list(items)
except (RuntimeError, EOFError, ConnectionError):  # whichever is noticed first
    worker.join()
print(worker.exitcode)
"""


def test_without_it_they_die() -> None:
    """Which torch raises in a handler of SIGCHLD, in the middle of whatever the training is doing: not here."""
    command = [sys.executable, "-c", UNSHIELDED]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert int(printed) in [-number for number in NUMBERS]


@pytest.mark.usefixtures("shielded")
def test_programs_that_a_dataset_starts_can_be_ended() -> None:
    class Starts(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, i: int) -> torch.Tensor:
            program = subprocess.Popen(["sleep", "60"])
            program.terminate()
            return torch.tensor(program.wait(30))

    assert [int(code) for code in DataLoader(Starts(), num_workers=1)] == [-signal.SIGTERM]


def test_what_was_there_is_there_again() -> None:
    def there() -> list[Any]:
        return [worker._worker_loop, stateful_dataloader._worker_loop, signal_handling._set_worker_pids]

    before = there()
    shield(NUMBERS)()
    assert there() == before


FORKSERVER = """
import multiprocessing, signal
from torch.utils.data import DataLoader
from lightning_ft._preemption.loader_workers import shield

stop = shield([signal.SIGTERM])
assert len(list(DataLoader([0, 1], batch_size=None, num_workers=1, multiprocessing_context="forkserver"))) == 2
stop()
with multiprocessing.get_context("forkserver").Pool(1) as pool:
    print(sorted(pool.apply(signal.pthread_sigmask, (signal.SIG_BLOCK, []))))
"""


def test_what_else_a_forkserver_starts_has_nothing_blocked() -> None:
    """It is there from the first worker on, in a process of its own here: the tests' has one already."""
    run = subprocess.run([sys.executable, "-c", FORKSERVER], capture_output=True, text=True, timeout=240, check=False)
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr
