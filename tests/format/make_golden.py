"""Writes the golden checkpoints of the present format: ``python -m tests.format.make_golden``.

To be run once per *released* format, by the release that introduces it, and never again for the same one: the files
stand for what is on the disks of users, and `test_golden` proves that every later version still continues from them.
Until the first release the format is not fixed yet; then, and only then, the command may be run again.

The files are compressed, because random states take up most of them: ``v<format>/<case>/<name>.ckpt.gz``. Beside
them, ``golden.json`` says what the uninterrupted run did.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tempfile
from pathlib import Path

import lightning
import torch

import lightning_ft as ft
from lightning_ft._names import FORMAT_VERSION
from tests.format import job

HERE = Path(__file__).parent


def main() -> None:
    """Every case of `job` is trained uninterrupted, and one checkpoint of it is kept."""
    target = HERE / f"v{FORMAT_VERSION}"
    shutil.rmtree(target, ignore_errors=True)
    golden = {}
    for case, (_, name) in job.CASES.items():
        with tempfile.TemporaryDirectory() as made:
            reports = job.run(case, made)
            (target / case).mkdir(parents=True)
            data = (Path(made) / name).read_bytes()
        (target / case / f"{name}.gz").write_bytes(gzip.compress(data, mtime=0))
        golden[case] = {"ranks": reports}
    written_by = {
        "lightning_ft": ft.__version__, "torch": str(torch.__version__), "lightning": lightning.__version__,
        "python": sys.version.split()[0],
    }  # fmt: skip
    (target / "golden.json").write_text(json.dumps({"written_by": written_by, "cases": golden}, separators=(",", ":")))
    total = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"{target}: {total / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
