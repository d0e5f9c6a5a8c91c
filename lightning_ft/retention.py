"""What to keep: a value, and a pure function from a list of checkpoints to a list of decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_ft._names import parse_checkpoint_name
from lightning_ft.errors import ConfigurationError
from lightning_ft.manifest import CheckpointInfo


@dataclass(frozen=True)
class Retention:
    """Keep the newest `keep_last` checkpoints (-1: all), and one per multiple of `keep_every_n_train_steps`.

    Raises:
        ConfigurationError: A value is no whole number, or out of range.
    """

    keep_last: int = 3
    keep_every_n_train_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every_n_train_steps"):
            value = getattr(self, name)
            if value is None and name != "keep_last":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigurationError(f"{name}={value!r}: a whole number is needed, not {type(value).__name__}")
        if self.keep_last < 1 and self.keep_last != -1:
            raise ConfigurationError(f"keep_last={self.keep_last}: at least 1 is needed, or -1 to keep all")
        every = self.keep_every_n_train_steps
        if every is not None and every < 1:
            raise ConfigurationError(f"keep_every_n_train_steps={every}: at least 1 is needed; None switches it off")


@dataclass(frozen=True)
class Decision:
    """What is to happen to one checkpoint, and why."""

    path: str
    keep: bool
    why: str


def plan(
    infos: Sequence[CheckpointInfo],
    retention: Retention,
    run_id: str,
    newest: str,
    pinned: frozenset[str],
    given_up: frozenset[str] = frozenset(),
) -> list[Decision]:
    """One decision per info, newest first; only good checkpoints of this run under our names are deleted.

    Args:
        infos: A fresh listing of the directory.
        retention: The policy.
        run_id: The run whose checkpoints may be deleted.
        newest: Path of the checkpoint committed last. Unless it is there and good, nothing is deleted.
        pinned: Paths that are kept whatever the policy says.
        given_up: Generations from which nothing is to be started any more: they do not count, and go with what is
            older than those that do.
    """
    ordered = sorted(infos, key=lambda info: (info.order, info.path), reverse=True)
    if not any(info.path == newest and info.problem is None and info.manifest is not None for info in infos):
        return [Decision(info.path, True, "the newest checkpoint is not known to be good") for info in ordered]
    ours = [info for info in ordered if untouchable(info, run_id) is None]
    counting = [info.path for info in ours if info.manifest and info.manifest.generation not in given_up]
    kept = counting if retention.keep_last == -1 else counting[: retention.keep_last]
    paths = [info.path for info in ours]
    # All down to the last one that counts, with what lies between.
    last = frozenset(paths[: paths.index(kept[-1]) + 1] if kept else paths)
    milestones = _milestones([info for info in ours if info.path in counting], retention)
    return [_decide(info, retention, run_id, newest, pinned, last, milestones) for info in ordered]


def _milestones(ours: Sequence[CheckpointInfo], retention: Retention) -> frozenset[str]:
    """Checkpoints with which a multiple of `keep_every_n_train_steps` was reached or passed; saves may miss it."""
    every = retention.keep_every_n_train_steps
    if every is None:
        return frozenset()
    found, passed = set(), 0
    for info in reversed(ours):  # oldest first
        assert info.manifest is not None
        if info.manifest.step // every > passed:
            passed = info.manifest.step // every
            found.add(info.path)
    return frozenset(found)


def untouchable(info: CheckpointInfo, run_id: str) -> str | None:
    """Why a checkpoint is never deleted, whatever the policy; None if it may be."""
    if info.problem is not None:
        # It may be another tool's, or a newer version's, or the only copy of something that can be repaired.
        return f"never deletes what it cannot read: {info.problem}"
    if info.manifest is None:
        return "written by another tool"
    if info.manifest.run_id != run_id:
        return f"belongs to run {info.manifest.run_id}" if info.manifest.run_id else "belongs to no run"
    if parse_checkpoint_name(info.name) is None:
        # Saved by the user, or by a ModelCheckpoint beside us that rotates its own files.
        return "its name was given by somebody else"
    return None


def _decide(
    info: CheckpointInfo,
    retention: Retention,
    run_id: str,
    newest: str,
    pinned: frozenset[str],
    last: frozenset[str],
    milestones: frozenset[str],
) -> Decision:
    """The first rule that keeps the checkpoint, or its deletion."""
    why_not = untouchable(info, run_id)
    if why_not is not None or info.manifest is None:
        return Decision(info.path, True, why_not or "written by another tool")
    if info.path == newest:
        return Decision(info.path, True, "the newest")
    if info.path in last:
        return Decision(info.path, True, f"among the newest {len(last)}")
    if info.path in pinned:
        return Decision(info.path, True, "pinned")
    if info.path in milestones:
        return Decision(info.path, True, f"the first at or after a multiple of {retention.keep_every_n_train_steps}")
    return Decision(info.path, False, f"older than the newest {len(last)}")
