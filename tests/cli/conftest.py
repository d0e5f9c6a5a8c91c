"""A directory as a real run leaves it, and the program: in this process, and in one of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_ft import cli

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """All of stdout: with anything else there, this fails."""
        return json.loads(self.out)


@pytest.fixture
def ft(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """`ft("list", path)` in this process."""

    def call(*args: Any) -> Answer:
        capsys.readouterr()
        code = cli.run([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert "Traceback" not in err, err
        return Answer(code, out, err)

    return call


def environment(**values: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **values}


def program(*args: Any, timeout: float = 120, **kwargs: Any) -> Answer:
    """`python -m lightning_ft` in a process of its own."""
    command = [sys.executable, "-m", "lightning_ft", *map(str, args)]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=timeout, env=environment(),
        stdin=subprocess.DEVNULL, **kwargs,
    )  # fmt: skip
    return Answer(run.returncode, run.stdout, run.stderr)


@pytest.fixture(scope="session")
def left_by_a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run`: four checkpoints of ours and one of a ModelCheckpoint; `plain`: of plain Lightning. Not to be changed."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    import lightning_ft
    from tests.trainer import runs

    place = tmp_path_factory.mktemp("left")
    ours = lightning_ft.FaultTolerantCheckpoint(str(place / "run"), every_n_train_steps=2, keep_last=-1)
    users = ModelCheckpoint(place / "run", filename="best", every_n_train_steps=3, save_top_k=1)
    runs.fit(runs.trainer(users, ours, max_steps=8), runs.Line(width=500))
    plain = ModelCheckpoint(place / "plain", filename="users", every_n_train_steps=4, save_last=True)
    runs.fit(runs.trainer(plain, max_steps=4), runs.Line(width=500))
    return place


@pytest.fixture
def run_dir(left_by_a_run: Path, tmp_path: Path) -> Path:
    """A copy of `run`, to be changed."""
    return Path(shutil.copytree(left_by_a_run / "run", tmp_path / "run"))


@pytest.fixture
def plain_dir(left_by_a_run: Path, tmp_path: Path) -> Path:
    """A copy of `plain`, to be changed."""
    return Path(shutil.copytree(left_by_a_run / "plain", tmp_path / "plain"))


def step(dirpath: Path, number: int) -> Path:
    return dirpath / f"step={number:08d}.ckpt"


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def cut(path: Path, share: float = 0.5) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def data_offset(path: Path, record: str) -> int:
    """Where the data of a record of the archive begin."""
    import zipfile

    with zipfile.ZipFile(path) as archive:
        info = next(i for i in archive.infolist() if i.filename.partition("/")[2] == record)
        head = path.read_bytes()[info.header_offset : info.header_offset + 30]
        return info.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")


@contextmanager
def holding(dirpath: Path) -> Iterator[int]:
    """Another process, whose number this is, holds the lock of the directory as a training does."""
    code = (
        "import sys; from lightning_ft._disk.lock import DirectoryLock\n"
        "DirectoryLock(sys.argv[1]).acquire(); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(dirpath)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        yield holder.pid
    finally:
        holder.communicate()
