"""What a restart is compared with: the facts a run depends on, and the report of what came back and what did not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl

from lightning_ft._data.elastic import Change, GlobalBatch
from lightning_ft._fit import loops
from lightning_ft.errors import RestoreError

_MISSING = "(nothing)"
# Of these, Lightning makes one out of another when the number of ranks changes; any other sampler it wraps.
_SAMPLERS = ("RandomSampler", "SequentialSampler", "DistributedSampler")


@dataclass
class RestoreReport:
    """What a restart restored and what not, in words; complete before the first step."""

    path: str
    start: str = ""
    """Which start this is, and from what; empty if it is not known."""
    again: str = ""
    """What is done again; empty if nothing is, as far as is known."""
    position: str = ""
    """Where it goes on; empty if it is not known."""
    restored: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What the run has and the checkpoint has not."""
    ignored: list[str] = field(default_factory=list)
    """What the checkpoint has and the run has not."""
    changed: list[str] = field(default_factory=list)
    """What is in both and differs, so that the run cannot be the one that was saved."""
    noted: list[str] = field(default_factory=list)
    """Differences that are mended, or that do not touch the steps to come."""

    @property
    def differences(self) -> list[str]:
        """Everything that makes this run another one than the one saved; with ``strict=True`` an error."""
        return [
            *(f"missing in the checkpoint: {m}" for m in self.missing),
            *(f"left over from the checkpoint: {i}" for i in self.ignored),
            *(f"changed: {c}" for c in self.changed),
        ]

    def render(self) -> str:
        """The report as lines for a log."""
        lines = [
            f"{self.start or f'restored from {self.path}'}: {self.position or ', '.join(self.restored)}{self.again}"
        ]
        lines += self.differences + [f"note: {n}" for n in self.noted]
        return "\n  ".join(lines)

    def raise_if_different(self) -> None:
        """Nothing happens if the run is the one that was saved.

        Raises:
            RestoreError: It is not; the message lists every difference.
        """
        if self.differences:
            listed = "\n  ".join(self.differences)
            raise RestoreError(
                f"this run differs from the one saved in {self.path}:\n  {listed}\nNo step was trained. Start the "
                "unchanged command, or continue knowingly with FaultTolerantCheckpoint(strict=False); with other data "
                "only from a checkpoint of an epoch's end."
            )


