"""A sharded model from any checkpoint: which rank verifies and reads what, and that all of them go on, or none.

====  ==================================================================  ==========================================
Step  What is done                                                        Ranks
====  ==================================================================  ==========================================
1     `.metadata` and `meta.pt` are read, verified                        each
2     every file that is told of is there                                 zero
3     local: every byte of every file is compared                         each a part of the files
4     options of the optimizers, step counters and the like are read      zero, which tells the others
5     names, shapes, optimizers and groups fit                            each
6     small buffers and the like are read                                 zero, which tells the others
7     of a store: the files with parts of this rank are fetched, verified each its own
8     parameters and optimizers are filled                                each its own, from the files with parts of it
====  ==================================================================  ==========================================

Up to step 7 nothing of the model has changed, and an error on one rank is raised on all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_ft import _names
from lightning_ft._ranks.dist import Ranks
from lightning_ft._restart.broadcast import load_once
from lightning_ft._restart.loading import Loading
from lightning_ft._restart.shared_verification import share_out
from lightning_ft._sharded.filling import Filling, Source, WholeFile, objects_of
from lightning_ft._sharded.places import Places
from lightning_ft._sharded.shards import Shards


def load_into(
    loading: Loading,
    path: str,
    module: nn.Module,
    optimizers: Sequence[Optimizer] | None,
    *,
    strict: bool,
    weights_only: bool | None,
    once: bool,
) -> dict[str, Any]:
    """`module` and its `optimizers` are what `path` holds; returns everything else in it.

    Ranks: all. Thread: main. Blocks on: all ranks.

    Args:
        loading: Of the plugin.
        path: A directory of shards or one file, saved by whatever strategy on however many ranks; the same on all.
        module: The LightningModule, set up by its strategy.
        optimizers: Those of its strategy; None where only weights are wanted.
        strict: Whether all weights must be there, and no others.
        weights_only: As for `torch.load`.
        once: Whether one file is to be read by rank 0 alone, which sends it to the others.

    Raises:
        CheckpointError: It is damaged; nothing has changed.
        RestoreError: It does not fit; nothing has changed.
    """
    ranks = Ranks()
    fill = partial(Filling, module=module, optimizers=optimizers, strict=strict)
    try:
        if ranks.together(lambda: loading.is_sharded(path)):
            return _from_shards(loading, ranks, path, fill, optimizers is not None, weights_only)
        load: Callable[[], dict[str, Any]] = partial(loading.load, path, None, weights_only, mapped=not once)
        load = partial(load_once, load, None) if once else load
        return _from_file(loading, ranks, path, fill, module, optimizers is not None, load)
    finally:
        ranks.close()


def _from_shards(
    loading: Loading,
    ranks: Ranks,
    path: str,
    fill: Callable[[Source, dict[str, Any]], Filling],
    optimizers: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    with closing(ranks.together(lambda: loading.open_shards(path))) as shards:
        rest = ranks.together(lambda: _rest(loading, shards, weights_only))
        ranks.decide(shards.check_presence)
        if ranks.decide(lambda: loading.knows(path)):
            shards.trust()
        _verify_together(shards, ranks)
        objects = ranks.decide(lambda: _read_on_zero(shards, objects_of(shards, optimizers), weights_only))
        filling = ranks.together(lambda: fill(shards, objects))
        small = ranks.decide(lambda: _read_on_zero(shards, filling.small, weights_only))
        ranks.together(lambda: shards.verify(shards.files_wanted(filling.wanted)))
        ranks.together(lambda: filling.fill(small))
    return rest


def _rest(loading: Loading, shards: Shards, weights_only: bool | None) -> dict[str, Any]:
    rest = shards.read_rest(weights_only)
    loading.check_identity(shards.path, shards.manifest, rest)
    return rest


def _verify_together(shards: Shards, ranks: Ranks) -> None:
    names = share_out(shards.manifest, ranks.world_size)[ranks.rank] if shards.manifest is not None else ()
    ranks.together(lambda: shards.verify_only(names))
    shards.trust()


def _read_on_zero(shards: Shards, entries: list[Any], weights_only: bool | None) -> dict[str, Any]:
    shards.verify(shards.files_of(entries))
    return shards.read_objects(entries, weights_only)


def _from_file(
    loading: Loading,
    ranks: Ranks,
    path: str,
    fill: Callable[[Source, dict[str, Any]], Filling],
    module: nn.Module,
    optimizers: bool,
    load: Callable[[], dict[str, Any]],
) -> dict[str, Any]:
    """Of a local file each rank looks at its own parts only, through memory that is shared with the others."""
    ranks.decide(lambda: loading.verify(path))
    if _names.is_local(path):
        loading.mark_verified(path)
    checkpoint = ranks.together(load)
    source = ranks.together(lambda: WholeFile(path, checkpoint, Places(module).parameter_names()))
    objects = source.read_objects(objects_of(source, optimizers), None)
    filling = ranks.together(lambda: fill(source, objects))
    ranks.together(lambda: filling.fill(source.read_objects(filling.small, None)))
    return checkpoint
