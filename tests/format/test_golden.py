"""Checkpoints written by every released format are listed, verified, loaded and continued from, exactly.

A failure here means that users' files are no longer read: the code is to be mended, never the files (`make_golden`).
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_ft as ft
from lightning_ft._names import FORMAT_VERSION
from lightning_ft.manifest import EOCD_SIGNATURE
from tests.format import job

HERE = Path(__file__).parent
PAGE = (Path(ft.__file__).parent / "FORMAT.md").read_text()
FORMATS = sorted(path.name for path in HERE.glob("v*"))
GOLDEN = {name: json.loads((HERE / name / "golden.json").read_text())["cases"] for name in FORMATS}
EVERY = [(name, case) for name in FORMATS for case in GOLDEN[name]]
OF_A_RUN = [(name, case) for name, case in EVERY if case != "plugin_alone"]
# Of checkpoints of another kind, or newer than these.
NOT_IN_EVERY_ONE = {"validation_due", "left_out", "emergency", "as_file"}


def unpacked(version: str, case: str, place: Path) -> Path:
    """The golden file, alone in a directory."""
    (packed,) = (HERE / version / case).iterdir()
    path = place / packed.name.removesuffix(".gz")
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    return path


def section(heading: str) -> str:
    """What FORMAT.md says under a heading."""
    return PAGE.partition(f"## {heading}\n")[2].partition("\n##")[0]


def documented(heading: str) -> set[str]:
    """The keys in the first column of the table there."""
    cells = re.findall(r"^\| (`.*?) \|", section(heading), re.MULTILINE)
    return {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}


def manifest_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(data[data.rindex(EOCD_SIGNATURE) + 22 :])


def test_the_present_format_has_golden_files() -> None:
    assert f"v{FORMAT_VERSION}" in FORMATS
    assert set(GOLDEN[f"v{FORMAT_VERSION}"]) == set(job.CASES)


def test_they_are_small() -> None:
    for version in FORMATS:
        assert sum(p.stat().st_size for p in (HERE / version).rglob("*") if p.is_file()) < 60_000


@pytest.mark.parametrize(("version", "case"), EVERY)
def test_listed_and_verified(version: str, case: str, tmp_path: Path) -> None:
    path = unpacked(version, case, tmp_path)
    (info,) = ft.list_checkpoints(str(tmp_path))
    assert ft.verify(str(path)).problem is None
    assert info.manifest is not None
    assert (info.name, info.manifest.step) == (path.name, int(re.findall(r"step=(\d+)", path.name)[0]))
    if case == "plugin_alone":
        assert ft.last_good(str(tmp_path)) is None
        assert (info.manifest.run_id, info.manifest.boundary, info.manifest.reason) == ("", "none", "user")
    else:
        good = ft.last_good(str(tmp_path))
        assert good is not None
        assert good.path == str(path)


@pytest.mark.parametrize(("version", "case"), EVERY)
def test_manifest_is_what_the_page_says(version: str, case: str, tmp_path: Path) -> None:
    values = manifest_of(unpacked(version, case, tmp_path))
    assert set(values) == documented("Manifest") - {"files"} | {"seal"}  # a single file has no such key
    assert values["format"] == int(version[1:])
    assert next(iter(values)) == "lightning_ft"
    assert list(values)[-1] == "seal"


@pytest.mark.parametrize(("version", "case"), EVERY)
def test_loads_without_us(version: str, case: str, tmp_path: Path) -> None:
    loaded = torch.load(unpacked(version, case, tmp_path), weights_only=True)
    model = job.Model()
    model.load_state_dict(loaded["state_dict"])
    if case == "plugin_alone":
        assert "lightning_ft" not in loaded
        return
    assert documented("The dictionary inside") - set(loaded["lightning_ft"]) == NOT_IN_EVERY_ONE
    assert not set(loaded["lightning_ft"]) - documented("The dictionary inside")
    ranks = loaded["lightning_ft"]["ranks"]
    assert len(ranks) == job.CASES[case][0]
    loaders = ranks[0]["loaders"]
    nested = {*ranks[0], *ranks[0]["rng"], *loaders, *(key for position in loaders["train"] for key in position)}
    undocumented = {key for key in nested if f"`{key}`" not in section("The dictionary inside")}
    assert not undocumented or version != f"v{FORMAT_VERSION}"


@pytest.mark.parametrize(("version", "case"), OF_A_RUN)
def test_continued_exactly(version: str, case: str, tmp_path: Path) -> None:
    """The samples and the random draws of every step are compared, and the means over the epochs, exactly.

    Weights within a tolerance: their last bits depend on the instructions of the processor.
    """
    path = unpacked(version, case, tmp_path)
    step = int(re.findall(r"step=(\d+)", path.name)[0])
    reports = job.run(case, tmp_path, ckpt_path="last")
    for expected, report in zip(GOLDEN[version][case]["ranks"], reports, strict=True):
        rest = expected["seen"][next(i for i, line in enumerate(expected["seen"]) if line[0] == step) :]
        assert report["seen"] == rest
        assert report["weights"] == pytest.approx(expected["weights"], rel=1e-4)
    names = {info.name for info in ft.list_checkpoints(str(tmp_path))}
    assert path.name in names
    assert f"step={job.STEPS:08d}.ckpt" in names
    assert all(ft.verify(str(tmp_path / name)).problem is None for name in names)


@pytest.mark.parametrize("version", FORMATS)
def test_plugin_alone_is_continued_as_plain_lightning_would(version: str, tmp_path: Path) -> None:
    """It holds no position in the data: the counters go on, the order begins anew."""
    path = unpacked(version, "plugin_alone", tmp_path)
    (report,) = job.run("plugin_alone", tmp_path, ckpt_path=str(path))
    steps = [line[0] for line in report["seen"] if line[0] != "mean"]
    assert steps == list(range(3, job.STEPS))
    saved = torch.load(tmp_path / "epoch=1-step=12.ckpt", weights_only=True)
    assert saved["lr_schedulers"][0]["_last_lr"] == [0.1 * 0.5**2]
