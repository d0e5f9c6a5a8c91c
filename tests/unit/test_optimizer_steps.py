from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ft._copying.optimizer_steps import before_steps


class Watch:
    """What the parameter was at each call."""

    def __init__(self, p: nn.Parameter) -> None:
        self.p = p
        self.seen: list[float] = []

    def __call__(self) -> None:
        self.seen.append(float(self.p.detach()))


@pytest.fixture
def watch() -> Iterator[Watch]:
    watch = Watch(nn.Parameter(torch.tensor(1.0)))
    remove = before_steps(watch)
    yield watch
    remove()


def closure_of(p: nn.Parameter, events: list[str] | None = None) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        if events is not None:
            events.append("closure")
        p.grad = None
        loss = (p - 3) ** 2
        loss.backward()
        return loss

    return closure


def test_a_plain_step(watch: Watch) -> None:
    optimizer = torch.optim.SGD([watch.p], lr=0.1)
    closure_of(watch.p)()
    for _ in range(2):
        optimizer.step()
    assert watch.seen == pytest.approx([1.0, 1.4])
    assert float(watch.p) == pytest.approx(1.8)


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_with_a_closure_after_it_and_before_the_change(how: str) -> None:
    p = nn.Parameter(torch.tensor(1.0))
    events: list[str] = []
    remove = before_steps(lambda: events.append(f"call at {float(p)}"))
    optimizer, closure = torch.optim.SGD([p], lr=0.1), closure_of(p, events)
    loss = optimizer.step(closure) if how == "positional" else optimizer.step(closure=closure)
    remove()
    assert events == ["closure", "call at 1.0"]
    assert loss is not None
    assert float(loss) == 4.0
    assert float(p) == pytest.approx(1.4)


@pytest.mark.parametrize("closure", [None, "keyword"])
def test_no_closure_in_whatever_form(closure: str | None, watch: Watch) -> None:
    optimizer = torch.optim.SGD([watch.p], lr=0.1)
    closure_of(watch.p)()
    assert optimizer.step(None) is None if closure is None else optimizer.step(closure=None) is None
    assert watch.seen == [1.0]
    assert float(watch.p) == pytest.approx(1.4)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_evaluates_several_times(line_search: str | None) -> None:
    """A call after each evaluation; the first comes before anything has changed."""
    p = nn.Parameter(torch.tensor(1.0))
    events: list[str] = []
    remove = before_steps(lambda: events.append(str(float(p))))
    optimizer = torch.optim.LBFGS([p], max_iter=4, line_search_fn=line_search)
    optimizer.step(closure_of(p, events))
    remove()
    assert events[:2] == ["closure", "1.0"]
    assert events[::2] == ["closure"] * (len(events) // 2)
    assert len(events) >= 4


class Own(torch.optim.Optimizer):
    """Gets more than a closure, and returns something of its own."""

    def __init__(self, p: nn.Parameter) -> None:
        super().__init__([p], {})
        self.got: Any = None

    def step(self, closure: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.got = closure() if closure is not None else None, args, kwargs
        return "its own"


def test_other_arguments_and_results_pass_through(watch: Watch) -> None:
    optimizer = Own(watch.p)
    scale = torch.ones(1)
    # As `GradScaler` calls an optimizer that scales by itself.
    assert optimizer.step(grad_scaler=scale) == "its own"
    assert optimizer.got == (None, (), {"grad_scaler": scale})
    assert optimizer.step(lambda: 5, 1, grad_scaler=scale) == "its own"
    assert optimizer.got == (5, (1,), {"grad_scaler": scale})
    assert optimizer.step(grad_scaler=scale, closure=lambda: 6) == "its own"
    assert optimizer.got == (6, (), {"grad_scaler": scale})
    assert len(watch.seen) == 3


@pytest.mark.parametrize("found_inf", [False, True])
def test_a_grad_scaler(found_inf: bool, watch: Watch) -> None:
    """A step that it leaves out calls no optimizer, and changes nothing."""
    optimizer, scaler = torch.optim.SGD([watch.p], lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(watch.p * (float("inf") if found_inf else 2.0)).backward()
    scaler.step(optimizer)
    assert watch.seen == ([] if found_inf else [1.0])
    assert float(watch.p) == pytest.approx(1.0 if found_inf else 0.8)


def test_any_optimizer_of_the_process_and_own_hooks_beside_it(watch: Watch) -> None:
    first, second = (torch.optim.SGD([watch.p], lr=0.1) for _ in range(2))
    order: list[str] = []
    second.register_step_pre_hook(lambda *_: order.append(f"own after {len(watch.seen)} calls"))
    closure_of(watch.p)()
    first.step()
    second.step()
    assert watch.seen == pytest.approx([1.0, 1.4])
    assert order == ["own after 2 calls"]


def test_what_is_removed_is_called_no_more() -> None:
    p = nn.Parameter(torch.tensor(1.0))
    watch = Watch(p)
    remove = before_steps(watch)
    optimizer = torch.optim.SGD([p], lr=0.1)
    optimizer.step(closure_of(p))
    remove()
    optimizer.step(closure_of(p))
    optimizer.step()
    assert len(watch.seen) == 1
    remove()  # a second time is harmless


def test_an_error_of_the_call_keeps_the_step_from_being_made() -> None:
    p = nn.Parameter(torch.tensor(1.0))

    def fail() -> None:
        raise RuntimeError("not ready")

    remove = before_steps(fail)
    optimizer = torch.optim.SGD([p], lr=0.1)
    closure_of(p)()
    for arguments in ((), (closure_of(p),)):
        with pytest.raises(RuntimeError, match="not ready"):
            optimizer.step(*arguments)
    remove()
    assert float(p) == 1.0
