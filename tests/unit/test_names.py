from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ft import _names
from lightning_ft._names import IN_SIGHT, checkpoint_name, likely_newest, next_name

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
    ("url", "shown"),
    [
        ("ftp://user:secret@host/run", "ftp://user:***@host/run"),
        ("s3://key:sec/ret@bucket", "s3://key:sec/ret@bucket"),  # a colon in a key
        ("https://:secret@host:80/a@b", "https://:***@host:80/a@b"),
        ("abfss://container@account.dfs.core.windows.net/run", "abfss://container@account.dfs.core.windows.net/run"),
        ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
        ("/runs/user:x@y", "/runs/user:x@y"),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert _names.without_password(url) == shown


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


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[int, set[int]]]:
    """Saves in order: how far training went back before each, and which of the older ones are deleted after it."""
    return draw(st.lists(st.tuples(st.integers(0, 12), st.sets(st.integers(0, 30), max_size=3)), max_size=40))


@given(histories(), st.integers(1, 3))
def test_the_newest_is_always_among_the_likely_ones(history: list[tuple[int, set[int]]], interval: int) -> None:
    """Whatever was gone back to and deleted before it, also when nothing but names is known."""
    names: list[str] = []  # in the order of their saves
    step = 0
    for back, deleted in history:
        step = max(1, step + interval - (back if back > 6 else 0))
        name = next_name(step, names)
        assert name not in names
        names.append(name)
        assert name in likely_newest(names, IN_SIGHT)
        names = [kept for place, kept in enumerate(names) if place not in deleted or kept == name]
        assert name in likely_newest(names, IN_SIGHT)


def test_names_are_plain_as_long_as_training_goes_on() -> None:
    names: list[str] = []
    for step in range(10, 200, 10):
        names.append(next_name(step, names))
    assert names == [checkpoint_name(step) for step in range(10, 200, 10)]


def test_going_far_back_makes_a_version() -> None:
    names = [checkpoint_name(step) for step in range(10, 200, 10)]
    assert next_name(95, names) == checkpoint_name(95, 1)
    assert next_name(105, [*names, checkpoint_name(95, 1)]) == checkpoint_name(105, 1)
    assert next_name(185, names) == checkpoint_name(185)  # the last but one: in sight without