def fingerprint(trainer: pl.Trainer, loaders: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Facts on which the steps to come depend, as plain values by name."""
    return {
        "world size": world_size,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "precision": str(trainer.precision),
        "gradient_clip_val": trainer.gradient_clip_val,
        "batches per epoch": _finite(trainer.num_training_batches),
        "optimizers": [type(o).__name__ for o in trainer.optimizers],
        "lr schedulers": [type(c.scheduler).__name__ for c in trainer.lr_scheduler_configs],
        **loaders,
    }


def planned(trainer: pl.Trainer) -> dict[str, Any]:
    """How long the run is meant to be, and when it validates: may change on purpose, and is worth a word then."""
    return {
        "max_steps": trainer.max_steps,
        "max_epochs": trainer.max_epochs,
        "val_check_interval": _plain(trainer.val_check_interval),
        "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
        "limit_val_batches": _plain(trainer.limit_val_batches),
    }


def compare(
    report: RestoreReport,
    saved: dict[str, Any],
    present: dict[str, Any],
    *,
    other_data: bool,
    change: Change | None = None,
) -> None:
    """Differences of two fingerprints are in the report.

    Args:
        report: Of this restart.
        saved: `fingerprint` at the save.
        present: `fingerprint` now.
        other_data: Those of the data are none.
        change: On another number of ranks: what follows from that alone is noted, and so is another global batch. That
            it is kept, by another batch size or ``accumulate_grad_batches``, is no difference.
    """
    kept = change is not None and _same_global_batch(report, saved, present, change)
    for name in {**saved, **present}:
        if other_data and (name.startswith("train dataloader") or name == "batches per epoch"):
            continue
        then, now = saved.get(name, _MISSING), present.get(name, _MISSING)
        if then == now:
            continue
        if name == "world size":
            report.noted.append(f"{name}: {then} when saved, {now} now")
        elif change is None or not _follows(name, str(then), str(now), kept=kept):
            report.changed.append(f"{name}: {then} when saved, {now} now")


def _follows(name: str, then: str, now: str, *, kept: bool) -> bool:
    """Whether a fact is another one because the number of ranks is."""
    if name == "batches per epoch" or (name.startswith("train dataloader") and name.endswith(" batches")):
        return True
    if name.endswith(" sampler"):
        wrapped = "DistributedSamplerWrapper" in (then, now)
        return wrapped or (then in _SAMPLERS and now in _SAMPLERS)
    return kept and (name == "accumulate_grad_batches" or name.endswith(" batch size"))


def _same_global_batch(report: RestoreReport, saved: dict[str, Any], present: dict[str, Any], change: Change) -> bool:
    """Whether a step has as many samples as it had; if not, the report says so, and what would keep it."""
    same = True
    for name in [n for n in present if n.startswith("train dataloader") and n.endswith(" batch size")]:
        then, now = saved.get(name), present[name]
        loader = name.removesuffix(" batch size")
        if not isinstance(then, int) or not isinstance(now, int):
            report.noted.append(f"{loader}: nothing tells whether a step has as many samples as it had")
            same = same and then == now
            continue
        before = GlobalBatch(change.saved, then, saved["accumulate_grad_batches"])
        after = GlobalBatch(change.present, now, present["accumulate_grad_batches"])
        if before.samples != after.samples:
            same = False
            report.noted.append(
                f"{loader}: {before} when saved, {after} now: learning rates and schedules made for one may not "
                f"fit the other; {after.keeping(before)}"
            )
    return same


def compare_plan(report: RestoreReport, saved: dict[str, Any], present: dict[str, Any]) -> None:
    """What is planned otherwise than when it was saved is noted in the report."""
    for name, now in present.items():
        if name not in saved or saved[name] == now:  # the first checkpoints did not say when they validate
            continue
        then = "validations" if "val" in name else "schedules made from it"
        report.noted.append(f"{name} was {saved[name]} and is {now}: {then} are not those of the run that was saved")


def compare_checkpoint(report: RestoreReport, checkpoint: dict[str, Any], trainer: pl.Trainer) -> None:
    """Callbacks and hyper-parameters of Lightning's own part of a checkpoint are compared with those of the run."""
    callbacks = {c.state_key: c for c in loops.callbacks(trainer)}
    for key in checkpoint.get("callbacks", {}):
        if key not in callbacks:
            report.ignored.append(f"state of callback {key}, which this run does not have")
    for key, callback in callbacks.items():
        if key not in checkpoint.get("callbacks", {}) and callback.state_dict():
            report.missing.append(f"state of callback {key}")
    for owner in (trainer.lightning_module, loops.datamodule(trainer)):
        if owner is None or not owner.hparams:
            continue
        saved = checkpoint.get(owner.CHECKPOINT_HYPER_PARAMS_KEY, {})
        present = dict(owner.hparams)
        for name in {**saved, **present}:
            then, now = saved.get(name, _MISSING), present.get(name, _MISSING)
            if not _same(then, now):
                report.changed.append(
                    f"hyper-parameter {name} of {type(owner).__name__}: {then!r} when saved, {now!r} now"
                )


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return bool(a == b) if isinstance(a, (int, float)) and isinstance(b, (int, float)) else False
    try:
        return bool(a == b or (a != a and b != b))  # not-a-number is the same hyper-parameter twice
    except (RuntimeError, ValueError, TypeError):  # arrays and tensors have no single answer
        return repr(a) == repr(b)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float, type(None))) else str(value)  # a span of time is possible


def _finite(value: float) -> int | None:
    return None if value == float("inf") else int(value)
