"""Snapshots whose copies are made while training goes on, at the worst moment for each of them."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _late import LastMoment
from torch import Tensor

from lightning_ft._copying import copies as _copies
from lightning_ft._copying import staging
from lightning_ft._copying.copy_plan import Late
from lightning_ft._copying.staging import SnapshotError, SnapshotWithdrawnError, Staged, Stager

WAIT_SECS = 60.0
"""A wait that runs out is a failure, and no hang."""
ELEMENTS = 1024  # 4 KiB of float32


class Training:
    """A parameter, its optimizer state, and a buffer; every element of each has the number of the step as value."""

    def __init__(self, elements: int = ELEMENTS) -> None:
        self.weight = torch.zeros(elements, requires_grad=True)
        self.moment = torch.zeros(elements)
        self.buffer = torch.zeros(elements)
        self.more: dict[str, Any] = {}

    def checkpoint(self) -> dict[str, Any]:
        return {
            "state_dict": {"weight": self.weight.detach(), "buffer": self.buffer},
            "optimizer_states": [{"state": {0: {"moment": self.moment, **self.more}}}],
        }

    def late(self, steps: int = 0) -> Late:
        return Late(frozenset({self.weight.untyped_storage().data_ptr()}), frozenset(), steps)

    def forward(self, value: float) -> None:
        self.buffer.fill_(value)

    @torch.no_grad()
    def step(self, value: float) -> None:
        self.weight.fill_(value)
        self.moment.fill_(value)


def values(checkpoint: dict[str, Any]) -> tuple[set[float], set[float], set[float]]:
    moment = checkpoint["optimizer_states"][0]["state"][0]["moment"]
    tensors = (checkpoint["state_dict"]["weight"], moment, checkpoint["state_dict"]["buffer"])
    return tuple(set(t.tolist()) for t in tensors)  # type: ignore[return-value]


def all_of(value: float) -> Any:
    return ({value},) * 3


@pytest.fixture
def stager() -> Iterator[Stager]:
    stager = Stager(overlap=True)
    yield stager
    stager.close()


@pytest.fixture
def last_moment(stager: Stager) -> LastMoment:
    stager.lanes._threads = last_moment = LastMoment()  # type: ignore[assignment]
    return last_moment


@pytest.fixture
def held(stager: Stager) -> Iterator[Callable[[], None]]:
    """Real threads, all of them held until the fixture is called."""
    gate = threading.Event()
    executor = stager.lanes._executor()
    for _ in range(executor._max_workers):
        executor.submit(gate.wait, WAIT_SECS)
    yield gate.set
    gate.set()


# -- what is copied when -----------------------------------------------------------------------------------------


def test_late_ones_are_copied_when_finish_is_called_and_others_at_once(stager: Stager, last_moment: LastMoment) -> None:
    training = Training()
    staged = stager.stage(training.checkpoint(), training.late())
    assert last_moment.left == 1
    training.forward(9)
    stager.finish()
    assert last_moment.left == 0
    training.step(9)
    assert values(staged.wait()) == all_of(0)
    staged.release()


def test_without_finish_the_step_would_show(
    stager: Stager, last_moment: LastMoment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shows that the test above can fail: a `finish` that does nothing is found out."""
    training = Training()
    monkeypatch.setattr(Staged, "finish", lambda self: None)
    staged = stager.stage(training.checkpoint(), training.late())
    stager.finish()
    training.step(9)
    with pytest.raises(SnapshotError):
        staged.wait()
    staged.release()


def test_finish_waits_for_the_thread_that_copies(stager: Stager, held: Callable[[], None]) -> None:
    training, copied = Training(), []
    staged = stager.stage(training.checkpoint(), training.late())
    copying = staged._copying
    assert copying is not None
    thread = threading.Thread(target=lambda: (stager.finish(), copied.append(copying.done())))
    thread.start()
    assert not staged.settled
    held()
    thread.join(WAIT_SECS)
    assert copied == [True]
    assert staged.settled
    training.step(9)
    assert values(staged.wait()) == all_of(0)
    staged.release()


