"""How this package reaches into Lightning's loops: where its hooks end, and the counters it keeps.

Lightning has no hook at the end of a step. `on_train_batch_end` comes before the module's own hook of that name,
before a due validation, and before the counters and step-wise plateau schedulers move on, so a checkpoint made there
lacks them. These hooks stand around the loops' own methods instead (2.5.5 to 2.6.x):

=================  =====================================  ==================================================
hook               around                                 what is true then
=================  =====================================  ==================================================
before_setup_data  before ``fit_loop.setup_data``         loaders may be made now
making_loaders     around it                              the user's code that makes them runs
after_setup_data   after it                               they are made
before_epoch       before ``fit_loop.on_advance_start``   everything is restored; nothing of the epoch ran
epoch_runs         after ``epoch_loop.on_run_start``      the first batch is about to be asked for
after_batch        after ``*_optimization.run``            forward, backward and optimizer step are over
after_step         after ``epoch_loop.on_advance_end``    the step, its hooks and its validation are over
leaves_epoch       before ``fit_loop.on_advance_end``      no further batch of the epoch is trained
after_epoch        after ``fit_loop.on_advance_end``      the epoch, its hooks and its schedulers are over
training_over      before ``fit_loop.on_run_end``         no further batch is trained; hooks of the end come next
=================  =====================================  ==================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.loop import _Loop
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_ft._data import elastic
from lightning_ft.state import Progress

_ABSENT = object()


class Hooks(Protocol):
    """What is called at the points of the table above, on all ranks, in the main thread."""

    def before_setup_data(self) -> None: ...
    def making_loaders(self) -> AbstractContextManager[None]: ...
    def after_setup_data(self) -> None: ...
    def before_epoch(self) -> None: ...
    def epoch_runs(self) -> None: ...
    def after_batch(self) -> None: ...
    def after_step(self) -> None: ...
    def leaves_epoch(self) -> bool: ...
    def after_epoch(self) -> None: ...
    def training_over(self) -> None: ...


def install(trainer: pl.Trainer, hooks: Hooks) -> Callable[[], None]:
    """`hooks` are called until the returned function is."""
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    undo = [
        around(
            fit_loop,
            "setup_data",
            before=hooks.before_setup_data,
            inside=hooks.making_loaders,
            after=hooks.after_setup_data,
        ),
        around(fit_loop, "on_advance_start", before=hooks.before_epoch),
        around(epoch_loop, "on_run_start", after=hooks.epoch_runs),
        around(epoch_loop.automatic_optimization, "run", after=hooks.after_batch),
        around(epoch_loop.manual_optimization, "run", after=hooks.after_batch),
        around(epoch_loop, "on_advance_end", after=hooks.after_step),
        around(fit_loop, "on_advance_end", before=hooks.after_batch),  # of an epoch that a batch not trained has ended
        around(fit_loop, "on_advance_end", before=partial(_uncount_end_of_data, trainer), after=hooks.after_epoch),
        around(fit_loop, "on_advance_end", before=partial(_leave_epoch, hooks)),
        around(fit_loop, "on_run_end", before=hooks.training_over),
    ]

    def remove() -> None:
        for step in reversed(undo):
            step()

    return remove


def around(
    target: Any,
    name: str,
    *,
    before: Callable[[], None] | None = None,
    inside: Callable[[], AbstractContextManager[None]] = nullcontext,
    after: Callable[[], None] | None = None,
) -> Callable[[], None]:
    """`target.name` of this one object runs after `before`, within `inside` and before `after`.

    Until the returned function is called.
    """
    original = getattr(target, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        with inside():
            result = original(*args, **kwargs)
        if after is not None:
            after()
        return result

    return replaced(target, name, method)


def replaced(target: Any, name: str, value: Any) -> Callable[[], None]:
    """`target.name` is `value` for this one object, until the returned function is called."""
    own = vars(target)
    before = own.get(name, _ABSENT)
    own[name] = value

    def undo() -> None:
        if before is _ABSENT:
            own.pop(name, None)
        else:
            own[name] = before

    return undo


def before_backward(trainer: pl.Trainer, call: Callable[[Tensor], None]) -> Callable[[], None]:
    """`call` gets every loss before it is differentiated, until the returned function is called.

    As it is: what Lightning's own hook of that kind gets is multiplied by the scale of a `GradScaler`.
    """
    strategy = trainer.strategy
    original = strategy.backward

    def backward(closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        call(closure_loss)
        return original(closure_loss, *args, **kwargs)

    return replaced(strategy, "backward", backward)


def callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """The callbacks of the trainer."""
    return trainer.callbacks  # type: ignore[attr-defined,no-any-return]  # set outside of its class


def datamodule(trainer: pl.Trainer) -> pl.LightningDataModule | None:
    """The datamodule of the trainer, if there is one."""
    return trainer.datamodule  # type: ignore[attr-defined,no-any-return]  # set outside of its class


def progress(trainer: pl.Trainer) -> Progress:
    """The counters of the run, as they stand."""
    fit_loop = trainer.fit_loop
    batches: Any = fit_loop.epoch_loop.batch_progress  # its counters are declared as a base class of what they are
    epochs: Any = fit_loop.epoch_progress
    manual = not trainer.lightning_module.automatic_optimization
    return Progress(
        # In manual optimization Lightning counts every optimizer's step: two per batch for a GAN.
        step=batches.total.processed if manual else trainer.global_step,
        batch=batches.total.processed,
        epochs=epochs.total.processed,
        last_batch=bool(batches.is_last_batch) or batches.current.ready >= trainer.num_training_batches,
        epoch_over=0 < epochs.current.started == epochs.current.processed,
    )


def collective_timeout(trainer: pl.Trainer) -> timedelta | None:
    """How long a collective of the training may take (``DDPStrategy(timeout=...)``); None if nobody said."""
    timeout = getattr(trainer.strategy, "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def data_rank(trainer: pl.Trainer) -> tuple[int, int]:
    """Which rank this is of how many that train on different data: those of a tensor-parallel group are one."""
    kwargs = trainer.distributed_sampler_kwargs
    return (0, 1) if kwargs is None else (kwargs["rank"], kwargs["num_replicas"])


def batches_done(trainer: pl.Trainer, counts: list[tuple[int, int]], cycled: list[bool]) -> int:
    """How many batches of the epoch count as trained.

    Args:
        trainer: The trainer, its loaders made.
        counts: Per loader, how many batches a whole pass has and how many are left.
        cycled: Per loader, whether it has begun again in this epoch.
    """
    combined: Any = trainer.fit_loop._combined_loader
    whole, left = zip(*counts, strict=True)
    of_epoch = elastic.epoch_batches(combined._mode, whole, [False] * len(whole))
    return of_epoch - elastic.epoch_batches(combined._mode, left, cycled)


def set_batches_done(trainer: pl.Trainer, done: int) -> None:
    """Of the epoch, so many batches count as trained; what counts over the whole run stays."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    shift = done - batches.current.processed
    for name in ("ready", "started", "processed", "completed"):
        setattr(batches.current, name, getattr(batches.current, name) + shift)
    batches.is_last_batch = False


