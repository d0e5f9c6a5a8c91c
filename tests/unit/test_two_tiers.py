"""A local directory in front of another: its arguments, whose it is, and which checkpoint of both is taken."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from _archives import save

import lightning_ft as ft
from lightning_ft import _names, discovery
from lightning_ft._fit import local_tier
from lightning_ft._fit.local_tier import LocalTier
from lightning_ft._names import checkpoint_name
from lightning_ft.errors import ConfigurationError
from lightning_ft.storage import Storage

# -- arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"local_dirpath": ""}, "local_dirpath='': must be the path of a directory"),
        ({"local_dirpath": 7}, "local_dirpath=7: must be the path of a directory"),
        ({"local_dirpath": "s3://bucket/run"}, "local_dirpath='s3://bucket/run': must be in a mounted file system"),
        ({"local_dirpath": "memory://run"}, "local_dirpath='memory://run': must be in a mounted file system"),
        ({"local_dirpath": "/nvme/run", "dirpath": "/nvme/run/"}, "local_dirpath='/nvme/run': is dirpath"),
        ({"local_dirpath": "file:///nvme/run", "dirpath": "/nvme/run"}, "local_dirpath='/nvme/run': is dirpath"),
        ({"local_every_n_train_steps": 5}, "local_every_n_train_steps=5: needs local_dirpath"),
        ({"local_dirpath": "/nvme", "local_every_n_train_steps": 0}, "local_every_n_train_steps=0: at least 1"),
        ({"local_dirpath": "/nvme", "local_every_n_train_steps": "5"}, "local_every_n_train_steps='5': a whole number"),
        ({"local_dirpath": "/nvme", "local_keep_last": 0}, "local_keep_last=0: at least 1"),
        ({"local_dirpath": "/nvme", "local_keep_last": None}, "local_keep_last=None: a whole number"),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ft.FaultTolerantCheckpoint(**{"dirpath": "s3://bucket/run", **arguments})
    assert str(caught.value).startswith(message)


def test_a_link_to_dirpath_is_dirpath(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigurationError, match="is dirpath"):
        ft.FaultTolerantCheckpoint(tmp_path / "real", local_dirpath=tmp_path / "link")


def test_what_can_be() -> None:
    tier = LocalTier.of(Path("/nvme/run"), 5, 2, "s3://bucket/run")
    assert (tier.dirpath, tier.trigger.every_n_train_steps, tier.retention.keep_last) == ("/nvme/run", 5, 2)
    assert LocalTier.of("/nvme/run", None, -1, None).trigger.every_n_train_steps is None


# -- whose it is -------------------------------------------------------------------------------------------------


def test_a_local_directory_belongs_to_one_dirpath(tmp_path: Path) -> None:
    local = str(tmp_path)
    local_tier.claim(local, "s3://a/run")
    local_tier.claim(local, "s3://b/run")  # nothing is in it: whoever comes
    save(f"{local}/{checkpoint_name(1)}")
    local_tier.claim(local, "s3://b/run")
    local_tier.require_own(local, "s3://b/run")
    for ask in (local_tier.claim, local_tier.require_own):
        with pytest.raises(ConfigurationError, match="saved for dirpath='s3://b/run', not for 's3://a/run'"):
            ask(local, "s3://a/run")
    # As the message says.
    (tmp_path / _names.ORIGIN_NAME).write_text("s3://a/run\n")
    local_tier.require_own(local, "s3://a/run")


def test_checkpoints_of_nobody_knows_what_are_not_taken_over(tmp_path: Path) -> None:
    save(f"{tmp_path}/{checkpoint_name(1)}")
    with pytest.raises(ConfigurationError, match="saved for nothing that is known"):
        local_tier.claim(str(tmp_path), "s3://a/run")
    assert not (tmp_path / _names.ORIGIN_NAME).exists()


def test_a_directory_that_does_not_exist_is_nobodys(tmp_path: Path) -> None:
    local_tier.require_own(str(tmp_path / "none"), "s3://a/run")


# -- which one is taken ------------------------------------------------------------------------------------------

A, B = {"run_id": "a"}, {"run_id": "b"}


def put(dirpath: Path, *checkpoints: Any) -> None:
    """Checkpoints of steps, each a number or a tuple (number, fields, harm)."""
    for checkpoint in checkpoints:
        step, fields, harm = (*checkpoint, "")[:3] if isinstance(checkpoint, tuple) else (checkpoint, {}, "")
        path = dirpath / checkpoint_name(step)
        save(str(path), **{"step": step, "batch": step, "generation": f"{step:032d}", **A, **fields})
        data = bytearray(path.read_bytes())
        if harm == "data":
            data[45] ^= 1
        elif harm == "manifest":
            data[-100] ^= 1
        path.write_bytes(data[:10] if harm == "cut" else data)


@pytest.mark.parametrize(
    ("local", "remote", "chosen"),
    [
        # (nothing there), one tier only, the newer one of two, the same one in both
        ([], [], "empty"),
        ([], [3], "remote 3"),
        ([3], [], "local 3"),
        ([3, 4], [1, 3], "local 4"),
        ([3, 4], [5], "remote 5"),
        ([3], [3], "local 3"),
        ([2, 3], [1, 2, 3], "local 3"),
        # a broken copy gives way to the other one, whatever is broken of it
        ([(3, {}, "data")], [3], "remote 3"),
        ([(3, {}, "manifest")], [3], "remote 3"),
        ([(3, {}, "cut")], [3], "remote 3"),
        ([3], [(3, {}, "data")], "local 3"),
        ([3], [(3, {}, "manifest")], "local 3"),
        ([3], [(3, {}, "cut")], "local 3"),
        # and if both are, what is next
        ([2, (3, {}, "data")], [1, (3, {}, "data")], "local 2"),
        ([1, (3, {}, "data")], [2, (3, {}, "data")], "remote 2"),
        ([(3, {}, "data"), (4, {}, "data")], [2, 3], "remote 3"),
        ([2, 3], [(4, {}, "data"), (5, {}, "cut")], "local 3"),
        ([(3, {}, "data")], [(3, {}, "data")], "unusable"),
        ([(3, {}, "cut")], [], "unusable"),
        ([], [(3, {}, "data")], "unusable"),
        # a local copy whose digest is not that of the manifest in dirpath
        ([(3, {"reason": "stop"})], [3], "local 3"),
        # a later start supersedes, with whatever step
        ([(3, {"start": 2})], [8], "local 3"),
        ([8], [(3, {"start": 2})], "remote 3"),
        # runs: the newest manifest that can be read says which one it is
        ([(3, {"start": 2, **B})], [8], "local 3"),
        ([8], [(3, {"start": 2, **B})], "remote 3"),
        ([8], [(3, {"start": 2, **B}, "data")], "unusable"),
        ([(3, {"start": 2, **B}, "data")], [8], "unusable"),
        ([(2, {"start": 2, **B}), (3, {"start": 2, **B}, "data")], [8], "local 2"),
        ([(2, {"start": 2, **B}, "data")], [(1, {"start": 2, **B}), 8], "remote 1"),
        ([8], [(3, {"start": 2, **B}, "cut")], "local 8"),
        # what another callback saved is no state to continue from
        ([(9, {"boundary": "none"})], [3], "remote 3"),
        ([(9, {"run_id": ""})], [3], "remote 3"),
    ],
)  # fmt: skip
def test_the_newest_good_one_of_both(local: list[Any], remote: list[Any], chosen: str, tmp_path: Path) -> None:
    put(tmp_path / "local", *local)
    put(tmp_path / "remote", *remote)
    selection = local_tier.select(str(tmp_path / "local"), str(tmp_path / "remote"))
    found = selection.chosen
    if found is None:
        assert selection.empty == (chosen == "empty")
        assert chosen in ("empty", "unusable")
        assert bool(selection.passed_over) == (chosen == "unusable")
        return
    assert found.manifest is not None
    assert f"{os.path.basename(os.path.dirname(found.path))} {found.manifest.step}" == chosen
    assert found.path not in dict(selection.passed_over)
    assert discovery.verify(found.path).problem is None


def test_g7_a_local_copy_with_another_digest_gives_way(tmp_path: Path) -> None:
    put(tmp_path / "remote", 3)
    save(f"{tmp_path}/local/{checkpoint_name(3)}", b"other", step=3, batch=3, generation=f"{3:032d}", **A)
    chosen = local_tier.select(str(tmp_path / "local"), str(tmp_path / "remote")).chosen
    assert chosen is not None
    assert chosen.path == f"{tmp_path}/remote/{checkpoint_name(3)}"


def test_nothing_is_read_of_a_store_whose_newest_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "local", 3)
    put(tmp_path / "remote", 2, 3)
    read: list[str] = []
    read_digest = Storage.read_digest

    def counted(self: Storage, path: str, size_bytes: int) -> str:
        read.append(path)
        return read_digest(self, path, size_bytes)

    monkeypatch.setattr(Storage, "read_digest", counted)
    local_tier.select(str(tmp_path / "local"), str(tmp_path / "remote"))
    assert read == [f"{tmp_path}/local/{checkpoint_name(3)}"]


def test_why_newer_ones_were_passed_over(tmp_path: Path) -> None:
    put(tmp_path / "local", (5, {}, "data"), (6, {}, "cut"))
    put(tmp_path / "remote", 4, (7, {}, "data"))
    selection = local_tier.select(str(tmp_path / "local"), str(tmp_path / "remote"))
    passed_over = {os.path.relpath(path, tmp_path): reason for path, reason in selection.passed_over}
    assert sorted(passed_over) == [
        f"local/{checkpoint_name(5)}", f"local/{checkpoint_name(6)}", f"remote/{checkpoint_name(7)}"
    ]  # fmt: skip
