"""`lightning-ft show`: what is in a file, as torch would find it, with nothing executed."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import random
import re
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from lightning_ft._inspection.contents import read_contents
from lightning_ft._inspection.descriptions import (
    DescriptionError,
    Name,
    Placeholder,
    TensorDescription,
    describe,
    leaves,
)
from lightning_ft._inspection.tensors import TensorReader
from lightning_ft.cli.output import Output
from lightning_ft.errors import CorruptCheckpointError
from lightning_ft.storage import Storage
from tests.cli.conftest import Answer, cut, data_offset, flip, step
from tests.trainer import runs

Ft = Callable[..., Answer]


def test_a_checkpoint_of_ours(ft: Ft, run_dir: Path) -> None:
    path = step(run_dir, 4)
    document = ft("show", path, "--json").json
    assert set(document) == {
        "command", "path", "size_bytes", "step", "epoch", "manifest", "totals", "tensors", "placeholders",
    }  # fmt: skip
    assert (document["step"], document["manifest"]["step"]) == (4, 4)
    assert document["manifest"]["topology"] == {"world_size": 1}
    assert document["placeholders"] == []
    state = torch.load(path, weights_only=True)
    weights = {t["name"]: t for t in document["tensors"] if t["name"].startswith("state_dict.")}
    assert {name.removeprefix("state_dict."): t["shape"] for name, t in weights.items()} == {
        name: list(tensor.shape) for name, tensor in state["state_dict"].items()
    }
    totals = {total["key"]: total for total in document["totals"]}
    assert set(totals) == set(state)
    assert totals["state_dict"]["size_bytes"] == sum(t.nbytes for t in state["state_dict"].values())
    text = ft("show", path).out
    assert "state_dict.layer.weight" in text
    assert "world_size 1" in text


def test_a_checkpoint_of_plain_lightning(ft: Ft, plain_dir: Path) -> None:
    answer = ft("show", plain_dir / "users.ckpt", "--json")
    assert answer.code == 0
    assert answer.json["manifest"] is None
    assert answer.json["step"] == 4
    assert "written by plain Lightning" in ft("show", plain_dir / "users.ckpt").out


def test_only_and_values(ft: Ft, run_dir: Path) -> None:
    document = ft("show", step(run_dir, 4), "--only", "optimizer_states.0", "--values", "--json").json
    assert all(t["name"].startswith("optimizer_states.0.") for t in document["tensors"] + document["values"])
    assert {"name": "optimizer_states.0.param_groups.0.lr", "value": 0.001} in document["values"]
    answer = ft("show", step(run_dir, 4), "--only", "state")
    assert answer.code == 2
    assert "state_dict" in answer.err


def test_the_model_comes_first_and_what_is_ours_is_summed_up(ft: Ft, run_dir: Path, tmp_path: Path) -> None:
    out = ft("show", step(run_dir, 4)).out
    names = re.findall(r"^([a-z_]+)\.\S+ +float32 ", out, re.MULTILINE)
    assert names[0] == "state_dict"
    assert "lightning_ft" not in names
    assert re.search(r"^and \d+ more tensors \(callbacks, lightning_ft\): --all$", out, re.MULTILINE)
    everything = ft("show", step(run_dir, 4), "--all").out
    assert "lightning_ft.ranks.0.rng.torch" in everything
    assert "--all" not in everything
    assert "lightning_ft.ranks.0.rng.torch" in ft("show", step(run_dir, 4), "--only", "lightning_ft").out
    torch.save({"optimizer_states": [torch.ones(1)], "state_dict": {"w": torch.ones(1)}}, tmp_path / "x.ckpt")
    assert re.findall(r"^(\w+)\.", ft("show", tmp_path / "x.ckpt").out, re.MULTILINE)[0] == "state_dict"


def test_a_long_name_is_shortened_on_a_terminal_only(
    tmp_path: Path, ft: Ft, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "ModelCheckpoint" + "{'monitor': 'val_acc'}" * 10 + ".best"
    torch.save({"callbacks": {long: torch.ones(1)}, "state_dict": {"w": torch.ones(1)}}, tmp_path / "x.ckpt")
    assert f"callbacks.{long}" in ft("show", tmp_path / "x.ckpt", "--all").out
    output = Output(as_json=False)
    output.console = Console(force_terminal=True, width=80, no_color=True, highlight=False, markup=False)
    output.table(("tensor", "dtype", "size"), [[long, "float32", "4 B"], ["w", "float32", "4 B"]], shortened="tensor")
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    assert re.fullmatch(r"ModelCheckpoint\{.*\.\.\..*\.best +float32 +4 B", lines[1])


def test_what_cannot_be_shown(ft: Ft, run_dir: Path, tmp_path: Path) -> None:
    assert ft("show", tmp_path / "x.ckpt").code == 3
    assert ft("show", run_dir).code == 2
    flip(step(run_dir, 4), data_offset(step(run_dir, 4), "data.pkl"))
    answer = ft("show", step(run_dir, 4))
    assert answer.code == 1
    assert "data.pkl" in answer.err
    cut(step(run_dir, 6))
    assert ft("show", step(run_dir, 6)).code == 1
    with zipfile.ZipFile(tmp_path / "other.ckpt", "w") as archive:
        archive.writestr("hello", "world")
    answer = ft("show", tmp_path / "other.ckpt")
    assert answer.code == 1
    assert "no checkpoint of torch" in answer.err


def test_memory_url(ft: Ft, run_dir: Path) -> None:
    import fsspec

    with runs.memory() as url:
        fsspec.filesystem("memory").pipe_file(f"{url}/x.ckpt", step(run_dir, 4).read_bytes())
        assert ft("show", f"{url}/x.ckpt", "--json").json["step"] == 4


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def tensor_of(shape: list[int], numel: int = 1) -> bytes:
    """The pickle of a tensor, of any shape."""
    extents = b"(" + b"".join(b"I%d\n" % extent for extent in shape) + b"t"
    strides = b"(" + b"I0\n" * len(shape) + b"t"
    storage = b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI%d\ntQ" % numel
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"I0\n" + extents + strides + b"I00\n}tR."


def test_nothing_is_executed(ft: Ft, tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    path = tmp_path / "evil.ckpt"
    torch.save({"state_dict": {"w": torch.ones(2)}, "evil": Evil(mark), "path": pathlib.PurePosixPath("a/b")}, path)
    answer = ft("show", path, "--json", "--values")
    assert answer.code == 0
    assert not mark.exists()
    assert "posix.system" in answer.json["placeholders"]
    assert {"name": "evil.class", "value": "<posix.system>"} in answer.json["values"]
    assert [t["name"] for t in answer.json["tensors"]] == ["state_dict.w"]
    assert "posix.system" in ft("show", path).out
    torch.load(path, weights_only=False)
    assert mark.exists()  # it would have been


def saved(value: Any, path: Path) -> Any:
    torch.save(value, path)
    return read_contents(Storage(), str(path))


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def test_every_dtype_and_view_is_described_and_read_as_torch_does(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tied = torch.randn(3)
    value = {
        **{str(dtype): torch.ones(2, 3).to(dtype) for dtype in DTYPES},
        "view": base[1:3, ::2],
        "transposed": base.t(),
        "expanded": torch.ones(1).expand(5),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5),
        "tied": [tied, tied],
    }
    contents = saved(value, tmp_path / "x.ckpt")
    found = {tuple(path): leaf for path, leaf in leaves(contents.root)}
    truth = {path: leaf for path, leaf in leaves(value) if isinstance(leaf, torch.Tensor)}
    assert set(found) == set(truth)
    with TensorReader(Storage(), contents) as reader:
        for path, tensor in truth.items():
            described = found[path]
            assert isinstance(described, TensorDescription)
            assert (described.shape, f"torch.{described.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
            assert described.size_bytes == tensor.nbytes
            assert described.requires_grad == tensor.requires_grad
            read = reader.read(described)
            assert read.dtype == tensor.dtype
            assert torch.equal(bits(read), bits(tensor))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def test_containers_and_objects(tmp_path: Path) -> None:
    class Local(OrderedDict[str, int]):
        pass

    value = {"a": [1, (2.5, None)], "b": {"c": {1, 2}}, "d": b"bytes", "e": torch.float32, "f": torch.Size([1, 2])}
    root = saved(value, tmp_path / "x.ckpt").root
    assert root["a"] == [1, (2.5, None)]
    assert root["b"] == {"c": {1, 2}}
    assert root["d"] == b"bytes"
    assert root["e"] == Name("torch.float32")
    assert root["f"] == (1, 2)
    data = pickle.dumps(random.Random(1))
    described, unknown = describe(data)
    assert isinstance(described, Placeholder)
    assert unknown == {"random.Random"}


def tampered(*, pickled: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    return buffer.getvalue()


HOLDS_ITSELF = b"(lp0\ng0\na."
WIDE = b"]q\0" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(60)) + b"."


@pytest.mark.parametrize(
    "data",
    [
        b"", b".", b"garbage", b"\x80\x04.", b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f.", b"r\xff\xff\xff\x7f.",
        b"]r\xff\xff\xff\x7f.x", b"(S'storage'\nNtQ.", b"\x82\x01.",
        pickle.dumps({10**5000: 10**5000}), pickle.dumps(10**700),
        b"ccollections\nOrderedDict\n)RS'a'\nI1\ns}S'items'\ncos\nsystem\nsb.",
        b"\x80\2}K\1" + b"\x85" * 3_000_000 + b"K\1s.",
        b"\x80\4}" + b"(" * 3000 + b"\x91" * 3000 + b"K\1sK\1" + b"(" * 3000 + b"\x91" * 3000 + b"s.",
        b"\x80\2}" + b"cbuiltins\nfrozenset\n(](" * 3000 + b"K\1" + b"etR" * 3000 + b"K\1s.",
        tensor_of([1 << 62] * 20), tensor_of([1 << 62] * 100_000), tensor_of([1], numel=10**400),
    ],
)  # fmt: skip
def test_hostile_pickles_are_errors_or_plain_values(ft: Ft, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.ckpt"
    path.write_bytes(tampered(pickled=data))
    for command in (("show", path), ("show", path, "--values"), ("verify", path), ("diff", path, path)):
        answer = ft(*command)
        assert answer.code in (0, 1)
        assert answer.err.count("\n") == (1 if answer.err else 0)
        assert ft(*command, "--json").json


@pytest.mark.parametrize(
    "data",
    [
        b"ctorch._utils\n_rebuild_tensor_v2\n(N(S'__defaults__'\nNdtb.",
        b"ctorch\nfloat32\n}S'qualified'\nS'x'\nsb.",
        b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI1\ntQ}S'numel'\nS'x'\nsb.",
    ],
    ids=["a function", "a name", "a storage"],
)
def test_what_was_checked_cannot_be_changed_afterwards(data: bytes) -> None:
    with pytest.raises(DescriptionError, match="a state for a"):
        describe(data)


def test_sizes_are_not_believed() -> None:
    tracemalloc.start()
    with pytest.raises(DescriptionError):
        describe(b"\x96" + (1 << 30).to_bytes(8, "little") + b".")
    with pytest.raises(DescriptionError):
        describe(b"]r\xff\xff\xff\x7f")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_record_that_is_too_small_for_its_tensor(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(100)}, tmp_path / "x.ckpt")
    with (
        zipfile.ZipFile(tmp_path / "x.ckpt") as whole,
        zipfile.ZipFile(tmp_path / "forged.ckpt", "w") as forged,
    ):
        for info in whole.infolist():
            data = whole.read(info)
            forged.writestr(info.filename, data[:8] if info.filename.endswith("data/0") else data)
    contents = read_contents(Storage(), str(tmp_path / "forged.ckpt"))
    with (
        pytest.raises(CorruptCheckpointError, match="too few for a tensor of shape"),
        TensorReader(Storage(), contents) as reader,
    ):
        reader.read(contents.tensors[0][1])


@pytest.mark.parametrize("data", [HOLDS_ITSELF, WIDE], ids=["holds itself", "2 to the power of 60 values"])
def test_endless_ones_end(tmp_path: Path, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_ft._inspection import descriptions

    monkeypatch.setattr(descriptions, "MAX_LEAVES", 1000)
    monkeypatch.setattr(descriptions._Walk, "__init__", lambda self: self.__dict__.update(inside=set(), left=1000))
    path = tmp_path / "x.ckpt"
    path.write_bytes(tampered(pickled=data))
    with pytest.raises(CorruptCheckpointError, match=r"holds itself|more than 1000 values"):
        read_contents(Storage(), str(path))


def test_damaged_pickles_raise_nothing_else(run_dir: Path) -> None:
    with zipfile.ZipFile(step(run_dir, 4)) as archive:
        whole = archive.read("archive/data.pkl")
    drawn = random.Random(2)
    outcomes = set()
    for _ in range(1000):
        data = bytearray(whole)
        for _ in range(drawn.choice([1, 1, 3])):
            data[drawn.randrange(len(data))] = drawn.randrange(256)
        try:
            list(leaves(describe(bytes(data))[0]))
            outcomes.add("described")
        except DescriptionError:
            outcomes.add("refused")
    assert outcomes == {"described", "refused"}


def test_text_of_a_file_does_not_reach_the_terminal(ft: Ft, tmp_path: Path) -> None:
    saved({"state_dict": {"\x1b[31mred": torch.ones(1)}, "x": "\x1b[2J"}, tmp_path / "x.ckpt")
    text = ft("show", tmp_path / "x.ckpt", "--values").out
    assert "\x1b" not in text
    assert "\\x1b[31mred" in text
