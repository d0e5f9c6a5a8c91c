"""Wheel and sdist of a clean copy of this tree, and an empty environment in which the wheel was installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
# The environment is made and filled, a torch of several hundred megabytes included, on a machine with other work.
WITHIN_SECS = 600


def run(*command: Any, cwd: Path, code: int | None = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """It has ended with `code`. Nothing of this environment, in which the package is importable, leaks into it."""
    given = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env={**given, "PYTHONNOUSERSITE": "1", **environment}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=WITHIN_SECS,
    )  # fmt: skip
    assert code in (None, done.returncode), f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def tracked() -> list[str]:
    """The files of the project, with those that are new; all there are where this is no checkout but an sdist."""
    if not (ROOT / ".git").exists():
        caches = ("__pycache__", ".pytest_cache", ".hypothesis", ".venv")
        files = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]
        return sorted(str(path) for path in files if not set(path.parts) & set(caches))
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in listed.split("\0") if name and (ROOT / name).exists())


@dataclass(frozen=True)
class Built:
    """What was built, from `tree`."""

    tree: Path
    sdist: Path
    wheel: Path
    """Of the sdist."""
    wheel_of_tree: Path


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Both distributions, and the wheel once more without the detour. Beside the sources lies what work leaves."""
    place = tmp_path_factory.mktemp("built")
    tree = place / "tree"
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    for name in ("lightning_ft/__pycache__/errors.cpython-311.pyc", "runs/a.ckpt", "build/a.txt", "left.ckpt"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("not to be shipped")
    run(sys.executable, "-m", "build", "--outdir", place / "both", tree, cwd=place)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", place / "one", tree, cwd=place)
    (sdist,), (wheel,), (again,) = map(place.glob, ("both/*.tar.gz", "both/*.whl", "one/*.whl"))
    return Built(tree, sdist, wheel, again)


@dataclass(frozen=True)
class Environment:
    """One with nothing in it but the wheel and what that asks for."""

    place: Path
    wheel: Path

    def pip(self, *args: Any) -> str:
        """It has worked; returns what it said."""
        return run(self.place / "bin/python", "-m", "pip", *args, cwd=self.place).stdout

    def install(self, what: Any) -> None:
        """With the versions of constraints.txt."""
        # Modules are compiled when they are imported: of torch's, most never are.
        self.pip("install", "--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt", what)

    def python(self, *args: Any, cwd: Path | None = None, code: int | None = 0, **environment: str) -> Any:
        """Run with its interpreter."""
        return run(self.place / "bin/python", *args, cwd=cwd or self.place, code=code, **environment)


@pytest.fixture(scope="session")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel, installed without an extra."""
    place = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", place, cwd=place)
    environment = Environment(place, built.wheel)
    environment.install(built.wheel)
    return environment
