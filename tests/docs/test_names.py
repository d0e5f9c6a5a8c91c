"""What the pages name in code exists: modules, classes, arguments, commands, options, variables, targets."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator

import pytest
import typer.main

import lightning_ft as ft
from lightning_ft import exit_codes
from lightning_ft.cli.app import app
from tests.docs.pages import DOCS, PAGES, README, ROOT, Page, name

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def code(page: Page) -> list[str]:
    return [*page.spans, *page.blocks("python", "yaml", "console", "bash")]


def unknown_names(text: str) -> list[str]:
    """Dotted names below the package that nothing has."""
    found = []
    for dotted in re.findall(r"(?<![\w./])(?:lightning_ft|ft)\.([A-Za-z_]\w*(?:\.\w+)*)", text):
        value: object = ft
        path = "lightning_ft"
        for part in dotted.split("."):
            path = f"{path}.{part}"
            try:
                value = getattr(value, part)
            except AttributeError:
                try:
                    value = importlib.import_module(path)
                except ImportError:
                    found.append(path)
                    break
    return found


def calls(text: str) -> Iterator[ast.Call]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def unknown_arguments(text: str) -> list[str]:
    """Keywords, in calls of public names, that those do not have."""
    found = []
    for call in calls(text):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if called not in ft.__all__ or inspect.ismodule(getattr(ft, called)):
            continue
        parameters = inspect.signature(getattr(ft, called)).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            continue
        found += [f"{called}({k.arg}=...)" for k in call.keywords if k.arg is not None and k.arg not in parameters]
    return found


def options_of(command: str) -> set[str]:
    parameters = COMMANDS[command].params
    return {option for p in parameters for option in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}


def wrong_commands(text: str) -> list[str]:
    """Commands of ours, and options of them, that do not exist."""
    found = []
    for line in re.findall(r"lightning-ft ([a-z].*)", text):
        words = line.partition(" #")[0].split(" -- ")[0].split()
        command = words[0].strip("`,.:;")
        if command not in COMMANDS:
            found.append(f"lightning-ft {command}")
            continue
        options = {word.partition("=")[0] for word in words if word.startswith("-") and word != "--"}
        found += [f"lightning-ft {command} {option}" for option in options - options_of(command)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_names_exist(page: Page) -> None:
    assert [wrong for text in code(page) for wrong in unknown_names(text)] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_arguments_exist(page: Page) -> None:
    assert [wrong for text in code(page) for wrong in unknown_arguments(text)] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_and_their_options_exist(page: Page) -> None:
    assert [wrong for text in code(page) for wrong in wrong_commands(text)] == []


@pytest.mark.parametrize("page", [Page(DOCS / "drill.md"), Page(DOCS / "command-line.md")], ids=name)
def test_options_alone_exist(page: Page) -> None:
    ours = {option for command in COMMANDS for option in options_of(command)}
    named = {word for span in page.spans for word in span.partition(" -- ")[0].split() if word.startswith("--")}
    assert named
    assert {option for option in named - {"--"} if option not in ours} == set()


def test_every_command_and_option_is_shown() -> None:
    page = (DOCS / "command-line.md").read_text()
    assert {command for command in COMMANDS if f"{{program-output}} lightning-ft {command} --help" not in page} == set()


@pytest.mark.parametrize(
    ("check", "text", "wrong"),
    [
        (unknown_names, "lightning_ft.guards.Verdict, ft.testing.x, .lightning_ft.lock", ["lightning_ft.testing.x"]),
        (unknown_arguments, "ft.HangGuard(step_timeout=1, stop_timeout=2)", ["HangGuard(stop_timeout=...)"]),
        (unknown_arguments, "fault_tolerance(guards=(), no=1)", ["fault_tolerance(no=...)"]),
        (wrong_commands, "$ lightning-ft prune x --keep-last 2 --keep-first 1", ["lightning-ft prune --keep-first"]),
        (wrong_commands, "lightning-ft drill --sweep -- python train.py --unknown", []),
        (wrong_commands, "lightning-ft start", ["lightning-ft start"]),
    ],
)  # fmt: skip
def test_the_checks_can_fail(check: object, text: str, wrong: list[str]) -> None:
    assert callable(check)
    assert check(text) == wrong


INTERNAL = {"LIGHTNING_FT_DRILL", "LIGHTNING_FT_DRILL_RUN"}
"""By which the drill tells a process of its own what to do."""


def test_environment_variables_are_those_that_are_read() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "lightning_ft").rglob("*.py"))
    read = set(re.findall(r'"(LIGHTNING_FT_[A-Z_]+)"', sources)) - INTERNAL
    table = {re.findall(r"LIGHTNING_FT_[A-Z_]+", row[0])[0] for row in Page(DOCS / "operations.md").rows("Variable")}
    assert table == read
    named = {variable for page in PAGES for variable in re.findall(r"LIGHTNING_FT_[A-Z_]+", page.path.read_text())}
    assert named - read == set()


def test_exit_codes_are_those_that_there_are() -> None:
    codes = {key: value for key, value in vars(exit_codes).items() if key.isupper() and isinstance(value, int)}
    rows = Page(DOCS / "operations.md").rows("What the launcher should do")
    assert {row[1].strip("`"): int(row[0]) for row in rows if row[1]} == codes
    shown = {number for row in README.rows("A launcher should") for number in re.findall(r"\d+", row[2])}
    assert {str(value) for value in codes.values()} <= shown


def test_errors_that_are_explained_are_errors_of_ours() -> None:
    rows = Page(DOCS / "operations.md").rows("Error")
    assert rows
    assert all(issubclass(getattr(ft, row[0].strip("`")), ft.FaultToleranceError) for row in rows)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_exist(page: Page) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for text in code(page) for word in re.findall(r"^(?:\$ )?make ([a-z-]+)", text, re.MULTILINE)}
    assert named - targets == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_are_named_exist(page: Page) -> None:
    paths = [span for span in page.spans if re.fullmatch(r"(?:examples|tests|docs|lightning_ft)/[\w./-]+", span)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_arguments_in_tables_and_text_exist(page: Page) -> None:
    """`keep_last=3`, alone in backticks, is an argument of something public."""
    public = [getattr(ft, key) for key in ft.__all__ if inspect.isclass(getattr(ft, key))]
    known = {parameter for value in (*public, ft.fault_tolerance, ft.verify) for parameter in _parameters(value)}
    known |= {p for value in public for method in vars(value).values() if callable(method) for p in _parameters(method)}
    known |= {p for value in (ft.testing.assert_resume_exact,) for p in _parameters(value)}
    named = {m[1] for span in page.spans if (m := re.fullmatch(r"([a-z_]+)=\S.*", span))}
    assert named - known - THEIRS == set()


THEIRS = {
    "accelerator", "accumulate_grad_batches", "ckpt_path", "deterministic", "devices", "drop_last", "in_order", "state",
    "process_group_backend", "save_distributed_checkpoint", "save_top_k", "state_dict_type", "strict_loading",
    "weights_only", "durable", "max_epochs", "max_steps", "save_last",
}  # fmt: skip
"""Of Lightning and torch, and what a progress bar shows."""


def _parameters(value: object) -> set[str]:
    try:
        return set(inspect.signature(value).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return set()


def test_nothing_of_a_machine_is_in_the_pages() -> None:
    for path in (README.path, *DOCS.glob("*.*")):
        if path.suffix in (".md", ".svg", ".py"):
            assert re.search(r"/(?:root|home|work|Users)/", path.read_text()) is None, path
