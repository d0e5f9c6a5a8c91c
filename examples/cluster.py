"""One script for every launcher: SLURM, torchrun, Kubernetes, or Lightning's own (``python examples/cluster.py``).

Whoever ends it, however often, and starts the same command again: the line it prints at its end is that of a run that
nobody has ended. See ``slurm/``, ``torchrun/`` and ``kubernetes/`` beside this file.
"""

import lightning_ft as ft

# First of all: signals are noted from here on, and the imports below take seconds.
guard = ft.PreemptionGuard()

import argparse  # noqa: E402
import os  # noqa: E402
import time  # noqa: E402
from datetime import timedelta  # noqa: E402

import lightning as L  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        time.sleep(0.02)  # slow enough to be interrupted
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layers(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def ranks() -> tuple[int, int]:
    """Processes per machine, and machines: what the launcher says."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        return int(env["LOCAL_WORLD_SIZE"]), int(env["GROUP_WORLD_SIZE"])
    if "SLURM_NTASKS" in env:
        nodes = int(env["SLURM_NNODES"])
        return int(env["SLURM_NTASKS"]) // nodes, nodes
    return int(env.get("DEVICES", "1")), int(env.get("NODES", "1"))


def main() -> None:
    """Train, or continue to train."""
    options = argparse.ArgumentParser()
    options.add_argument("--dirpath", default="runs/cluster", help="directory or URL that all machines see")
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--timeout-secs", type=float, default=600, help="after which a silent rank is taken for gone")
    arguments = options.parse_args()
    L.seed_everything(1)
    inputs = torch.randn(1600, 16)
    targets = inputs[:, :4].prod(dim=1, keepdim=True)
    devices, nodes = ranks()
    several = DDPStrategy(timeout=timedelta(seconds=arguments.timeout_secs))
    trainer = L.Trainer(
        max_steps=arguments.steps,
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        strategy=several if devices * nodes > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        callbacks=[ft.FaultTolerantCheckpoint(arguments.dirpath, every_n_train_steps=20, guards=[guard])],
    )
    model = Regression()
    trainer.fit(model, DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True), ckpt_path="last")
    if trainer.is_global_zero:
        total = sum(parameter.double().sum() for parameter in model.parameters())
        print(f"step {trainer.global_step}, sum of the weights {total:.17g}", flush=True)


if __name__ == "__main__":
    main()
