"""That the checks around every test can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TESTS = {
    "needs": "@pytest.mark.needs('root', 'a-tool-that-is-nowhere')\ndef test_it(): pass",
    "thread": """
def test_it():
    threading.Thread(target=threading.Event().wait, args=(60,), name="lightning-ft-writer", daemon=True).start()
""",
    "observer": "def test_it():\n    events.observe(print)",
    "clean": "def test_it():\n    events.observe(print)()",
}


def outcome(which: str, place: Path, **environment: str) -> str:
    file = place / "test_made.py"
    file.write_text(f"import threading\nimport pytest\nfrom lightning_ft import events\n{TESTS[which]}\n")
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(place)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", *options, str(file)],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    return done.stdout


def test_what_a_machine_lacks_is_skipped_with_the_reason(tmp_path: Path) -> None:
    assert "SKIPPED [1]" in (output := outcome("needs", tmp_path, CI=""))
    assert "needs" in output
    assert "a-tool-that-is-nowhere" in output


@pytest.mark.parametrize("value", ["true", "1"])
def test_nothing_is_skipped_in_ci(value: str, tmp_path: Path) -> None:
    assert "1 error" in (output := outcome("needs", tmp_path, CI=value))
    assert "nothing is skipped with CI=true" in output


@pytest.mark.parametrize(("which", "found"), [("thread", "threads left running"), ("observer", "observers left")])
def test_leftovers_are_found(which: str, found: str, tmp_path: Path) -> None:
    assert found in outcome(which, tmp_path)


def test_no_leftovers(tmp_path: Path) -> None:
    assert "1 passed" in outcome("clean", tmp_path)
