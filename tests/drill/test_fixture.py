"""The fixture of pytest, in a pytest of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import environment

ROOT = Path(__file__).parents[2]
FAULTY = Path(__file__).with_name("faulty.py")


def pytest_says(test: str, tmp_path: Path) -> tuple[int, str]:
    (tmp_path / "test_users.py").write_text(test)
    # Installed or not: named here, and not found as an entry point.
    plugin = ["-p", "no:lightning_ft", "-p", "lightning_ft._fixture"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, "-p", "no:cacheprovider", "-c", "/dev/null", "test_users.py"],
        cwd=tmp_path, env=environment(COLUMNS="150"), capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    return run.returncode, run.stdout


def test_it_fails_a_test_in_readable_words_and_is_not_noticed_until_used(tmp_path: Path) -> None:
    code, out = pytest_says(
        "import sys\n"
        "def test_nothing_heavy_is_imported():\n"
        "    assert not {'torch', 'lightning', 'lightning_ft.drill'} & set(sys.modules)\n"
        "def test_drill(lightning_ft_drill):\n"
        "    lightning_ft_drill([sys.executable, '-c', 'print(12345)'])\n"
        "def test_no_program(lightning_ft_drill):\n"
        "    lightning_ft_drill(['no-such-program'])\n"
        "def test_text(lightning_ft_drill):\n"
        "    lightning_ft_drill('python train.py')\n"
        "def test_bad_option(lightning_ft_drill):\n"
        "    lightning_ft_drill(['true'], kill_at='Never')\n",
        tmp_path,
    )
    assert code == 1, out
    assert "4 failed, 1 passed" in out
    for text in (
        "HARD FAILURE: before anything was killed",
        "  the uninterrupted run trained nothing with a FaultTolerantCheckpoint",
        "  | 12345",
        "no-such-program cannot be started: No such file or directory",
        "ValueError: command='python train.py': give a list",
        "ValueError: kill point 'Never'",
    ):
        assert text in out, out
    assert "engine.py" not in out.partition("test_no_program")[0]  # no traceback of ours


@pytest.mark.slow
def test_it_drills_a_script(tmp_path: Path) -> None:
    code, out = pytest_says(
        "import sys\n"
        "def test_sound(lightning_ft_drill):\n"
        f"    outcome = lightning_ft_drill([sys.executable, {str(FAULTY)!r}, 'none', 'x'], steps=12)\n"
        "    assert outcome.batches == 12\n",
        tmp_path,
    )
    assert (code, "1 passed" in out) == (0, True), out


def test_pytest_finds_it_where_the_package_is_installed() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.entry-points.pytest11]\n")[2].partition("\n[")[0]
    assert 'lightning_ft = "lightning_ft._fixture"' in section.splitlines()
