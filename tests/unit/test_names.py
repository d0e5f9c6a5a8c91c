from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ft import _names

HEX = "0123456789abcdef"


@pytest.mark.parametrize(
    ("step", "version", "name"),
    [
        (0, 0, "step=00000000.ckpt"),
        (1000, 0, "step=00001000.ckpt"),
        (1000, 1, "step=00001000-v1.ckpt"),
        (123456789, 0, "step=123456789.ckpt"),
        (123456789, 12, "step=123456789-v12.ckpt"),
    ],
    ids=["zero", "plain", "version", "nine-digits", "nine-digits-version"],
)
def test_checkpoint_name(step: int, version: int, name: str) -> None:
    assert _names.checkpoint_name(step, version) == name
    assert _names.parse_checkpoint_name(name) == (step, version)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "last.ckpt",
        "step=1000.ckpt",
        "step=00001000",
        "step=00001000.ckpt.tmp",
        "step=00001000.ckpt\n",
        "xstep=00001000.ckpt",
        "step=000001000.ckpt",
        "step=00001000-v0.ckpt",
        "step=00001000-v01.ckpt",
        "step=00001000-v.ckpt",
        "step=-0001000.ckpt",
        "step=\u0660\u0660\u0660\u0660\u0661\u0660\u0660\u0660.ckpt",
        "epoch=1-step=00001000.ckpt",
    ],
)
def test_names_that_are_not_ours(name: str) -> None:
    assert _names.parse_checkpoint_name(name) is None


@given(st.integers(0, 10**12), st.integers(0, 100))
def test_checkpoint_names_come_back(step: int, version: int) -> None:
    assert _names.parse_checkpoint_name(_names.checkpoint_name(step, version)) == (step, version)


@pytest.mark.parametrize("name", ["step=00001000.ckpt", "last.ckpt", "a.b c-.attempt"])
def test_hidden_names_come_back(name: str) -> None:
    attempt, deleted = _names.attempt_name(name, HEX), _names.deleted_name(name, HEX)
    assert attempt.startswith(".")
    assert deleted.startswith(".")
    assert _names.parse_leftover(attempt) == _names.Leftover(name, HEX, "attempt")
    assert _names.parse_leftover(deleted) == _names.Leftover(name, HEX, "deleted")
    assert _names.parse_leftover(_names.probe_name(HEX)) == _names.Leftover("", HEX, "probe")


@pytest.mark.parametrize(
    "name",
    [
        "step=00001000.ckpt",
        f"a.ckpt.{HEX}.attempt",
        f".a.ckpt.{HEX[:-1]}.attempt",
        f".a.ckpt.{HEX.upper()}.attempt",
        f".a.ckpt.{HEX}.tmp",
        f".a.ckpt.{HEX}.attempt~",
        f"..{HEX}.attempt",
        ".attempt",
        ".lightning_ft.lock",
        ".nfs0000000000000001",
    ],
)
def test_hidden_names_that_are_not_ours(name: str) -> None:
    assert _names.parse_leftover(name) is None


@pytest.mark.parametrize(
    ("path", "dirpath", "name"),
    [
        ("/a/b.ckpt", "/a", "b.ckpt"),
        ("/b.ckpt", "/", "b.ckpt"),
        ("a/b.ckpt", "a", "b.ckpt"),
        ("b.ckpt", "", "b.ckpt"),
        ("s3://bucket/run/b.ckpt", "s3://bucket/run", "b.ckpt"),
        ("s3://bucket/b.ckpt", "s3://bucket", "b.ckpt"),
        ("memory://b.ckpt", "memory://", "b.ckpt"),
        ("memory://run/b.ckpt", "memory://run", "b.ckpt"),
    ],
)
def test_split_and_join(path: str, dirpath: str, name: str) -> None:
    assert _names.split(path) == (dirpath, name)
    assert _names.join(dirpath, name) == path


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/a/b/", "/a/b"),
        ("/a/../b", "/b"),
        ("/", "/"),
        ("run", os.path.join(os.getcwd(), "run")),
        ("~/run", os.path.join(os.path.expanduser("~"), "run")),
        (Path("/a/b"), "/a/b"),
        ("file:///a/b", "/a/b"),
        ("local:///a/b", "/a/b"),
        (Path("file:///a/b"), "/a/b"),
        ("s3://bucket/run", "s3://bucket/run"),
        ("s3://bucket/run/", "s3://bucket/run"),
        ("s3://bucket", "s3://bucket"),
        ("S3://Bucket/Run", "s3://Bucket/Run"),
        ("s3://bucket/a//b", "s3://bucket/a//b"),
        (Path("s3://bucket/run"), "s3://bucket/run"),
        ("memory://", "memory://"),
        ("memory://run/", "memory://run"),
        (Path("memory://run"), "memory://run"),
        ("simplecache::s3://bucket/run", "simplecache::s3://bucket/run"),
        ("step:/1", os.path.join(os.getcwd(), "step:/1")),
    ],
    ids=str,
)
def test_normalise(path: str | Path, expected: str) -> None:
    assert _names.normalise(path) == expected
    assert _names.normalise(expected) == expected


@pytest.mark.parametrize(
    ("path", "local"),
    [("/a", True), ("C:/a", True), ("s3://b/a", False), ("memory://", False), ("simplecache::s3://b", False)],
)
def test_is_local(path: str, local: bool) -> None:
    assert _names.is_local(path) is local
