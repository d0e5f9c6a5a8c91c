"""The store itself is killed while it is written to, and comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_ft._saving.engine import SaveTask, Writer
from lightning_ft._stores.errors import is_transient
from lightning_ft.discovery import last_good, verify
from lightning_ft.errors import StorageError
from lightning_ft.storage import Storage
from tests.stores.checkpoints import MIB, archive, manifest, save, small_parts, uploads
from tests.stores.fixtures import running
from tests.stores.seaweed import BUCKET, SeaweedServer, options

__all__ = ["small_parts"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("s3fs", "weed"),
    pytest.mark.usefixtures("small_parts"),
]

URL = f"s3://{BUCKET}/run"


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[SeaweedServer]:
    with running(tmp_path / "server") as server:
        yield server


def _save_and_kill(storage: Storage, server: SeaweedServer) -> None:
    data = memoryview(archive(64 * MIB))
    with storage.open_attempt(f"{URL}/step=00000002.ckpt") as attempt:
        attempt.write(data[: 16 * MIB])
        server.kill()
        for start in range(16 * MIB, len(data), MIB):
            attempt.write(data[start : start + MIB])
        attempt.commit(manifest)


def test_a_server_killed_in_the_middle_of_an_upload(own_server: SeaweedServer) -> None:
    """What was acknowledged is there, the half upload is invisible, and the save made again is whole."""
    storage = Storage(options(own_server.url, deadline_secs=5))
    storage.probe(URL)
    first = save(storage, URL, 1, size_bytes=12 * MIB)
    with pytest.raises(StorageError) as caught:
        _save_and_kill(storage, own_server)
    assert is_transient(caught.value)
    own_server.start()
    assert storage.listdir(URL) == ["step=00000001.ckpt"]
    assert verify(first, storage_options=storage.storage_options).problem is None
    assert uploads(storage, URL) == ["step=00000002.ckpt"]  # the server could not be told
    save(storage, URL, 2, size_bytes=12 * MIB)
    found = last_good(URL, storage_options=storage.storage_options)
    assert found is not None
    assert found.name == "step=00000002.ckpt"
    own_server.kill()
    own_server.start()
    assert verify(found.path, storage_options=storage.storage_options).problem is None


class Given:
    """A snapshot that is there."""

    size_bytes = 12 * MIB
    blocked_secs = staging_secs = 0.0

    def __init__(self, value: Any) -> None:
        self.value = value
        self.reductions: dict[int, Any] = {}

    def wait(self) -> dict[str, Any]:
        return {"value": self.value}

    def check(self) -> None: ...

    def release(self) -> None: ...


def test_a_save_in_the_background_outlives_a_restart_of_the_server(
    own_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    storage = Storage(options(own_server.url, deadline_secs=30))
    storage.probe(URL)
    opening, killed, half_way = Storage.open_attempt, [], threading.Event()

    def open_and_kill(self: Storage, path: str, expected_bytes: int | None = None) -> Any:
        attempt: Any = opening(self, path, expected_bytes)
        if not killed:
            killed.append(path)
            parts = attempt._parts
            sending = parts._send

            def send() -> None:
                sending()
                if len(parts._parts) + len(parts._on_their_way) == 2:
                    half_way.set()

            parts._send = send
        return attempt

    monkeypatch.setattr(Storage, "open_attempt", open_and_kill)
    writer = Writer(storage, retries=3)
    path = f"{URL}/step=00000001.ckpt"
    try:
        writer.save(SaveTask(path, Given(torch.zeros(3 * MIB)), manifest(0, "")))
        assert half_way.wait(60)
        own_server.kill()
        own_server.start()
        assert writer.drain(240)
    finally:
        writer.close()
    assert killed == [path]
    assert writer.take_failure() is None
    assert verify(path, storage_options=storage.storage_options).problem is None
