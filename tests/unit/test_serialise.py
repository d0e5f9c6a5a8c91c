"""The bytes are those of `torch.save`, for every kind of tensor, and where torch has changed they still are."""

from __future__ import annotations

import collections
import inspect
import io
import logging
import re
import shutil
import subprocess
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _archives import maker
from hypothesis import given, settings
from hypothesis import strategies as st
from test_archive import Hollow, Pieces

from lightning_ft._disk.archive import write_archive
from lightning_ft._saving import serialise
from lightning_ft.storage import Storage

ID = "archive/.data/serialization_id"


def of_torch(checkpoint: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    return buffer.getvalue()


def of_us(checkpoint: Any, serialization_id: str | None = None, alignment_bytes: int = 64) -> bytes:
    """With the identifier of torch's file in place of ours, which cannot be the same: torch's depends on the hash of
    strings and the order of a set in the C++ library that it was built with."""
    buffer = io.BytesIO()
    found = serialise.collect(checkpoint).found
    write_archive(buffer, [(name, data) for name, data, _ in found], alignment_bytes, serialization_id)
    return buffer.getvalue()


def identity(data: bytes) -> str:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read(ID).decode()


def assert_same(checkpoint: Any) -> None:
    theirs = of_torch(checkpoint)
    assert of_us(checkpoint, identity(theirs)) == theirs
    ours = io.BytesIO()
    serialise.save(checkpoint, ours)
    with zipfile.ZipFile(ours) as archive, zipfile.ZipFile(io.BytesIO(theirs)) as expected:
        assert archive.testzip() is None
        for one, other in zip(archive.infolist(), expected.infolist(), strict=True):
            assert (one.filename, one.header_offset, one.file_size) == (
                other.filename, other.header_offset, other.file_size
            )  # fmt: skip
            assert one.filename == ID or archive.read(one) == expected.read(other)


class Tagged(torch.Tensor):
    pass


def _with_attribute() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.note = "kept"  # type: ignore[attr-defined]
    return tensor


def _tied() -> dict[str, Any]:
    weights = torch.arange(12.0).reshape(3, 4)
    return {"a": weights, "b": weights.t(), "c": weights[1:, 2:], "d": weights, "e": [weights[0], weights.view(-1)]}


def _optimizer() -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}


def _quantised() -> Any:
    return torch.quantize_per_channel(torch.ones(2, 2), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8)


# Without those that torch cannot save: quantised ones without a quantiser, and integers of less than a byte.
DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and not re.fullmatch(r"q.*|bit.*|u?int[1-7]", name)
}

CHECKPOINTS: dict[str, Callable[[], Any]] = {
    "nothing": dict,
    "one tensor": lambda: torch.arange(3),
    "model and optimizer": _optimizer,
    "tied": _tied,
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: [torch.empty(0), torch.empty(0, 5), torch.empty(3, 0, 2, dtype=torch.int64)],
    "empty storage": lambda: torch.UntypedStorage(0),
    "expanded": lambda: torch.ones(1).expand(1000),
    "strided": lambda: torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1)[::2],
    "channels last": lambda: torch.ones(1, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    "needs gradient": lambda: torch.ones(3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "buffer": lambda: torch.nn.Buffer(torch.ones(3)) if hasattr(torch.nn, "Buffer") else None,
    "subclass": lambda: torch.ones(3).as_subclass(Tagged),
    "attribute": _with_attribute,
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j]).conj().imag,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 3, torch.quint8),
    "quantised by channel": _quantised,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "meta": lambda: torch.ones(3, device="meta"),
    "storages": lambda: [torch.ones(3).untyped_storage(), torch.ones(2)._typed_storage()],
    "random state": lambda: torch.get_rng_state(),
    "module": lambda: torch.nn.Linear(2, 2),
    "numpy": lambda: {"array": np.arange(5), "number": np.float64(3)},
    "keys": lambda: {"é": torch.ones(1), "ключ": 2, 3: None, (1, "a"): torch.ones(2), "": b"bytes"},
    "plain": lambda: collections.OrderedDict(a=1, b=[1.5, None, True, 2**80], c={"d": ("x", {1, 2}, slice(1, 2))}),
    "itself": lambda: (lambda found: found.append(found) or found)([torch.ones(1)]),  # type: ignore[func-returns-value]
    "large": lambda: [torch.arange(3 << 20), torch.ones(5), torch.zeros(1 << 20, dtype=torch.uint8)],
    "many": lambda: {str(i): torch.full((i % 50,), i) for i in range(3000)},
    **{n: lambda dtype=dtype: torch.zeros(4, 16, dtype=torch.uint8).view(dtype) for n, dtype in DTYPES.items()},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.filterwarnings("ignore")  # of torch, about kinds of tensors that it means to change