def half_done(trainer: pl.Trainer) -> bool:
    """Whether a batch is being trained or an epoch is being opened: counters, gradients and weights do not agree."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    epochs: Any = trainer.fit_loop.epoch_progress.total
    return bool(batches.ready != batches.processed or epochs.ready != epochs.started)


def stop_now(trainer: pl.Trainer) -> Callable[[], None]:
    """Training ends at this boundary, whatever `min_epochs` and `min_steps` ask for, until the returned function."""
    fit_loop: Any = trainer.fit_loop
    trainer.should_stop = True
    undo = [replaced(fit_loop, "min_epochs", 0), replaced(fit_loop.epoch_loop, "min_steps", None)]

    def remove() -> None:
        for step in undo:
            step()

    return remove


def end_validation(trainer: pl.Trainer) -> None:
    """After a validation that an exception has ended, training goes on; its results are nobody's."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    trainer._logger_connector.epoch_end_reached()
    loop._logged_outputs = []
    loop._results.reset()
    loop._on_evaluation_model_train()


def finish_step(trainer: pl.Trainer) -> None:
    """What is left of the step trained last is done: the validation, whatever the time, and what follows it."""
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    undo = replaced(epoch_loop, "_should_check_val_fx", lambda data_fetcher: True)
    validation = around(epoch_loop.val_loop, "run", before=undo)
    try:
        epoch_loop.on_advance_end(trainer.fit_loop._data_fetcher)
    finally:
        validation()
        undo()
    epoch_loop.on_iteration_done()


