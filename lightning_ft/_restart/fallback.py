"""What `ckpt_path="last"` takes where no run of ours has left anything: a `last*.ckpt` of a `ModelCheckpoint`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lightning_ft import discovery
from lightning_ft._inspection.contents import opened
from lightning_ft._names import join
from lightning_ft.errors import CorruptCheckpointError
from lightning_ft.manifest import REST
from lightning_ft.storage import Storage

# What Lightning writes into a sharded directory last.


def last_of_others(
    selection: discovery.Selection, depth: discovery.Depth, storage_options: Mapping[str, Any] | None
) -> tuple[str | None, list[tuple[str, str]]]:
    """The file to take, None if there is none; and those that cannot be used, each with the reason.

    Blocks on: reading each candidate, until one can be used; to depth "full" every byte, else its ending.

    Args:
        selection: Of a directory; its `empty` is true, or nothing of the kind is to be looked at.
        depth: How carefully.
        storage_options: For `fsspec`, used with URLs only.
    """
    storage = Storage(storage_options)
    unusable: list[tuple[str, str]] = []
    others = [info for info in selection.foreign if info.name.startswith("last")]
    for info in sorted(others, key=lambda info: _version(info.name), reverse=True):  # last-v2, last-v1, last
        if info.manifest is not None:
            problem = discovery.verify(info.path, depth, storage_options).problem
        else:
            problem = _plain_problem(storage, info.path, depth)
        if problem is None:
            return info.path, unusable
        unusable.append((info.path, problem))
    return None, unusable


def _version(name: str) -> int:
    """Lightning counts up the name of a file that another run has left."""
    match = re.fullmatch(r".*-v([0-9]+)\.ckpt", name)
    return int(match[1]) if match else 0


def _plain_problem(storage: Storage, path: str, depth: discovery.Depth) -> str | None:
    """What is wrong with a file of plain Lightning, as far as a zip archive's own table and checksums tell."""
    if not storage.is_file(path):
        # Of a directory nothing can be compared.
        return None if storage.is_sharded(path) and storage.exists(join(path, REST)) else f"a directory without {REST}"
    try:
        with storage.open_read(path) as file, opened(file, path) as archive:
            damaged = archive.testzip() if depth == "full" else None
    except CorruptCheckpointError as error:
        return error.reason
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None if damaged is None else f"damaged: checksum of {damaged} does not match"
