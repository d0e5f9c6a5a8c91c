"""For crash tests: small checkpoints that are written as large ones are."""

from __future__ import annotations

import pytest

from lightning_ft import _direct, _sink


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kilobytes take several writes, past the page cache."""
    monkeypatch.setattr(_sink, "BUFFER_BYTES", 1024)
    monkeypatch.setattr(_sink, "CHUNK_BYTES", 2048)
    monkeypatch.setattr(_direct, "BUFFERS", _direct.DiskBuffers(4096, 3))
