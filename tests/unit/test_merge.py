"""Partial epoch metrics of several ranks as those of one."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMaxMetric, MinMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.regression import PearsonCorrCoef

from lightning_ft._state import merged_metrics
from lightning_ft._state import metrics as _metrics


def logged(reduction: str, value: float, weight: int | None = None, **meta: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "meta": {"on_epoch": True, **meta}, "reduce_fx": reduction, "is_tensor": True, "update_count": 2,
        "value": torch.tensor(value), "sync": {"should": True},
    }  # fmt: skip
    if weight is not None:
        entry["cumulated_batch_size"] = torch.tensor(weight)
    return entry


def part(**results: Any) -> dict[str, Any]:
    return {"results": results, "torchmetrics": {}, "callback_metrics": {"val": 1}}


def trainer(**metrics: Any) -> Any:
    module = nn.Module()
    for name, metric in metrics.items():
        module.add_module(name, metric)
    return SimpleNamespace(lightning_module=module, callbacks=[])


@pytest.mark.parametrize(
    ("reduction", "a", "b", "expected"),
    [
        ("mean", (3.0, 4), (5.0, 2), (8.0, 6)),
        ("sum", (3.0,), (5.0,), (8.0,)),
        ("max", (3.0,), (5.0,), (5.0,)),
        ("min", (3.0,), (5.0,), (3.0,)),
    ],
)
def test_logged_values(reduction: str, a: Any, b: Any, expected: Any) -> None:
    merged, problems = merged_metrics.merge(trainer(), [part(x=logged(reduction, *a)), part(x=logged(reduction, *b))])
    x = merged["results"]["x"]
    assert problems == []
    assert (float(x["value"]), *(int(x[k]) for k in ("cumulated_batch_size",) if k in x)) == expected
    assert x["update_count"] == 4


def test_a_value_that_only_one_rank_has_logged() -> None:
    merged, _ = merged_metrics.merge(trainer(), [part(x=logged("sum", 1.0)), part(y=logged("sum", 2.0))])
    assert list(merged["results"]) == ["x", "y"]


def test_a_value_of_a_step_stays_that_of_the_step() -> None:
    a, b = (part(x=logged("mean", v, 1, on_epoch=False)) for v in (3.0, 5.0))
    assert float(merged_metrics.merge(trainer(), [a, b])[0]["results"]["x"]["value"]) == 3.0


def test_a_new_rank_has_nothing_and_the_same_names() -> None:
    saved = part(a=logged("mean", 3.0, 4), b=logged("max", 3.0), c=logged("min", 3.0), d=logged("sum", 3.0))
    before = copy.deepcopy(saved)
    empty = merged_metrics.empty(saved)
    values = {k: float(v["value"]) for k, v in empty["results"].items()}
    assert values == {"a": 0.0, "b": float("-inf"), "c": float("inf"), "d": 0.0}
    assert list(values) == list(saved["results"])
    assert int(empty["results"]["a"]["cumulated_batch_size"]) == 0
    assert empty["callback_metrics"] == {"val": 1}
    assert saved["results"]["a"]["value"] == before["results"]["a"]["value"]
    # merging it changes nothing
    merged, _ = merged_metrics.merge(trainer(), [saved, empty])
    assert {k: float(v["value"]) for k, v in merged["results"].items()} == dict.fromkeys("abcd", 3.0)


class Own(Metric):
    """States reduced by a mean and by a function of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("average", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("product", torch.tensor(1.0), dist_reduce_fx=lambda values: values.prod(0))

    def update(self, value: Any) -> None:
        self.average += (value - self.average) / self._update_count
        self.product *= value

    def compute(self) -> Any:
        return self.average + self.product


METRICS: dict[str, Any] = {
    "mean": MeanMetric,
    "sum": SumMetric,
    "max": MaxMetric,
    "min": MinMetric,
    "cat": CatMetric,
    "own": Own,
    "collection": lambda: MetricCollection({"a": MeanMetric(), "b": MaxMetric()}),
}


def saved_metrics(made: Any) -> dict[str, Any]:
    found = {n: m for n, m in trainer(m=made).lightning_module.named_modules() if isinstance(m, Metric)}
    return {**part(), "torchmetrics": {n: _metrics._capture_metric(m) for n, m in found.items()}}


@pytest.mark.parametrize("name", METRICS)
def test_torchmetrics_of_three_ranks(name: str) -> None:
    values = [[1.0, 2.0], [3.0], [4.0, 6.0, 5.0]]
    whole, parts = METRICS[name](), []
    for of_rank in values:
        one = METRICS[name]()
        for value in of_rank:
            one.update(torch.tensor(value))
            whole.update(torch.tensor(value))
        parts.append(saved_metrics(one))
    present = METRICS[name]()
    run = trainer(m=present)
    merged, problems = merged_metrics.merge(run, parts)
    assert problems == []
    assert _metrics._restore_torchmetrics(run, merged["torchmetrics"]) == []
    for metric in (present, whole):
        metric.update(torch.tensor(7.0))
    expected = whole.compute()
    torch.testing.assert_close(present.compute(), expected)


def test_a_metric_of_vectors() -> None:
    make = lambda: MulticlassAccuracy(num_classes=3, average="macro")  # noqa: E731
    predicted, target = torch.tensor([0, 1, 2, 1, 0, 2]), torch.tensor([0, 1, 1, 1, 2, 2])
    whole, parts = make(), []
    whole.update(predicted, target)
    for rank in range(2):
        one = make()
        one.update(predicted[rank::2], target[rank::2])
        parts.append(saved_metrics(one))
    present = make()
    run = trainer(m=present)
    merged, problems = merged_metrics.merge(run, parts)
    _metrics._restore_torchmetrics(run, merged["torchmetrics"])
    assert (problems, present.compute()) == ([], whole.compute())


def test_what_cannot_be_merged_is_said_by_name() -> None:
    parts = []
    for rank in range(2):
        one = PearsonCorrCoef()
        one.update(torch.tensor([1.0, 2.0, 4.0]) + rank, torch.tensor([2.0, 1.0, 3.0]))
        parts.append(saved_metrics(one))
    _, problems = merged_metrics.merge(trainer(m=PearsonCorrCoef()), parts)
    assert any("state mean_x of metric 'm'" in p for p in problems)

    parts = []
    for rank in range(2):
        extremes = MinMaxMetric(MeanMetric())
        extremes.update(torch.tensor(float(rank)))
        extremes.compute()
        parts.append(saved_metrics(extremes))
    _, problems = merged_metrics.merge(trainer(m=MinMaxMetric(MeanMetric())), parts)
    assert [p.partition(":")[0] for p in problems] == [
        "attribute min_val of metric 'm'",
        "attribute max_val of metric 'm'",
    ]
