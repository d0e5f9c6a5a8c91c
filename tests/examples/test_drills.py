"""The drill passes on every example: killed and restarted, each does what it does when it is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_ft.testing import _free_port
from tests.cli.conftest import ROOT, environment
from tests.examples.processes import EXAMPLES
from tests.stores.fixtures import Place

# A run of two ranks imports torch and Lightning one rank after another, and there are three runs.
pytestmark = pytest.mark.timeout(600)

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "cli.py": ("fit", "--config", str(EXAMPLES / "cli.yaml")),
    "ddp.py": (),
    "digits.py": (),
    "from_model_checkpoint.py": ("after",),
    "fsdp.py": (),
    "language_model.py": (),
    "minimal.py": (),
    "stateful_dataloader.py": (),
}
NEEDS = {"language_model.py": "transformers", "cli.py": "jsonargparse"}


def test_no_example_is_forgotten() -> None:
    drilled = {*ARGUMENTS, "s3.py", "cluster.py"}
    assert drilled == {path.name for path in EXAMPLES.glob("*.py")} - {"demo.py", "demo_run.py"}  # proofs themselves


def drill(*command: Any, cwd: Path, **values: str) -> None:
    """It has passed, and has left nothing where it was called."""
    drilled = [sys.executable, "-m", "lightning_ft", "drill", "--steps", "60", "--timeout", "180", "--", *command]
    done = subprocess.run(
        [*map(str, drilled)], cwd=cwd, env=environment(**values), stdin=subprocess.DEVNULL, capture_output=True,
        text=True, check=False, timeout=570,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS: killed at batch " in done.stdout
    assert "went on after batch " in done.stdout
    assert not list(cwd.iterdir())  # checkpoints and logs, which it would write here


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.needs(*filter(None, [NEEDS.get(name)]))) for name in ARGUMENTS]
)
def test_as_it_is_called(name: str, tmp_path: Path) -> None:
    drill(sys.executable, EXAMPLES / name, *ARGUMENTS[name], cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.needs("s3fs", "weed")
def test_with_a_store(s3: Place, tmp_path: Path) -> None:
    credentials = {
        "AWS_ACCESS_KEY_ID": s3.options["key"], "AWS_SECRET_ACCESS_KEY": s3.options["secret"],
        "AWS_ENDPOINT_URL": s3.options["endpoint_url"],
    }  # fmt: skip
    drill(sys.executable, EXAMPLES / "s3.py", f"{s3.url}/drilled", tmp_path / "local", cwd=tmp_path, **credentials)


@pytest.mark.slow
@pytest.mark.distributed
def test_under_torchrun(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", _free_port())
    drill(sys.executable, *torchrun, EXAMPLES / "cluster.py", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.distributed
def test_as_the_pod_of_the_job(tmp_path: Path) -> None:
    """Its command and environment, on a machine of ours."""
    job = yaml.safe_load((EXAMPLES / "kubernetes/job.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    python, script, *arguments = container["command"]
    assert python == "python"
    values = {variable["name"]: variable["value"] for variable in container["env"]}
    drill(sys.executable, ROOT / script, *arguments, cwd=tmp_path, **values)
    assert not os.path.exists("/checkpoints/run1")
