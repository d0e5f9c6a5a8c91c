"""That the benchmark measures everything it says; how fast anything is, is not looked at."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.benchmarks import replicated, sharded, stores
from tests.benchmarks.contenders import CONTENDERS
from tests.benchmarks.figures import Samples
from tests.benchmarks.model import Layers
from tests.benchmarks.pace import Pace, Save
from tests.benchmarks.plan import FULL, QUICK, Plan, Shape
from tests.benchmarks.targets import TARGETS, Target, judge
from tests.benchmarks.training import follow
from tests.stores.fixtures import Place

ROOT = Path(__file__).parents[2]
SAVING = [name for name in CONTENDERS if name != "none"]
CHECKPOINTING = [name for name in SAVING if name != "floor"]
SAVES = 3


def expected() -> list[str]:
    limits = ["memcpy_1_secs", "memcpy_2_secs", "hash_secs", "read_secs", "write_secs"]
    names = [f"{shape}.limits.{limit}" for shape in ("large", "small") for limit in limits]
    for shape in ("large", "small"):
        names += [f"{shape}.{c}.{q}" for c in CONTENDERS for q in ("steps_per_sec", "throughput", "gap_secs")]
        names += [f"{shape}.{c}.{q}" for c in SAVING for q in ("blocked_secs", "durable_secs", "first_blocked_secs")]
    names += [f"sharded.limits.{limit}" for limit in ("memcpy_secs", "write_secs")]
    names += [f"sharded.{c}.{q}_secs" for c in sharded.CONTENDERS for q in ("first_blocked", "blocked", "durable")]
    quantities = ("first_blocked_secs", "blocked_secs", "durable_secs", "rank_0_bytes", "rank_1_bytes")
    names += [f"replicated.{layout}.{q}" for layout in replicated.LAYOUTS for q in quantities]
    names += [f"restart.{way}.secs" for way in ("read", "lightning", "ours")]
    added = ("none", "ours", "added", "guards", "floor_added")
    names += [f"idle.{ranks}.{q}_secs" for ranks in ("one", "two") for q in added]
    return names + [f"memory.{c}.{q}_bytes" for c in CHECKPOINTING for q in ("peak", "kept")]


def test_a_run_with_a_minute_state_measures_everything(tmp_path: Path) -> None:
    sizes = "--state-mib 3 --small-mib 1 --sharded-mib 1 --rounds 1 --steps 3 --idle-steps 100 --idle-pairs 1"
    command = f"-m tests.benchmarks --quick {sizes} --memory-saves {SAVES} --out".split()
    run = subprocess.run(
        [sys.executable, *command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr

    left = {path.name for path in tmp_path.iterdir()}
    assert left - {"bench.png"} == {"bench.json"}
    assert ("bench.png" in left) != ("no picture" in run.stdout)

    result = json.loads((tmp_path / "bench.json").read_text())
    samples = result["samples"]
    assert [name for name in expected() if not samples.get(name)] == []
    assert all(math.isfinite(value) for values in samples.values() for value in values)
    counts = {c: len(samples[f"memory.{c}.peak_bytes"]) for c in CHECKPOINTING}
    assert counts == {c: SAVES if c == "overlap" else min(SAVES, QUICK.other_memory_saves) for c in CHECKPOINTING}
    assert all(t["least"] is not None for t in result["targets"] if t["name"].startswith(("idle", "throughput")))

    assert [t["name"] for t in result["targets"]] == [t.name for t in TARGETS]
    # A file system without O_DIRECT has no such limit.
    assert [t["name"] for t in result["targets"] if t["value"] is None and "O_DIRECT" not in t["name"]] == []
    assert all(target.name in run.stdout for target in TARGETS)


@pytest.mark.needs("s3fs", "weed")
def test_the_stores_are_measured_in_every_way(s3: Place, tmp_path: Path) -> None:
    samples = stores.measure(s3.options, tmp_path, 3 << 20, rounds=1)
    assert {name: len(secs) for name, secs in samples.items()} == dict.fromkeys(
        ["put_file", "save", "get_file", "verify", "open_verified"], 1
    )
    table = stores.report(samples, 3)
    assert all(name in table for name in samples)


@pytest.mark.parametrize(("value", "at_least", "met"), [(0.9, False, True), (1.1, False, False), (1.1, True, True)])
def test_a_target_is_met_on_the_right_side_of_its_limit(value: float, at_least: bool, met: bool) -> None:
    assert Target("", lambda samples, plan: None, 1.0, "x", at_least).met(value) is met


def test_what_was_not_measured_is_no_target_met() -> None:
    assert {outcome.met for outcome in judge(Samples(), Plan())} == {None}


@pytest.mark.parametrize(("values", "growth"), [([1.0, 2.0, 2.0], 0.0), ([1.0, 2.0, 9.0, 3.0], 7.0), ([4.0], 0.0)])
def test_growth_is_what_later_saves_take_beyond_the_first_two(values: list[float], growth: float) -> None:
    samples = Samples()
    samples.add("saves", {"bytes": values})
    assert samples.growth("saves.bytes") == growth


class ClockByHand:
    """Stands for `perf_counter`: goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


