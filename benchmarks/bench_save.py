"""Measures what a save costs the training loop, beside Lightning's own plugins and this machine's limits.

Every round saves the same state dictionary once with each candidate, in turn, so that a slow moment of the
disk hits all of them. Two times are taken per save:

* blocked: until ``save_checkpoint`` returned, which is the time the training loop stands still.
* on disk: until the checkpoint is durable. ``lightning_ft`` syncs the file and its directory itself.
  Lightning's plugins do not, so the benchmark does it for them: data still in memory is not on disk.

    python benchmarks/bench_save.py --mib 256 --rounds 5
"""

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

import lightning_ft as ft

MIB = 2**20
# A 1024 x 1024 matrix, as in a medium-sized transformer: neither one huge tensor nor thousands of tiny ones.
TENSOR_MIB = 4


@dataclass
class Candidate:
    """One way to save, and what it took."""

    name: str
    save: Callable[[str], None]
    """Returns when the training loop may go on."""
    finish: Callable[[str], None]
    """Returns when what `save` was given is on disk."""
    teardown: Callable[[], None] = lambda: None
    warm_ups: int = 0
    """Uncounted calls of `save` before the counted one."""
    blocked_secs: list[float] = field(default_factory=list)
    durable_secs: list[float] = field(default_factory=list)

    def measure(self, path: str) -> None:
        """Save to `path` and note both times."""
        for _ in range(self.warm_ups):
            self.save(path)
        began = time.perf_counter()
        self.save(path)
        returned = time.perf_counter()
        self.finish(path)
        finished = time.perf_counter()
        self.blocked_secs.append(returned - began)
        self.durable_secs.append(finished - began)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the state dictionary (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="counted saves per candidate (%(default)s)")
    parser.add_argument("--dir", default=".", help="directory on the disk to measure (%(default)s)")
    args = parser.parse_args()
    if args.mib < TENSOR_MIB or args.rounds < 1:
        parser.error(f"--mib must be at least {TENSOR_MIB} and --rounds at least 1")

    tensors = make_tensors(args.mib)
    checkpoint = make_checkpoint(tensors)
    candidates = make_candidates(checkpoint, tensors)
    scratch = tempfile.mkdtemp(prefix=".bench-save-", dir=args.dir)
    try:
        # Round 0 is printed on its own: it allocates the buffers that later saves use again.
        for number in range(args.rounds + 1):
            # In another order each round: whoever follows a heavy writer must not always be the same one.
            turn = number % len(candidates)
            for candidate in candidates[turn:] + candidates[:turn]:
                path = str(Path(scratch, f"{candidates.index(candidate)}-step={number:08d}.ckpt"))
                candidate.measure(path)
                if os.path.exists(path):
                    require_size(candidate, path, args.mib)
                    os.unlink(path)
                # What was written or deleted before must not be paid for by the next one.
                os.sync()
    finally:
        for candidate in candidates:
            candidate.teardown()
        shutil.rmtree(scratch)
    print_table(candidates, args.mib, args.rounds)


