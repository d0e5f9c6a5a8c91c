"""Partial epoch metrics: what `self.log(on_epoch=True)` and torchmetrics have accumulated since the epoch began.

Lightning saves neither, so the epoch mean of a resumed epoch covers only its remainder. Every rank keeps its own. On
another number of ranks, those of ranks that are gone are merged into those of ranks that are there
(`_state.merged_metrics`), and new ranks begin with nothing, so that every sample of the epoch counts once.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_ft._copying.module_tree import ModuleTree
from lightning_ft._fit import loops

_META = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx",
    "dataloader_idx", "metric_attribute",
)  # fmt: skip
_REDUCTIONS = ("mean", "max", "min", "sum")  # all that Lightning accepts in `self.log(reduce_fx=...)`


def capture(trainer: pl.Trainer, tree: ModuleTree) -> dict[str, Any]:
    """Everything logged and accumulated so far on this rank, as plain data on the CPU.

    Args:
        trainer: The trainer.
        tree: Of its module.
    """
    connector = trainer._logger_connector
    return {
        "results": {
            key: _capture_result(result)
            for key, result in trainer.fit_loop.epoch_loop._results.items()
            if not result.has_reset
        },
        "callback_metrics": _to_cpu(connector._callback_metrics),
        "logged_metrics": _to_cpu(connector._logged_metrics),
        "progress_bar_metrics": _to_cpu(connector._progress_bar_metrics),
        "current_fx": connector._current_fx,
        "torchmetrics": {name: _capture_metric(m) for name, m in find_metrics(trainer, tree.modules)},
    }


class _AnySync(_Sync):
    """How a value is reduced over ranks, until it is logged again: then as that call says.

    Lightning notes whether the user asks for it *and* there are several ranks, and refuses a value that is logged with
    another note.
    """

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Sync) or self.fn != other.fn:
            return NotImplemented
        self.rank_zero_only, self._group, self._op = other.rank_zero_only, other.group, other.op
        self.should = other.should
        return True

    __hash__ = None  # type: ignore[assignment]


def restore(trainer: pl.Trainer, saved: dict[str, Any], *, within_epoch: bool, other_ranks: bool = False) -> list[str]:
    """Metrics accumulate on from where they were.

    Args:
        trainer: The trainer, after Lightning has reset its results for the run.
        saved: What `capture` returned.
        within_epoch: The epoch of `saved` continues, so its first batch here must not reset what it had logged.
        other_ranks: `saved` is that of another number of ranks.

    Returns:
        What found no place, in words.
    """
    connector = trainer._logger_connector
    device = trainer.strategy.root_device
    connector._callback_metrics.update(_to_device(saved["callback_metrics"], device))
    connector._logged_metrics.update(_to_device(saved["logged_metrics"], device))
    connector._progress_bar_metrics.update(saved["progress_bar_metrics"])
    problems = _restore_torchmetrics(trainer, saved["torchmetrics"])
    if within_epoch:
        connector._first_loop_iter = True
        connector._current_fx = saved["current_fx"]
        for key, entry in saved["results"].items():
            result = _restore_result(trainer, entry, other_ranks=other_ranks)
            if result is None:
                problems.append(f"epoch value of {key!r}, logged with an attribute the module no longer has")
            else:
                trainer.fit_loop.epoch_loop._results[key] = result
    return problems


def _capture_result(result: _ResultMetric) -> dict[str, Any]:
    meta = result.meta
    entry: dict[str, Any] = {
        "meta": {name: getattr(meta, name) for name in _META},
        "reduce_fx": meta.reduce_fx.__name__,
        "reduce_fx_builtin": meta.reduce_fx.__module__ == "builtins",
        "sync": {"should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "is_tensor": result.is_tensor,
        "update_count": result._update_count,
        "forward_cache": _to_cpu(result._forward_cache),
    }
    if result.is_tensor:
        entry["value"] = _to_cpu(result.value)
        if meta.is_mean_reduction:
            entry["cumulated_batch_size"] = _to_cpu(result.cumulated_batch_size)
    return entry


def _restore_result(trainer: pl.Trainer, entry: dict[str, Any], *, other_ranks: bool) -> _ResultMetric | None:
    assert entry["reduce_fx"] in _REDUCTIONS, entry["reduce_fx"]
    device = trainer.strategy.root_device
    reductions = builtins if entry["reduce_fx_builtin"] else torch
    meta = _Metadata(**entry["meta"], reduce_fx=getattr(reductions, entry["reduce_fx"]))
    # The next `self.log` compares its metadata with this one, down to the function that reduces over ranks.
    meta.sync = (_AnySync if other_ranks else _Sync)(
        fn=trainer.strategy.reduce, _should=entry["sync"]["should"], rank_zero_only=entry["sync"]["rank_zero_only"]
    )
    result = _ResultMetric(meta, entry["is_tensor"])
    if entry["is_tensor"]:
        result.value = _to_device(entry["value"], device)
        if meta.is_mean_reduction:
            weight = _to_device(entry["cumulated_batch_size"], device)
            # Lightning averages the weights over the ranks, in whole numbers. Here a rank may have none.
            result.cumulated_batch_size = weight.to(result.value.dtype) if other_ranks else weight
    else:
        try:
            result.value = attrgetter(meta.metric_attribute or "")(trainer.lightning_module)
        except AttributeError:
            return None
    result._update_count = entry["update_count"]
    result._forward_cache = _to_device(entry["forward_cache"], device)
    return result


def find_metrics(trainer: pl.Trainer, modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Metric]]:
    """Every torchmetrics object of the module and the callbacks, under a name that a restart finds again."""
    for name, module in modules:
        if isinstance(module, Metric):
            yield name, module
    for callback in loops.callbacks(trainer):
        for attribute, value in vars(callback).items():
            if isinstance(value, nn.Module) and value is not trainer.lightning_module:
                for name, module in value.named_modules():
                    if isinstance(module, Metric):
                        yield f"callback {callback.state_key} {attribute}.{name}", module


def _capture_metric(metric: Metric) -> dict[str, Any]:
    return {
        "states": {name: _to_cpu(getattr(metric, name)) for name in metric._defaults},
        # Wrappers such as `Running` and `MinMaxMetric` count in plain attributes, which are no declared states.
        "attributes": {n: _to_cpu(v) for n, v in _attributes(metric) if isinstance(v, (bool, int, float, Tensor))},
        "forward_cache": _to_cpu(metric._forward_cache),
    }


def _attributes(metric: Metric) -> list[tuple[str, Any]]:
    return [*vars(metric).items(), *metric.named_buffers(recurse=False)]


def _restore_torchmetrics(trainer: pl.Trainer, saved: dict[str, dict[str, Any]]) -> list[str]:
    present = dict(find_metrics(trainer, trainer.lightning_module.named_modules()))
    for name in saved.keys() & present.keys():
        metric, entry = present[name], saved[name]
        for state, value in entry["states"].items():
            setattr(metric, state, _to_device(value, metric.device))
        for attribute, value in entry["attributes"].items():
            setattr(metric, attribute, _to_device(value, metric.device))
        metric._forward_cache = _to_device(entry["forward_cache"], metric.device)
        metric._computed = None
    return [f"accumulated state of metric {name!r}" for name in saved.keys() - present.keys()]


def _to_cpu(value: Any) -> Any:
    return _map_tensors(value, lambda t: t.detach().cpu().clone())


def _to_device(value: Any, device: torch.device) -> Any:
    return _map_tensors(value, lambda t: t.to(device, copy=True))


def _map_tensors(value: Any, function: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {k: _map_tensors(v, function) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_tensors(v, function) for v in value]
    return value
