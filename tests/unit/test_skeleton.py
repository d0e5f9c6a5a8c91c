from __future__ import annotations

import threading
from collections import OrderedDict, UserDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ft._copying.skeleton import Skeleton, name_of
from lightning_ft._saving.weights_only import not_weights_only


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def filled(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The copy, with clones in the places of the tensors."""
    skeleton = Skeleton(checkpoint)
    return skeleton.filled([t.detach().clone() for t in skeleton.tensors])


def test_tensors_are_found_once_each_in_the_order_of_the_walk() -> None:
    a, b, c, d = (torch.full((1,), float(i)) for i in range(4))
    skeleton = Skeleton({"x": [a, {"y": b}], "again": a, "tuple": (c, 1), "object": Holder([d, b])})
    assert [int(t) for t in skeleton.tensors] == [0, 1, 2, 3]
    assert all(x is y for x, y in zip(skeleton.tensors, (a, b, c, d), strict=True))


def test_equal_structures_are_walked_equally() -> None:
    def checkpoint() -> dict[str, Any]:
        a, b = torch.ones(1), torch.ones(2)
        return {"o": Holder((a, [b])), "d": {"b": b, "a": a}, "t": (torch.ones(3), "x"), "l": [a, b]}

    shapes = [[t.shape for t in Skeleton(checkpoint()).tensors] for _ in range(3)]
    assert shapes[0] == shapes[1] == shapes[2]


def test_only_what_is_under_optimizer_states_is_optimizer_state() -> None:
    weight, moment = torch.ones(1), torch.ones(2)
    skeleton = Skeleton(
        {
            "state_dict": {"w": weight},
            "optimizer_states": [{"state": {0: {"m": moment, "w": weight, "t": (torch.ones(3),)}}}],
            "callbacks": {"optimizer_states": [torch.ones(4)]},
        }
    )
    assert [skeleton.tensors[i].numel() for i in skeleton.of_optimizers] == [2, 3]


def test_no_optimizer_state_is_none() -> None:
    assert list(Skeleton({"state_dict": {"w": torch.ones(1)}}).of_optimizers) == []


def test_the_attributes_of_an_ordered_dict_are_copied() -> None:
    """`nn.Module.state_dict` keeps the versions of modules there, and loading asks for them."""
    state = nn.BatchNorm1d(2).state_dict()
    state._metadata["own"] = {"t": torch.ones(1)}
    copy = filled({"state_dict": state})["state_dict"]
    assert type(copy) is OrderedDict
    assert list(copy) == list(state)
    assert copy._metadata[""] == {"version": 2}
    state._metadata[""]["version"] = 0
    state._metadata["own"]["t"].fill_(9)
    assert copy._metadata[""] == {"version": 2}
    assert int(copy._metadata["own"]["t"]) == 1
    nn.BatchNorm1d(2).load_state_dict(copy)


def test_shared_objects_stay_shared_and_a_cycle_closes() -> None:
    inner, items, holder = {"n": 1}, [1], Holder(None)
    root: dict[str, Any] = {"a": inner, "b": [inner, items], "c": items, "h": holder, "i": (holder, inner)}
    holder.value = inner
    inner["root"] = root
    items.append(items)
    copy = filled(root)
    assert copy["a"] is copy["b"][0] is copy["h"].value is copy["i"][1]
    assert copy["c"] is copy["b"][1] is copy["c"][1]
    assert copy["h"] is copy["i"][0]
    assert copy["a"]["root"] is copy
    assert copy["a"] is not inner


def test_a_dict_first_met_in_an_object_is_the_one_of_the_walk() -> None:
    inner = {"t": torch.ones(1)}
    copy = filled({"object": Holder(inner), "dict": inner})
    assert copy["object"].value is copy["dict"]


def test_a_tensor_of_an_object_and_of_a_dict_is_one() -> None:
    t = torch.ones(1)
    copy = filled({"object": Holder([t]), "dict": {"t": t}, "tuple": (t,)})
    assert copy["object"].value[0] is copy["dict"]["t"] is copy["tuple"][0]


def test_later_changes_do_not_show() -> None:
    items, mapping, ordered, bag = [1], {"a": [1]}, OrderedDict(a={1: [2]}), UserDict(a=[1])
    source = {"l": items, "d": mapping, "o": ordered, "u": bag, "t": (items, torch.ones(1))}
    copy = filled(source)
    items.append(2)
    mapping["a"].append(2)
    ordered["a"][1].append(3)
    bag["a"].append(2)
    source["new"] = 1
    assert (copy["l"], copy["d"], dict(copy["o"]), copy["u"]["a"]) == ([1], {"a": [1]}, {"a": {1: [2]}}, [1])
    assert copy["t"][0] == [1]
    assert "new" not in copy


def test_keys_of_every_kind_are_kept_in_order() -> None:
    device = torch.device("cpu")
    keys = {0: 1, "a": 2, None: 3, 1.5: 4, (1, "x"): 5, device: 6, True: 7, torch.float32: 8, b"k": 9}
    copy = filled({"k": keys})["k"]
    assert list(copy.items()) == list(keys.items())


def test_one_walk_of_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands of small tensors every further walk would cost as much as the copies."""
    visits: list[int] = []
    for name in ("_copied_dict", "_copied_list"):
        original = getattr(Skeleton, name)

        def visit(self: Any, source: Any, *args: Any, original: Any = original) -> Any:
            visits.append(id(source))
            return original(self, source, *args)

        monkeypatch.setattr(Skeleton, name, visit)
    state = {"state": {i: {"m": torch.ones(1), "v": [torch.ones(1)]} for i in range(100)}}
    skeleton = Skeleton({"optimizer_states": [state]})
    skeleton.filled(skeleton.tensors)
    assert len(visits) == len(set(visits)) == 203


class Uncopyable:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("not to be copied")


def test_what_cannot_be_copied_raises_when_it_is_filled() -> None:
    for value in (threading.Lock(), Uncopyable()):
        skeleton = Skeleton({"k": value})
        with pytest.raises(TypeError):
            skeleton.filled([])


# -- odd ---------------------------------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {
    "tensors": {"a": torch.ones(1), "b": [nn.Parameter(torch.ones(1))]},
    "numbers": [1, 2.5, True, None, 1j, -5, 2**1999],
    "plain tuple": (1, (2, "x")),
    "size": torch.Size([1]),
    "ordered": OrderedDict(a=1),
    "state dict": nn.Linear(1, 1).state_dict(),
    "keys": {1: 1, "a": 2, None: 3, 0.5: 4},
    "empty": [{}, [], ()],
}
MAYBE_REFUSED: dict[str, Any] = {
    "path": Path("x"),
    "bytes": b"",
    "bytes in a tuple": (b"",),
    "bytes in a deep tuple": (1, (b"",)),
    "bytes as key": {b"": 1},
    "large int": 2**2000,
    "large negative int": -(2**2000),
    "large int in a tuple": (2**2000,),
    "large int as key": {2**2000: 1},
    "large int in a deep key": {"a": [{2**2000: 1}]},
    "tuple key": {(1, Path("x")): 1},
    "object": Holder(1),
    "default dict": defaultdict(list),
    "attribute": OrderedDict(a=1),
    "list subclass": type("Own", (list,), {})([1]),
    "str subclass": type("Text", (str,), {})("x"),
    "tensor in a tuple": (torch.ones(1), Path("x")),
}
MAYBE_REFUSED["attribute"].extra = Path("x")


