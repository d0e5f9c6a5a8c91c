"""One run that is interrupted by real signals again and again, in the same processes, and one that is not.

A fit that a signal has stopped raises `SystemExit`; here the same process starts the next one, as a fresh process
would, with the same command. So a hundred interruptions of one training take little more time than the training, and
what all of it did is compared with the run that nobody has interrupted.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

import lightning_ft as ft
from lightning_ft import _names, testing
from lightning_ft._proof.recorder import Recorder
from lightning_ft.guards.preemption import PreemptionGuard
from tests import ranks
from tests.ranks import Rank
from tests.trainer import scenarios as s

WAIT_SECS = 60.0


@dataclass(frozen=True)
class Ended:
    """One fit, as a rank has seen it end."""

    code: int | None
    """The exit code it asked for; None: `fit` has returned."""
    began_at: int
    """Batches trained when its training began."""
    batches: int
    """Batches trained when it ended."""
    stops: tuple[str, ...]
    """Rank 0: the good checkpoints of exactly that state."""


STEPS_OF_A_TRIAL = 6
"""So many are left for each signal that is still to come: training stops within two of them."""


class Tell(Callback):
    """Lets the outside know that this fit is being set up, and that it trains; leaves steps for the signals to come."""

    def __init__(self, path: Path, number: int, trials: int) -> None:
        self.path = path
        self.number = number
        self.trials = trials
        self.began_at = -1

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self.path.write_text(json.dumps({"pid": os.getpid(), "fit": self.number, "trains": False}))

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.began_at = trainer.fit_loop.epoch_loop.batch_progress.total.processed

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0 or trainer.fit_loop.epoch_loop.batch_progress.total.processed == self.began_at:
            half = self.path.with_suffix(".half")
            half.write_text(json.dumps({"pid": os.getpid(), "fit": self.number, "trains": True}))
            os.replace(half, self.path)
        left = trainer.max_steps - trainer.global_step
        while left <= STEPS_OF_A_TRIAL * (self.trials - self.number) and not self._is_signalled():
            time.sleep(0.002)  # by the interpreter, which handles signals meanwhile: no wait of a store does

    def _is_signalled(self) -> bool:
        return self.path.with_name(f"{self.number}.signalled").exists()


def train(
    rank: Rank, place: str, name: str, trials: int, max_steps: int, make_model: Callable[[], Any], workers: int,
    kwargs: Any,
) -> list[Ended]:  # fmt: skip
    """The run `name` to its end, started as often as it takes. What each start did is in `place`, in one trace."""
    # Loader workers start as under `python train.py`, not as this process was started.
    multiprocessing.set_start_method("fork", force=True)
    dirpath = f"{place}/{name}/checkpoints"
    ended: list[Ended] = []
    while True:
        trainer = s.trainer(
            dirpath, every=13, max_epochs=-1, max_steps=max_steps, val_check_interval=20, check_val_every_n_epoch=None,
            ft_args={"guards": [PreemptionGuard()]}, **kwargs,
        )  # fmt: skip
        tell = Tell(Path(f"{place}/{rank.number}.fit"), len(ended), trials)
        trainer.callbacks[:0] = [Recorder(f"{place}/{name}/{len(ended)}.rank{rank.number}.jsonl"), tell]
        code = None
        try:
            trainer.fit(make_model(), *s.shuffled(workers), ckpt_path="last")
        except SystemExit as left:
            code = left.code
        batches = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        stops = _at(dirpath, trainer.global_step) if rank.number == 0 else ()
        ended.append(Ended(code, tell.began_at, batches, stops))
        if code is None:
            return ended


def _at(dirpath: str, step: int) -> tuple[str, ...]:
    there = [i for i in ft.list_checkpoints(dirpath) if (_names.parse_checkpoint_name(i.name) or (-1, 0))[0] == step]
    return tuple(info.name for info in there if ft.verify(info.path).problem is None)


Pattern = tuple[tuple[int, int], ...]
"""Which rank gets which signal, in this order; a negative number goes to all children of the rank, too."""


def patterns(world_size: int) -> list[Pattern]:
    """To one rank, to all, twice, two signals, to a whole process group, after a save on demand."""
    term, early, save = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
    each = [((rank, number),) for rank in range(world_size) for number in (term, early)]
    everyone = tuple((rank, term) for rank in range(world_size))
    group = tuple((rank, -term) for rank in range(world_size))
    last = world_size - 1
    mixed: list[Pattern] = [((0, term), (0, term)), ((0, early), (last, term)), ((last, save), (0, term))]
    return [*each, *mixed, group, ((last, -early),), everyone, everyone[::-1], everyone * 2]


class Signaller:
    """Signals the ranks of a run at random moments, once per fit, until `trials` fits were signalled."""

    def __init__(self, place: Path, world_size: int, trials: int, seed: int, within_secs: float) -> None:
        self._place = place
        self._random = random.Random(seed)
        self._world_size = world_size
        self._trials = trials
        self._within_secs = within_secs
        self._over = threading.Event()
        self.sent: list[tuple[Pattern, bool]] = []
        """What was sent to each fit, and whether all ranks were training by then."""

    def run(self) -> None:
        """Returns when all is sent, or the run has ended."""
        for fit in range(self._trials):
            training = self._random.random() < 0.85
            pids = self._await(fit, training)
            if pids is None:
                return
            time.sleep(self._random.uniform(0, self._within_secs))  # the random moment itself
            pattern = self._random.choice(patterns(self._world_size))
            for rank, number in pattern:
                for pid in [*(_children(pids[rank]) if number < 0 else ()), pids[rank]]:
                    os.kill(pid, abs(number))
            self.sent.append((pattern, training))
            (self._place / f"{fit}.signalled").touch()

    def _await(self, fit: int, training: bool) -> list[int] | None:
        """The processes, when all of them are at this fit; None if the run is over."""
        while not self._over.wait(0.002):
            told = [self._read(rank) for rank in range(self._world_size)]
            if all(t is not None and t["fit"] == fit and t["trains"] >= training for t in told):
                return [t["pid"] for t in told if t is not None]
        return None

    def _read(self, rank: int) -> dict[str, Any] | None:
        try:
            return dict(json.loads((self._place / f"{rank}.fit").read_text()))
        except (OSError, ValueError):
            return None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """In a thread, while the block runs."""
        thread = threading.Thread(target=self.run, name="signaller")
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def interrupted_equals_uninterrupted(
    place: Path,
    *,
    trials: int,
    max_steps: int,
    seed: int,
    within_secs: float,
    make_model: Callable[[], Any] = s.Net,
    world_size: int = 2,
    workers: int = 0,
    run_within_secs: float = 280,
    **kwargs: Any,
) -> list[list[Ended]]:
    """After `trials` signals each start has ended at one state on all ranks, and the run did what it does without them.

    Returns:
        How each fit has ended, by rank.
    """
    if world_size > 1:
        kwargs |= {"strategy": "ddp", "devices": world_size}
    for name in ("uninterrupted", "restarted"):
        (place / name).mkdir(parents=True)
    signaller = Signaller(place, world_size, trials, seed, within_secs)

    def run(name: str, trials: int) -> list[list[Ended]]:
        return ranks.values(
            train, place / f"{name}-ranks", str(place), name, trials, max_steps, make_model, workers, kwargs,
            world_size=world_size, within_secs=run_within_secs,
        )  # fmt: skip

    run("uninterrupted", 0)
    for told in place.glob("*.fit"):
        told.unlink()
    with signaller.at_work():
        ended = run("restarted", trials)
    assert len(signaller.sent) == trials, f"the run was over after {len(signaller.sent)} of {trials} signals: longer"
    _check(ended, signaller)
    _compare(place, world_size)
    return ended


def _check(ended: list[list[Ended]], signaller: Signaller) -> None:
    assert len(ended[0]) == len(signaller.sent) + 1, "every signal ends one fit, and the last one ends by itself"
    for number, fits in enumerate(zip(*ended, strict=True)):
        sent = signaller.sent[number] if number < len(signaller.sent) else "nothing"
        what = f"fit {number}, sent {sent}: {fits}"
        last = number == len(signaller.sent)
        assert [fit.code for fit in fits] == [None if last else 75] * len(fits), what
        assert len({fit.batches for fit in fits}) == 1, f"not the same step: {what}"
        assert len({fit.began_at for fit in fits}) == 1, what
        if number:
            assert fits[0].began_at == ended[0][number - 1].batches, f"trained again, or left out: {what}"
        if fits[0].batches:
            assert len(fits[0].stops) == 1, f"not one good checkpoint of this state: {what}"


def _compare(place: Path, world_size: int) -> None:
    for rank in range(world_size):
        expected = testing._read(place / "uninterrupted", rank)
        actual = testing._read(place / "restarted", rank)
        last = max(record["start"] for record in actual)
        # `on_train_end` is called at each stop too.
        actual = [record for record in actual if record["kind"] != "end" or record["start"] == last]
        assert testing._compare(expected, actual, rank) == 0, "a step was trained twice"
