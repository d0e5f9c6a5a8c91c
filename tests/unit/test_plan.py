from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ft._copying import buffers
from lightning_ft._copying.buffers import Buffers
from lightning_ft._copying.copy_plan import Late, Plan, Work
from lightning_ft._copying.layout import signature
from lightning_ft._copying.module_tree import ModuleTree
from lightning_ft._copying.skeleton import Skeleton
from lightning_ft._saving import serialise

KIB = 256  # elements of float32


class Model(nn.Module):
    """Parameters and buffers of 4 KiB, and some smaller or larger."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.ones(4 * KIB))
        self.small = nn.Parameter(torch.ones(4 * KIB - 1))
        self.large = nn.Parameter(torch.ones(1024 * KIB))
        self.frozen = nn.Parameter(torch.ones(4 * KIB), requires_grad=False)
        self.unlisted = nn.Parameter(torch.ones(4 * KIB))
        self.temperature = nn.Parameter(torch.ones(()))
        self.shared = nn.Parameter(torch.ones(8 * KIB))
        self.register_buffer("running", torch.ones(4 * KIB))
        self.register_buffer("window", self.shared.detach()[:10])


def checkpoint(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "state_dict": model.state_dict(),
        "callbacks": {"average": torch.ones(4 * KIB)},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [torch.ones(4 * KIB)],
    }


class Made(Plan):
    """A plan that knows the addresses of what it was made for."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        entries, self.addresses = signature(list(tensors))
        super().__init__(entries, Buffers(pinned=False))

    def parts(self, late: Late | None, of_optimizers: range) -> tuple[Work, Work]:
        return self.split(late, of_optimizers, self.addresses)


def made() -> tuple[Model, torch.optim.Optimizer, Skeleton, Made]:
    model = Model()
    listed = [p for name, p in model.named_parameters() if name != "unlisted"]
    optimizer = torch.optim.Adam(listed)
    sum((p.sum() for p in listed if p.requires_grad), torch.zeros(())).backward()
    optimizer.step()
    skeleton = Skeleton(checkpoint(model, optimizer))
    return model, optimizer, skeleton, Made(skeleton.tensors)


def addresses(plan: Made, work: Work) -> list[int]:
    return sorted(plan.addresses[plan.layout.extents[index].tensor] for index in work.extents)


def storages(tensors: Iterable[Tensor]) -> list[int]:
    return sorted(t.untyped_storage().data_ptr() for t in tensors)


def test_what_is_late() -> None:
    model, optimizer, skeleton, plan = made()
    now, late = plan.parts(Late.of(ModuleTree(model), [optimizer], 1), skeleton.of_optimizers)
    state = [t for p in optimizer.state.values() for t in p.values()]
    assert len(state) == 15  # three each of trained, small, large, shared, temperature
    assert addresses(plan, late) == storages([model.trained, model.large, *state])
    assert sorted([*now.extents, *late.extents]) == list(range(len(plan.layout.extents)))
    assert not set(now.extents) & set(late.extents)


def test_without_late_all_is_copied_at_once() -> None:
    _, _, skeleton, plan = made()
    now, late = plan.parts(None, skeleton.of_optimizers)
    assert late.extents == []
    assert len(now.extents) == len(plan.layout.extents)


