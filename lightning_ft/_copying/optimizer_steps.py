"""A call just before any optimizer changes parameters, whoever steps it and however."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


def before_steps(call: Callable[[], None]) -> Callable[[], None]:
    """`call` runs before each optimizer step of this process, until the returned function is called.

    With a closure (Lightning's automatic optimization, LBFGS) the forward and backward pass are inside the step: then
    `call` runs after each evaluation of the closure, which is when optimizers change something. One that does so
    before (sharpness-aware minimisation moves the parameters first) is not waited for.

    Thread: `call` runs in the thread that steps.
    """

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure")
        positional = closure is None and len(args) > 1  # args[0] is the optimizer
        if positional:
            closure = args[1]
        if not callable(closure):
            call()
            return None

        def evaluated() -> Any:
            result = closure()
            call()
            return result

        if positional:
            return (args[0], evaluated, *args[2:]), kwargs
        return args, {**kwargs, "closure": evaluated}

    return register_optimizer_step_pre_hook(hook).remove