def leave_out_signal_broadcast(trainer: pl.Trainer) -> Callable[[], None]:
    """Lightning does not tell all ranks of a SIGTERM on rank 0 before every batch, until the returned function.

    That is a collective on the group of the training, and on a GPU a synchronisation, in each step (from 2.6 on).
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    if not hasattr(epoch_loop, "_broadcast_sigterm_tensor"):
        return lambda: None
    return replaced(epoch_loop, "_broadcast_sigterm_tensor", lambda: None)


def update_no_more_schedulers(trainer: pl.Trainer) -> Callable[[], None]:
    """Plateau schedulers, whose metric may be one that is missing, stay as they are until the returned function."""
    return replaced(trainer.fit_loop.epoch_loop, "update_lr_schedulers", lambda *args, **kwargs: None)


def _leave_epoch(hooks: Hooks) -> None:
    """If they say so, training ends without the end of its epoch: hooks, metrics and schedulers of that."""
    if hooks.leaves_epoch():
        raise StopIteration  # what the loop itself takes for the end of training


def _uncount_end_of_data(trainer: pl.Trainer) -> None:
    """A `training_step` that found the end of the data, where a batch was to be, was no step."""
    if takes_iterator(trainer):
        counters: Any = trainer.fit_loop.epoch_loop.batch_progress
        for count in (counters.total, counters.current):
            count.ready = count.started = count.processed


def takes_iterator(trainer: pl.Trainer) -> bool:
    """Whether `training_step` takes batches from an iterator by itself (``training_step(self, dataloader_iter)``)."""
    return isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher)


def logged_step(trainer: pl.Trainer) -> int:
    """The step under which Lightning would log something now."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def stops_here(trainer: pl.Trainer) -> bool:
    """Whether no further batch will be trained, for a reason that is not the end of the epoch."""
    epoch_loop = trainer.fit_loop.epoch_loop
    limit_reached = epoch_loop.max_steps != -1 and trainer.global_step >= epoch_loop.max_steps
    return bool(limit_reached or (trainer.should_stop and trainer.fit_loop._can_stop_early))


def run_is_over(trainer: pl.Trainer) -> bool:
    """Whether a restart from here would have nothing to train, whatever else is asked for."""
    epoch_loop = trainer.fit_loop.epoch_loop
    limit_reached = epoch_loop.max_steps != -1 and trainer.global_step >= epoch_loop.max_steps
    return bool(limit_reached or (stopped_early(trainer) and trainer.fit_loop._can_stop_early))


def planned_steps(trainer: pl.Trainer) -> int | None:
    """How many steps, as `progress` counts them, the run has at most; None if nobody knows."""
    limits = [trainer.max_steps] if trainer.max_steps != -1 else []
    if trainer.max_epochs not in (None, -1) and trainer.num_training_batches != float("inf"):
        limits.append(int(trainer.max_epochs or 0) * steps_per_epoch(trainer))
    return min(limits, default=None)


