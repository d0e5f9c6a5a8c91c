from __future__ import annotations

import traceback

import pytest
import torch

from lightning_ft._ranks import out_of_memory


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError("Unable to allocate 8.00 TiB for an array"), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_is_a_lack_of_memory(error: BaseException, expected: bool) -> None:
    assert out_of_memory.is_out_of_memory(error) is expected


def test_the_allocator_of_this_machine_says_it() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert out_of_memory.is_out_of_memory(raised.value)


def printed(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def test_the_error_says_what_to_do() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory.")
    out_of_memory.advise(error, 2)
    text = printed(error)
    assert "CUDA out of memory." in text
    assert "smaller batch_size" in text
    assert "accumulate_grad_batches=4), which is 2 now" in text
    assert "torch.utils.checkpoint" in text


def test_the_same_where_exceptions_have_no_notes() -> None:
    class Old(MemoryError):
        add_note = property()  # type: ignore[assignment]

    error = Old("no memory")
    out_of_memory.advise(error, 1)
    assert "no memory\nMemory was not enough" in printed(error)


def test_other_errors_stay_as_they_are() -> None:
    error = ValueError("x")
    out_of_memory.advise(error, 1)
    assert printed(error) == "ValueError: x\n"
