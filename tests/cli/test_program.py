"""The program as a whole: what it loads, how it ends, what its help says, and how its answers look."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import fsspec
import pytest

import lightning_ft
from lightning_ft import cli
from lightning_ft.cli import list_, options
from lightning_ft.cli.exits import Code
from lightning_ft.errors import StorageError
from lightning_ft.storage import Storage
from tests.cli.conftest import ROOT, Answer, environment, flip, program, step
from tests.trainer import runs

Ft = Callable[..., Answer]
HERE = Path(__file__).parent
COMMANDS = ("list", "verify", "show", "diff", "prune", "consolidate", "report", "drill")


def python(code: str, *args: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment())


# -- what it needs ---------------------------------------------------------------------------------------------------


def test_looking_and_pruning_need_neither_torch_nor_lightning(run_dir: Path) -> None:
    code = """
import contextlib, io, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "lightning", "pytorch_lightning"}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
from lightning_ft.cli import run
directory, file = sys.argv[1:]
for args in (["list", directory, "--verify", "full"], ["verify", directory], ["show", file],
             ["prune", directory, "--keep-last", "1", "--yes"], ["diff", file, file]):
    with contextlib.redirect_stdout(io.StringIO()):
        code = run(args)
    print(args[0], code)
"""
    run = python(code, run_dir, step(run_dir, 8))
    assert run.stdout.split("\n") == ["list 0", "verify 0", "show 0", "prune 0", "diff 6", ""], run.stderr


def test_without_the_extra_one_line_says_what_to_install() -> None:
    run = python("import sys; sys.modules['typer'] = None; from lightning_ft.cli import run; sys.exit(run(['list']))")
    assert run.returncode == Code.NOT_INSTALLED
    assert run.stderr == "lightning-ft: typer is missing: pip install 'lightning-ft[cli]'\n"


def test_the_module_and_the_script_are_the_same() -> None:
    answer = program("--version")
    assert (answer.code, answer.out, answer.err) == (0, f"lightning-ft {lightning_ft.__version__}\n", "")
    assert 'lightning-ft = "lightning_ft.cli:main"' in (ROOT / "pyproject.toml").read_text()


# -- how it ends -----------------------------------------------------------------------------------------------------


def test_exit_codes_agree() -> None:
    assert (cli._NOT_INSTALLED, cli._INTERRUPTED, cli._OUTPUT_CLOSED) == (
        Code.NOT_INSTALLED, Code.INTERRUPTED, Code.OUTPUT_CLOSED,
    )  # fmt: skip
    said = dict(re.findall(r"^ +(\d+) +(\S.*)$", program("--help").out, re.MULTILINE))
    assert {int(code) for code in said} == set(map(int, Code))
    section = (ROOT / "docs" / "command-line.md").read_text().partition("\n## Exit codes")[2].partition("\n## ")[0]
    table = dict(re.findall(r"^\| (\d+) \| (.+) \|$", section, re.MULTILINE))
    assert {int(code) for code in table} == set(map(int, Code))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_a_manual_page(ft: Ft, command: str) -> None:
    text = ft(command, "--help").out
    for part in (
        "Usage:",
        "Examples:",
        f"lightning-ft {command} ",
        "Exit code:",
        "JSON:",
        "--json",
        *([] if command == "drill" else ["--storage-option"]),  # which starts a script, and reads no URL
    ):
        assert part in text
    assert max(map(len, text.split("\n"))) <= 82
    assert "\b" not in text
    assert ft(command, "-h").out == text


def test_usage_errors_take_one_line(ft: Ft, run_dir: Path) -> None:
    for args in (
        ["lst"], ["list"], ["list", run_dir, "--foo"], ["list", "s4://x"], ["list", ""], ["verify"],
        ["list", run_dir, "--verify", "some"], ["list", "memory://x", "--storage-option", "x"],
        ["list", "memory://x", "--storage-option", "a=1", "--storage-option", "a.b=1"],
        ["verify", run_dir, "--jobs", "0"], ["list", "a\0b"], ["list", "simplecache::memory://run"],
        ["list", "memory://x", "--storage-option", "deadline_secs=1e12"],
        ["list", "memory://x", "--storage-option", "deadline_secs=Infinity"],
    ):  # fmt: skip
        answer = ft(*args)
        assert answer.code == Code.USAGE, args
        assert answer.err.count("\n") == 1, answer.err
        assert answer.err.startswith("lightning-ft")
        assert answer.out == ""


@pytest.mark.parametrize("where", ["local", "memory"])
def test_a_file_is_no_directory(ft: Ft, run_dir: Path, where: str) -> None:
    path = str(step(run_dir, 2))
    if where == "memory":
        path = f"memory://{run_dir.name}/step=00000002.ckpt"
        with fsspec.open(path, "wb") as file:
            file.write(step(run_dir, 2).read_bytes())
    for args in (["list"], ["prune", "--keep-last", 1, "--yes"]):
        answer = ft(*args, path)
        assert answer.code == Code.USAGE
        assert "is a file" in answer.err


def test_errors_are_json_too(ft: Ft, tmp_path: Path) -> None:
    for args, code in ((["list", tmp_path / "x"], 3), (["list", "--json", "--foo"], 2), (["show", tmp_path], 2)):
        answer = ft(*args, "--json")
        assert answer.code == code
        assert answer.json["error"]["exit_code"] == code
        assert answer.json["error"]["message"] in answer.err


def test_names_in_errors_are_not_obeyed_by_the_terminal(ft: Ft, tmp_path: Path) -> None:
    bad = tmp_path / "\x1b[31m"
    bad.mkdir()
    (bad / "step=00000001.ckpt").write_bytes(b"bad")
    for args in (["show", bad / "step=00000001.ckpt"], ["verify", bad / "x"], ["prune", bad, "--keep-last", 1, "-y"]):
        answer = ft(*args)
        assert answer.code in (1, 3)
        assert "\\x1b[31m" in answer.err
        assert "\x1b" not in answer.err


def test_a_storage_that_refuses_is_one_line(ft: Ft, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ClientError(Exception):
        """Of a client of an object store."""

    for error in (
        PermissionError(13, "Permission denied", "x"),
        TimeoutError("30 s"),
        ClientError("503\nSlow Down"),
        StorageError("x"),
    ):

        def fails(*args: Any, error: Exception = error, **kwargs: Any) -> Any:
            raise error

        monkeypatch.setattr(list_, "survey", fails)
        answer = ft("list", run_dir)
        assert answer.code == Code.STORAGE
        assert answer.err.count("\n") == 1


def test_a_storage_that_does_not_answer_is_named(ft: Ft, monkeypatch: pytest.MonkeyPatch) -> None:
    class EndpointError(Exception):
        """Of a client of an object store."""

    def fails(error: Exception) -> Callable[..., Any]:
        def exists(self: Storage, path: str) -> bool:
            raise error

        return exists

    monkeypatch.setattr(Storage, "exists", fails(EndpointError("cannot\nconnect")))
    for args in (["list"], ["verify"], ["show"], ["prune", "--keep-last", 1, "-y"]):
        answer = ft(*args, "memory://run")
        assert answer.code == Code.STORAGE
        word = "FILE" if args == ["show"] else "URL"
        assert answer.err == f"lightning-ft {args[0]}: {word} memory://run: EndpointError: cannot connect\n"
    # Some file systems look at their options when they are first used.
    monkeypatch.setattr(Storage, "exists", fails(TypeError("unexpected keyword argument 'x'")))
    answer = ft("list", "memory://run", "--storage-option", "x=1")
    assert (answer.code, answer.err.count("\n")) == (Code.USAGE, 1)


def test_a_bug_shows_where_it_is(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(list_, "survey", lambda *args: 1 / 0)
    assert cli.run(["list", str(run_dir)]) == Code.BUG
    assert "Traceback" in capsys.readouterr().err


def large_answer(place: Path) -> list[Any]:
    """Arguments of a call whose answer is more than a pipe holds."""
    path = place / "x.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(list(range(50_000))))
    return ["show", path, "--json", "--values"]


def test_a_reader_that_goes_away_hears_nothing(run_dir: Path, tmp_path: Path) -> None:
    for args in (["list", run_dir], ["list", run_dir, "--json"], ["--help"], large_answer(tmp_path)):
        reads, writes = os.pipe()
        os.close(reads)
        try:
            run = subprocess.run(
                [sys.executable, "-m", "lightning_ft", *map(str, args)],
                stdout=writes, stderr=subprocess.PIPE, text=True, check=False, timeout=60, env=environment(),
            )  # fmt: skip
        finally:
            os.close(writes)
        assert (run.returncode, run.stderr) == (Code.OUTPUT_CLOSED, ""), args


def test_with_closed_outputs_the_exit_code_is_right(run_dir: Path, tmp_path: Path) -> None:
    command = f"{sys.executable} -m lightning_ft"
    for line, code in (
        (f"list {run_dir} >&-", 0),
        (f"list {tmp_path / 'x'} >&-", 3),
        (f"verify {run_dir} >&- 2>&-", 0),
    ):
        run = subprocess.run(
            ["sh", "-c", f"{command} {line}"], capture_output=True, text=True, check=False, env=environment()
        )
        assert run.returncode == code, run.stderr
        assert "Traceback" not in run.stderr
    run = subprocess.run(
        ["sh", "-c", f"{command} list {tmp_path / 'x'} --json 2>&-"],
        capture_output=True, text=True, check=False, env=environment(),
    )  # fmt: skip
    assert json.loads(run.stdout)["error"]["exit_code"] == run.returncode == 3


def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lightning_ft", *map(str, large_answer(tmp_path))]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
        # Of what is started in the background it is ignored, and so by all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1) == b"{"  # it writes, and will not be done: a pipe holds less than there is
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == Code.INTERRUPTED
    assert b"Traceback" not in process.stderr.read()
    process.stdout.close()
    process.stderr.close()


# -- where it works --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["local", "memory"])
def test_g8_every_command_at_any_url(ft: Ft, run_dir: Path, where: str) -> None:
    with runs.memory() as url:
        if where == "local":
            url = str(run_dir)
        else:
            for path in run_dir.glob("*.ckpt"):
                fsspec.filesystem("memory").pipe_file(f"{url}/{path.name}", path.read_bytes())
        a, b = f"{url}/step=00000004.ckpt", f"{url}/step=00000006.ckpt"
        assert ft("list", url, "--verify", "full").code == 0
        assert ft("verify", url, a).code == 0
        assert ft("show", a).code == 0
        assert ft("diff", a, b).code == 1
        assert ft("prune", url, "--keep-last", 2, "--yes").code == 0
        assert ft("show", a).code == 3
        assert ft("consolidate", b, f"{url}/copy/b.ckpt").code == 0
        assert ft("diff", b, f"{url}/copy/b.ckpt").code == 0


# -- options ---------------------------------------------------------------------------------------------------------


def test_storage_options() -> None:
    assert options.storage_options(["anon=true", "key=abc=", "n=5", 'secret="123"', "a.b.c=x", "a.d=null"]) == {
        "anon": True, "key": "abc=", "n": 5, "secret": "123", "a": {"b": {"c": "x"}, "d": None},
    }  # fmt: skip


def test_storage_options_reach_the_file_system(ft: Ft, run_dir: Path) -> None:
    from fsspec.implementations.local import LocalFileSystem

    seen: list[dict[str, Any]] = []

    class Recording(LocalFileSystem):
        protocol = "recording"
        cachable = False

        def __init__(self, **kwargs: Any) -> None:
            seen.append(kwargs)
            super().__init__()

        @classmethod
        def _strip_protocol(cls, path: Any) -> Any:
            return super()._strip_protocol(str(path).replace("recording://", ""))

    fsspec.register_implementation("recording", Recording, clobber=True)
    given = ("--storage-option", "anon=true", "--storage-option", "deadline_secs=9")  # this one is ours
    answer = ft("list", f"recording://{run_dir}", *given, "--json")
    assert answer.code == 0
    assert seen
    assert all(kwargs == {"anon": True} for kwargs in seen)


# -- how it looks ----------------------------------------------------------------------------------------------------


@pytest.fixture
def frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The golden checkpoints, one of them damaged, one cut off, and a leftover; at a fixed time."""
    place = tmp_path / "run"
    place.mkdir()
    golden = ROOT / "tests" / "format" / "v1"
    for name, case in (("step=00000006.ckpt", "end_of_an_epoch"), ("epoch=0-step=3.ckpt", "plugin_alone")):
        [packed] = (golden / case).iterdir()
        (place / name).write_bytes(gzip.decompress(packed.read_bytes()))
    newest = (place / "step=00000006.ckpt").read_bytes()
    (place / "step=00000008.ckpt").write_bytes(newest)
    flip(place / "step=00000008.ckpt", 9000)
    (place / "step=00000010.ckpt").write_bytes(newest[:5000])
    (place / ".step=00000012.ckpt.0123456789abcdef.attempt").write_bytes(newest[:100])
    created = lightning_ft.verify(str(place / "step=00000006.ckpt")).manifest
    assert created is not None
    later = datetime.fromisoformat(created.created).timestamp() + 3 * 3600
    monkeypatch.setattr(list_, "_now", lambda: datetime.fromtimestamp(later, timezone.utc))
    return place


