"""Each example runs, and a run of it that was killed prints what the one that was not prints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.examples.processes import EXAMPLES, WITHIN_SECS, run
from tests.stores.fixtures import Place

SHORT = [path.name for path in sorted(EXAMPLES.glob("*.py")) if path.name != "demo.py"]  # no example: `make demo`


@pytest.mark.parametrize("name", SHORT)
def test_it_is_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 100


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("digits.py", ()),
        pytest.param("minimal.py", (), marks=pytest.mark.slow),
        ("stateful_dataloader.py", ()),
        pytest.param("language_model.py", (), marks=pytest.mark.needs("transformers")),
        pytest.param(
            "cli.py", ("fit", "--config", str(EXAMPLES / "cli.yaml")), marks=pytest.mark.needs("jsonargparse")
        ),
    ],
)
def test_killed_and_run_again_it_prints_the_same(name: str, args: tuple[str, ...], tmp_path: Path) -> None:
    expected = run(name, *args, place=tmp_path / "a")
    assert expected.startswith("step ")
    run(name, *args, place=tmp_path / "b", kill_at=2)
    assert run(name, *args, place=tmp_path / "b") == expected
    assert run(name, *args, place=tmp_path / "b") == expected  # a run that is finished


@pytest.mark.needs("s3fs", "weed")
def test_s3(s3: Place, tmp_path: Path) -> None:
    environment = {
        "AWS_ACCESS_KEY_ID": s3.options["key"], "AWS_SECRET_ACCESS_KEY": s3.options["secret"],
        "AWS_ENDPOINT_URL": s3.options["endpoint_url"],
    }  # fmt: skip

    def lines(run_name: str, local: str, kill_at: int | None = None) -> str:
        args = (f"{s3.url}/{run_name}", local)
        return run("s3.py", *args, place=tmp_path, environment=environment, kill_at=kill_at)

    expected = lines("a", "disk-1")
    lines("b", "disk-2", kill_at=8)
    assert lines("b", "disk-3") == expected  # another machine, which has nothing but the store


def test_before_and_after(tmp_path: Path) -> None:
    """What follows a checkpoint of plain Lightning, made at the last batch of an epoch, is exact from there on."""
    for name in ("a", "b"):
        assert run("from_model_checkpoint.py", "before", "1", place=tmp_path / name).startswith("step 60,")
    expected = run("from_model_checkpoint.py", "after", "3", place=tmp_path / "a")
    assert expected.startswith("step 180,")
    run("from_model_checkpoint.py", "after", "3", place=tmp_path / "b", kill_at=3)
    assert run("from_model_checkpoint.py", "after", "3", place=tmp_path / "b") == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp.py", "fsdp.py"])
def test_two_ranks(name: str, tmp_path: Path) -> None:
    """Lightning starts the second one as it does for a user: the script once more."""
    command = [sys.executable, str(EXAMPLES / name)]

    def finish(place: Path) -> str:
        place.mkdir(exist_ok=True)
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=WITHIN_SECS, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()[-1]

    expected = finish(tmp_path / "a")
    assert expected.startswith("step 60,")
    place = tmp_path / "b"
    place.mkdir()
    with subprocess.Popen(
        command, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        deadline = time.monotonic() + WITHIN_SECS
        while len(list(place.glob("runs/*/step=*"))) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
    assert len(list(place.glob("runs/*/step=*"))) >= 2
    assert finish(place) == expected