def test_a_wait_before_the_optimizer_step_is_blocked_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = ClockByHand()

    class Waits(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            clock.now += 100  # a step, which is nobody's wait

        def on_before_optimizer_step(self, *args: Any) -> None:
            clock.now += 5

        def on_save_checkpoint(self, *args: Any) -> None:
            clock.now += 2

    def contender(pace: Pace, dirpath: str) -> dict[str, Any]:
        arguments = CONTENDERS["lightning"](pace, dirpath)
        return {**arguments, "callbacks": [*arguments["callbacks"], Waits()]}

    def script(pace: Pace, model: Layers) -> Iterator[None]:
        yield
        for _ in range(2):
            pace.allow(1)
            yield
            pace.wait()
            yield

    monkeypatch.setitem(CONTENDERS, "waits", contender)
    monkeypatch.setattr(time, "perf_counter", clock)
    pace = follow(script, "waits", Shape("", 0.01, 2), 1, torch.get_num_threads(), str(tmp_path))
    assert [save.blocked_secs for save in pace.saves] == [7, 7]


def test_the_contender_may_say_that_it_blocked_for_longer() -> None:
    assert Save("", began=1.0, returned=2.0, metrics={"blocked_secs": 3.0}).blocked_secs == 3.0
    assert Save("", began=1.0, returned=5.0, metrics={"blocked_secs": 3.0}).blocked_secs == 4.0


def test_a_save_is_let_through_when_the_one_before_is_durable() -> None:
    pace = Pace()
    pace.removes = False
    pace.allow(2)
    with pace.saving("a"):
        assert not pace.due
    assert not pace.due
    pace.durable()
    assert pace.due
    with pace.saving("b"):
        pass
    pace.durable()
    assert not pace.due
    pace.close()


def test_a_failed_save_is_no_measurement() -> None:
    pace = Pace()
    pace.allow(1)
    with pace.saving("a"):
        pace.fail("no space left")
    with pytest.raises(RuntimeError, match=r"a was not saved: no space left"):
        pace.wait()
    pace.close()


@pytest.mark.parametrize("plan", [FULL, QUICK])
def test_a_state_has_the_size_that_was_asked_for(plan: Plan) -> None:
    for shape in (plan.large, plan.small):
        assert shape.size_bytes == pytest.approx(shape.mib * 2**20, rel=0.02)


def test_the_attribution_names_functions_of_the_whole_package() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "from tests.benchmarks.attribution import main; main(60)"],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    for name in ("_fit/session.py", "_data/order.py", "callback.py", "_vote/voting.py"):
        assert name in run.stdout
