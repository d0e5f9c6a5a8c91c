"""`lightning-ft drill` as it is called: on one rank, on two, under a launcher; from CI."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from lightning_ft import events
from lightning_ft.cli.app import app
from lightning_ft.testing import _free_port
from tests.cli.conftest import Answer, program

# A run of two ranks imports torch and Lightning one rank after another, and there are three.
pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
FAULTY = Path(__file__).with_name("faulty.py")
VARIED = Path(__file__).with_name("varied.py")


def drill(*args: Any, cwd: Path | None = None, within_secs: float = 560) -> Answer:
    return program("drill", *args, cwd=cwd, timeout=within_secs)


@pytest.mark.slow
def test_the_document_is_what_help_says(tmp_path: Path) -> None:
    answer = drill("--json", "--kill-at-step", "10", "--", sys.executable, VARIED, "plain", tmp_path / "users")
    assert answer.code == 0, answer.out
    document = answer.json
    keys = [
        "command", "verdict", "repeatable", "drilled", "batches", "world_size", "validations", "trials", "not_covered",
    ]  # fmt: skip
    assert list(document) == keys
    (trial,) = document["trials"]
    resumed = trial["resumed_batch"]
    assert trial == {
        "kill_at": "10", "killed": True, "verdict": "PASS", "reason": "", "cause": "", "output": "",
        "resumed_batch": resumed, "durable_batch": resumed, "replayed": 10 - resumed,
        "differ_from": "",
    }  # fmt: skip
    help_text = drill("--help").out
    assert all(key in help_text for key in (*keys[1:], *trial))
    assert all(f"{point}" in help_text for point in events.KILL_POINTS)
    assert answer.err.splitlines() == ["run 1: uninterrupted", "run 2: to be killed at batch 10", "run 3: restarted"]
    assert not (tmp_path / "users").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_of_lightnings_launcher(tmp_path: Path) -> None:
    script = (sys.executable, VARIED, "plain", tmp_path / "users", "--devices", "2", "--strategy", "ddp")
    answer = drill("--json", "--keep", tmp_path / "kept", "--", *script)
    document = answer.json
    assert (answer.code, document["verdict"], document["world_size"]) == (0, "PASS", 2), document
    assert document["batches"] == 8  # of each rank
    (trial,) = document["trials"]
    assert trial["replayed"] == int(trial["kill_at"]) - trial["resumed_batch"]  # by each
    assert "several machines" in document["not_covered"]
    assert "several ranks" not in document["not_covered"]
    for name in ("uninterrupted/0", "killed-0/0", "killed-0/1"):
        assert {path.name for path in (tmp_path / "kept").glob(f"{name}.rank*")} == {
            f"{name[-1]}.rank0.jsonl", f"{name[-1]}.rank1.jsonl",
        }  # fmt: skip
    assert not (tmp_path / "users").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_rank_that_is_spawned_writes_elsewhere_too(tmp_path: Path) -> None:
    document = drill("--json", "--kill-at-step", "10", "--", sys.executable, VARIED, "spawned", tmp_path / "users").json
    assert document["verdict"] == "PASS", document
    assert not (tmp_path / "users").exists()


def torchrun() -> tuple[Any, ...]:
    return (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", _free_port())


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp_ft"])
def test_two_ranks_of_torchrun_killed_in_a_save_of_one(strategy: str, tmp_path: Path) -> None:
    script = (VARIED, "plain", tmp_path / "users", "--devices", "2", "--strategy", strategy)
    document = drill("--json", "--kill-at", "Renamed@0", "--", *torchrun(), *script).json
    assert (document["verdict"], document["world_size"]) == ("PASS", 2), document
    assert document["trials"][0]["resumed_batch"] == 4


@pytest.mark.slow
@pytest.mark.distributed
def test_a_fault_of_one_rank_is_named_though_all_ranks_follow(tmp_path: Path) -> None:
    script = (FAULTY, "generator of its own on rank 1", tmp_path / "users", "2")
    document = drill("--json", "--", *torchrun(), *script).json
    (trial,) = document["trials"]
    assert (document["verdict"], document["world_size"]) == ("SILENT DIVERGENCE", 2), document
    assert f"step {trial['resumed_batch'] + 1} on rank 1: batch differs" in trial["reason"]
    assert "random numbers that are not restored" in trial["cause"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--kill-at-step", "3", "--sweep"), "give one of --kill-at-step, --kill-at and --sweep"),
        (("--kill-at", "renamed"), "give a batch number or one of SaveStarted"),
        (("--kill-at", "Renamed:0"), "events are counted from 1"),
        (("--kill-at-step", "0"), "batches are counted from 1"),
        (("--steps", "0"), "steps=0"),
        (("--atol", "-1"), "atol=-1.0"),
        (("--timeout", "0"), "timeout=0.0"),
        (("--keep", "/etc"), "/etc is not an empty directory"),
    ],
)
def test_wrong_options_are_said_before_anything_runs(args: tuple[str, ...], words: str, ft: Any) -> None:
    answer = ft("drill", *args, "--", "no-such-program")
    assert answer.code == 2
    assert words in answer.err


def test_a_program_that_is_not_there_is_said_in_a_line(ft: Any) -> None:
    answer = ft("drill", "--json", "--", "no-such-program")
    assert answer.code == 3
    message = "no-such-program cannot be started: No such file or directory"
    assert json.loads(answer.out)["error"]["message"] == message


def test_the_workflow_of_the_examples_can_be_run() -> None:
    workflow = yaml.safe_load((ROOT / "examples" / "github-actions" / "drill.yml").read_text())
    (job,) = workflow["jobs"].values()
    (install,) = [step["run"] for step in job["steps"] if step.get("run", "").startswith("pip install")]
    assert shlex.split(install) == ["pip", "install", ".[cli]"]
    assert "\ncli = [" in (ROOT / "pyproject.toml").read_text()
    (line,) = [step["run"] for step in job["steps"] if step.get("run", "").startswith("lightning-ft drill")]
    command = typer.main.get_command(app).commands["drill"]  # type: ignore[attr-defined]
    context = command.make_context("drill", shlex.split(line)[2:])
    assert context.params["command"][0] == "python"
    assert (ROOT / context.params["command"][1]).is_file()
