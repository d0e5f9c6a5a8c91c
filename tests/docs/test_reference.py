"""The reference: every public name is in it, is documented whole, and is built without a warning."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import docstring_parser
import pytest
from sphinx.pycode import ModuleAnalyzer

import lightning_ft as ft
from lightning_ft import _fixture, errors, events, exit_codes, guards, testing
from tests.docs.pages import DOCS, ROOT

METHODS = {
    ft.FaultTolerantCheckpointIO: (
        "save_checkpoint", "save_sharded", "load_checkpoint", "load_sharded", "remove_checkpoint",
    ),
    guards.Guard: ("poll",),
    _fixture.DrillFixture: ("__call__",),
}  # fmt: skip
"""Of the classes whose methods somebody calls; the other ones are called by Lightning."""
SAME_AS_LIGHTNINGS = (ft.FSDPStrategy, ft.ModelParallelStrategy)


def public() -> Iterator[tuple[str, object]]:
    for name in ft.__all__:
        value = getattr(ft, name)
        if not inspect.ismodule(value) and name != "__version__":
            yield name, value
    for module in (guards, testing, events, errors):
        for name in getattr(module, "__all__", vars(module)):
            value = getattr(module, name)
            ours = getattr(value, "__module__", "").startswith("lightning_ft")
            if (
                ours
                and not name.startswith("_")
                and name not in ft.__all__
                and (inspect.isclass(value) or inspect.isfunction(value))
            ):
                yield f"{module.__name__}.{name}", value
    for cls, methods in METHODS.items():
        for method in methods:
            yield f"{cls.__name__}.{method}", getattr(cls, method)


PUBLIC = dict(public())


def arguments(value: object) -> set[str]:
    try:
        found = set(inspect.signature(value).parameters)  # type: ignore[arg-type]
    except ValueError:  # of an exception that has Python's own constructor
        return set()
    return found - {"self", "args", "kwargs"}


def undocumented(value: object) -> set[str]:
    """Arguments, or fields of a dataclass, that nothing is said of."""
    text = inspect.getdoc(value) or ""
    said = {p.arg_name for p in docstring_parser.parse(text, style=docstring_parser.DocstringStyle.GOOGLE).params}
    said |= set(re.findall(r"`(\w+)`", text))
    wanted = arguments(value)
    if inspect.isclass(value):
        if value in SAME_AS_LIGHTNINGS or getattr(value, "_is_protocol", False):
            return set()
        if issubclass(value, Exception):
            wanted -= {"message"}
            for base in value.__mro__:
                said |= set(re.findall(r"^ +(\w+): ", base.__dict__.get("__doc__") or "", re.MULTILINE))
        if dataclasses.is_dataclass(value):
            for base in value.__mro__:
                if base.__module__.startswith("lightning_ft"):
                    found = ModuleAnalyzer.for_module(base.__module__).find_attr_docs()
                    said |= {name for (owner, name) in found if owner == base.__name__}
    return wanted - said


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_documented_whole(name: str) -> None:
    value = PUBLIC[name]
    assert value.__doc__, "no docstring of its own"
    assert undocumented(value) == set()


def test_the_check_can_fail() -> None:
    def bare(there: int, missing: int) -> None:
        """Do it.

        Args:
            there: Something.
        """

    @dataclasses.dataclass(frozen=True)
    class Bare(events.Event):
        """Something."""

        field: int

    assert undocumented(bare) == {"missing"}
    assert undocumented(Bare) == {"field"}


def test_every_exit_code_is_documented() -> None:
    found = ModuleAnalyzer.for_module(exit_codes.__name__).find_attr_docs()
    assert {name for _, name in found} == {name for name in vars(exit_codes) if name.isupper()}


def test_the_pages_build_without_a_warning_and_have_every_name(tmp_path: Path) -> None:
    command = ["-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    # As `make docs` does it, and where nothing can be fetched.
    nowhere = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, *command, "-d", str(tmp_path / "trees"), str(DOCS), str(tmp_path / "html")],
        cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, **nowhere, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "html" / "api.html").read_text()
    shown = set(re.findall(r'id="lightning_ft\.(?:\w+\.)*(\w+)"', reference))
    assert {name for name in ft.__all__ if not inspect.ismodule(getattr(ft, name)) and name != "__version__"} <= shown
    assert "How long the process has from the first signal" in re.sub(r"<[^>]+>", "", reference)
    help_page = re.sub(r"<[^>]+>", "", (tmp_path / "html" / "command-line.html").read_text())
    assert "--kill-at-step N" in help_page
    assert re.findall(r'src="(https?:[^"]+)"', reference) == []
