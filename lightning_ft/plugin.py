"""The `CheckpointIO` through which every checkpoint of a run passes, whoever asks for it."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, BinaryIO, Literal

import lightning.pytorch as pl
from lightning.pytorch.plugins.io import CheckpointIO
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ft import _names, events
from lightning_ft._copying.copy_plan import Late
from lightning_ft._copying.staging import Staged, Stager
from lightning_ft._ranks.dist import Ranks
from lightning_ft._restart.broadcast import load_once
from lightning_ft._restart.loading import Loading
from lightning_ft._saving.engine import Writer
from lightning_ft._saving.failure import Failure, agreed_failure
from lightning_ft._saving.options import SaveOptions, manifest_of, options_of
from lightning_ft._saving.task import SaveTask
from lightning_ft._saving.uploads import Uploads
from lightning_ft._saving.weights_only import WeightsOnlyRule
from lightning_ft._saving.writers import Writers
from lightning_ft._sharded.loading import load_into
from lightning_ft._sharded.replicated import Replicated
from lightning_ft._sharded.sharding import Agreed, Sharding, Unstaged, stage
from lightning_ft._sharded.writer import sharded_save
from lightning_ft.errors import ConfigurationError, SaveError
from lightning_ft.storage import Storage

_log = logging.getLogger(__name__)

_FIT_TAKES_WEIGHTS_ONLY = "weights_only" in inspect.signature(pl.Trainer.fit).parameters  # since Lightning 2.6


class FaultTolerantCheckpointIO(CheckpointIO):
    """Writes checkpoints in the background, atomically and with a checksum over every bit; reads them verified.

    Give it to ``Trainer(plugins=[...])`` to set options; `FaultTolerantCheckpoint` installs one with defaults
    otherwise. It serves the user's own `ModelCheckpoint` as well. When `save_checkpoint` returns, nothing the
    training does changes what will be in the file; the file appears under its name when it is complete and synced.

    Ranks: the strategy calls save and remove on rank 0 alone, load on all ranks.

    Args:
        async_save: Write in a background thread. If False, saving blocks until the checkpoint is durable.
        staging: When the copy of the state has to be finished. ``"overlap"``: parameters and optimizer state are copied
            while the next forward and backward pass runs, and the next optimizer step waits for the copy; everything
            else, and any save that is not made by `FaultTolerantCheckpoint` between two batches of an epoch, is copied
            before `save_checkpoint` returns. A parameter that is changed in between, by anything but an optimizer,
            makes that save fail, by name; it is made again, and from then on copies are made at once.
            ``"blocking"``: all is copied before `save_checkpoint` returns, by as many threads as torch uses
            (`torch.get_num_threads`).
        when_busy: What a due save does while another one is being written: ``"wait"``: it is copied and waits behind
            that one, and a third would stop training until there is room; ``"newest"``: the same, but it takes the
            place of one that waits; ``"skip"``: it is made after the first step that finds the writer idle, so there is
            one copy of the state at most and not two. Saves asked for by other callbacks are never left out.
        verify: What is checked before a checkpoint is used: ``"full"`` every byte against its digest, ``"size"`` the
            manifest and the size, ``"off"`` only that the manifest, where there is one, is undamaged.
        verify_after_write: What is read back once a checkpoint is written, in the writer thread, before it counts as
            saved and anything older is removed: False nothing, ``"size"`` manifest and size, ``"full"`` every byte.
            What is not as it was written is removed, and the save has failed. Of a local file the kernel's page cache
            is dropped before, so that the disk itself is asked as far as it lets. With ``"full"`` rotation counts only
            on checkpoints that were read whole by this process.
        layout: What `FaultTolerantCheckpoint` saves under DDP and on a single device: ``"file"``, which rank 0 writes;
            or ``"sharded"``, a directory of which each rank writes its share of what all have alike, and which loads
            anywhere. A sharded strategy decides for itself; what others save (`ModelCheckpoint`, you) stays a file.
        load: Who reads a checkpoint that all ranks load: ``"each"`` for itself; or, with ``"broadcast"``, rank 0 alone,
            which sends what it has loaded to the others, tensor by tensor, to the CPU: storage is read once. For DDP,
            and for whatever of a sharded strategy is in one file; all ranks have to call `load_checkpoint` then.
        on_error: ``"raise"``: a failed save stops the run on all ranks at the next step. ``"warn"``: it is reported
            there and the run goes on; the third failure in a row stops it.
        retries: How often a write is tried again after an error that may pass (timeouts, connections, busy storage).
        storage_options: Arguments for the fsspec file system behind a URL; and `deadline_secs` (60), how long a single
            request to a store may take with its repetitions.

    Raises:
        ConfigurationError: An argument has a value it cannot have.
    """

    def __init__(
        self,
        *,
        async_save: bool = True,
        staging: Literal["overlap", "blocking"] = "overlap",
        when_busy: Literal["wait", "newest", "skip"] = "wait",
        verify: Literal["full", "size", "off"] = "full",
        verify_after_write: Literal[False, "size", "full"] = False,
        layout: Literal["file", "sharded"] = "file",
        load: Literal["each", "broadcast"] = "each",
        on_error: Literal["raise", "warn"] = "raise",
        retries: int = 3,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        _require("async_save", async_save, (True, False))
        _require("staging", staging, ("overlap", "blocking"))
        _require("when_busy", when_busy, ("wait", "newest", "skip"))
        _require("verify", verify, ("full", "size", "off"))
        _require("verify_after_write", verify_after_write, (False, "size", "full"))
        _require("layout", layout, ("file", "sharded"))
        _require("load", load, ("each", "broadcast"))
        _require("on_error", on_error, ("raise", "warn"))
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ConfigurationError(f"retries={retries!r}: must be an integer of at least 0")
        if storage_options is not None and not isinstance(storage_options, dict):
            raise ConfigurationError(f"storage_options={storage_options!r}: must be a dictionary or None")
        self.async_save = async_save
        self.staging = staging
        self.when_busy = when_busy
        self.verify = verify
        self.verify_after_write = verify_after_write
        self.layout = layout
        self.load = load
        self.on_error = on_error
        self.retries = retries
        self.storage_options = storage_options
        self.reports_failures = True
        """Whether this plugin raises failures itself; False while a callback reports them on all ranks."""
        self._rule = WeightsOnlyRule()
        storage = Storage(storage_options)
        self._writers = Writers(storage, retries, verify_after_write or None)
        self._stager: Stager | None = None
        self._sharding: Sharding | None = None
        self._own_directories: set[str] = set()
        self._loading = Loading(storage, verify, storage_options)
        self._between_fits = False

    @property
    def writer(self) -> Writer:
        """The background writer of this process."""
        return self._writers.saves

    @property
    def uploads(self) -> Uploads:
        """What copies checkpoints from a local directory to that of the run, in this process."""
        return self._writers.uploads

    @property
    def writers(self) -> Writers:
        """Both of them."""
        return self._writers

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stager": None, "_sharding": None}

    @property
    def stager(self) -> Stager:
        """What copies the state in this process."""
        if self._stager is None:
            self._stager = Stager(overlap=self.staging == "overlap")
        return self._stager

    @property
    def overlaps(self) -> bool:
        """Whether a save made now may be copied late."""
        return self.async_save and not self._between_fits and self.stager.overlaps

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """`checkpoint` is copied and will be written to `path`; what is under `path` now stays until then.

        Thread: main. Blocks on: the copy (see `staging`), and on a save that waits already. On disk after: nothing
        yet; with ``async_save=False``, or once a fit has ended (``trainer.save_checkpoint("final.ckpt")`` as the last
        line of a script), the checkpoint.

        Raises:
            ConfigurationError: `storage_options` is given by anybody but our callback; they belong to the plugin.
            SaveError: An earlier save failed and no `FaultTolerantCheckpoint` is there to report it.
        """
        options = options_of(storage_options)
        self._report()
        path = _names.normalise(path)
        manifest = manifest_of(checkpoint)

        def take(late: Late | None) -> SaveTask:
            staged = self._rule.checked(self.stager.stage(checkpoint, late), checkpoint, path)
            staged.blocked_secs = time.monotonic() - options.asked_at
            return SaveTask(path, staged, manifest, options.on_commit, options.replaceable, options.asked_at)

        self._submit(path, manifest.step, take, options)
        self._report()

    def save_sharded(
        self,
        state: dict[str, Any] | Replicated,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """`state`, of which each rank has a part, and `checkpoint` are copied and will be written to one directory.

        As `save_checkpoint`, but: each rank copies and writes its own part; `path`, `checkpoint` and the identity in it
        are those of rank 0; and a save that fails on one rank fails on all of them, with nothing to be seen of it.

        Ranks: all, in the same order. Thread: main. Blocks on: all ranks to come here, besides.

        Args:
            state: In Lightning's layout: the model under one key, each optimizer under ``"optimizer_0"`` and so on.
            checkpoint: All the rest.
            path: Of the directory.
            storage_options: Of our callback only.

        Raises:
            ConfigurationError: As `save_checkpoint`.
            SaveError: As `save_checkpoint`; the same on all ranks.
        """
        options = options_of(storage_options)
        if self._sharding is None:
            self._sharding = Sharding()
        if self.reports_failures:
            self._raise_or_warn(agreed_failure(self._sharding.ranks, self))
        path, manifest = _names.normalise(path), manifest_of(checkpoint)
        try:
            agreed = self._sharding.agree(state, path, manifest)
        except SaveError as error:
            self.writer.record_failure(path, manifest.step, error)
        else:
            self._submit_part(agreed, checkpoint, options)
        if self._between_fits:
            self.close_sharding()
        self._report()

    def _submit_part(self, agreed: Agreed, checkpoint: dict[str, Any], options: SaveOptions) -> None:
        def take(late: Late | None) -> SaveTask:
            copy: Staged | Unstaged
            try:
                staged = stage(self.stager, agreed, checkpoint, late)
                copy = self._rule.checked(staged, checkpoint if agreed.rank == 0 else {}, agreed.path)
            except Exception as error:
                copy = Unstaged(error)
            copy.blocked_secs = time.monotonic() - options.asked_at
            return sharded_save(agreed, copy, options.on_commit, options.asked_at)

        submitted, _ = self.writer.saves
        try:
            self._submit(agreed.path, agreed.manifest.step, take, options)
        except BaseException as error:
            if self.writer.saves[0] == submitted:  # the other ranks' writers are going to wait for this one's
                self.writer.save(sharded_save(agreed, Unstaged(error), None, options.asked_at))
            raise

    def _submit(self, path: str, step: int, take: Callable[[Late | None], SaveTask], options: SaveOptions) -> None:
        self._own_directories.add(_names.split(path)[0])
        in_background = self.async_save and not self._between_fits
        if in_background:
            self.stager.finish()  # the writer may wait for it, and we are about to wait for the writer
            self.writer.make_room(replace=options.replaceable and self.when_busy == "newest")
        try:
            task = take(options.late if in_background else None)
        except Exception as error:
            self.writer.record_failure(path, step, error)
        else:
            (self.writer.save if in_background else self.writer.save_now)(task)
            if not in_background:
                self._writers.drain()
        if self._between_fits:
            self._close_stager()  # nobody knows of a next save for which the memory would be kept

    def close_sharding(self) -> None:
        """What the ranks of a fit have for sharded saves is given up; the next one makes its own.

        Local: asks nothing of other ranks. Thread: main. Blocks on: the writer, if there was a sharded save.
        """
        sharding, self._sharding = self._sharding, None
        if sharding is not None:
            self._writers.drain()  # of a rank that is dead they hear; and this one's end is heard of when it is closed
            sharding.close()

    def _close_stager(self) -> None:
        stager, self._stager = self._stager, None
        if stager is not None:
            stager.close()

    def before_optimizer_step(self) -> None:
        """Parameters may be changed: every copy of them was taken. Thread: main. Blocks on: copies under way."""
        if self._stager is not None:
            self._stager.finish()

    def step_is_over(self, optimizer_steps: int) -> None:
        """A batch was trained, `optimizer_steps` were taken so far: what comes next may change anything."""
        if self._stager is not None:
            self._stager.step_is_over(optimizer_steps)

    def take_repeat(self) -> bool:
        """Whether a save has to be made again, since parameters were changed while they were copied; asked once.

        Ranks: those that take copies.
        """
        return self._stager is not None and self._stager.take_repeat()

    @override
    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint at `path`, on the CPU, verified as deep as `verify` says before anything is unpickled.

        A file without a manifest (plain Lightning wrote it) is loaded and said to be unverified. `weights_only` is that
        of `torch.load`.

        Ranks: any, each for itself; all, with ``load="broadcast"``.

        Raises:
            ConfigurationError: Another `map_location` than the CPU, which ``load="broadcast"`` does not have.
            CorruptCheckpointError: The file is not what was written, or was ours and has lost its manifest.
            FileNotFoundError: There is no such file.
        """
        self.drain()
        load = partial(self._loading.load, _names.normalise(path), map_location, self._weights_only(weights_only))
        return load() if self.load == "each" else load_once(load, map_location)

    def load_sharded(
        self,
        path: str | os.PathLike[str],
        module: nn.Module,
        optimizers: Sequence[Optimizer] | None,
        *,
        strict: bool,
        weights_only: bool | None,
    ) -> dict[str, Any]:
        """A sharded `module` and its `optimizers` are filled from `path`, a directory or a file; returns the rest.

        Ranks: all. Thread: main. With `strict`, what has no place in `module` is an error. `weights_only` is that of
        `torch.load`. See `_sharded.loading.load_into`.
        """
        path = _names.normalise(path)
        self.drain()
        return load_into(
            self._loading, path, module, optimizers,
            strict=strict, weights_only=self._weights_only(weights_only), once=self.load == "broadcast",
        )  # fmt: skip

    def _weights_only(self, given: bool | None) -> bool | None:
        if given is None and not _FIT_TAKES_WEIGHTS_ONLY and not self._rule.required:
            return False  # Lightning 2.5's own way, and there is no argument by which a user could ask for it
        return given

    @override
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """`path` is removed once everything submitted earlier is durable; after a failed save, not before a good one.

        Kept instead, with a line that says so: the checkpoint this run was resumed from, and anything in a directory
        this run has not saved into.
        """
        path = _names.normalise(path)
        reason = None
        if path == self._loading.loaded_path:
            reason = "this run was resumed from it"
        elif _names.split(path)[0] not in self._own_directories:
            reason = "this run has not written into its directory"
        if reason is not None:
            _log.info("%s is kept: %s", path, reason)
            events.emit(events.DeleteSkipped(path, reason))
            return
        self.writer.remove(path)

    def drain(self) -> None:
        """Everything submitted is durable, or recorded as failed. Thread: main. Blocks on: the writer."""
        try:
            self.before_optimizer_step()
        finally:
            self._writers.drain()

    def wait_for(self, path: str | os.PathLike[str]) -> None:
        """No save to `path` is queued or being written. Thread: main. Blocks on: the writer, if one is."""
        if self._writers.holds(_names.normalise(path)):
            self.drain()

    @property
    def failed(self) -> bool:
        """Whether a failed save or upload waits to be reported."""
        return self._writers.failed

    def take_failure(self) -> Failure | None:
        """The oldest failure that was not yet reported, of saves before uploads; each is reported once."""
        return self._writers.take_failure(self.on_error)

    def settle_failure(self) -> None:
        """A failed save of all ranks, of which another rank has heard, waits to be reported here, too."""
        self._writers.settle_failure()

    @override
    def teardown(self) -> None:
        """Everything submitted is durable or failed and no thread is left; the plugin can be used again.

        Raises:
            SaveError: A save failed and nobody has reported it yet (unless another error is on its way already).
        """
        self._between_fits = True
        self._loading.forget_fetched()
        try:
            self.before_optimizer_step()
        finally:
            self._writers.close()
        self._close_stager()
        self.close_sharding()
        try:
            if sys.exc_info()[1] is None:
                self._report()
            elif (failure := self.take_failure()) is not None:
                _log.error("%s", failure.error)  # raising here would hide the error that ended the run
        finally:
            self._writers.forget()

    def fit_begins(self, *, require_weights_only: bool, sharded_over: Ranks | None = None) -> None:
        """A callback reports failures from here on, on all ranks, and saves are made in the background again.

        Args:
            require_weights_only: Whether to save what ``torch.load(weights_only=True)`` would refuse is a failed save.
            sharded_over: The ranks of the fit, if its saves are sharded; until `close_sharding`.
        """
        self.reports_failures = False
        self._rule.required = require_weights_only
        self._between_fits = False
        self._close_stager()  # another model, perhaps, of which it is to be seen anew whether its copies may be late
        self.close_sharding()
        self._sharding = None if sharded_over is None else Sharding(sharded_over)

    def _report(self) -> None:
        self._raise_or_warn(self.take_failure() if self.reports_failures else None)

    @staticmethod
    def _raise_or_warn(failure: Failure | None) -> None:
        if failure is not None:
            if failure.ends_the_run:
                raise failure.error
            _log.warning("%s", failure.error)

    def mark_verified(self, path: str, fetched: BinaryIO | None = None) -> None:
        """`path` was verified in full by this process, as `fetched` if it is in a store; it is not hashed again."""
        self._loading.mark_verified(path, fetched)


def _require(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if not any(value is a or (isinstance(a, str) and value == a) for a in allowed):
        choices = ", ".join(repr(a) for a in allowed)
        raise ConfigurationError(f"{name}={value!r}: must be one of {choices}")
