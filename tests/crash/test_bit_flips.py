"""One flipped bit anywhere in a checkpoint of a real training is found."""

from __future__ import annotations

import os
import random
from pathlib import Path

import lightning_ft as ft
from tests.trainer import runs

FLIPS = 1000


def test_every_one_of_a_thousand_flipped_bits_is_found(tmp_path: Path) -> None:
    runs.first_run(tmp_path)
    path = ft.list_checkpoints(str(tmp_path))[0].path
    size_bytes = os.path.getsize(path)
    chosen = random.Random(1000).sample(range(8 * size_bytes), FLIPS)
    missed, problems = [], set()
    descriptor = os.open(path, os.O_RDWR)
    try:
        for bit in chosen:
            byte = os.pread(descriptor, 1, bit // 8)
            os.pwrite(descriptor, bytes([byte[0] ^ 1 << bit % 8]), bit // 8)
            problem = ft.verify(path).problem
            os.pwrite(descriptor, byte, bit // 8)
            problems.add(problem)
            if problem is None:
                missed.append(bit)
    finally:
        os.close(descriptor)
    print(f"{FLIPS - len(missed)} of {FLIPS} found in {size_bytes} bytes: {problems}")
    assert missed == []
    assert ft.verify(path).problem is None, "every bit was flipped back"