@pytest.mark.parametrize("name", PLAIN)
def test_what_weights_only_takes_is_not_odd(name: str) -> None:
    """Else it would be looked through by the slow check at every save."""
    assert not_weights_only({"k": PLAIN[name]}) == []
    assert not Skeleton({"k": PLAIN[name]}).odd


@pytest.mark.parametrize("name", MAYBE_REFUSED)
def test_what_weights_only_may_refuse_is_odd(name: str) -> None:
    assert Skeleton({"k": MAYBE_REFUSED[name]}).odd


def test_a_key_at_the_top_that_is_no_string_is_odd() -> None:
    assert Skeleton({1: 2}).odd  # type: ignore[dict-item]


# -- names -------------------------------------------------------------------------------------------------------


def test_the_name_of_a_tensor_is_its_key_path() -> None:
    a, b, c, d = (torch.ones(1) for _ in range(4))
    checkpoint = {"state_dict": OrderedDict({"layer.weight": a}), "optimizer_states": [{"state": {0: {"m": b}}}]}
    checkpoint["callbacks"] = {"C": (1, [c])}  # type: ignore[assignment]
    checkpoint["object"] = Holder(d)  # type: ignore[assignment]
    found: list[tuple[Tensor, str]] = [
        (a, "state_dict['layer.weight']"),
        (b, "optimizer_states[0]['state'][0]['m']"),
        (c, "callbacks['C'][1][0]"),
        (d, ""),
        (torch.ones(1), ""),
    ]
    for tensor, name in found:
        assert name_of(checkpoint, tensor) == name
