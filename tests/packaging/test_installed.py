"""The wheel in an environment that has nothing but what the wheel asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lightning_ft
from tests.packaging.conftest import Environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

IMPORT_ALL = """
import importlib, json, pkgutil, lightning_ft
missing = {}
for module in pkgutil.walk_packages(lightning_ft.__path__, "lightning_ft.", onerror=lambda name: None):
    if module.name != "lightning_ft.__main__":
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            missing.setdefault(error.name.partition(".")[0], []).append(module.name)
print(json.dumps(missing))
"""

# Killed after batch 13 of 20, when a checkpoint is there.
TRAIN = """
import os, signal, sys, time
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
import lightning_ft as ft

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.first = None

    def training_step(self, batch, batch_idx):
        self.first = self.global_step if self.first is None else self.first
        return self.net(batch[0]).square().mean()

    def on_train_batch_end(self, *args):
        if sys.argv[2] == "kill" and self.global_step == 13:
            while ft.last_good(sys.argv[1]) is None:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

L.seed_everything(1)
net = Net()
loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4, shuffle=True)
callback = ft.FaultTolerantCheckpoint(sys.argv[1], every_n_train_steps=5)
trainer = L.Trainer(max_steps=20, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[callback])
trainer.fit(net, loader, ckpt_path="last")
print(net.first, trainer.global_step, f"{sum(p.double().sum() for p in net.parameters()):.17g}")
"""


def test_everything_that_it_needs_is_there(installed: Environment) -> None:
    assert installed.pip("check").strip() == "No broken requirements found."
    version = f"lightning-ft {lightning_ft.__version__}"
    assert installed.python("-m", "lightning_ft", "--version").stdout.strip() == version
    assert installed.python("-c", "import lightning_ft; print(lightning_ft.__file__)").stdout.startswith(
        str(installed.place)
    )
    installed.python("-c", "from importlib.metadata import version; from lightning_ft import __version__ as v\n"
                     "assert version('lightning-ft') == v")  # fmt: skip


def test_a_training_that_was_killed_is_resumed(installed: Environment, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)

    def train(*args: str, code: int = 0) -> list[str]:
        out = installed.python("train.py", *args, cwd=tmp_path, code=code, OMP_NUM_THREADS="1").stdout
        return [] if code else out.splitlines()[-1].split()

    first, *expected = train("whole", "on")
    assert (first, expected[0]) == ("0", "20")
    train("killed", "kill", code=-9)
    first, *found = train("killed", "on")
    assert first in ("5", "10")
    assert found == expected


def test_the_command_line_is_an_extra(installed: Environment, tmp_path: Path) -> None:
    """Without it one line says what to install, and only modules of extras miss something; with it, it works."""
    for program in (("bin/python", "-m", "lightning_ft"), ("bin/python", "bin/lightning-ft")):
        done = installed.python(*program[1:], "list", tmp_path, code=6)
        assert done.stdout == ""
        assert done.stderr == "lightning-ft: typer is missing: pip install 'lightning-ft[cli]'\n"
    missing = json.loads(installed.python("-c", IMPORT_ALL).stdout)
    assert missing.keys() <= {"typer", "rich", "pytest", "s3fs", "aiobotocore", "botocore", "matplotlib"}
    assert {"lightning_ft.cli.app"} <= set(missing["typer"])
    installed.install(f"{installed.wheel}[cli]")
    assert installed.pip("check").strip() == "No broken requirements found."
    done = installed.python("bin/lightning-ft", "list", tmp_path, "--json", code=3)
    assert json.loads(done.stdout)["last"]["outcome"] == "starts_fresh"
    assert "usage: lightning-ft" in installed.python("-m", "lightning_ft", "--help").stdout.lower()