def test_the_bytes_are_those_of_torch(name: str) -> None:
    assert_same(CHECKPOINTS[name]())


SHAPES = st.lists(st.integers(0, 4), max_size=3)
TENSORS = st.builds(
    lambda shape, dtype, cut, turn: (lambda t: (t.t() if turn and t.dim() == 2 else t)[cut:] if t.dim() else t)(
        torch.zeros(shape, dtype=dtype)
    ),
    SHAPES,
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]),
    st.integers(0, 2),
    st.booleans(),
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5) | TENSORS
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


@given(tree=TREES, shared=TENSORS)
@settings(max_examples=150, deadline=None)
def test_any_nesting_gives_the_bytes_of_torch(tree: Any, shared: torch.Tensor) -> None:
    assert_same({"tree": tree, "twice": [shared, tree, shared, shared.detach()]})


@pytest.mark.parametrize("alignment_bytes", [64, 4096])
def test_the_alignment_that_torch_was_told(alignment_bytes: int) -> None:
    config = pytest.importorskip("torch.utils.serialization").config
    with config.patch("save.storage_alignment", alignment_bytes):
        theirs, ours = of_torch(_tied()), io.BytesIO()
        serialise.save(_tied(), ours)
        assert len(ours.getvalue()) == len(theirs)
        assert of_us(_tied(), identity(theirs), alignment_bytes) == theirs


@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"weights_only": True}, {"mmap": True, "weights_only": True}])
def test_torch_loads_the_committed_file(tmp_path: Path, options: dict[str, bool]) -> None:
    path = str(tmp_path / "step=00000010.ckpt")
    with Storage().open_attempt(path) as attempt:
        serialise.save({**_tied(), "large": torch.arange(2 << 20)}, attempt)
        attempt.commit(maker())
    found = torch.load(path, **{"weights_only": False, **options})
    assert all(torch.equal(found[key], value) for key, value in _tied().items() if key != "e")
    assert found["a"].untyped_storage().data_ptr() == found["c"].untyped_storage().data_ptr()
    assert torch.equal(found["large"], torch.arange(2 << 20))
    if shutil.which("unzip"):
        subprocess.run(["unzip", "-tqq", path], check=True)


def test_no_tensor_is_copied() -> None:
    checkpoint = {"a": torch.zeros(16 << 20), "b": torch.ones(3)}
    tracemalloc.start()
    try:
        serialise.save(checkpoint, Pieces())
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    found = {name: owner for name, _, owner in serialise.collect(checkpoint).found}
    assert found["data/0"].data_ptr() == checkpoint["a"].data_ptr()  # type: ignore[attr-defined]


def test_torch_is_not_asked_about_what_is_no_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[type] = []
    is_storage = torch.is_storage
    monkeypatch.setattr(torch, "is_storage", lambda value: asked.append(type(value)) or is_storage(value))
    serialise.collect({str(i): torch.ones(i + 1) for i in range(50)})
    assert len(asked) < 50


def test_what_tensors_are_to_a_pickle_is_found_out_once_for_those_that_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = [torch.ones(2, 3).t(), torch.ones(4, dtype=torch.float64), torch.ones(5, requires_grad=True)]
    reductions: serialise.Reductions = dict.fromkeys(map(id, kept))
    reduce, asked = serialise._reduce, []
    monkeypatch.setattr(serialise, "_reduce", lambda tensor: asked.append(id(tensor)) or reduce(tensor))
    for number in range(4):
        checkpoint = {"kept": kept, "again": kept[0], "other": torch.full((number + 1,), 1.0)}
        before = len(asked)
        found = [(name, bytes(data)) for name, data, _ in serialise.collect(checkpoint, reductions).found]
        assert len(asked) - before == (4 if number == 0 else 1)
        assert found == [(name, bytes(data)) for name, data, _ in serialise.collect(checkpoint).found]
    assert len(reductions) == len(kept)


