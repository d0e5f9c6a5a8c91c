"""The names under which `Trainer(strategy=...)` finds our strategies, without importing anything for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module, util
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAMES = {
    "fsdp_ft": ("FSDPStrategy", "FSDP whose checkpoints are written by lightning_ft"),
    "model_parallel_ft": ("ModelParallelStrategy", "FSDP2 and tensor parallelism, checkpoints written by lightning_ft"),
}
_STRATEGIES = "lightning.pytorch.strategies"


def register() -> None:
    """Our names are in Lightning's registry, or will be as soon as Lightning is imported."""
    module = sys.modules.get(_STRATEGIES)
    if module is not None and hasattr(module, "StrategyRegistry"):
        _add(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _add(module: ModuleType) -> None:
    for name, (strategy, description) in NAMES.items():
        if name not in module.StrategyRegistry:
            module.StrategyRegistry.register(name, _Maker(strategy), description=description)


class _Maker:
    """Makes a strategy; its module, and with it torch, is imported when one is wanted."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, **arguments: Any) -> Any:
        return getattr(import_module("lightning_ft.strategies"), self._name)(**arguments)


class _Finder(MetaPathFinder):
    """Finds no module of its own: it registers when the module with the registry has been executed, and goes."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _STRATEGIES:
            return None
        sys.meta_path.remove(self)
        spec = util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _add(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
