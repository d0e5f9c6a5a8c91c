"""That the benchmark measures everything it says; how fast anything is, is not looked at."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.contenders import CONTENDERS
from tests.benchmarks.figures import Samples
from tests.benchmarks.plan import FULL, QUICK, Plan
from tests.benchmarks.targets import TARGETS, Target, judge

ROOT = Path(__file__).parents[2]
SAVING = [name for name in CONTENDERS if name != "none"]
SAVES = 3


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run with a minute state has written, and printed."""
    out = tmp_path_factory.mktemp("bench")
    sizes = "--state-mib 3 --small-mib 1 --rounds 1 --idle-steps 100 --idle-pairs 1"
    command = f"-m tests.benchmarks --quick {sizes} --memory-saves {SAVES} --out".split()
    run = subprocess.run([sys.executable, *command, str(out)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    left = {path.name for path in out.iterdir()}
    assert left - {"bench.png"} == {"bench.json"}
    assert ("bench.png" in left) != ("no picture" in run.stdout)
    return {**json.loads((out / "bench.json").read_text()), "printed": run.stdout}


def expected() -> list[str]:
    limits = ["memcpy_1_secs", "memcpy_2_secs", "hash_secs", "read_secs", "write_secs"]
    names = [f"{shape}.limits.{limit}" for shape in ("large", "small") for limit in limits]
    for shape in ("large", "small"):
        names += [f"{shape}.{c}.{q}" for c in CONTENDERS for q in ("steps_per_sec", "throughput", "gap_secs")]
        names += [f"{shape}.{c}.{q}" for c in SAVING for q in ("blocked_secs", "durable_secs", "first_blocked_secs")]
    names += [f"restart.{way}.secs" for way in ("read", "lightning", "ours")]
    names += [f"idle.{ranks}.{q}_secs" for ranks in ("one", "two") for q in ("none", "ours", "added")]
    return names + [f"memory.{c}.{q}_bytes" for c in SAVING for q in ("peak", "kept")]


def test_every_figure_is_there(result: dict[str, Any]) -> None:
    missing = [name for name in expected() if not result["samples"].get(name)]
    assert missing == []
    assert all(math.isfinite(value) for values in result["samples"].values() for value in values)


def test_the_memory_of_every_save_is_there(result: dict[str, Any]) -> None:
    assert {len(result["samples"][f"memory.{c}.peak_bytes"]) for c in SAVING} == {SAVES}


def test_every_target_was_judged(result: dict[str, Any]) -> None:
    assert [t["name"] for t in result["targets"]] == [t.name for t in TARGETS]
    # A file system without O_DIRECT has no such limit.
    assert [t["name"] for t in result["targets"] if t["value"] is None and "O_DIRECT" not in t["name"]] == []
    assert all(target.name in result["printed"] for target in TARGETS)


@pytest.mark.parametrize(("value", "at_least", "met"), [(0.9, False, True), (1.1, False, False), (1.1, True, True)])
def test_a_target_is_met_on_the_right_side_of_its_limit(value: float, at_least: bool, met: bool) -> None:
    assert Target("", lambda samples, plan: None, 1.0, "x", at_least).met(value) is met


def test_what_was_not_measured_is_no_target_met() -> None:
    assert {outcome.met for outcome in judge(Samples(), Plan())} == {None}


def test_growth_compares_the_ends_of_the_series() -> None:
    samples = Samples()
    samples.add("rising", {"bytes": [1.0, 2.0, 9.0, 3.0, 5.0, 4.0]})
    assert samples.growth("rising.bytes") == 3.0


@pytest.mark.parametrize("plan", [FULL, QUICK])
def test_a_state_has_the_size_that_was_asked_for(plan: Plan) -> None:
    for shape in (plan.large, plan.small):
        assert shape.size_bytes == pytest.approx(shape.mib * 2**20, rel=0.02)