@pytest.mark.parametrize("value", [lambda: None, [torch.ones(3), lambda: None]], ids=["function", "nested"])
def test_what_cannot_be_pickled_is_not_begun(value: Any) -> None:
    sink = Pieces()
    with pytest.raises(Exception, match=r"[Pp]ickle"):
        serialise.save({"weights": torch.ones(3), "value": value}, sink)
    assert sink.sizes == []


def test_one_memory_with_two_types_is_refused_as_by_torch() -> None:
    tensor = torch.ones(4)
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        serialise.save([tensor, tensor.view(torch.int32)], Pieces())


def test_an_error_of_the_sink_is_passed_on() -> None:
    with pytest.raises(OSError, match="injected"):
        serialise.save(_tied(), Pieces(fail_at=1))


# -- a torch that is not as expected -----------------------------------------------------------------------------


def test_torch_saves_in_the_way_that_is_known_here() -> None:
    """Fails with a torch that has changed: saves work through `torch.save` then, and `serialise` is to adapt."""
    save = torch.serialization._save
    assert list(inspect.signature(save).parameters) == serialise._PARAMETERS
    assert [name for name, _, _ in serialise.collect([torch.ones(1), torch.ones(1)]).found][-2:] == [
        "data/0",
        "data/1",
    ]


def _other_parameters(obj: Any, zip_file: Any, pickle_module: Any, pickle_protocol: Any) -> None:
    raise AssertionError("called in spite of its shape")


def _other_record(real: Any) -> Callable[..., None]:
    def save(obj, zip_file, pickle_module, pickle_protocol, _disable_byteorder_record):  # type: ignore[no-untyped-def]
        if isinstance(zip_file, serialise.Records):
            zip_file.write_record("data.pkl", 140_000_000, 3)
        real(obj, zip_file, pickle_module, pickle_protocol, _disable_byteorder_record)

    return save


def test_another_torch_saves_by_itself(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.serialization, "_save", _other_record(torch.serialization._save))
    with caplog.at_level(logging.WARNING):
        file = io.BytesIO()
        serialise.save(_tied(), file)
    assert file.getvalue() == of_torch(_tied())
    assert "record data.pkl is a int" in caplog.text


@pytest.mark.parametrize("change", ["parameters", "absent"])
def test_another_shape_is_not_called(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    called: list[Any] = []
    monkeypatch.setattr(torch, "save", lambda *args: called.append(args))
    if change == "absent":
        monkeypatch.delattr(torch.serialization, "_save")
    else:
        monkeypatch.setattr(torch.serialization, "_save", _other_parameters)
    sink = Pieces()
    serialise.save({"a": 1}, sink)
    assert called == [({"a": 1}, sink)]


def test_data_that_is_to_be_left_out_is_left_out() -> None:
    skip = pytest.importorskip("torch.serialization").skip_data
    file, expected = io.BytesIO(), io.BytesIO()
    with skip():
        serialise.save(_tied(), file)
        torch.save(_tied(), expected)
    assert file.getvalue() == expected.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("size_bytes", [2**32 - 2, 2**32 - 1, 2**32 + 70])
def test_beyond_4_gib_the_bytes_are_those_of_torch(size_bytes: int) -> None:
    checkpoint = [torch.ones(3), torch.zeros(size_bytes, dtype=torch.uint8), torch.ones(5), torch.ones(0)]
    theirs, ours = Hollow(), Hollow()
    torch.save(checkpoint, theirs)
    with zipfile.ZipFile(theirs) as archive:  # type: ignore[arg-type]
        serialization_id = archive.read(ID).decode()
    found = serialise.collect(checkpoint).found
    write_archive(ours, [(name, data) for name, data, _ in found], 64, serialization_id)  # type: ignore[arg-type]
    assert ours.size_bytes == theirs.size_bytes
    # In between there is nothing but zeros, which are not kept.
    for offset in (0, ours.size_bytes - 5000):
        ours.seek(offset)
        theirs.seek(offset)
        assert ours.read(5000) == theirs.read(5000)
