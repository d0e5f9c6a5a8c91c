"""What is in the wheel and in the sdist, and what they say of themselves."""

from __future__ import annotations

import email
import tarfile
import zipfile
from pathlib import Path

import pytest

import lightning_ft
from tests.packaging.conftest import Built, tracked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VERSION = lightning_ft.__version__
INFO = f"lightning_ft-{VERSION}.dist-info"


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_is_the_package_and_nothing_else(built: Built) -> None:
    found = contents(built.wheel)
    ours = {name: (built.tree / name).read_bytes() for name in tracked() if name.startswith("lightning_ft/")}
    assert {"lightning_ft/py.typed", "lightning_ft/FORMAT.md", "lightning_ft/__about__.py"} <= ours.keys()
    assert {name: data for name, data in found.items() if not name.startswith(f"{INFO}/")} == ours
    assert found[f"{INFO}/licenses/LICENSE"] == (built.tree / "LICENSE").read_bytes()
    about = {name.removeprefix(f"{INFO}/") for name in found.keys() - ours.keys()}
    assert about == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def test_the_wheel_says_what_it_is(built: Built) -> None:
    assert built.wheel.name == f"lightning_ft-{VERSION}-py3-none-any.whl"
    found = contents(built.wheel)
    said = email.message_from_bytes(found[f"{INFO}/METADATA"])
    assert (said["Name"], said["Version"]) == ("lightning-ft", VERSION)
    assert (said["License-Expression"], said["License-File"]) == ("Apache-2.0", "LICENSE")
    assert (said["Requires-Python"], said["Description-Content-Type"]) == (">=3.10", "text/markdown")
    assert "Typing :: Typed" in said.get_all("Classifier")
    assert {"cli", "s3", "plot", "safetensors"} <= set(said.get_all("Provides-Extra"))
    assert said.get_payload() == (built.tree / "README.md").read_text()
    points = found[f"{INFO}/entry_points.txt"].decode()
    assert "lightning-ft = lightning_ft.cli:main" in points
    assert "lightning_ft = lightning_ft._fixture" in points


def test_the_sdist_is_what_was_tracked(built: Built) -> None:
    """All that is needed to build, to test, and to read; nothing that lay beside it."""
    top = f"lightning_ft-{VERSION}"
    with tarfile.open(built.sdist) as archive:
        names = {member.name.removeprefix(f"{top}/") for member in archive if member.isfile()}
        assert {member.name.partition("/")[0] for member in archive} == {top}
    assert names - set(tracked()) == {"PKG-INFO"}
    top_level = {"README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "pyproject.toml"}
    places = ("lightning_ft/", "tests/", "examples/", "docs/")
    assert names >= top_level | {name for name in tracked() if name.startswith(places)}


def test_the_wheel_of_the_sdist_is_that_of_the_tree(built: Built) -> None:
    assert built.wheel.read_bytes() == built.wheel_of_tree.read_bytes()
