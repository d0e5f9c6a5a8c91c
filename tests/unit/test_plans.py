"""Which plan a snapshot is given, whatever comes in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_ft._copying.places import Plans
from lightning_ft._copying.skeleton import Skeleton
from lightning_ft._copying.staging import Stager


def checkpoint(value: float) -> dict[str, Any]:
    return {"value": value, "state": {"tensor": torch.full((2,), value), "values": [value]}}


@pytest.fixture
def stager() -> Iterator[Stager]:
    """One that has a plan."""
    stager = Stager(overlap=False)
    for value in (0.0, 1.0):
        stager.stage(checkpoint(value)).release()
    assert stager.plans.made == 1
    yield stager
    stager.close()


def values(copy: dict[str, Any]) -> tuple[float, list[float], list[float]]:
    return copy["value"], copy["state"]["tensor"].tolist(), copy["state"]["values"]


def test_a_save_within_another_has_a_copy_of_its_own(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning saves in the handler of the signal with which a scheduler takes the machine back."""
    init, inner = Skeleton.__init__, []

    def interrupted(self: Skeleton, *args: Any) -> None:
        init(self, *args)
        if not inner:
            inner.append(None)
            inner[0] = stager.stage(checkpoint(2.0))

    monkeypatch.setattr(Skeleton, "__init__", interrupted)
    outer = stager.stage(checkpoint(3.0))
    assert values(inner[0].wait()) == (2.0, [2.0, 2.0], [2.0])
    assert values(outer.wait()) == (3.0, [3.0, 3.0], [3.0])
    inner[0].release()
    outer.release()
    assert stager.plans.made == 2


@pytest.mark.parametrize(
    "where",
    ["_copying.skeleton.Template.refill", "_copying.alike.Alike.addresses", "_copying.skeleton.Template.__init__"],
)
def test_a_plan_is_free_again_after_an_interruption(
    where: str, stager: Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"lightning_ft.{where}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            stager.stage({**checkpoint(2.0), "more": []})
    assert len(stager.plans._free) == 1
    staged = stager.stage(checkpoint(3.0))
    assert values(staged.wait()) == (3.0, [3.0, 3.0], [3.0])
    staged.release()
    assert stager.plans.made == 1


def test_a_save_that_failed_half_way_leaves_nothing_in_the_next(stager: Stager) -> None:
    class Uncopyable:
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("not to be copied")

    for value in (2.0, 3.0):
        with pytest.raises(TypeError, match="not to be copied"):
            stager.stage({**checkpoint(value), "more": Uncopyable()})
        staged = stager.stage(checkpoint(-value))
        assert values(staged.wait()) == (-value, [-value, -value], [-value])
        staged.release()
    assert stager.plans.made == 1


def test_where_nobody_can_tell_tensors_apart_each_save_looks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    init, looks = Skeleton.__init__, []
    monkeypatch.setattr(Skeleton, "__init__", lambda self, *args: looks.append(1) or init(self, *args))
    monkeypatch.setattr(Skeleton, "templates", None)
    stager = Stager(overlap=False)
    for value in (1.0, 2.0, 3.0):
        staged = stager.stage({**checkpoint(value), "sparse": torch.eye(2).to_sparse()})
        assert values(staged.wait()) == (value, [value, value], [value])
        staged.release()
    assert len(looks) == 3


def test_of_two_plans_the_one_that_is_free_is_used(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    made, walks = Plans._made, []
    monkeypatch.setattr(Plans, "_made", lambda self, checkpoint: walks.append(1) or made(self, checkpoint))
    running = [stager.stage(checkpoint(2.0)), stager.stage(checkpoint(3.0))]
    for value in (4.0, 5.0, 6.0):
        oldest = running.pop(0)
        assert values(oldest.wait())[0] == value - 2
        oldest.release()
        running.append(stager.stage(checkpoint(value)))
    for staged in running:
        staged.release()
    assert stager.plans.made == 2
    assert len(walks) == 1