@pytest.mark.parametrize("name", ["list", "list_full", "verify", "prune", "show"])
def test_golden_output(ft: Ft, frozen: Path, name: str) -> None:
    args = {
        "list": ["list", frozen],
        "list_full": ["list", frozen, "--verify", "full"],
        "verify": ["verify", frozen],
        "prune": ["prune", frozen, "--keep-last", "1", "--dry-run"],
        "show": ["show", frozen / "step=00000006.ckpt"],
    }[name]
    text = ft(*args).out.replace(str(frozen), "runs/1")
    if name == "verify":  # its columns are as wide as the path
        text = re.sub("(?<=[^ \n])   +", "  ", text)
    path = HERE / "golden" / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_on_a_terminal_there_is_colour_and_nothing_is_shortened(frozen: Path) -> None:
    import pty

    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_ft", "list", str(frozen)],
        stdout=child, stderr=child, stdin=child, env=environment(TERM="xterm", COLUMNS="60"),
    )  # fmt: skip
    os.close(child)
    output = b""
    while True:
        try:
            piece = os.read(parent, 4096)
        except OSError:  # how Linux says that the other side is closed
            break
        if not piece:
            break
        output += piece
    os.close(parent)
    assert process.wait(60) == 1
    text = output.decode()
    assert "\x1b[1;31m" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    for part in ("step=00000010.ckpt", "unverified", "truncated or not a zip archive", "left by a save"):
        assert part in plain
    assert "…" not in plain
    # Where the terminal is too narrow, the note has a line of its own.
    assert "\n     truncated or not a zip archive" in plain


def test_json_is_ascii_and_one_document(ft: Ft, run_dir: Path) -> None:
    step(run_dir, 2).rename(run_dir / "größe.ckpt")
    answer = ft("list", run_dir, "--json")
    assert answer.out.isascii()
    assert any(row["name"] == "größe.ckpt" for row in json.loads(answer.out)["checkpoints"])


def test_text_survives_a_terminal_that_knows_only_ascii(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step(run_dir, 2).rename(run_dir / "größe.ckpt")
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    assert cli.run(["list", str(run_dir)]) == 0
    ascii_only.seek(0)
    assert "gr\\xf6\\xdfe.ckpt" in ascii_only.read()