def make_tensors(mib: int) -> list[torch.Tensor]:
    """Return about `mib` MiB of float32 that no disk can compress away."""
    generator = torch.Generator().manual_seed(0)
    rows = TENSOR_MIB * MIB // 4 // 1024
    return [torch.randn(rows, 1024, generator=generator) for _ in range(mib // TENSOR_MIB)]


def make_checkpoint(tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Return a dictionary of the shape that `Trainer.save_checkpoint` makes."""
    return {
        "epoch": 0,
        "global_step": 1,
        "pytorch-lightning_version": L.__version__,
        "state_dict": {f"layers.{index}.weight": tensor for index, tensor in enumerate(tensors)},
        "loops": {},
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
    }


def make_candidates(checkpoint: dict[str, Any], tensors: list[torch.Tensor]) -> list[Candidate]:
    """Return the two limits first, in the order of the table."""
    background = ft.FaultTolerantCheckpointIO()
    foreground = ft.FaultTolerantCheckpointIO(async_save=False)
    plain = TorchCheckpointIO()
    threaded = AsyncCheckpointIO(TorchCheckpointIO())
    buffers = [torch.empty_like(tensor) for tensor in tensors]

    def copy(_: str) -> None:
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)

    def write(path: str) -> None:
        with open(path, "wb", buffering=0) as file:
            for tensor in tensors:
                data = memoryview(tensor.numpy()).cast("B")
                while data:
                    data = data[file.write(data) :]

    def finish_threaded(path: str) -> None:
        # The plugin's only way to wait; it makes a new thread for the next save.
        threaded.teardown()
        sync(path)

    return [
        # Warmed up, since a limit is what the machine can do at best.
        Candidate("limit: copy of the tensors in memory", copy, lambda _: None, warm_ups=2),
        Candidate("limit: raw write and fsync", write, sync),
        Candidate(
            "lightning_ft",
            lambda path: background.save_checkpoint(checkpoint, path),
            lambda _: background.drain(),
            background.teardown,
        ),
        Candidate(
            "lightning_ft, async_save=False",
            lambda path: foreground.save_checkpoint(checkpoint, path),
            lambda _: foreground.drain(),
            foreground.teardown,
        ),
        Candidate("Lightning TorchCheckpointIO", lambda path: plain.save_checkpoint(checkpoint, path), sync),
        Candidate(
            "Lightning AsyncCheckpointIO",
            lambda path: threaded.save_checkpoint(checkpoint, path),
            finish_threaded,
        ),
    ]


def sync(path: str) -> None:
    """Make a written file, and its name in the directory, survive a power cut."""
    for name in (path, os.path.dirname(path)):
        descriptor = os.open(name, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def require_size(candidate: Candidate, path: str, mib: int) -> None:
    """Refuse to report the speed of a save that did not save."""
    size_bytes = os.path.getsize(path)
    if size_bytes < mib // TENSOR_MIB * TENSOR_MIB * MIB:
        raise RuntimeError(f"{candidate.name} wrote only {size_bytes} bytes of {mib} MiB to {path}")


def print_table(candidates: list[Candidate], mib: int, rounds: int) -> None:
    """Print medians with their range, and ratios to the physical limits."""
    copy, write = candidates[:2]
    copy_secs = statistics.median(copy.blocked_secs[1:])
    write_secs = statistics.median(write.durable_secs[1:])
    print(f"{mib} MiB of float32 in {mib // TENSOR_MIB} tensors; median of {rounds} rounds (lowest to highest)")
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, lightning {L.__version__}, "
        f"lightning_ft {ft.__version__}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads\n"
    )
    print(f"{'':36} | {'blocked, ms':>22} {'first':>6} {'x copy':>6} | {'on disk, ms':>22} {'x write':>7}")
    print(f"{'-' * 37}+{'-' * 38}+{'-' * 31}")
    for candidate in candidates:
        blocked, durable = candidate.blocked_secs, candidate.durable_secs
        ratio = statistics.median(blocked[1:]) / copy_secs
        row = f"{candidate.name:36} | {_span(blocked[1:])} {blocked[0] * 1e3:6.0f} {ratio:6.2f} |"
        if candidate is not copy:
            row += f" {_span(durable[1:])} {statistics.median(durable[1:]) / write_secs:7.2f}"
        print(row.rstrip())
    print(f"\ncopy {mib / copy_secs / 1024:.1f} GiB/s, write and fsync {mib / write_secs / 1024:.2f} GiB/s")


def _span(secs: list[float]) -> str:
    low, middle, high = (f"{1e3 * value:.0f}" for value in (min(secs), statistics.median(secs), max(secs)))
    return f"{middle:>8} {f'({low} to {high})':>13}"


if __name__ == "__main__":
    main()
