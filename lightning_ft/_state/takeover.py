"""Which of the saved ranks' states a rank of this run goes on with, and what a new rank begins with.

With the number of (data-parallel) ranks that was saved, each has its own. With another number, of W saved ranks and W'
present ones:

* rank r < W goes on with the random state of saved rank r. A new rank begins with a seed made of the root seed of the
  run's data order, the run's own seed, the batches trained so far, and its number: the same in every restart from that
  point, and no other rank's.
* saved rank q's metrics are merged into those of rank ``q % W'``; a new rank's are empty.
* positions of loaders are those of all ranks together (`_data.elastic`); they must be equal.
* gradients held in manual optimization must be equal on all ranks, as DDP leaves them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_ft._data import elastic
from lightning_ft._data.elastic import Change, DataRank
from lightning_ft._state import merged_metrics, random_state
from lightning_ft._state.digest import digest
from lightning_ft.errors import RestoreError, TopologyError


@dataclass(frozen=True)
class RankState:
    """What this rank goes on with."""

    loaders: dict[str, Any]
    metrics: list[dict[str, Any]]
    """To be merged; its own first."""
    gradients: dict[str, Any]
    rng: dict[str, Any] | None
    """None: it is new, and begins with `seed`."""
    seed: int
    change: Change | None
    """None: as many ranks as were saved."""
    noted: list[str]
    """For the report of the restart, the same on all ranks."""


def of_this_rank(saved: dict[str, Any], present: DataRank, number: int, path: str) -> RankState:
    """The part of this rank in what all ranks saved.

    Args:
        saved: Of `_restart.restore.build_state`, with the states of all ranks.
        present: This rank's place among those with data of their own.
        number: Its number in the run, for messages.
        path: The checkpoint.

    Raises:
        RestoreError: There is nothing of the rank.
        TopologyError: Of another number of ranks, what they had does not become one.
    """
    ranks: list[dict[str, Any]] = saved["ranks"] or []
    places = [r.get("data_rank", {"rank": i, "size": saved["world_size"]}) for i, r in enumerate(ranks)]
    size = places[0]["size"] if places else saved["world_size"]
    complete = len(ranks) == saved["world_size"] and {p["rank"] for p in places} == set(range(size))
    mine = elastic.sources([place["rank"] for place in places], present)
    seed = random_state.mix(
        "rank", ranks[0]["loaders"]["root_seed"] if ranks else 0, str(saved["seed"]), saved["batch"], present.rank
    )
    if size == present.size and mine:
        own = ranks[mine[0]]
        return RankState(own["loaders"], [own["metrics"]], own["gradients"], own["rng"], seed, None, [])
    if not complete or size == present.size:
        raise RestoreError(f"{path} holds no random state and data position of rank {number}")
    change = Change(size, present.size, path, saved["fingerprint"])
    if saved["within_epoch"]:
        _same_everywhere(change, ranks)
    first = ranks[mine[0]] if mine else ranks[0]
    loaders = first["loaders"]
    return RankState(
        loaders={
            **loaders,
            "train": [p if mine else _without(p, "fetching") for p in loaders["train"]],
            # One with a state of its own begins as the script makes it: that state is one rank's.
            "val": [_without(p, "fetching", "state") for p in loaders["val"]],
        },
        metrics=[ranks[i]["metrics"] for i in mine] or [merged_metrics.empty(first["metrics"])],
        gradients=_equal_gradients(change, ranks),
        rng=first["rng"] if mine else None,
        seed=seed,
        change=change,
        noted=_noted(change, loaders["val"]),
    )


def _noted(change: Change, validation: list[dict[str, Any]]) -> list[str]:
    noted = [
        f"validation dataloader {i} keeps a state of its own, that of one rank: it begins as the script made it"
        for i, position in enumerate(validation)
        if "state" in position
    ]
    if change.present > change.saved:
        new = f"rank {change.saved} is" if change.present == change.saved + 1 else f"ranks from {change.saved} on are"
        noted.append(f"{new} new: random state begins with a seed of each rank's own")
    return noted


def _without(position: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in position.items() if k not in keys}


def _same_everywhere(change: Change, ranks: list[dict[str, Any]]) -> None:
    of_pass = ("kind", "passes", "cycles", "delivered", "exhausted", "epoch_over", "deal")
    for index, positions in enumerate(zip(*(r["loaders"]["train"] for r in ranks), strict=True)):
        seen = {digest({k: p.get(k) for k in of_pass}) for p in positions}
        if len(seen) > 1:
            delivered = [p["delivered"] for p in positions]
            raise change.refusal(
                f"train dataloader {index}", {}, f"its ranks stand at different places ({delivered} batches delivered)"
            )


def _equal_gradients(change: Change, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    gradients: dict[str, Any] = ranks[0]["gradients"]
    if len({digest(r["gradients"]) for r in ranks}) > 1:
        raise TopologyError(
            f"{change.path} was saved by {change.saved} ranks, each with gradients of its own that the next step adds "
            f"to, and this run has {change.present}: call zero_grad after an optimizer's step, or start {change.saved}",
            change.saved,
            change.present,
        )
    return gradients
