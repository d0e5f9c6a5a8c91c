"""The code of the pages: all of it is code, and what a newcomer copies runs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

import lightning_ft as ft
from tests.docs.pages import DOCS, PAGES, README, ROOT, Page, name

SCRIPT = next(block for block in Page(DOCS / "quickstart.md").blocks("python") if "__main__" in block)


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path},
    )  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_is_python_and_yaml_is_yaml(page: Page) -> None:
    for block in page.blocks("python"):
        ast.parse(block)
    for block in page.blocks("yaml"):
        assert yaml.safe_load(block)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_shell_is_shell(page: Page) -> None:
    for block in page.blocks("bash"):
        subprocess.run(["bash", "-n"], input=block, text=True, check=True)


@pytest.mark.parametrize("page", [README, Page(DOCS / "index.md")], ids=name)
def test_the_six_lines(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = page.blocks("python")
    monkeypatch.chdir(tmp_path)
    # As long as a test may take; what is saved at its end is what matters here.
    shorter = block.replace("L.Trainer(", "L.Trainer(max_steps=4, logger=False, accelerator='cpu',")
    exec(shorter, {"model": BoringModel(), "datamodule": BoringDataModule()})  # noqa: S102
    good = ft.last_good("runs/1")
    assert good is not None
    assert good.manifest is not None
    assert good.manifest.step == 4


def test_the_quick_starts_script_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    durable = "self.global_step == 250 and self.trainer.strategy.checkpoint_io.drain()"  # what was saved by then
    killed = SCRIPT.replace("time.sleep(0.01)", f"{durable}; self.global_step == 250 and __import__('os').kill(0, 9)")
    assert killed != SCRIPT
    (tmp_path / "killed.py").write_text(killed)
    quick = SCRIPT.replace("time.sleep(0.01)", "pass")
    (tmp_path / "quick.py").write_text(quick)
    whole = python("quick.py", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    os.rename(tmp_path / "runs", tmp_path / "whole")
    # `kill(0, 9)` is for its whole process group, which must not be this one.
    subprocess.run(
        [sys.executable, "killed.py"], cwd=tmp_path, capture_output=True, timeout=200, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    good = ft.last_good(str(tmp_path / "runs" / "1"))
    assert good is not None
    assert good.manifest is not None
    assert good.manifest.step == 240
    again = python("quick.py", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert whole.stdout.splitlines()[-1].startswith("weights ")
    assert again.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_quick_starts_drill(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = python("-m", "lightning_ft", "drill", "--steps", "60", "--", "python", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout


def test_the_preset_as_it_is_shown() -> None:
    shown = [block for page in PAGES for block in page.blocks("python") if "**ft.fault_tolerance(" in block]
    assert len(shown) >= 2
    arguments = ft.fault_tolerance("runs/1")
    assert sorted(arguments) == ["callbacks", "plugins"]


def test_the_configuration_as_it_is_shown() -> None:
    (block,) = Page(DOCS / "configuration.md").blocks("yaml")
    (callback,) = yaml.safe_load(block)["trainer"]["callbacks"]
    given = callback["init_args"]
    guards = [getattr(ft, g["class_path"].rpartition(".")[2])(**g.get("init_args", {})) for g in given.pop("guards")]
    assert [type(guard) for guard in guards] == [ft.PreemptionGuard, ft.DivergenceGuard]
    given.pop("train_time_interval")  # "0:10:00": jsonargparse makes it a timedelta
    assert isinstance(ft.FaultTolerantCheckpoint(**given, guards=guards), ft.FaultTolerantCheckpoint)


def test_torch_reads_what_the_pages_say_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any("torch.load(path, weights_only=True)" in span for span in Page(DOCS / "operations.md").spans)
    test_the_six_lines(README, tmp_path, monkeypatch)
    (path,) = (tmp_path / "runs" / "1").glob("*.ckpt")
    assert "state_dict" in torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    ("codes", "starts"),
    [([75, 76, 1, 78, 79, 137, 0, 1], 7), ([77, 0], 1), ([1, 130, 0], 2)],
    ids=["until it is finished", "not after a bad loss", "not after Ctrl-C"],
)
def test_the_loop_in_a_shell_starts_again_what_should_be(codes: list[int], starts: int, tmp_path: Path) -> None:
    (loop,) = Page(DOCS / "operations.md").blocks("bash")
    (tmp_path / "codes").write_text("\n".join(map(str, codes)) + "\n")
    (tmp_path / "python").write_text(
        '#!/bin/bash\necho start >>starts\ncode=$(head -n 1 codes)\nsed -i 1d codes\nexit "$code"\n'
    )
    (tmp_path / "sleep").write_text("#!/bin/bash\n")
    for program in ("python", "sleep"):
        (tmp_path / program).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(["bash", "-c", loop], cwd=tmp_path, env={**os.environ, "PATH": path}, timeout=60, check=False)
    assert (tmp_path / "starts").read_text().splitlines() == ["start"] * starts


def test_a_damaged_file_that_somebody_vouches_for_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page says to do where nothing else is left."""
    test_the_six_lines(README, tmp_path, monkeypatch)
    (path,) = (tmp_path / "runs" / "1").glob("*.ckpt")
    content = bytearray(path.read_bytes())
    weights = torch.load(path, weights_only=True)["state_dict"]["layer.weight"]
    content[bytes(content).find(weights.numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    assert ft.verify(path).problem is not None

    def resumed_at(**how: Any) -> int:
        trainer = L.Trainer(
            max_steps=6, logger=False, accelerator="cpu", enable_progress_bar=False,
            callbacks=[ft.FaultTolerantCheckpoint("runs/1", every_n_train_steps=500)], **how,
        )  # fmt: skip
        seen: list[int] = []
        module = BoringModel()
        monkeypatch.setattr(module, "on_train_start", lambda: seen.append(trainer.global_step))
        trainer.fit(module, BoringDataModule(), ckpt_path=str(path))
        return seen[0]

    with pytest.raises(ft.CorruptCheckpointError):
        resumed_at()
    assert resumed_at(plugins=[ft.FaultTolerantCheckpointIO(verify="off")]) == 4


def test_state_of_ones_own_is_restored_by_the_recipes(tmp_path: Path) -> None:
    (block,) = Page(DOCS / "restoring.md").blocks("python")
    names: dict[str, Any] = {"L": L, "torch": torch}
    exec(block, names)  # noqa: S102

    class Net(names["Net"]):  # type: ignore[misc]
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            (level,) = (c.level for c in self.trainer.callbacks if isinstance(c, names["Curriculum"]))
            self.average += batch.mean()
            self.scale *= 0.9
            return self.layer(batch * self.scale / (1 + self.average + level)).sum() / 100

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Curriculum(names["Curriculum"]):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any) -> None:
            self.level += 1

    def trained(dirpath: str, steps: int) -> tuple[Any, ...]:
        L.seed_everything(1)
        curriculum, stream, net = Curriculum(), names["Stream"](), Net()
        trainer = L.Trainer(
            max_steps=steps, accelerator="cpu", logger=False, enable_progress_bar=False,
            callbacks=[curriculum, ft.FaultTolerantCheckpoint(tmp_path / dirpath, every_n_train_steps=2, guards=())],
        )  # fmt: skip
        trainer.fit(net, torch.utils.data.DataLoader(stream, batch_size=4), ckpt_path="last")
        return net.layer.weight.tolist(), float(net.average), net.scale, curriculum.level, stream.position

    whole = trained("whole", 7)
    trained("parts", 3)
    assert trained("parts", 7) == whole


def test_the_preset_is_what_it_is_spelled_out_to_be() -> None:
    spelled = next(b for b in Page(DOCS / "configuration.md").blocks("python") if "verify_after_write" in b)
    preset = ft.fault_tolerance("runs/1")
    arguments: dict[str, Any] = {}

    class Trainer:
        def __init__(self, **given: Any) -> None:
            arguments.update(given)

    class Lightning:
        pass

    Lightning.Trainer = Trainer  # type: ignore[attr-defined]
    exec(spelled, {"L": Lightning, "ft": ft, "EarlyStopping": lambda monitor: None})  # noqa: S102
    ours, theirs = arguments["callbacks"][1], preset["callbacks"][-1]
    assert isinstance(ours, ft.FaultTolerantCheckpoint)
    assert isinstance(theirs, ft.FaultTolerantCheckpoint)
    same = ("trigger", "retention", "local", "max_restarts_without_progress", "save_on_train_end", "strict")
    assert {key: getattr(ours.settings, key) for key in same} == {key: getattr(theirs.settings, key) for key in same}
    assert [type(guard) for guard in ours.settings.guards] == [type(guard) for guard in theirs.settings.guards]
    (writes,), (their_writes,) = arguments["plugins"], preset["plugins"]
    assert writes.verify_after_write == their_writes.verify_after_write
    with pytest.raises(TypeError, match="multiple values for keyword argument 'callbacks'"):
        L.Trainer(**preset, callbacks=[])
