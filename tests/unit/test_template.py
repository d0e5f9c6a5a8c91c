"""Copies of a structure that was copied before: equal to a copy made from nothing, whatever has changed."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ft._copying import places
from lightning_ft._copying import template as _template
from lightning_ft._copying.skeleton import Skeleton
from lightning_ft._copying.staging import Stager
from lightning_ft._copying.template import Template, UnfitError


def template(value: Any) -> Template:
    skeleton = Skeleton({"part": value})
    return Template(value, skeleton.filled([t.clone() for t in skeleton.tensors])["part"], 0)


def part() -> Any:
    ordered = OrderedDict(a=torch.ones(1), b=torch.ones(2))
    vars(ordered)["_metadata"] = OrderedDict({"": {"version": 1}})
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1], "on": True}]
    state = {0: {"m": torch.ones(3)}}
    bare: dict[str, Any] = OrderedDict()
    return {"state": state, "ordered": ordered, "bare": bare, "groups": groups, "none": None, "empty": []}


CHANGES: dict[str, Any] = {
    "a key more": lambda p: p.update(more=1),
    "a key less": lambda p: p.pop("none"),
    "another key": lambda p: (p.pop("none"), p.update(nothing=None)),
    "another order of keys": lambda p: p.update(state=p.pop("state")),
    "an equal key of another type": lambda p: p["state"].update({False: p["state"].pop(0)}),
    "a tensor for a value": lambda p: p["groups"][0].update(lr=torch.ones(1)),
    "a value for a tensor": lambda p: p["state"][0].update(m=1.0),
    "a container for a value": lambda p: p.update(none={}),
    "a value for a container": lambda p: p.update(groups=0),
    "a tuple that holds a list": lambda p: p["groups"][0].update(betas=([0.9], 0.99)),
    "a longer list": lambda p: p["groups"][0]["params"].append(2),
    "a tuple for a list": lambda p: p.update(groups=tuple(p["groups"])),
    "a dictionary for an ordered one": lambda p: p.update(ordered=dict(p["ordered"])),
    "an attribute more": lambda p: vars(p["ordered"])["_metadata"].update(a={"version": 2}),
    "attributes gone": lambda p: vars(p["ordered"]).clear(),
    "attributes where there were none": lambda p: vars(p["bare"]).update(a=1),
    "one container in two places": lambda p: p["groups"].append(p["groups"][0]),
    "bytes": lambda p: p.update(none=b"x"),
    "an integer of 2,001 bits": lambda p: p.update(none=1 << 2001),
    "a value of a class of its own": lambda p: p.update(none=random.Random(0)),
}


ROWS: dict[str, Any] = {
    "a row more": lambda rows: rows.update({20: {"m": torch.ones(1), "v": torch.ones(1)}}),
    "a row is another dictionary": lambda rows: rows.update({3: OrderedDict(rows[3])}),
    "a row is a tensor": lambda rows: rows.update({3: torch.ones(1)}),
    "a key more in a row": lambda rows: rows[3].update(x=torch.ones(1)),
    "another key in a row": lambda rows: (rows[3].pop("v"), rows[3].update(x=torch.ones(1))),
    "a key moves to the next row": lambda rows: rows.update(
        {3: {"m": rows[3]["m"]}, 4: {"v": rows[3]["v"], **rows[4]}}
    ),
    "a value for a tensor": lambda rows: rows[3].update(m=1.0),
    "a row twice": lambda rows: rows.update({3: rows[4]}),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_another_structure_are_not_taken_for_the_same(name: str) -> None:
    def rows() -> dict[int, dict[Any, Any]]:
        return {i: {"m": torch.ones(1), "v": torch.ones(1)} for i in range(12)}

    known, changed = template(rows()), rows()
    assert known.refill(rows()) is not None
    ROWS[name](changed)
    assert known.refill(changed) is None


def test_plain_values_in_rows_are_those_of_the_last_time() -> None:
    known = template({f"layer.{i}": {"version": 1} for i in range(12)})
    for version in (1, 2, 2):
        assert known.refill({f"layer.{i}": {"version": version} for i in range(12)}) is not None
        assert known.copy == {f"layer.{i}": {"version": version} for i in range(12)}


@pytest.mark.parametrize("name", CHANGES)
def test_another_structure_is_not_taken_for_the_same(name: str) -> None:
    known, changed = template(part()), part()
    assert known.refill(part()) is not None
    CHANGES[name](changed)
    assert known.refill(changed) is None


@pytest.mark.parametrize(
    "value",
    [
        {"a": {1}}, (torch.ones(1),), [torch.eye(2).to_sparse()], b"x", {b"k": 1}, {1 << 2001: 1}, 1,
    ],
    ids=["a set", "a tuple", "sparse", "bytes", "a key of bytes", "a key of 2,001 bits", "a value"],
)  # fmt: skip
def test_what_cannot_be_kept(value: Any) -> None:
    with pytest.raises(UnfitError):
        template(value)


@pytest.mark.parametrize("change", [lambda p: p["a"].append(1), lambda p: p.update(more=1)], ids=["list", "dictionary"])
def test_what_another_thread_has_changed_since_it_was_copied_is_not_kept(change: Any) -> None:
    value: dict[str, Any] = {"a": [0]}
    copy = Skeleton({"part": value}).filled([])["part"]
    change(value)
    with pytest.raises(UnfitError):
        Template(value, copy, 0)


def test_what_is_met_twice_in_a_checkpoint_is_kept_once_at_most() -> None:
    shared, tensor = {"k": 1}, torch.ones(1)
    twice: dict[str, Any] = {
        "a": [shared], "b": {"s": shared}, "c": [tensor], "d": [tensor], "e": [[tensor], [tensor]], "f": [[], {}]
    }  # fmt: skip
    twice["g"] = [twice["f"][0], twice["f"][0]]
    twice["h"] = twice
    skeleton = Skeleton(twice)
    skeleton.filled(skeleton.tensors)
    assert list(skeleton.templates()) == ["a", "c", "f"]


def test_a_structure_with_room_on_the_stack_for_a_walk_alone_is_not_kept() -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    skeleton = Skeleton({"deep": deep})
    assert skeleton.filled([])["deep"] == deep
    skeleton.templates()


def test_plain_values_are_those_of_the_last_time() -> None:
    known, changed = template(part()), part()
    changed["groups"][0].update(lr=0.2, betas=(0.5, 0.5), on=1)
    changed["groups"][0]["params"][1] = 7
    changed["none"] = "some"
    vars(changed["ordered"])["_metadata"][""]["version"] = 2
    refilled = known.refill(changed)
    assert refilled is not None
    assert [t.numel() for t in refilled[0]] == [3, 1, 2]
    group = known.copy["groups"][0]
    assert (group["lr"], group["betas"], group["params"], type(group["on"])) == (0.2, (0.5, 0.5), [0, 7], int)
    assert known.copy["none"] == "some"
    assert known.copy["ordered"]._metadata[""] == {"version": 2}
    assert group is not changed["groups"][0]


def test_what_two_parts_share_stays_shared_wherever_it_is_met_first() -> None:
    shared = {"t": torch.ones(1)}
    known = {"b": template({"s": shared})}
    for checkpoint in ({"a": [shared], "b": {"s": shared}}, {"b": {"s": shared}, "c": [shared]}):
        skeleton = Skeleton(checkpoint, known)
        copy = skeleton.filled([t.clone() for t in skeleton.tensors])
        assert copy.get("a", copy.get("c"))[0] is copy["b"]["s"]
        assert len(skeleton.tensors) == 1


def test_the_tensors_are_found_in_the_order_of_a_walk() -> None:
    ordered = OrderedDict(a=torch.zeros(1))
    vars(ordered)["attribute"] = torch.ones(1)
    found = template(ordered).refill(ordered)
    assert found is not None
    assert found[0] == Skeleton({"part": ordered}).tensors


# -- from save to save ------------------------------------------------------------------------------------------------


def equal(copy: Any, value: Any) -> bool:
    if type(copy) is not type(value):
        return False
    if isinstance(value, Tensor):
        return (copy.dtype, copy.shape, copy.stride(), copy.requires_grad) == (
            value.dtype, value.shape, value.stride(), value.requires_grad
        ) and torch.equal(copy, value)  # fmt: skip
    if isinstance(value, dict):
        same = list(copy) == list(value) and all(equal(copy[k], value[k]) for k in value)
        return same and (type(value) is dict or equal(vars(copy), vars(value)))
    if isinstance(value, (list, tuple)):
        return len(copy) == len(value) and all(map(equal, copy, value))
    return bool(copy == value)


def test_a_training_is_walked_once_and_every_copy_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[int] = []
    made = places.Plans._made
    monkeypatch.setattr(places.Plans, "_made", lambda self, checkpoint: walks.append(1) or made(self, checkpoint))
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    stager = Stager(overlap=True)
    for step in range(6):
        model(torch.randn(8, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
        checkpoint = {
            "global_step": step,
            "state_dict": model.state_dict(),
            "optimizer_states": [optimizer.state_dict()],
            "lr_schedulers": [scheduler.state_dict()],
            "random": torch.get_rng_state(),
            "callbacks": {"seen": list(range(step)), "odd": {step}},
        }
        staged = stager.stage(checkpoint)
        assert equal(staged.wait(), checkpoint)
        staged.release()
    stager.close()
    assert len(walks) == 1


NUMBERS: dict[str, list[dict[str, list[int]]]] = {
    "what one part loses another gains": [{"a": [1, 2], "b": [3], "c": [4]}, {"a": [1], "b": [3], "c": [4, 5]}],
    "the parts have another order": [{"a": [1], "b": [2]}, {"b": [2], "a": [1]}],
    "a part is gone and comes again": [{"a": [1], "b": [2]}, {"b": [2], "c": [3]}, {"a": [1], "b": [2]}],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_tensors_of_equal_form_do_not_change_places(name: str) -> None:
    stager = Stager(overlap=False)
    for parts in NUMBERS[name]:
        checkpoint = {key: [torch.full((2,), float(n)) for n in numbers] for key, numbers in parts.items()}
        staged = stager.stage(checkpoint)
        assert equal(staged.wait(), checkpoint)
        staged.release()
    stager.close()


@pytest.mark.parametrize("order", [[True, False], [False, True, False]])
def test_what_two_parts_shared_once_they_share_no_more(order: list[bool]) -> None:
    stager = Stager(overlap=False)
    for number, shares in enumerate(order):
        first, second = {"k": number}, {"k": -number}
        checkpoint = {"t": torch.ones(1), "a": [first], "b": [first if shares else second]}
        staged = stager.stage(checkpoint)
        copy = staged.wait()
        assert equal(copy, checkpoint)
        assert (copy["a"][0] is copy["b"][0]) is shares
        staged.release()
    stager.close()


@pytest.mark.parametrize("seed", range(60))
def test_whatever_changes_between_two_saves_the_copy_is_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random structures, each changed a little and saved again, with one or two copies in memory."""
    if seed % 2:
        monkeypatch.setattr(_template, "_FEW", 0)
    made = MadeUp(seed)
    draw, stager = made.draw, Stager(overlap=False)
    checkpoint: dict[str, Any] = {key: made.value(3) for key in ("state_dict", "optimizer_states", "callbacks", "x")}
    running: list[Any] = []
    for _ in range(25):
        for _ in range(draw.choice([0, 0, 1, 3])):
            made.change(checkpoint, 0.3)
        staged = stager.stage(checkpoint)
        assert described(staged.wait()) == described(checkpoint)
        assert staged.odd == Skeleton(checkpoint).odd
        running.append(staged)
        if draw.random() < 0.8 or len(running) > 1:
            running.pop(0).release()
    stager.close()


