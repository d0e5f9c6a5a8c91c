"""`python -m tests.benchmarks.stores`: uploads and downloads beside those of s3fs, against a real S3 server.

Each round moves the same bytes in each way, in another order; figures are MiB/s, medians over the rounds, and ratios
are of medians. Server and client share this machine, so what is compared is what the client costs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec

from lightning_ft.storage import Storage
from tests.stores.checkpoints import MIB, archive_of, manifest
from tests.stores.seaweed import BUCKET, SeaweedServer, options

TARGET = 0.9


def main() -> None:
    """Prints the figures; exit code 0 whatever they are."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.stores", description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the file (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is measured (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the samples there, too")
    given = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="lightning-ft-stores-"))
    server = SeaweedServer(directory / "server")
    try:
        server.start()
        fsspec.filesystem("s3", **options(server.url)).mkdir(BUCKET)
        samples = measure(options(server.url), directory, given.mib * MIB, given.rounds)
    finally:
        server.kill()
        shutil.rmtree(directory)
    print(report(samples, given.mib))
    if given.json is not None:
        given.json.write_text(json.dumps(samples, indent=1) + "\n")


def measure(storage_options: dict[str, Any], directory: Path, size_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every way, by its name, one per round."""
    fs = fsspec.filesystem("s3", **storage_options)
    storage = Storage(storage_options)
    folder = f"{BUCKET}/{uuid.uuid4().hex}"
    url = f"s3://{folder}"
    storage.probe(url)
    data = archive_of(os.urandom(size_bytes))
    file, fetched = directory / "file", directory / "fetched"
    file.write_bytes(data)

    def save() -> None:
        with storage.open_attempt(f"{url}/ours.ckpt", len(data)) as attempt:
            view = memoryview(data)
            for start in range(0, len(view), 4 * MIB):  # as the writer of archives gives it
                attempt.write(view[start : start + 4 * MIB])
            attempt.commit(lambda size, digest: manifest(size, digest, boundary="none", generation=uuid.uuid4().hex))

    def verify() -> None:
        found = storage.read_manifest(f"{url}/ours.ckpt")[0]
        assert found is not None
        assert storage.read_digest(f"{url}/ours.ckpt", found.size_bytes) == found.digest

    ways: dict[str, Callable[[], object]] = {
        "put_file": lambda: fs.put_file(str(file), f"{folder}/plain"),
        "save": save,
        "get_file": lambda: fs.get_file(f"{folder}/plain", str(fetched)),
        "verify": verify,
        "open_verified": lambda: storage.open_verified(f"{url}/ours.ckpt")[0].close(),
    }
    samples: dict[str, list[float]] = defaultdict(list)
    for turn in range(rounds + 1):
        # Whoever follows a heavy writer is not always the same one; but what is read was written before.
        for pair in (("put_file", "save"), ("get_file", "verify", "open_verified")):
            for name in (*pair[turn % len(pair) :], *pair[: turn % len(pair)]):
                began = time.perf_counter()
                ways[name]()
                if turn:  # the first round warms up
                    samples[name].append(time.perf_counter() - began)
    return dict(samples)


def report(samples: dict[str, list[float]], mib: float) -> str:
    """A table."""
    lines = [f"{mib:g} MiB, S3 server on this machine", f"{'':16} {'MiB/s (lowest to highest)':>28} {'x s3fs':>8}"]
    against = {"save": "put_file", "verify": "get_file", "open_verified": "get_file"}
    for name, secs in samples.items():
        speed = [mib / each for each in secs]
        spread = f"{statistics.median(speed):.0f} ({min(speed):.0f} to {max(speed):.0f})"
        ratio = ""
        if name in against:
            ratio = f"{statistics.median(samples[against[name]]) / statistics.median(secs):.2f}"
        lines.append(f"{name:16} {spread:>28} {ratio:>8}")
    lines.append(f"target: at least {TARGET} x put_file and get_file")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
