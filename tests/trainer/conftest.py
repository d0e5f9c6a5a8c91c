"""Shared by the tests of whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.tiers import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Two directories that do not exist yet."""
    return Place(tmp_path)
