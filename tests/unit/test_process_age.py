"""When a process began."""

from __future__ import annotations

import subprocess
import sys
import time


def test_it_is_told_once_and_is_before_the_imports() -> None:
    code = "import time; time.sleep(0.3); "
    code += "from lightning_ft._history.process_age import began_at; print(began_at(), began_at())"
    before = time.time()
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    first, second = run.stdout.split()
    assert before - 0.1 <= float(first) <= time.time() - 0.25
    assert second == "None"


def test_in_a_shell_it_is_not_told() -> None:
    code = "import sys; sys.ps1 = '>'; from lightning_ft._history.process_age import began_at; print(began_at())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.split() == ["None"]
