"""What several tests of single modules need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lightning_ft import events
from tests.trainer import runs


@pytest.fixture
def seen() -> Iterator[list[events.Event]]:
    """Everything that is emitted meanwhile, in order."""
    with runs.recorded() as found:
        yield found
