"""For crash tests: small checkpoints that are written as large ones are."""

from __future__ import annotations

import pytest

from lightning_ft._disk import direct, sink


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some kilobytes take several writes, past the page cache."""
    monkeypatch.setattr(sink, "BUFFER_BYTES", 1024)
    monkeypatch.setattr(sink, "CHUNK_BYTES", 2048)
    monkeypatch.setattr(direct, "BUFFERS", direct.DiskBuffers(4096, 3))
