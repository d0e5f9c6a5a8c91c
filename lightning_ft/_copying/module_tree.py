"""What is known of a model from one save to the next: walking its modules costs more than most of a save."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ft._sharded.wrappers import plain_name
from lightning_ft.state import optimizer_layout

_shape, _dtype = attrgetter("shape"), attrgetter("dtype")
_tables = attrgetter("_parameters", "_modules")


class ModuleTree:
    """The modules of a model and their parameters, looked for again when one was added, removed or replaced.

    Thread: main. Holds on to modules and parameters that the model has given up until it is asked again.

    Args:
        root: The model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.walks = 0
        """How often everything was looked through."""
        self._modules: list[tuple[str, nn.Module]] = []
        self._found = _Members([])
        self._lookups: list[nn.Embedding | nn.EmbeddingBag] = []
        self._parameters: list[nn.Parameter] = []
        self._trained: dict[str, bool] = {}
        self._layout: _Layout | None = None

    @property
    def modules(self) -> list[tuple[str, nn.Module]]:
        """Each module once, with its name, as `nn.Module.named_modules` has them."""
        self._look()
        return self._modules

    def changed_in_forward(self) -> list[Tensor]:
        """Buffers, and what a forward pass renormalises: with `max_norm`, rows of an embedding that are looked up."""
        self._look()
        buffers = [b for _, m in self._modules for b in m._buffers.values() if b is not None]
        return buffers + [m.weight for m in self._lookups if m.max_norm is not None]

    def requires_grad(self) -> dict[str, bool]:
        """Which parameters are trained, by name; the same object again while that is so. Not to be changed."""
        self._look()
        if list(self._trained.values()) != [p.requires_grad for p in self._parameters]:
            names = [plain_name(name) for name, _ in self._root.named_parameters()]
            self._trained = dict(zip(names, [p.requires_grad for p in self._parameters], strict=True))
        return self._trained

    def layout(self, optimizers: Sequence[Optimizer]) -> list[list[dict[str, Any]]]:
        """See `optimizer_layout`; the same object again while nothing of it has changed. Not to be changed."""
        self._look()
        if self._layout is None or not self._layout.is_of(optimizers):
            self._layout = _Layout(optimizers, self._root)
        return self._layout.value

    def _look(self) -> None:
        """What is remembered is what is there now."""
        if self.walks and self._found.are_now():
            return
        self.walks += 1
        self._modules = list(self._root.named_modules())
        self._parameters = [parameter for _, parameter in self._root.named_parameters()]
        self._lookups = [m for _, m in self._modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
        self._found = _Members([module for _, module in self._modules])
        self._trained, self._layout = {}, None


class _Members:
    """The parameters and modules that modules have, by name; asked of all in a few calls, since every save asks."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._tables = self._tables_now()
        # Those of a scripted module are no dictionaries, and nothing of them is the same object twice.
        self._comparable = {dict, OrderedDict}.issuperset(map(type, self._tables))
        self._lengths, self._names, self._values = self._members() if self._comparable else ([], [], [])

    def are_now(self) -> bool:
        """Whether the modules have these and no others; no, if nobody knows."""
        if not self._comparable or not all(map(operator.is_, self._tables_now(), self._tables)):
            return False
        lengths, names, values = self._members()
        return lengths == self._lengths and names == self._names and all(map(operator.is_, values, self._values))

    def _tables_now(self) -> list[dict[str, Any]]:
        return list(chain.from_iterable(map(_tables, self._modules)))

    def _members(self) -> tuple[list[int], list[str], list[Any]]:
        values = chain.from_iterable(map(dict.values, self._tables))
        return list(map(len, self._tables)), list(chain.from_iterable(self._tables)), list(values)


class _Layout:
    def __init__(self, optimizers: Sequence[Optimizer], root: nn.Module) -> None:
        self.value = optimizer_layout(optimizers, root)
        self._groups = [len(optimizer.param_groups) for optimizer in optimizers]
        self._parameters = _parameters(optimizers)
        self._shapes, self._dtypes = list(map(_shape, self._parameters)), list(map(_dtype, self._parameters))

    def is_of(self, optimizers: Sequence[Optimizer]) -> bool:
        parameters = _parameters(optimizers)
        return (
            [len(optimizer.param_groups) for optimizer in optimizers] == self._groups
            and [len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
            == [len(group["names"]) for groups in self.value for group in groups]
            and all(map(operator.is_, parameters, self._parameters))
            and all(map(operator.eq, map(_shape, parameters), self._shapes))
            and all(map(operator.is_, map(_dtype, parameters), self._dtypes))
        )


def _parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
