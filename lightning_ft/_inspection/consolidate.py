"""One file from whatever a checkpoint is: a `.ckpt` with a manifest, or the weights alone as `.safetensors`."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import uuid
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from lightning_ft.__about__ import __version__
from lightning_ft._disk.disk_file import make_dirs, sync_dir
from lightning_ft._disk.sink import CHUNK_BYTES
from lightning_ft._inspection.check import check
from lightning_ft._inspection.contents import Contents, opened, read_contents, read_tail
from lightning_ft._inspection.descriptions import TensorDescription, dotted
from lightning_ft._names import attempt_name, is_local, join, split
from lightning_ft.errors import CheckpointError, CorruptCheckpointError
from lightning_ft.manifest import Manifest
from lightning_ft.storage import Storage

if TYPE_CHECKING:
    import torch

    from lightning_ft._sharded.shards import Shards

Progress = Callable[[int], None]

SUFFIXES = (".ckpt", ".safetensors")
# How Lightning names the number of batches trained, among its loops.
_BATCHES = ("loops", "fit_loop", "epoch_loop.batch_progress", "total", "processed")


def consolidate(storage: Storage, source: str, target: str, progress: Progress) -> Manifest | None:
    """`target` holds what `source` does, whole, and durable where that means something; or this raises.

    On disk after: `target`, replaced at once if it was there. After an error what was there before.

    Args:
        storage: Where both are.
        source: A checkpoint file, or a directory of shards.
        target: Its suffix, one of `SUFFIXES`, decides what is written.
        progress: Called with the number of bytes read since the last call.

    Returns:
        The manifest of a `.ckpt`; None for `.safetensors`.

    Raises:
        CheckpointError: `source` is damaged, or nothing that is known here.
        ImportError: torch or safetensors is needed for this and not there.
    """
    sharded = not storage.is_file(source)
    if not sharded:
        storage.refuse_part(source)
    if target.endswith(".safetensors"):
        tensors, facts = (_weights_of_shards if sharded else _weights_of_file)(storage, source, progress)
        _write_safetensors(storage, target, tensors, facts)
        return None
    if sharded:
        return _save_shards(storage, source, target, progress)
    return _copy_archive(storage, source, target, progress)


# -- from a file to a `.ckpt`: the archive stays as it is, byte for byte, and gets a manifest ------------------------


def _copy_archive(storage: Storage, source: str, target: str, progress: Progress) -> Manifest:
    """Memory: one chunk. Nothing of the pickle is executed, and torch is not needed."""
    _refuse_damaged(storage, source, progress)
    contents = read_contents(storage, source)
    with storage.open_read(source) as file, storage.open_attempt(target) as attempt:
        total_bytes, manifest = read_tail(file, source)
        with opened(file, source) as archive:
            comment_bytes = len(archive.comment)
        left = total_bytes - comment_bytes - 2
        file.seek(0)
        while left:
            chunk = file.read(min(left, CHUNK_BYTES))
            if not chunk:
                raise CorruptCheckpointError(source, "became shorter while it was read")
            attempt.write(chunk)
            left -= len(chunk)
        attempt.write(b"\0\0")  # in place of the length of the comment

        def make_manifest(size_bytes: int, digest: str) -> Manifest:
            if manifest is None:
                return _new_manifest(contents, size_bytes, digest)
            if (size_bytes, digest) != (manifest.size_bytes, manifest.digest):
                raise CorruptCheckpointError(source, "changed while it was read")
            return manifest

        return attempt.commit(make_manifest)


def _refuse_damaged(storage: Storage, source: str, progress: Progress) -> None:
    finding = check(storage, source, "full", progress)
    if finding.bad:
        parts = "; ".join(f"{damage.part}: {damage.reason}" for damage in finding.damages)
        raise CorruptCheckpointError(source, f"{finding.problem} ({parts})" if parts else str(finding.problem))


def _new_manifest(contents: Contents | None, size_bytes: int, digest: str, step: int = 0, epoch: int = 0) -> Manifest:
    """Of the state of no run that could be continued: what a restart also needs was never saved."""
    batch = 0
    if contents is not None:
        step, epoch = contents.step or 0, contents.epoch or 0
        batch = next((leaf for path, leaf in contents.leaves if path == _BATCHES and isinstance(leaf, int)), 0)
    return Manifest(
        generation=uuid.uuid4().hex, run_id="", start=0, step=step, batch=batch, epoch=epoch, reason="consolidated",
        boundary="none", created=datetime.now(timezone.utc).isoformat(timespec="seconds"), size_bytes=size_bytes,
        digest=digest, versions={"lightning_ft": __version__, "python": platform.python_version()},
    )  # fmt: skip


# -- from shards -----------------------------------------------------------------------------------------------------


def load_shards(storage: Storage, source: str, progress: Progress = lambda _: None) -> dict[str, Any]:
    """What one file of the same checkpoint would hold, from a directory of ours or of plain Lightning, at any URL.

    Memory: all of it. Everything is verified before it is unpickled, as far as there is a manifest.

    Raises:
        CheckpointError: `source` is no such directory, or damaged.
    """
    from lightning_ft._sharded.assembling import assemble

    with closing(_shards(storage, source)) as shards:
        return assemble(shards, None, progress)


def _shards(storage: Storage, source: str) -> Shards:
    from lightning_ft._sharded.shards import Shards

    return Shards(storage, source, "full")


def _save_shards(storage: Storage, source: str, target: str, progress: Progress) -> Manifest:
    checkpoint = load_shards(storage, source, progress)
    manifest, _ = storage.read_manifest(source)
    from lightning_ft._saving import serialise

    step, epoch = (value if isinstance(value, int) else 0 for value in map(checkpoint.get, ("global_step", "epoch")))

    def make_manifest(size_bytes: int, digest: str) -> Manifest:
        if manifest is None:
            return _new_manifest(None, size_bytes, digest, step, epoch)
        # The same save in another form.
        return replace(manifest, size_bytes=size_bytes, digest=digest, files={})

    with storage.open_attempt(target) as attempt:
        serialise.save(checkpoint, attempt)
        return attempt.commit(make_manifest)


# -- to `.safetensors` -----------------------------------------------------------------------------------------------


def _weights_of_file(
    storage: Storage, source: str, progress: Progress
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    from lightning_ft._inspection.tensors import TensorReader

    _refuse_damaged(storage, source, progress)
    contents = read_contents(storage, source)
    found = [
        (dotted(path[1:]), leaf)
        for path, leaf in contents.leaves
        if path[:1] == ("state_dict",) and isinstance(leaf, TensorDescription)
    ]
    if not found:
        raise CheckpointError(f"{source} has no state_dict with tensors in it")
    with TensorReader(storage, contents) as reader:
        tensors = {name: _own(reader.read(leaf)) for name, leaf in found}
    facts = {"step": str(contents.step), "epoch": str(contents.epoch)}
    if contents.manifest is not None:
        facts["generation"] = contents.manifest.generation
    return tensors, facts


def _weights_of_shards(
    storage: Storage, source: str, progress: Progress
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with closing(_shards(storage, source)) as shards:
        saved = {name: entry for name, entry in shards.weights.items() if entry.is_tensor}
        if not saved:
            raise CheckpointError(f"{source} has no state_dict with tensors in it")
        shards.check_presence()
        shards.verify(shards.files_of(saved.values()))
        rest = shards.read_rest(None)
        found = shards.read_objects(saved.values(), None, progress)
        facts = {"step": str(rest.get("global_step")), "epoch": str(rest.get("epoch"))}
        if shards.manifest is not None:
            facts["generation"] = shards.manifest.generation
        return {name: _own(found[entry.key]) for name, entry in saved.items()}, facts


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """In memory of its own: safetensors knows no shared and no strided tensors, so tied weights are written twice."""
    return tensor.detach().clone(memory_format=_contiguous())


def _contiguous() -> Any:
    import torch

    return torch.contiguous_format


def _write_safetensors(
    storage: Storage, target: str, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, str]
) -> None:
    """`target` holds `tensors` and, as metadata, `facts`; durable and replaced at once, as `Storage.open_attempt` does.

    That commits archives only, so here are the same steps for another kind of file.
    """
    try:
        from safetensors.torch import save, save_file
    except ImportError as error:
        raise ImportError(
            "safetensors is needed to write this: pip install 'lightning-ft[safetensors]'", name="safetensors"
        ) from error
    metadata = {"format": "pt", **facts}
    if not is_local(target):
        storage.write_object(target, memoryview(save(dict(tensors), metadata)))
        return
    dirpath, name = split(target)
    make_dirs(dirpath)
    attempt = join(dirpath, attempt_name(name, secrets.token_hex(8)))
    try:
        save_file(dict(tensors), attempt, metadata)
        fd = os.open(attempt, os.O_RDWR)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(attempt, target)
        sync_dir(dirpath)
    finally:
        with contextlib.suppress(FileNotFoundError):  # renamed
            os.unlink(attempt)
