"""Going back, within a fit, to an older checkpoint of it: restored by the code of a restart, and trained on from there.

What a fresh process has by being fresh is seen to here: no gradients, no partial metrics, no scaler within a step, new
iterators over the data. `on_train_start` and its like do not run again: training has not ended. What callbacks and
modules keep outside of their `state_dict` stays as it is.

Private to Lightning (2.5.5 to 2.6): the loop of a fit, its `run` and `on_run_start`, its loader and the fetcher that
iterates over it; the connectors that restore a checkpoint and hold what was logged; the time that a `Timer` counts from
and the step that a `ModelCheckpoint` has saved last, neither of which a state can set back. `Trainer.fit` is the only
public way to load a checkpoint, and cannot be called from within itself. Private to torch (2.13): the state of a step
that a `GradScaler` has begun and not ended.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint, Timer

from lightning_ft._fit import loops
from lightning_ft._fit.watch import Fit
from lightning_ft._restart.consistent import compare_next_load
from lightning_ft._state.metrics import find_metrics

_log = logging.getLogger(__name__)


class GoBack(BaseException):
    """Unwinds the loops of Lightning; on all ranks alike. No `Exception`, so that no step of a user's swallows it.

    Args:
        path: Where training goes on from.
        leave_out: Batches that will not be trained.
    """

    def __init__(self, path: str, leave_out: Sequence[int]) -> None:
        super().__init__(path)
        self.path = path
        self.leave_out = tuple(leave_out)


def install(fit: Fit, restored: Callable[[], None]) -> Callable[[], None]:
    """A `GoBack` raised within training is followed, until the returned function is called.

    Args:
        fit: The fit.
        restored: Called when everything is as it was at the checkpoint, before training goes on.
    """
    fit_loop = fit.trainer.fit_loop
    run = fit_loop.run

    def run_and_go_back() -> None:
        asked = _followed(run)
        while asked is not None:
            _restore(fit, asked)
            restored()
            undo = loops.replaced(fit_loop, "on_run_start", lambda: _on_rerun_start(fit_loop))
            try:
                asked = _followed(run)
            finally:
                undo()

    return loops.replaced(fit_loop, "run", run_and_go_back)


def _followed(run: Callable[[], None]) -> GoBack | None:
    try:
        run()
    except GoBack as asked:
        return asked.with_traceback(None)  # its frames hold the batch and the graph
    return None


def _on_rerun_start(fit_loop: Any) -> None:
    """What of `_FitLoop.on_run_start` is about counters."""
    if not fit_loop._iteration_based_training():
        fit_loop.epoch_progress.current.completed = fit_loop.epoch_progress.current.processed


def _restore(fit: Fit, asked: GoBack) -> None:
    """Everything is as a restart from the checkpoint would have it. Ranks: all. Blocks on: reading it."""
    trainer = fit.trainer
    module = trainer.lightning_module
    fit.saves.settle("training goes back to an older checkpoint")
    fit.go_back()
    fit.saves.go_back(asked.path)
    module.zero_grad(set_to_none=True)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        scaler._per_optimizer_states.clear()  # it had unscaled the gradients of the step that was not taken
    trainer._logger_connector.reset_results()
    trainer._logger_connector.reset_metrics()
    for _, metric in find_metrics(trainer, module.named_modules()):
        metric.reset()
    trainer.should_stop = False
    trainer.training = True
    timers = [(c, c._offset) for c in loops.callbacks(trainer) if isinstance(c, Timer)]
    _load(fit, asked.path)
    for timer, offset in timers:
        timer._offset = offset  # the time has passed all the same
    for callback in loops.callbacks(trainer):
        if isinstance(callback, ModelCheckpoint):
            callback._last_global_step_saved = 0  # what was saved at that step was of another line
    fit.left_out.add(asked.leave_out)
    _renew_iterators(fit)


def _load(fit: Fit, path: str) -> None:
    connector = fit.trainer._checkpoint_connector
    undo = compare_next_load(fit.trainer, fit.ranks)
    options = {}
    takes = inspect.signature(connector._restore_modules_and_callbacks).parameters
    if not fit.strict and "weights_only" in takes:
        options = {"weights_only": False}  # this process has written it
    try:
        connector._restore_modules_and_callbacks(path, **options)
    finally:
        undo()
    connector.restore_training_state()
    connector.resume_end()


def _renew_iterators(fit: Fit) -> None:
    fit_loop = fit.trainer.fit_loop
    fetcher = fit_loop._data_fetcher
    assert fetcher is not None
    if fit.trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
        fetcher.teardown()
        fit_loop._combined_loader = None  # those of the epoch gone back to may be others: `setup_data` asks for them
        fit_loop.setup_data()
    else:
        iter(fetcher)
