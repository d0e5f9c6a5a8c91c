from __future__ import annotations

import enum
import io
import threading
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_ft._copying.staging import Stager
from lightning_ft._saving.weights_only import not_weights_only

Pair = namedtuple("Pair", "a b")


def snapshot(checkpoint: Any) -> Any:
    return Stager(overlap=False).stage(checkpoint).wait()


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


class Colour(enum.Enum):
    RED = 1


def through_a_file(state: Any, weights_only: bool = False) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def size_bytes(state: Any) -> int:
    file = io.BytesIO()
    torch.save(state, file)
    return file.tell()


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int64,
]
TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    **{str(dtype): lambda dtype=dtype: torch.tensor([0, 1, 1, 0]).to(dtype) for dtype in DTYPES},
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0),
    "empty-shaped": lambda: torch.empty(0, 3),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).T,
    "strided": lambda: torch.arange(10)[1::3],
    "expanded": lambda: torch.tensor([1.0]).expand(5),
    "channels-last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j]).conj().imag,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "parameter": lambda: nn.Parameter(torch.rand(3)),
    "frozen-parameter": lambda: nn.Parameter(torch.rand(3), requires_grad=False),
    "requires-grad": lambda: torch.rand(3, requires_grad=True),
    "result": lambda: torch.rand(3, requires_grad=True) * 2,
    "nan-and-inf": lambda: torch.tensor([float("nan"), float("inf"), -0.0]),
}
HIDDEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "dict": lambda t: {"t": t},
    "nested": lambda t: {"a": [{"b": (t, 1)}]},
    "object": Holder,
    "object-in-list": lambda t: [Holder([t])],
    "namedtuple": lambda t: Pair(t, 1),
    "user-dict": lambda t: UserDict(t=t),
    "default-dict": lambda t: defaultdict(list, t=[t]),
}


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (t.detach().resolve_conj().resolve_neg().reshape(-1) for t in (a, b))
    a, b = (t.clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


@pytest.mark.parametrize("name", TENSORS)
def test_a_copied_tensor_is_like_the_original(name: str) -> None:
    original = TENSORS[name]()
    copy = snapshot({"t": original})["t"]
    assert type(copy) is type(original)
    assert (copy.dtype, copy.shape, copy.layout) == (original.dtype, original.shape, original.layout)
    assert copy.requires_grad == original.requires_grad
    assert copy.is_leaf
    if original.layout == torch.strided and not original.is_conj() and not original.is_neg():
        assert copy.stride() == original.stride()
    loaded = through_a_file({"t": copy}, weights_only=True)["t"]
    for other in (copy, loaded):
        assert _same_bits(other.to_dense(), original.to_dense()) if name == "sparse" else _same_bits(other, original)


@pytest.mark.parametrize("hide", HIDDEN)
def test_a_later_change_of_a_tensor_does_not_show_wherever_it_is(hide: str) -> None:
    original = torch.arange(4.0)
    state = {"state": HIDDEN[hide](original)}
    file = io.BytesIO()
    copy = snapshot(state)
    original.fill_(9)
    torch.save(copy, file)
    assert str(_find(copy)) == "tensor([0., 1., 2., 3.])"


def _find(value: Any) -> Any:
    """The one tensor in a value."""
    if isinstance(value, torch.Tensor):
        return value
    inner = value.values() if isinstance(value, (dict, UserDict)) else value
    inner = vars(value).values() if isinstance(value, Holder) else inner
    if isinstance(inner, (str, int)):
        return None
    return next((found for item in inner if (found := _find(item)) is not None), None)


@pytest.mark.parametrize("hide", HIDDEN)
def test_a_tensor_of_the_autograd_graph_can_be_anywhere(hide: str) -> None:
    result = torch.rand(3, requires_grad=True) * 2
    copy = _find(snapshot({"state": HIDDEN[hide](result)}))
    assert torch.equal(copy, result)
    assert copy.grad_fn is None


def test_later_changes_of_lists_dicts_arrays_and_objects_do_not_show() -> None:
    array, items, mapping, holder = np.arange(3), [1], {"a": 1}, Holder([1])
    copy = snapshot({"array": array, "list": items, "dict": mapping, "object": holder})
    array[:] = 9
    items.append(9)
    mapping["a"] = 9
    holder.value.append(9)
    assert copy["array"].tolist() == [0, 1, 2]
    assert (copy["list"], copy["dict"], copy["object"].value) == ([1], {"a": 1}, [1])


@pytest.mark.parametrize("hide", HIDDEN)
def test_tensors_of_one_storage_share_one_in_the_copy(hide: str) -> None:
    weight = torch.rand(1000)
    matrix = weight.reshape(10, 100).T
    copy = snapshot({"embedding": weight, "head": HIDDEN[hide](weight), "view": weight[10:20], "matrix": matrix})
    tensors = [copy["embedding"], _find(copy["head"]), copy["view"], copy["matrix"]]
    assert {storage_of(t) for t in tensors} == {storage_of(tensors[0])}
    assert storage_of(tensors[0]) != storage_of(weight)
    assert torch.equal(copy["view"], weight[10:20])
    assert torch.equal(copy["matrix"], matrix)
    assert size_bytes(copy) < 1.5 * size_bytes({"embedding": weight})


def test_the_same_object_twice_is_one_object_in_the_copy() -> None:
    tensor, holder = torch.rand(2), Holder(1)
    copy = snapshot({"a": tensor, "b": tensor, "c": holder, "d": [holder]})
    assert copy["a"] is copy["b"]
    assert copy["c"] is copy["d"][0]


def test_empty_tensors_stay_apart() -> None:
    copy = snapshot({"a": torch.empty(0), "b": torch.empty(0, dtype=torch.int64)})
    assert copy["a"].untyped_storage()._cdata != copy["b"].untyped_storage()._cdata


def test_a_model_and_its_optimizer_continue_from_the_copy() -> None:
    model = nn.Linear(3, 3)
    model.register_parameter("tied", model.weight)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    step()
    copy = snapshot({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    reference = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    step()
    loaded = through_a_file(copy, weights_only=True)
    assert all(torch.equal(loaded["model"][k], reference["model"][k]) for k in reference["model"])
    assert storage_of(loaded["model"]["weight"]) == storage_of(loaded["model"]["tied"])
    for i, state in reference["optimizer"]["state"].items():
        assert all(torch.equal(loaded["optimizer"]["state"][i][k], v) for k, v in state.items())


def test_the_copy_is_on_the_cpu_whatever_the_default_device() -> None:
    original = torch.rand(3)
    with torch.device("meta"):
        copy = snapshot({"t": original})
    assert copy["t"].device.type == "cpu"
    assert torch.equal(copy["t"], original)


def test_a_tensor_without_data_is_kept_as_one() -> None:
    copy = snapshot({"t": torch.empty(3, device="meta"), "u": torch.ones(1)})
    assert (copy["t"].is_meta, copy["t"].shape) == (True, (3,))


def test_a_quantised_tensor_is_copied() -> None:
    original = torch.quantize_per_tensor(torch.tensor([0.0, 1.0, 2.0]), 0.1, 3, torch.quint8)
    copy = snapshot({"t": original})["t"]
    assert torch.equal(copy.int_repr(), original.int_repr())
    assert (copy.q_scale(), copy.q_zero_point()) == (original.q_scale(), original.q_zero_point())
    assert storage_of(copy) != storage_of(original)


def test_a_container_within_itself_is_copied() -> None:
    state: dict[str, Any] = {"t": torch.ones(1)}
    state["self"] = state
    copy = snapshot(state)
    assert copy["self"] is copy
    assert copy["t"] is not state["t"]


def test_what_cannot_be_copied_raises_at_once() -> None:
    with pytest.raises(TypeError, match="lock"):
        snapshot({"lock": threading.Lock()})


# -- weights_only ------------------------------------------------------------------------------------------------

SAFE: dict[str, Any] = {
    "tensor": torch.ones(1),
    "parameter": nn.Parameter(torch.ones(1)),
    "sparse": torch.eye(2).to_sparse(),
    "str": "text",
    "bytes": b"text",
    "bytearray": bytearray(b"x"),
    "int": 1,
    "large-int": 2**1000,
    "float": float("nan"),
    "complex": 1j,
    "none": None,
    "bool": True,
    "size": torch.Size([1, 2]),
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "list": [1, [2]],
    "tuple": (1, (2, 3, 4, 5)),
    "tuple-key": {(1, "a"): 1},
    "ordered-dict": OrderedDict(a=1),
    "set": {1, 2},
    "counter": Counter("a"),
    "state-dict": nn.BatchNorm1d(2).state_dict(),
}
UNSAFE: dict[str, tuple[Any, str]] = {
    "path": (Path("/tmp"), "pathlib.PosixPath"),
    "pure-path": (PurePosixPath("/tmp"), "pathlib.PurePosixPath"),
    "numpy-scalar": (np.float64(1), "numpy.float64"),
    "numpy-array": (np.ones(1), "numpy.ndarray"),
    "object": (Holder(1), f"{__name__}.Holder"),
    "default-dict": (defaultdict(list), "collections.defaultdict"),
    "namedtuple": (Pair(1, 2), f"{__name__}.Pair"),
    "enum": (Colour.RED, f"{__name__}.Colour"),
    "frozenset": (frozenset({1}), "builtins.frozenset"),
    "function": (through_a_file, "builtins.function"),
    "lambda": (lambda: 0, "builtins.function"),
    "lock": (threading.Lock(), "_thread.lock"),
    "empty-bytes": (b"", "builtins.bytes"),
}


@pytest.mark.parametrize("name", SAFE)
def test_what_weights_only_loads_is_no_problem(name: str) -> None:
    assert not_weights_only({"k": SAFE[name]}) == []
    through_a_file({"k": SAFE[name]}, weights_only=True)


@pytest.mark.parametrize("name", UNSAFE)
def test_what_weights_only_refuses_is_named_with_its_type(name: str) -> None:
    value, kind = UNSAFE[name]
    with pytest.raises(Exception, match=r".*"):
        through_a_file({"k": value}, weights_only=True)
    (problem,) = not_weights_only({"k": value})
    assert problem == f"checkpoint['k'] is a {kind}"


def test_an_int_too_long_for_weights_only_is_named() -> None:
    with pytest.raises(Exception, match="Unsupported operand"):
        through_a_file({"k": 2**3000}, weights_only=True)
    assert not_weights_only({"k": 2**3000}) == ["checkpoint['k'] is an int of 3001 bits"]


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": {"b": Colour.RED}}, "checkpoint['a']['b'] is a "),
        ({"a": [0, Colour.RED]}, "checkpoint['a'][1] is a "),
        ({"a": (0, [Colour.RED])}, "checkpoint['a'][1][0] is a "),
        ({"a": OrderedDict(x=Colour.RED)}, "checkpoint['a']['x'] is a "),
        ({Colour.RED: 1}, "checkpoint (key <Colour.RED: 1>) is a "),
        ({"a": {(1, Colour.RED): 1}}, "checkpoint['a'] (key (1, <Colour.RED: 1>))[1] is a "),
        ({"hyper_parameters": {"dir": Path("x")}}, "checkpoint['hyper_parameters']['dir'] is a pathlib.PosixPath"),
        ({"a": {1, Colour.RED}}, "checkpoint['a'] is a builtins.set"),
    ],
    ids=["dict", "list", "tuple", "ordered-dict", "key", "tuple-key", "hyper-parameter", "set"],
)
def test_the_key_path_says_where_it_is(value: Any, path: str) -> None:
    (problem,) = not_weights_only(value)
    assert problem.startswith(path)


def test_every_problem_is_named() -> None:
    state = {"a": Path("x"), "b": [np.float64(1), 1], "c": {"d": Colour.RED}}
    assert [p.partition(" is ")[0] for p in not_weights_only(state)] == [
        "checkpoint['a']",
        "checkpoint['b'][0]",
        "checkpoint['c']['d']",
    ]


def test_what_the_user_allowed_is_no_problem() -> None:
    state = {"a": Colour.RED, "b": Holder(1)}
    assert len(not_weights_only(state)) == 2
    with torch.serialization.safe_globals([Colour, Holder]):
        assert not_weights_only(state) == []
    assert len(not_weights_only(state)) == 2
