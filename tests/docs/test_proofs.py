"""The tests that the README names as proofs exist, on both sides: that plain Lightning does it, and that we do not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.pages import README, ROOT

ROWS = README.rows("Proved by")


def functions_of(path: Path) -> list[str]:
    return [node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]


def is_of_plain(path: Path, test: str) -> bool:
    return "plain" in test or "others" in test or path.name == "test_plain_lightning.py"


def named(cell: str) -> list[tuple[Path, str]]:
    """Each file of a cell with each name that follows it, and precedes the next file."""
    found = []
    for link in re.finditer(r"\[[^\]]+\]\(([^)]+)\)([^\[]*)", cell):
        names = re.findall(r"`(test_\w+)`", link[2])
        assert names, f"{link[0]}: no test is named"
        found += [(ROOT / link[1], name) for name in names]
    return found


def proofs(cell: str) -> list[tuple[Path, str]]:
    """The tests that a cell stands for: a whole name, or all that begin with `test_a1_`."""
    found = []
    for path, name in named(cell):
        tests = [test for test in functions_of(path) if test == name or test.startswith(f"{name}_")]
        assert tests, f"{path.name} has no {name}"
        found += [(path, test) for test in tests]
    return found


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_has_a_proof_of_both_sides(row: list[str]) -> None:
    found = proofs(row[3])
    assert [test for path, test in found if is_of_plain(path, test)], f"nothing shows what plain Lightning does: {row}"
    assert [test for path, test in found if not is_of_plain(path, test)], f"nothing shows what is done here: {row}"


def test_the_check_can_fail() -> None:
    with pytest.raises(AssertionError, match="has no test_zz9"):
        proofs("[data](tests/trainer/test_cases_data.py) `test_zz9`")
    with pytest.raises(AssertionError, match="no test is named"):
        proofs("[data](tests/trainer/test_cases_data.py)")


def test_the_table_is_not_empty() -> None:
    assert len(ROWS) >= 15
