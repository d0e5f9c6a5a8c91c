"""Copies of a structure that was copied before: equal to a copy made from nothing, whatever has changed."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ft import _plans, _template
from lightning_ft._skeleton import Skeleton
from lightning_ft._staging import Stager
from lightning_ft._template import Template, UnfitError


def template(value: Any) -> Template:
    skeleton = Skeleton({"part": value})
    return Template(value, skeleton.filled([t.clone() for t in skeleton.tensors])["part"])


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
        {"a": {1}}, (torch.ones(1),), [torch.eye(2).to_sparse()], b"x", {b"k": 1}, 1,
        (lambda d: [d, d])({}), (lambda t: [t, t])(torch.ones(1)),
    ],
    ids=["a set", "a tuple", "sparse", "bytes", "a key of bytes", "a value", "a container twice", "a tensor twice"],
)  # fmt: skip
def test_what_cannot_be_kept(value: Any) -> None:
    with pytest.raises(UnfitError):
        template(value)


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
    made = _plans.Plans._made
    monkeypatch.setattr(_plans.Plans, "_made", lambda self, checkpoint: walks.append(1) or made(self, checkpoint))
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


@pytest.mark.parametrize("seed", range(40))
def test_whatever_changes_between_two_saves_the_copy_is_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random structures, each changed a little and saved again, with one or two copies in memory."""
    if seed % 2:
        monkeypatch.setattr(_template, "_FEW", 0)
    draw = random.Random(seed)
    stager = Stager(overlap=False)
    checkpoint: dict[str, Any] = {key: _made_up(draw, 3) for key in ("state_dict", "optimizer_states", "callbacks")}
    running: list[Any] = []
    for _ in range(25):
        for _ in range(draw.choice([0, 0, 1, 3])):
            _change(draw, checkpoint)
        staged = stager.stage(checkpoint)
        assert equal(staged.wait(), checkpoint)
        running.append(staged)
        if draw.random() < 0.8 or len(running) > 1:
            running.pop(0).release()
    stager.close()


def _made_up(draw: random.Random, depth: int) -> Any:
    if depth == 0 or draw.random() < 0.2:
        makers = [_tensor, lambda d: d.random(), lambda d: d.randrange(9), lambda d: (1, "x"), lambda d: None]
        return draw.choice(makers)(draw)
    if draw.random() < 0.3:
        return [_made_up(draw, depth - 1) for _ in range(draw.randrange(4))]
    kind = draw.choice([dict, OrderedDict])
    return kind((draw.choice(["a", "b", "c", 0, 1]), _made_up(draw, depth - 1)) for _ in range(draw.randrange(5)))


def _tensor(draw: random.Random) -> Tensor:
    made = torch.full((draw.randrange(1, 4), 2), draw.random(), dtype=draw.choice([torch.float32, torch.float64]))
    return draw.choice([lambda t: t, lambda t: t.t(), lambda t: t[:1], nn.Parameter])(made)


def _change(draw: random.Random, value: Any) -> None:
    """One thing somewhere in `value` is another one."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    if not keys:
        return
    key = draw.choice(list(keys))
    inner = value[key]
    if isinstance(inner, (dict, list)) and inner and draw.random() < 0.8:
        _change(draw, inner)
    elif isinstance(inner, Tensor) and draw.random() < 0.5:
        inner.data.fill_(draw.random())
    elif isinstance(value, dict) and len(value) > 1 and draw.random() < 0.2:
        value[key] = value.pop(key)
    else:
        value[key] = _made_up(draw, 1)