def test_the_next_snapshot_finishes_the_one_before(stager: Stager, last_moment: LastMoment) -> None:
    training = Training()
    first = stager.stage(training.checkpoint(), training.late())
    second = stager.stage(training.checkpoint(), None)
    assert first.settled
    training.step(5)
    assert values(first.wait()) == values(second.wait()) == all_of(0)
    first.release()
    second.release()


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_late_unless_asked_for(overlap: bool) -> None:
    training, stager = Training(), Stager(overlap)
    staged = stager.stage(training.checkpoint(), training.late() if not overlap else None)
    assert staged.settled
    training.forward(9)
    training.step(9)
    assert values(staged.wait()) == all_of(0)
    assert stager.lanes._threads is None, "a thread for nothing"


def test_many_late_tensors_of_every_size(stager: Stager) -> None:
    """Grouped, in pieces, views of one storage, of every dtype."""
    for round_ in range(3):
        state: dict[Any, Any] = {size: torch.rand(size) for size in (1, 1023, 1024, 5000, 1 << 18, 3_000_001)}
        state["view"] = state[3_000_001][7:5000]
        state["bool"] = torch.rand(5000) > 0.5
        state["half"] = torch.rand(5000).bfloat16().view(50, 100).t()
        state["nan"] = torch.full((5000,), float("nan"))
        before = {key: tensor.clone() for key, tensor in state.items()}
        staged = stager.stage({"optimizer_states": [state]}, Late(frozenset(), frozenset(), round_))
        stager.finish()
        for tensor in state.values():
            tensor.zero_()
        copy = staged.wait()["optimizer_states"][0]
        assert all(torch.equal(copy[key].nan_to_num(7), before[key].nan_to_num(7)) for key in before)
        assert copy["view"].untyped_storage().data_ptr() == copy[3_000_001].untyped_storage().data_ptr()
        staged.release()


DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
# Quantised ones have no bits of their own; torch cannot save those of less than a byte.
UNSAVED = {d for d in DTYPES if re.match(r"torch\.(q|u?int[1-7]$)", str(d))}


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in UNSAVED], ids=str)
@pytest.mark.parametrize("late", [False, True])
def test_every_bit_of_every_dtype(dtype: torch.dtype, late: bool, stager: Stager) -> None:
    data = torch.randint(0, 256, (16 * ELEMENTS,), dtype=torch.uint8)
    if dtype == torch.bool:
        data = data % 2
    original = torch.empty(0, dtype=dtype)
    original.set_(data.untyped_storage(), 0, (len(data) // dtype.itemsize,))
    before = data.clone()
    staged = stager.stage({"optimizer_states": original}, Late(frozenset(), frozenset(), 0) if late else None)
    assert (staged._copying is not None) is late
    stager.finish()
    data.zero_()
    copy = staged.wait()["optimizer_states"]
    assert copy.dtype == dtype
    assert torch.equal(_copies.storage_bytes(copy.untyped_storage()), before)
    staged.release()


# -- a change that comes too early -------------------------------------------------------------------------------

CHANGES: dict[str, tuple[Callable[[Training], Any], str]] = {
    "in place": (lambda t: t.weight.detach().mul_(2), "state_dict['weight']"),
    "one element": (lambda t: t.weight.detach()[5].fill_(1), "state_dict['weight']"),
    "optimizer state": (lambda t: t.moment.add_(1), "optimizer_states[0]['state'][0]['moment']"),
    "through a view": (lambda t: t.moment.view(2, -1)[1].zero_(), "optimizer_states[0]['state'][0]['moment']"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("who", ["wait after finish", "wait before finish", "check"])
def test_a_change_before_finish_is_found_and_named(
    change: str, who: str, stager: Stager, last_moment: LastMoment, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training()
    make, name = CHANGES[change]
    staged = stager.stage(training.checkpoint(), training.late())
    if who == "check":
        staged.wait()  # the writer is quick, and writes while training changes what it has copied
    make(training)
    if who == "wait after finish":
        stager.finish()
    with pytest.raises(SnapshotError) as caught:
        staged.check() if who == "check" else staged.wait()
    assert str(caught.value).startswith(f"{name} was changed between the step boundary and the next optimizer step")
    assert not stager.overlaps
    staged.release()
    stager.finish()
    # From now on nothing is late, and nobody is told again.
    for value in (1, 2):
        training.step(value)
        training.forward(value)
        staged = stager.stage(training.checkpoint(), training.late())
        assert last_moment.left == 0
        training.step(9)
        assert values(staged.wait()) == all_of(value)
        staged.release()
    assert [r.message for r in caplog.records] == [
        f'{caught.value}; the save is repeated; from now on saves copy at once, as with staging="blocking"'
    ]


def test_what_is_copied_at_once_is_not_held_until_it_is_written(stager: Stager) -> None:
    """Training may give up its memory while the snapshot waits for its turn."""
    tensor = torch.ones(ELEMENTS)
    held = weakref.ref(tensor)
    staged = stager.stage({"state_dict": {"weight": tensor}})
    del tensor
    assert held() is None
    assert staged.wait()["state_dict"]["weight"].tolist() == [1.0] * ELEMENTS
    staged.release()


def test_once_finished_a_snapshot_stays_good(stager: Stager, last_moment: LastMoment) -> None:
    training = Training()
    staged = stager.stage(training.checkpoint(), training.late())
    stager.finish()
    training.step(1)
    stager.finish()
    stager.step_is_over(1)
    assert not stager.to_be_repeated
    staged.check()
    assert values(staged.wait()) == all_of(0)
    staged.check()
    staged.release()
    assert stager.overlaps


def _data_changed(training: Training) -> None:
    training.weight.data.mul_(0).add_(7)


def test_a_change_through_data_is_found_in_the_first_late_snapshot(stager: Stager, last_moment: LastMoment) -> None:
    training = Training()
    staged = stager.stage(training.checkpoint(), training.late())
    _data_changed(training)
    stager.finish()
    with pytest.raises(SnapshotError, match=r"^state_dict\['weight'\] was changed \(through `.data`"):
        staged.wait()
    with pytest.raises(SnapshotError):
        staged.check()
    staged.release()
    assert not stager.overlaps


@pytest.mark.parametrize("variable", [None, "0", "1"])
def test_in_later_ones_only_if_asked_for(
    variable: str | None, stager: Stager, last_moment: LastMoment, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is None:
        monkeypatch.delenv(staging.CHECK_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(staging.CHECK_VARIABLE, variable)
    training = Training()
    stager.stage(training.checkpoint(), None).release()  # a blocking one does not count as checked
    for _ in range(2):
        staged = stager.stage(training.checkpoint(), training.late())
        stager.finish()
        staged.wait()
        staged.release()
    staged = stager.stage(training.checkpoint(), training.late())
    _data_changed(training)
    stager.finish()
    if variable == "1":
        with pytest.raises(SnapshotError):
            staged.wait()
    else:
        assert values(staged.wait())[0] == {7.0}  # the limit that is documented
    staged.release()


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("written", [False, True])
def test_a_change_through_data_is_found_even_if_the_copy_was_quicker(
    written: bool, changes: bool, stager: Stager, caplog: pytest.LogCaptureFixture
) -> None:
    """This file is good; the next might not be, and would not be checked."""
    training = Training()
    staged = stager.stage(training.checkpoint(), training.late())
    staged.wait() if written else staged._copying.result()
    if changes:
        _data_changed(training)
    stager.finish()
    assert values(staged.wait()) == all_of(0)
    staged.release()
    assert stager.overlaps is not changes
    assert [r.message.partition(" was ")[0] for r in caplog.records] == ["state_dict['weight']"] * changes


def test_with_the_variable_what_is_copied_at_once_is_checked_too(
    stager: Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(staging.CHECK_VARIABLE, "1")
    training = Training()
    monkeypatch.setattr(torch, "_foreach_copy_", lambda targets, sources: None)
    staged = stager.stage(training.checkpoint(), None)
    # Memory that was never written is zero, as the training is: so it is the next that differs.
    staged.wait()
    staged.release()
    training.forward(1)
    staged = stager.stage(training.checkpoint(), None)
    with pytest.raises(SnapshotError, match=r"state_dict\['buffer'\]"):
        staged.wait()
    staged.release()


@pytest.mark.parametrize("change", [None, "in place", "data"])
def test_a_step_of_which_nobody_was_told_withdraws_the_copy(
    change: str | None, stager: Stager, last_moment: LastMoment
) -> None:
    """Lightning counts a step when `optimizer_step` is overridden and leaves it out; that is no failure."""
    training = Training()
    staged = stager.stage(training.checkpoint(), training.late(3))
    if change == "in place":
        training.step(1)
    elif change == "data":
        _data_changed(training)
    known_to_be_bad = change == "in place"  # that leaves a trace, and a change through `.data` does not
    stager.step_is_over(4)
    assert stager.to_be_repeated
    assert staged.settled
    with pytest.raises(SnapshotError if known_to_be_bad else SnapshotWithdrawnError):
        staged.wait()
    staged.release()
    assert not stager.overlaps


def test_late_copies_end_with_the_batch_even_without_a_step(stager: Stager, last_moment: LastMoment) -> None:
    """Gradients are accumulated: callbacks may change the weights now, for a validation."""
    training = Training()
    staged = stager.stage(training.checkpoint(), training.late(3))
    stager.step_is_over(3)
    assert not stager.to_be_repeated
    training.step(9)
    assert values(staged.wait()) == all_of(0)
    staged.release()
    assert stager._checked


@pytest.mark.parametrize("elements", [ELEMENTS, 1 << 20])
def test_memory_that_training_gives_up_lives_until_it_is_copied(
    elements: int, stager: Stager, last_moment: LastMoment
) -> None:
    """Optimizers that move their state elsewhere (`state.data = ...`) change no value and free what is to be copied."""
    training = Training(elements)
    training.step(1)
    training.forward(1)
    staged = stager.stage(training.checkpoint(), training.late())
    storages = [weakref.ref(t.untyped_storage()) for t in (training.weight, training.moment)]
    assert storages
    training.moment.data = torch.full((elements,), 5.0)
    training.weight.data = torch.full((elements,), 6.0)
    torch.full((elements,), 7.0)  # into the memory that is free now
    stager.finish()
    assert values(staged.wait()) == all_of(1)
    staged.release()


# -- memory ------------------------------------------------------------------------------------------------------


def test_memory_is_used_again_from_save_to_save(stager: Stager) -> None:
    training, places = Training(), set()
    for step in range(6):
        staged = stager.stage(training.checkpoint(), training.late(step))
        stager.finish()
        copy = staged.wait()
        places.add(tuple(p.data_ptr() for p in staged._plan.places))
        assert values(copy) == all_of(step)
        staged.release()
        training.forward(step + 1)
        training.step(step + 1)
    assert len(places) == 1
    assert (stager.plans.made, [p.buffers.allocations for p in stager.plans._free]) == (1, [1])


def test_two_at_once_have_memory_of_their_own_and_there_is_no_third(stager: Stager) -> None:
    training, running = Training(), []
    for step in range(6):
        running.append(stager.stage(training.checkpoint(), training.late(step)))
        stager.finish()
        training.forward(step + 1)
        training.step(step + 1)
        if len(running) == 2:
            written = running.pop(0)
            assert values(written.wait()) == all_of(step - 1)
            written.release()
    assert values(running[0].wait()) == all_of(5)
    running[0].release()
    assert (stager.plans.made, [p.buffers.allocations for p in stager.plans._free]) == (2, [1, 1])


@pytest.mark.parametrize("late", [False, True])
def test_what_was_copied_is_not_held_any_more(late: bool, stager: Stager) -> None:
    """Else the writer would keep a whole generation of state alive that training has replaced."""
    moment, sparse = torch.zeros(ELEMENTS), torch.eye(30).to_sparse()
    checkpoint = {"state_dict": {"s": sparse}, "optimizer_states": [{"m": moment}]}
    staged = stager.stage(checkpoint, Late(frozenset(), frozenset(), 0) if late else None)
    stager.finish()
    if not late:
        staged.wait()
    sources = [weakref.ref(moment), weakref.ref(sparse)]
    del moment, sparse, checkpoint
    gc.collect()
    assert [source() for source in sources] == [None, None]
    staged.release()


def test_release_lets_the_copy_go(stager: Stager) -> None:
    training = Training()
    staged = stager.stage(training.checkpoint(), training.late())
    stager.finish()
    copy = weakref.ref(staged.wait()["state_dict"]["weight"])
    staged.release()
    assert staged._checkpoint == {}
    assert copy() is staged._plan.targets[0]  # of the plan, for the next save


def test_memory_is_not_free_before_late_copies_have_ended(stager: Stager, last_moment: LastMoment) -> None:
    """A save that is given up: its plan must not be written into by a copy that is still under way."""
    training = Training()
    staged = stager.stage(training.checkpoint(), training.late())
    staged.release()
    assert last_moment.left == 0
    assert len(stager.plans._free) == 1


def test_structures_that_change_from_save_to_save(stager: Stager) -> None:
    """The first step makes optimizer state, layers are added, weights tied, shapes and dtypes change."""
    first, second = torch.rand(3000), torch.rand(5000)
    checkpoints: list[dict[str, Any]] = [
        {"state_dict": {"a": first}, "optimizer_states": []},
        {"state_dict": {"a": first}, "optimizer_states": [{"m": torch.rand(3000), "step": torch.tensor(1.0)}]},
        {"state_dict": {"a": first, "b": second}, "optimizer_states": [{"m": torch.rand(3000)}, {"m": second}]},
        {"state_dict": {"a": first, "b": first.view(30, 100).t()}, "optimizer_states": [{"m": torch.rand(9000)}]},
        {"state_dict": {"a": first.double()}, "optimizer_states": [{"m": torch.rand(10)}]},
        {"state_dict": {}, "optimizer_states": []},
        {"state_dict": {"a": second}, "optimizer_states": [{"m": torch.rand(100_000)}]},
    ]
    for _ in range(2):
        for checkpoint in checkpoints:
            tensors = [
                *checkpoint["state_dict"].values(),
                *(t for o in checkpoint["optimizer_states"] for t in o.values()),
            ]
            before = [t.clone() for t in tensors]
            late = Late(frozenset({t.untyped_storage().data_ptr() for t in tensors}), frozenset(), 0)
            staged = stager.stage(checkpoint, late)
            stager.finish()
            for tensor in tensors:
                tensor.add_(1)
            copy = staged.wait()
            copies = [*copy["state_dict"].values(), *(t for o in copy["optimizer_states"] for t in o.values())]
            assert all(torch.equal(x, y) for x, y in zip(copies, before, strict=True))
            staged.release()
            for tensor in tensors:
                tensor.sub_(1)
    assert stager.plans.made == 1


# -- threads and calls -------------------------------------------------------------------------------------------


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def large() -> dict[str, Tensor]:
    return {str(i): torch.randint(0, 256, (size,), dtype=torch.uint8) for i, size in enumerate((3_000_000, 1 << 20, 5))}


@pytest.mark.usefixtures("two_threads")
def test_all_threads_copy_at_once(stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_copies, "PIECE_BYTES", 10_001)
    memmove, moved = _copies.ctypes.memmove, []
    both = threading.Barrier(2)

    def memmove_(target: int, source: int, size_bytes: int) -> Any:
        if threading.get_ident() not in {thread for thread, _ in moved}:
            both.wait(WAIT_SECS)  # so that neither can do all of it alone
        moved.append((threading.get_ident(), size_bytes))
        return memmove(target, source, size_bytes)

    monkeypatch.setattr(_copies.ctypes, "memmove", memmove_)
    tensors = large()
    staged = stager.stage({"state_dict": tensors})
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    copy = staged.wait()["state_dict"]
    assert all(torch.equal(copy[key], before[key]) for key in before)
    assert sum(size for _, size in moved) == 3_000_000 + (1 << 20)
    assert len({thread for thread, _ in moved}) == 2
    staged.release()


@pytest.mark.usefixtures("two_threads")
def test_no_thread_copies_any_more_once_staging_has_failed(
    stager: Stager, last_moment: LastMoment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would write into memory that the next snapshot has."""
    monkeypatch.setattr(_copies, "PIECE_BYTES", 100_000)

    def fail(*args: Any) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", fail)
        with pytest.raises(MemoryError):
            stager.stage({"state_dict": large()})
    assert len(last_moment.jobs) == 1
    assert last_moment.left == 0
    assert len(stager.plans._free) == 1
    staged = stager.stage({"state_dict": {"a": torch.ones(5)}})
    assert staged.wait()["state_dict"]["a"].tolist() == [1.0] * 5
    staged.release()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("started", [0, 1])
def test_where_no_thread_can_be_started_the_main_thread_copies(
    started: int, stager: Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor has queued by then what it refuses, and would copy it later, into memory of another snapshot."""
    monkeypatch.setattr(_copies, "PIECE_BYTES", 100_000)
    training = Training()
    start, copy_late, threads, refused = threading.Thread.start, Staged._copy_late, [], threading.Event()

    def start_(thread: threading.Thread) -> None:
        if len(threads) == started:
            refused.set()
            raise RuntimeError("can't start new thread")
        threads.append(thread)
        start(thread)

    def copy_late_(*args: Any) -> None:
        assert refused.wait(WAIT_SECS)  # an idle thread would be given the next job
        copy_late(*args)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_)
        patch.setattr(Staged, "_copy_late", copy_late_)
        staged = stager.stage({**training.checkpoint(), "more": large()}, training.late())
        assert stager.lanes._threads is None
        assert len(threads) == started
        assert not any(thread.is_alive() for thread in threads)
    training.step(3)
    training.forward(3)
    again = stager.stage(training.checkpoint(), training.late())
    stager.finish()
    assert values(again.wait()) == all_of(3)
    again.release()
    staged.release()


@pytest.mark.parametrize("late", [False, True])
def test_thousands_of_small_tensors_are_copied_by_a_few_calls(
    late: bool, stager: Stager, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreach, memmove, calls = torch._foreach_copy_, _copies.ctypes.memmove, []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda t, s: calls.append(len(t)) or foreach(t, s))
    monkeypatch.setattr(_copies.ctypes, "memmove", lambda *a: calls.append(0) or memmove(*a))
    state = {i: torch.full((2 * ELEMENTS,), float(i)) for i in range(2000)}
    for _ in range(2):
        calls.clear()
        staged = stager.stage({"optimizer_states": [state]}, Late(frozenset(), frozenset(), 0) if late else None)
        stager.finish()
        copy = staged.wait()["optimizer_states"][0]
        assert all(int(copy[i][0]) == int(copy[i][-1]) == i for i in state)
        staged.release()
        assert sum(calls) == 2000
        assert len(calls) <= 3
        assert 0 not in calls


@pytest.mark.parametrize("where", ["late", "at once"])
def test_a_copy_that_fails(where: str, stager: Stager, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late one fails in the writer, where a save can fail; the memory is free afterwards, and the next one works."""
    training = Training()

    def fail(*args: Any) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        if where == "late":
            patch.setattr(Staged, "_copy_late", fail)
            staged = stager.stage(training.checkpoint(), training.late())
            stager.finish()  # does not raise: training goes on
            for _ in range(2):  # however often the write is tried
                with pytest.raises(MemoryError, match="no memory"):
                    staged.wait()
            staged.release()
        else:
            patch.setattr(Staged, "_copy_at_once", fail)
            with pytest.raises(MemoryError, match="no memory"):
                stager.stage(training.checkpoint(), training.late())
    assert len(stager.plans._free) == 1
    training.step(3)
    training.forward(3)
    staged = stager.stage(training.checkpoint(), training.late())
    stager.finish()
    assert values(staged.wait()) == all_of(3)
    staged.release()
    assert stager.plans.made == 1


def test_what_cannot_be_copied_leaves_the_memory_free(stager: Stager) -> None:
    training = Training()
    with pytest.raises(TypeError, match="lock"):
        stager.stage({**training.checkpoint(), "lock": threading.Lock()}, training.late())
    assert len(stager.plans._free) == 1
    stager.finish()


def test_a_writer_that_waits_and_checks_while_training_goes_on(stager: Stager) -> None:
    """Both threads at once, many times: every snapshot is that of its step, and none is said to be bad."""
    training, rounds = Training(), 200
    queue: list[tuple[int, Staged]] = []
    wrong: list[Any] = []
    condition = threading.Condition()

    def write() -> None:
        for _ in range(rounds):
            with condition:
                assert condition.wait_for(lambda: queue, WAIT_SECS)
                step, staged = queue.pop(0)
                condition.notify_all()
            try:
                copy = staged.wait()
                for _ in range(20):
                    staged.check()
                if values(copy) != all_of(step):
                    wrong.append((step, values(copy)))
            except SnapshotError as error:
                wrong.append((step, error))
            staged.release()

    writer = threading.Thread(target=write)
    writer.start()
    for step in range(rounds):
        with condition:
            assert condition.wait_for(lambda: not queue, WAIT_SECS)
            queue.append((step, stager.stage(training.checkpoint(), training.late(step))))
            condition.notify_all()
        training.forward(step + 1)
        stager.finish()
        training.step(step + 1)
    writer.join(WAIT_SECS)
    assert not writer.is_alive()
    assert wrong == []
    assert stager.plans.made <= 3


def test_a_closed_stager_has_no_threads_and_can_be_used_again(stager: Stager) -> None:
    training = Training()
    for _ in range(2):
        staged = stager.stage(training.checkpoint(), training.late())
        assert [t.name for t in threading.enumerate() if t.name.startswith("lightning-ft-staging")]
        stager.close()
        assert [t.name for t in threading.enumerate() if t.name.startswith("lightning-ft-staging")] == []
        training.step(5)
        training.forward(5)
        staged.wait()
        staged.release()
        training = Training()


def test_the_times(stager: Stager, last_moment: LastMoment, monkeypatch: pytest.MonkeyPatch) -> None:
    """`blocked_secs` is what the main thread stood still, `staging_secs` what it took until all was copied."""
    ticks = iter(range(1000))
    monkeypatch.setattr(staging.time, "monotonic", lambda: float(next(ticks)))
    training = Training()
    staged = stager.stage(training.checkpoint(), training.late())
    blocked_secs = staged.blocked_secs
    assert blocked_secs > 0
    assert staged.staging_secs == 0
    stager.finish()
    assert staged.blocked_secs > blocked_secs
    assert staged.staging_secs > blocked_secs
    staging_secs = staged.staging_secs
    staged.wait()
    assert staged.staging_secs == staging_secs
    staged.release()
