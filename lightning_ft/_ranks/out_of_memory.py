"""What to do about a run that does not fit into memory, said where it is needed: in the error."""

from __future__ import annotations

import re

import torch

_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED", re.IGNORECASE)

ADVICE = (
    "Memory was not enough. What lowers the peak, in the order of the effort:\n"
    "  1. a smaller batch_size;\n"
    "  2. the same effective batch in pieces: Trainer(accumulate_grad_batches={accumulate}), which is {now} now;\n"
    "  3. activation checkpointing: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).\n"
    "1 and 2 change what later batches are, so a restart with them is not bit for bit this run."
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory, of a device or of this machine, was not enough."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def advise(error: BaseException, accumulate_grad_batches: int) -> None:
    """`error`, if memory was not enough, says what to do.

    Args:
        error: About to end the fit.
        accumulate_grad_batches: That of the trainer.
    """
    if not is_out_of_memory(error):
        return
    advice = ADVICE.format(accumulate=2 * accumulate_grad_batches, now=accumulate_grad_batches)
    if hasattr(error, "add_note"):
        error.add_note(advice)
    else:  # before Python 3.11
        error.args = (f"{error}\n{advice}",)
