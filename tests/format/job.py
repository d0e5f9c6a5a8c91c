"""The run that the golden checkpoints are of. Frozen: what is in the files of released formats belongs to it.

6 batches of 4 per epoch, 2 epochs. Every sample carries its number and a draw of each random generator, so that a
wrong position or random state shows in integers and exact fractions, which are the same on every machine.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import lightning_ft as ft
from lightning_ft import testing

STEPS = 12

# The name of a case -> ranks, and the file of the run that is kept.
CASES = {
    "within_an_epoch": (1, "step=00000003.ckpt"),
    "end_of_an_epoch": (1, "step=00000006.ckpt"),
    "two_ranks": (2, "step=00000003.ckpt"),
    "plugin_alone": (1, "epoch=0-step=3.ckpt"),
}


class Numbers(Dataset[tuple[int, int]]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[int, int]:
        drawn = int(torch.randint(1000, ())), int(np.random.randint(1000)), random.randrange(1000)
        return i, drawn[0] * 10**6 + drawn[1] * 10**3 + drawn[2]


class Model(L.LightningModule):
    """Trained on fractions of the draws. `seen` is one line per step: its number, the samples, the draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.seen: list[list[Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, draws = batch
        self.seen.append([self.global_step, self.current_epoch, batch_idx, ids.tolist(), draws.tolist()])
        x = torch.stack([ids / 24, (draws % 1000) / 1000], dim=1)
        loss = (self.layer(x) - 1).pow(2).mean()
        # Of whole numbers, so that the mean over the epoch is exact.
        self.log("ids", ids.float().sum(), on_step=False, on_epoch=True, batch_size=1, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen.append(["mean", float(self.trainer.callback_metrics["ids"])])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def train(case: str, dirpath: str, ckpt_path: str | None = None) -> dict[str, Any]:
    """What this process was trained on, and the weights it ended with."""
    ranks, _ = CASES[case]
    # Another seed at a restart must not matter.
    L.seed_everything(1 if ckpt_path is None else 2, verbose=False)
    if case == "plugin_alone":
        callbacks: list[Callback] = [ModelCheckpoint(dirpath, every_n_train_steps=3, save_top_k=-1)]
        plugins = [ft.FaultTolerantCheckpointIO()]
    else:
        callbacks, plugins = [ft.FaultTolerantCheckpoint(dirpath, every_n_train_steps=3, keep_last=-1)], []
    trainer = L.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_epochs=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks, plugins=plugins,
    )  # fmt: skip
    model = Model()
    trainer.fit(model, DataLoader(Numbers(24 * ranks), batch_size=4, shuffle=True), ckpt_path=ckpt_path)
    return {"seen": model.seen, "weights": [value for p in model.parameters() for value in p.flatten().tolist()]}


def run(case: str, dirpath: str | Path, ckpt_path: str | None = None) -> list[dict[str, Any]]:
    """`train` in a fresh process per rank; what each rank reports."""
    context = multiprocessing.get_context("forkserver")
    ranks, _ = CASES[case]
    port = testing._free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=_rank, args=(rank, ranks, port, sends, case, str(dirpath), ckpt_path, list(sys.path)))
        for rank, (_, sends) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    reports = []
    try:
        for receives, sends in pipes:
            sends.close()
            assert receives.poll(240), "a rank says nothing"
            reports.append(receives.recv())
    finally:
        for process in processes:
            process.join(30)
            process.kill()
    errors = [report for report in reports if isinstance(report, str)]
    assert not errors, errors
    return reports


def _rank(
    rank: int, ranks: int, port: int, pipe: Connection, case: str, dirpath: str, ckpt_path: str | None, path: list[str]
) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    if ranks > 1:
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks), NODE_RANK="0", LOCAL_RANK=str(rank)
        )
    try:
        pipe.send(train(case, dirpath, ckpt_path))
    except Exception as error:
        pipe.send(f"rank {rank}: {type(error).__name__}: {error}")
        raise
