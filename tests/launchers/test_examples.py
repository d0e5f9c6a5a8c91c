"""The examples for clusters say what the package and their launchers understand."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_ft import exit_codes

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def job() -> Any:
    return yaml.safe_load((EXAMPLES / "kubernetes/job.yaml").read_text())


@pytest.mark.needs("kubernetes_validate")
def test_the_manifest_is_one(job: Any) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(job, "1.31", strict=True)


@pytest.mark.needs("kubernetes_validate")
def test_the_schema_can_fail(job: Any) -> None:
    import kubernetes_validate

    job = {**job, "spec": {**job["spec"], "podFailurePolicies": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.31", strict=True)


def test_the_manifest_and_the_package_agree(job: Any) -> None:
    template = job["spec"]["template"]["spec"]
    (container,) = template["containers"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert 0 < float(environment["LIGHTNING_FT_GRACE_SECS"]) < template["terminationGracePeriodSeconds"]
    assert template["restartPolicy"] == "Never"  # without it the API refuses a podFailurePolicy
    by_code = {
        code: rule["action"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert by_code == {
        exit_codes.PREEMPTED: "Ignore",
        exit_codes.PREEMPTED_UNSAVED: "Ignore",
        exit_codes.DIVERGED: "FailJob",
    }
    assert (EXAMPLES.parent / container["command"][1]).exists()


@pytest.mark.parametrize("name", ["slurm/job.sbatch", "torchrun/run.sh"])
def test_the_scripts_are_ones(name: str) -> None:
    subprocess.run(["bash", "-n", EXAMPLES / name], check=True)


@pytest.mark.parametrize("name", ["cluster.py", "slurm/job.sbatch", "torchrun/run.sh", "kubernetes/job.yaml"])
def test_they_are_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 100