def described(value: Any) -> list[Any]:
    """Types, values, forms, bytes, and what is the same object or storage as what came before."""
    found: list[Any] = []
    before: dict[Any, int] = {}

    def is_new(*identity: Any) -> bool:
        known = len(before)
        found.append(before.setdefault(identity, known))
        return len(before) > known

    def look(value: Any) -> None:
        found.append(type(value))
        if isinstance(value, Tensor):
            if is_new(id(value)):
                storage = value.untyped_storage()
                found.extend((value.dtype, value.shape, value.stride(), value.storage_offset(), value.requires_grad))
                if storage.nbytes() and is_new("storage", storage.data_ptr()):
                    found.append(bytes(storage.tolist()))
        elif isinstance(value, (dict, list)):
            if is_new(id(value)):
                found.append(len(value))
                attributes = vars(value).items() if type(value) is OrderedDict else ()
                for item in (*(value.items() if isinstance(value, dict) else value), *attributes):
                    look(item)
        elif isinstance(value, tuple):
            for item in value:
                look(item)
        else:
            found.append(repr(value))

    look(value)
    return found


class MadeUp:
    """Structures of whatever kind, in which the same objects are met again, and tensors look alike."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self._again = self.draw.choice([0, 0.05, 0.2])
        self._alike = self.draw.random() < 0.6
        self._odd = self.draw.choice([0, 0, 0.05])
        self._made: list[Any] = []

    def value(self, depth: int) -> Any:
        draw = self.draw
        if self._made and draw.random() < self._again:
            return draw.choice(self._made)
        if depth <= 0 or draw.random() < 0.2:
            return self._tensor() if draw.random() < 0.5 else self._leaf()
        if draw.random() < 0.3:
            value: Any = [self.value(depth - 1) for _ in range(draw.randrange(4))]
        elif draw.random() < 0.2:
            make = draw.choice([self._tensor, self._leaf])
            value = {number: {name: make() for name in "ab"} for number in range(draw.randrange(12))}
        else:
            items = [(draw.choice(["a", "b", "c", 0, 1, True, None]), self.value(depth - 1)) for _ in range(4)]
            value = draw.choice([dict, OrderedDict])(items[: draw.randrange(5)])
            if type(value) is OrderedDict and draw.random() < 0.3:
                vars(value)["attribute"] = self.value(depth - 2)
        if draw.random() < self._odd:
            value = draw.choice([(value,), {1.5: value}, defaultdict(list, a=value), {1 << 2001: value}, b"x"])
        if isinstance(value, (dict, list)):
            self._made = [*self._made[-10:], value]
        return value

    def change(self, value: Any, often: float = 0.8) -> None:
        """One thing somewhere in `value` is another one."""
        draw = self.draw
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key, other = draw.choice(keys), draw.choice(keys)
        inner = value[key]
        if isinstance(inner, (dict, list)) and inner and draw.random() < max(often, 0.6):
            self.change(inner)
        elif isinstance(inner, Tensor) and draw.random() < 0.5:
            inner.data = torch.full_like(inner.data, draw.random())
        elif draw.random() < 0.2:
            value[key], value[other] = value[other], value[key]
        elif isinstance(value, dict) and draw.random() < 0.3:
            value[key] = value.pop(key)
        elif isinstance(value, dict) and draw.random() < 0.2:
            value[draw.choice(["new", "x", 2])] = value.pop(key)
        else:
            value[key] = self.value(1)

    def _leaf(self) -> Any:
        return self.draw.choice([1, True, 0, 0.0, -0.0, False, None, "x", (1, "x"), (True, "x"), self.draw.random()])

    def _tensor(self) -> Tensor:
        draw = self.draw
        if self._alike:
            return torch.full((2,), draw.random())
        made = torch.full((draw.randrange(4), 2), draw.random(), dtype=draw.choice([torch.float32, torch.float64]))
        return draw.choice([lambda t: t, lambda t: t.t(), lambda t: t[:1], nn.Parameter])(made)