def planned_epochs(trainer: pl.Trainer) -> int | None:
    """How many whole epochs the run has at most; None if nobody knows."""
    limits = [trainer.max_epochs] if trainer.max_epochs not in (None, -1) else []
    if trainer.max_steps != -1 and trainer.num_training_batches != float("inf"):
        limits.append(trainer.max_steps // max(1, steps_per_epoch(trainer)))
    return min((limit for limit in limits if limit is not None), default=None)


def steps_per_epoch(trainer: pl.Trainer) -> int:
    """How many steps, as `progress` counts them, an epoch of known length has."""
    manual = not trainer.lightning_module.automatic_optimization
    return math.ceil(trainer.num_training_batches / (1 if manual else trainer.accumulate_grad_batches))


def accumulating(trainer: pl.Trainer) -> bool:
    """Whether gradients of an unfinished accumulation window are held."""
    return bool(trainer.lightning_module.automatic_optimization and trainer.fit_loop._should_accumulate())


def stopped_early(trainer: pl.Trainer) -> bool:
    """Whether an `EarlyStopping` decided that the run is over, so that a restart has nothing left to do.

    Whatever else sets `should_stop` (a timer, a signal, the user's own code before a preemption) ends this job and
    not the run.
    """
    stoppers = [c for c in callbacks(trainer) if isinstance(c, EarlyStopping)]
    return trainer.should_stop and any(c.stopped_epoch or c.wait_count >= c.patience for c in stoppers)


def begin_next_epoch(fit_loop_state: dict[str, Any]) -> None:
    """`fit_loop_state` (Lightning's own) says that the next epoch is about to begin.

    At the end of an epoch the counters within it still say "at the last batch": plain Lightning resumes such a file
    with an epoch that ends before it began, when `max_steps` is set.
    """
    for name in ("epoch_loop.batch_progress", "epoch_loop.scheduler_progress"):
        _zero(fit_loop_state[name]["current"])
    fit_loop_state["epoch_loop.batch_progress"]["is_last_batch"] = False
    optimizer = fit_loop_state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    _zero(optimizer["step"]["current"])
    _zero(optimizer["zero_grad"]["current"])


def _zero(counters: dict[str, int]) -> None:
    counters.update(dict.fromkeys(counters, 0))


def reloads(trainer: pl.Trainer) -> dict[str, int | None]:
    """The epochs in which the loaders were last made (`Trainer(reload_dataloaders_every_n_epochs=...)`)."""
    fit_loop = trainer.fit_loop
    made = {
        "train": fit_loop._last_train_dl_reload_epoch,
        "val": fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch,
    }
    return {name: None if math.isinf(epoch) else int(epoch) for name, epoch in made.items()}


def reload_due(trainer: pl.Trainer, epoch: int, made: int | None) -> bool:
    """Whether train dataloaders made in epoch `made` are made anew when `epoch` begins."""
    every = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    return bool(every and made is not None and epoch - made >= every)


def restore_reloads(trainer: pl.Trainer, saved: dict[str, int | None]) -> None:
    """Loaders are made anew in the epochs in which the uninterrupted run would make them."""
    every = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    train = saved["train"]
    # Due right now: the loaders were made a moment ago, for this start.
    if every and train is not None and not reload_due(trainer, trainer.current_epoch, train):
        trainer.fit_loop._last_train_dl_reload_epoch = train
    if every and saved["val"] is not None:
        trainer.fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = saved["val"]


def count_epoch(trainer: pl.Trainer) -> None:
    """The epoch that runs is counted as begun.

    Lightning leaves that out when it restarts from a checkpoint that it made itself at the last batch of an epoch, and
    from what is saved in such an epoch a restart would begin it once more.
    """
    epochs: Any = trainer.fit_loop.epoch_progress  # declared without `processed`, which it has
    if epochs.current.ready == epochs.current.processed:
        epochs.increment_ready()
        epochs.increment_started()


def restore_accumulation(trainer: pl.Trainer, batches: int) -> None:
    """The accumulation window is the scheduled one: its callback sets it when an epoch starts, not in its middle."""
    if any(isinstance(c, GradientAccumulationScheduler) for c in callbacks(trainer)):
        trainer.accumulate_grad_batches = batches


def continue_without_restart(trainer: pl.Trainer) -> None:
    """The loops take the next batch as if the run had never stopped.

    For checkpoints made at our boundaries, where nothing is half done: Lightning's own restart logic would look for
    a validation to skip or to finish, count a step twice for the loggers, and leave out a plateau scheduler.
    """
    _Loop.restarting.fset(trainer.fit_loop, False)  # type: ignore[attr-defined]


def inexact_reductions(trainer: pl.Trainer, world_size: int) -> list[str]:
    """A note where the first step of a process adds gradients up in another order than later ones, in words.

    `DistributedDataParallel` lays out its gradient buckets anew after the first backward of a process
    (``Reducer::rebuild_buckets``). Sums of two ranks do not depend on the layout; with more, the last bits may.
    """
    model = trainer.strategy.model
    if world_size <= 2 or not isinstance(model, DistributedDataParallel) or model.find_unused_parameters:
        return []
    return [
        f"DDP of {world_size} ranks adds up the gradients of a process's first step in another order: this restart may "
        "differ from the uninterrupted run in last bits (DDPStrategy(find_unused_parameters=True) keeps one order)"
    ]


def mark_consumed(trainer: pl.Trainer, cycled: list[bool]) -> None:
    """A combined loader numbers its batches on, and if it cycles shorter members, knows which have been through."""
    iterator: Any = getattr(trainer.fit_loop._combined_loader, "_iterator", None)
    if hasattr(iterator, "_idx"):
        iterator._idx = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    if hasattr(iterator, "_consumed"):
        iterator._consumed = list(cycled)


def batches_ahead(trainer: pl.Trainer) -> int:
    """Batches fetched and not yet trained: Lightning fetches one ahead where it knows no length."""
    return len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))
