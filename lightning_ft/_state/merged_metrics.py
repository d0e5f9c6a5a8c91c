"""Partial epoch metrics of several ranks as those of one, and those of a rank that has seen nothing yet."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from lightning_ft._state.digest import digest
from lightning_ft._state.metrics import find_metrics

_NOTHING = {"max": float("-inf"), "min": float("inf")}
_COMBINE: dict[str, Callable[[Any, Any], Any]] = {"max": torch.maximum, "min": torch.minimum}


def empty(saved: dict[str, Any]) -> dict[str, Any]:
    """What a rank holds that has trained nothing of the epoch: the entries of `saved`, at zero.

    They must be there, and in this order: at the end of the epoch all ranks reduce the same ones, logged again or not.
    (Of a mean that is not reduced over ranks, and not logged again, nothing is left here: its value is not-a-number.)
    What was last logged (`callback_metrics`) is the same on all ranks where callbacks depend on it, and stays.
    """
    results = {}
    for key, entry in saved["results"].items():
        results[key] = {**entry, "update_count": 0}
        if entry["is_tensor"]:
            results[key]["value"] = torch.full_like(entry["value"], _NOTHING.get(entry["reduce_fx"], 0.0))
            if "cumulated_batch_size" in entry:
                results[key]["cumulated_batch_size"] = torch.zeros_like(entry["cumulated_batch_size"])
    return {**saved, "results": results, "torchmetrics": {}}


def merge(trainer: pl.Trainer, parts: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The metrics of several saved ranks as one, and what could not be merged, in words.

    Args:
        trainer: Its metrics know how their states are reduced.
        parts: Of `_state.metrics.capture`, that of this rank first.
    """
    if len(parts) == 1:
        return parts[0], []
    metrics, problems = _merge_torchmetrics(trainer, [part["torchmetrics"] for part in parts])
    entries: dict[str, list[dict[str, Any]]] = {}
    for part in parts:
        for key, entry in part["results"].items():
            entries.setdefault(key, []).append(entry)
    results = {key: functools.reduce(_merge_results, of_ranks) for key, of_ranks in entries.items()}
    return {**parts[0], "results": results, "torchmetrics": metrics}, problems


def _merge_results(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    merged = {**a, "update_count": a["update_count"] + b["update_count"]}
    if a["is_tensor"] and a["meta"]["on_epoch"]:
        merged["value"] = _COMBINE.get(a["reduce_fx"], operator.add)(a["value"], b["value"])
        if "cumulated_batch_size" in a:
            merged["cumulated_batch_size"] = a["cumulated_batch_size"] + b["cumulated_batch_size"]
    return merged


def _merge_torchmetrics(
    trainer: pl.Trainer, parts: Sequence[dict[str, dict[str, Any]]]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    present = dict(find_metrics(trainer, trainer.lightning_module.named_modules()))
    merged, problems = dict(parts[0]), []
    for name in merged.keys() & present.keys():
        entries = [part[name] for part in parts if name in part]
        counts = [int(e["attributes"].get("_update_count", 1)) for e in entries]
        states = {}
        for state, first in entries[0]["states"].items():
            values = [e["states"][state] for e in entries]
            try:
                states[state] = _reduce(present[name]._reductions.get(state), values, counts)
            except (TypeError, RuntimeError) as error:
                states[state] = first
                problems.append(f"state {state} of metric {name!r}: {error}; what other ranks had accumulated is lost")
        # Those that are tensors are among the attributes, too.
        attributes = {k: v for k, v in entries[0]["attributes"].items() if k not in states}
        attributes["_update_count"] = sum(counts)
        for attribute, value in attributes.items():
            # Underscored ones are torchmetrics' own.
            if not attribute.startswith("_") and len({digest(e["attributes"].get(attribute)) for e in entries}) > 1:
                problems.append(
                    f"attribute {attribute} of metric {name!r}: ranks differ; it is {value!r}, of one of them"
                )
        merged[name] = {**entries[0], "states": states, "attributes": attributes}
    return merged, problems


def _reduce(reduction: Any, values: list[Any], counts: list[int]) -> Any:
    """As torchmetrics reduces over ranks, but for a mean, which is weighted by how often each was updated."""
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if reduction is dim_zero_cat:
        return torch.cat([v.reshape(1) if v.ndim == 0 else v for v in values])
    if reduction in (dim_zero_sum, dim_zero_max, dim_zero_min):
        return reduction(torch.stack(values))
    if reduction is dim_zero_mean:
        total = max(1, sum(counts))
        weighted: Tensor = sum(v * count for v, count in zip(values, counts, strict=True))
        return weighted / total
    if len({digest(v) for v in values}) == 1:
        return values[0]
    if reduction is None:
        raise TypeError("it does not say how to merge it")
    return reduction(torch.stack(values))
