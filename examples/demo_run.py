"""The training of digits.py, which writes down what it does, and kills itself where demo.py wants it to."""

import argparse
import json
import os
import signal
from typing import Any

import digits
import lightning as L
import torch
import xxhash


class Trace(L.Callback):
    """Appends what happened to a file, one JSON line each, and kills the process when told to."""

    def __init__(self, path: str, kill_at_step: int | None) -> None:
        self.kill_at_step = kill_at_step
        # Unbuffered: a line that was written survives a SIGKILL.
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: digits.Batch, batch_idx: int
    ) -> None:
        self._write(
            "batch",
            trainer,
            batch_idx=batch_idx,
            ids=batch[2].tolist(),
            loss=outputs["loss"].item().hex(),
            lr=trainer.optimizers[0].param_groups[0]["lr"].hex(),
            weights=_digest(pl_module),
        )
        if trainer.global_step == self.kill_at_step:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._write("validation", trainer, accuracy=_metric(trainer, "val_accuracy"))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write("epoch", trainer, mean_loss=_metric(trainer, "train_loss_epoch"))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write("end", trainer, weights=_digest(pl_module))

    def _write(self, kind: str, trainer: L.Trainer, **values: Any) -> None:
        line = {"kind": kind, "step": trainer.global_step, "epoch": trainer.current_epoch, **values}
        os.write(self.file, json.dumps(line).encode() + b"\n")


def _metric(trainer: L.Trainer, name: str) -> str:
    return float(trainer.callback_metrics[name]).hex()


def _digest(module: torch.nn.Module) -> str:
    """Return the digest of all parameters and buffers."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dirpath", required=True, help="where the checkpoints are")
    parser.add_argument("--trace", required=True, metavar="FILE", help="append one JSON line per batch")
    parser.add_argument("--kill-at-step", type=int, metavar="N", help="SIGKILL this process after step N")
    arguments = parser.parse_args()
    digits.main(arguments.dirpath, Trace(arguments.trace, arguments.kill_at_step))
