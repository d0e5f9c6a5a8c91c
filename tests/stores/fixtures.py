"""Servers for the tests: each worker of a test run has its own, started by the first test that asks for it."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest

from tests.stores.seaweed import BUCKET, RcloneServer, SeaweedServer, options

if TYPE_CHECKING:  # it needs aiohttp, and this module is imported for every test
    from tests.stores.chaos import ChaosProxy, Rule


@dataclass
class Place:
    """An empty directory in a store, and how to reach it."""

    url: str
    options: dict[str, Any]
    rules: list[Rule] = field(default_factory=list)
    """Of the proxy in between, if there is one."""
    proxy: ChaosProxy | None = None

    @property
    def log(self) -> list[tuple[str, str]]:
        """Method and path of every request that came to the proxy."""
        assert self.proxy is not None
        return self.proxy.log

    def direct(self) -> dict[str, Any]:
        """The same store without the proxy."""
        return self.options if self.proxy is None else {**self.options, "endpoint_url": self.proxy.upstream}


@contextlib.contextmanager
def running(directory: Path) -> Iterator[SeaweedServer]:
    """A real S3 server with a bucket; it is gone afterwards."""
    server = SeaweedServer(directory)
    try:
        server.start()
        fsspec.filesystem("s3", **options(server.url), skip_instance_cache=True).mkdir(BUCKET)
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    with running(tmp_path_factory.mktemp("seaweed") / "server") as server:
        yield server


@pytest.fixture
def s3(seaweed: SeaweedServer) -> Place:
    """A directory in a real S3 server."""
    return Place(f"s3://{BUCKET}/{uuid.uuid4().hex}/run", options(seaweed.url))


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RcloneServer]:
    server = RcloneServer(tmp_path_factory.mktemp("rclone") / "served")
    try:
        yield server.start()
    finally:
        server.kill()


@pytest.fixture
def poor_s3(rclone: RcloneServer) -> Place:
    """A directory in a store that ignores conditions."""
    return Place(f"s3://{BUCKET}/{uuid.uuid4().hex}/run", options(rclone.url))


@pytest.fixture(scope="session")
def proxy(seaweed: SeaweedServer) -> Iterator[ChaosProxy]:
    from tests.stores.chaos import ChaosProxy

    with ChaosProxy(seaweed.url) as entered:
        yield entered


@pytest.fixture
def chaos(s3: Place, proxy: ChaosProxy) -> Iterator[Place]:
    """A directory in a real S3 server, behind a proxy that does what its rules say."""
    yield Place(s3.url, {**s3.options, "endpoint_url": proxy.url}, proxy.rules, proxy)
    proxy.rules.clear()
    proxy.log.clear()