def test_small_ones_are_copied_in_groups_and_large_ones_in_pieces() -> None:
    tensors = {
        "small": torch.ones(10),
        "just below": torch.ones(1024 * KIB // 4 - 1),
        "a MiB": torch.ones(1024 * KIB),
        "view": torch.ones(10)[1:],
        "empty": torch.empty(0),
    }
    plan = Made(tensors.values())
    now, _ = plan.parts(None, range(0))
    assert (now.grouped, now.raw, now.device) == ([0, 1, 3], [2], {})


def test_optimizer_state_alone_is_late_if_no_parameter_may_be() -> None:
    model, optimizer, skeleton, plan = made()
    for p in model.parameters():
        p.requires_grad_(False)
    _, late = plan.parts(Late.of(ModuleTree(model), [optimizer], 1), skeleton.of_optimizers)
    assert {plan.layout.extents[i].tensor in skeleton.of_optimizers for i in late.extents} == {True}


def test_a_buffer_that_is_also_optimizer_state_is_not_late() -> None:
    model = nn.Module()
    model.register_buffer("memory", torch.ones(4 * KIB))
    skeleton = Skeleton({"optimizer_states": [{"memory": model.memory}]})
    plan = Made(skeleton.tensors)
    assert plan.parts(Late.of(ModuleTree(model), [], 0), skeleton.of_optimizers)[1].extents == []


def test_a_parameter_subclass_is_not_late() -> None:
    class Own(nn.Parameter):
        pass

    model = nn.Module()
    model.p = Own(torch.ones(4 * KIB))
    late = Late.of(ModuleTree(model), [torch.optim.SGD(model.parameters())], 0)
    assert late.addresses == frozenset()


def test_the_split_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, skeleton, plan = made()
    sorted_, calls = Plan._sorted, []
    monkeypatch.setattr(Plan, "_sorted", lambda self, is_late: calls.append(1) or sorted_(self, is_late))
    first = plan.parts(Late.of(ModuleTree(model), [optimizer], 1), skeleton.of_optimizers)
    for steps in range(2, 5):  # the number of steps is no part of it
        again = plan.parts(Late.of(ModuleTree(model), [optimizer], steps), skeleton.of_optimizers)
        assert again is first
    assert len(calls) == 1
    # A parameter was unfrozen, another frozen.
    model.trained.requires_grad_(False)
    assert plan.parts(Late.of(ModuleTree(model), [optimizer], 5), skeleton.of_optimizers) is not first
    assert len(calls) == 2
    assert plan.parts(None, skeleton.of_optimizers)[1].extents == []
    assert len(calls) == 3


@pytest.mark.parametrize("module", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_renormalises_itself_is_not_late(module: Any) -> None:
    """With `max_norm` the forward pass changes the rows that it looks up."""
    for max_norm in (None, 1.0):
        model = nn.Sequential(module(1024, 4, max_norm=max_norm))
        late = Late.of(ModuleTree(model), [torch.optim.SGD(model.parameters())], 0)
        assert (storages(model.parameters())[0] in late.never) is (max_norm is not None)


def test_settings_of_an_optimizer_that_are_tensors_are_not_late() -> None:
    """Schedules and hooks write into them before the next step: when a batch starts, or with its own warm-up."""
    model, *_ = made()
    rate, betas = torch.tensor(0.1), (torch.tensor(0.9), torch.tensor(0.99))
    optimizer = torch.optim.Adam([{"params": [model.trained]}], lr=rate, betas=betas, capturable=True)
    for parts in (optimizer.state_dict(), optimizer.state_dict()):
        skeleton = Skeleton({"optimizer_states": [parts]})
        plan = Made(skeleton.tensors)
        assert len(skeleton.of_optimizers) == 3
        assert plan.parts(Late.of(ModuleTree(model), [optimizer], 1), skeleton.of_optimizers)[1].extents == []


def test_the_targets_have_the_form_of_the_sources() -> None:
    flat = torch.arange(24.0)
    sources = [flat, flat.view(4, 6).t(), flat[3:5], nn.Parameter(flat, requires_grad=False), nn.Parameter(flat)]
    plan = Made(sources)
    for source, target in zip(sources, plan.targets, strict=True):
        assert type(target) is type(source)
        assert (target.dtype, target.shape, target.stride()) == (source.dtype, source.shape, source.stride())
        assert target.storage_offset() == source.storage_offset()
        assert target.requires_grad == source.requires_grad
        assert target.untyped_storage().nbytes() == flat.nbytes
    assert len(set(storages(plan.targets))) == 1


@pytest.fixture
def no_collections() -> Iterator[None]:
    """What is freed is freed at once, and not by luck."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_the_old_memory_is_given_back_before_more_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Growing must not need both at once, and nothing is left of a plan that is given up: also when it was written."""
    allocate, alive = buffers._allocate, []
    blocks: list[Any] = []

    def count() -> None:
        alive.append(sum(block() is not None for block in blocks))

    def allocate_(size_bytes: int, pinned: bool) -> Any:
        count()
        block = allocate(size_bytes, pinned)
        blocks.append(weakref.ref(block))
        return block

    monkeypatch.setattr(buffers, "_allocate", allocate_)
    plan = Made([torch.ones(10)])
    for elements in (5000, 10_000):
        serialise.collect(plan.targets, plan.reductions)
        assert None not in plan.reductions.values()
        plan.arrange(signature([torch.ones(10), torch.ones(elements)])[0])
    serialise.collect(plan.targets, plan.reductions)
    del plan
    count()
    assert alive == [0, 0, 0, 0]
