from __future__ import annotations

from typing import Any

import pytest
from _archives import info
from hypothesis import given
from hypothesis import strategies as st

from lightning_ft._names import checkpoint_name
from lightning_ft.errors import ConfigurationError
from lightning_ft.manifest import CheckpointInfo
from lightning_ft.retention import Retention, plan


def ours(step: int, problem: str | None = None, **fields: Any) -> CheckpointInfo:
    return info(f"/run/{checkpoint_name(step)}", problem, step=step, batch=step, **fields)


def deleted(
    infos: list[CheckpointInfo], retention: Retention, newest: str, pinned: frozenset[str] = frozenset()
) -> list[int]:
    decisions = plan(infos, retention, "run", newest, pinned)
    assert sorted(decision.path for decision in decisions) == sorted(item.path for item in infos)
    assert all(decision.why for decision in decisions)
    return sorted(int(decision.path[-13:-5]) for decision in decisions if not decision.keep)


FIVE = [ours(step) for step in (10, 20, 30, 40, 50)]
NEWEST = FIVE[-1].path


@pytest.mark.parametrize(
    ("retention", "pinned", "expected"),
    [
        (Retention(), [], [10, 20]),
        (Retention(1), [], [10, 20, 30, 40]),
        (Retention(5), [], []),
        (Retention(9), [], []),
        (Retention(-1), [], []),
        (Retention(1), [10, 30], [20, 40]),
        (Retention(1, 20), [], [10, 30]),
        (Retention(1, 20), [10], [30]),
        (Retention(2, 7), [], []),
        (Retention(1, 25), [], [10, 20, 40]),
    ],
    ids=[
        "default",
        "one",
        "all-five",
        "more-than-there",
        "keep-all",
        "pinned",
        "every-20",
        "both",
        "every-one-passes-a-multiple-of-7",
        "first-after-25",
    ],
)
def test_what_is_deleted(retention: Retention, pinned: list[int], expected: list[int]) -> None:
    paths = frozenset(f"/run/{checkpoint_name(step)}" for step in pinned)
    assert deleted(FIVE, retention, NEWEST, paths) == expected
    assert deleted(FIVE[::-1], retention, NEWEST, paths) == expected


@pytest.mark.parametrize(
    ("infos", "newest", "expected"),
    [
        (FIVE, "/run/step=00000060.ckpt", []),
        ([*FIVE, ours(60, "truncated")], "/run/step=00000060.ckpt", []),
        ([*FIVE, ours(60, "truncated")], NEWEST, [10, 20, 30, 40]),
        ([ours(5, "data is damaged"), *FIVE], NEWEST, [10, 20, 30, 40]),
        ([ours(5, run_id="other"), *FIVE], NEWEST, [10, 20, 30, 40]),
        ([ours(60, run_id="other"), *FIVE], NEWEST, [10, 20, 30, 40]),
        ([info("/run/last-00000001.ckpt", "no manifest"), *FIVE], NEWEST, [10, 20, 30, 40]),
        ([info("/run/best-00000005.ckpt", step=5, batch=5), *FIVE], NEWEST, [10, 20, 30, 40]),
        ([*FIVE, ours(15, start=2)], "/run/step=00000015.ckpt", [10, 20, 30, 40, 50]),
        ([*FIVE, ours(15, start=2)], NEWEST, [10, 20, 30, 40]),
        ([], NEWEST, []),
    ],
    ids=[
        "newest-absent", "newest-damaged", "a-later-one-damaged", "old-damaged", "old-of-other-run",
        "new-of-other-run", "foreign", "name-of-a-user", "later-start-wins", "newest-is-not-the-latest",
        "nothing",
    ],
)  # fmt: skip
def test_what_is_never_touched(infos: list[CheckpointInfo], newest: str, expected: list[int]) -> None:
    assert deleted(infos, Retention(1), newest) == expected


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"keep_last": 0}, "at least 1"),
        ({"keep_last": -2}, "at least 1"),
        ({"keep_last": True}, "not bool"),
        ({"keep_last": 1.0}, "not float"),
        ({"keep_last": None}, "not NoneType"),
        ({"keep_every_n_train_steps": 0}, "at least 1"),
        ({"keep_every_n_train_steps": True}, "not bool"),
        ({"keep_every_n_train_steps": "5"}, "not str"),
    ],
)
def test_refused_with_field_value_and_reason(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why) as caught:
        Retention(**fields)
    assert next(f"{name}={value!r}" for name, value in fields.items()) in str(caught.value)


INFOS = st.lists(
    st.builds(
        lambda step, start, problem, run_id: ours(step, problem, start=start, run_id=run_id),
        step=st.integers(0, 60),
        start=st.integers(1, 3),
        problem=st.sampled_from([None, None, None, "truncated"]),
        run_id=st.sampled_from(["run", "run", "run", "other"]),
    ),
    max_size=12,
    unique_by=lambda item: item.path,
)


@given(
    infos=INFOS,
    keep_last=st.one_of(st.just(-1), st.integers(1, 6)),
    every=st.one_of(st.none(), st.integers(1, 20)),
    newest=st.integers(0, 60),
    pinned=st.frozensets(st.integers(0, 60)),
)
def test_whatever_is_there(
    infos: list[CheckpointInfo], keep_last: int, every: int | None, newest: int, pinned: frozenset[int]
) -> None:
    newest_path = f"/run/{checkpoint_name(newest)}"
    pinned_paths = frozenset(f"/run/{checkpoint_name(step)}" for step in pinned)
    decisions = plan(infos, Retention(keep_last, every), "run", newest_path, pinned_paths)
    kept = {decision.path for decision in decisions if decision.keep}
    gone = {decision.path for decision in decisions if not decision.keep}
    mine = [item for item in infos if item.manifest is not None and item.manifest.run_id == "run"]
    good = [item.path for item in sorted(mine, key=lambda item: item.order, reverse=True)]
    assert newest_path not in gone
    assert gone.isdisjoint(pinned_paths)
    assert gone <= set(good)
    assert len(kept & set(good)) >= min(keep_last if keep_last > 0 else len(good), len(good))
    latest = {item.order for item in mine}
    if latest:
        assert max(latest) in {item.order for item in mine if item.path in kept}
    known_good = any(item.path == newest_path and item.problem is None for item in infos)
    if not known_good:
        assert gone == set()
    elif every is None and keep_last > 0:
        # Nothing is kept without a reason: the disk must not fill.
        assert len(kept & set(good)) <= keep_last + len(pinned_paths & set(good)) + 1
