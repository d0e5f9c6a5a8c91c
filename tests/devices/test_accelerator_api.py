"""`torch.accelerator` grows with every release: what is called of it is in the oldest torch that is supported."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lightning_ft"
IN_TORCH_2_6 = {
    "current_accelerator", "current_device_idx", "current_stream", "device_count", "is_available",
    "set_device_idx", "set_stream", "synchronize",
}  # fmt: skip


def called(source: str) -> set[str]:
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.accelerator"
    }


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_it_is_in_the_oldest_supported_torch(path: Path) -> None:
    assert called(path.read_text()) <= IN_TORCH_2_6


def test_the_check_can_fail() -> None:
    assert called("index = torch.accelerator.current_device_index()") == {"current_device_index"}
