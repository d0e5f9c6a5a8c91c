"""What the ranks of a run tell each other: on a process group of our own, from the main thread only.

The group is gloo whatever the training uses, so that nothing here waits behind, or is reordered with, the training's
collectives. With one process every function works unchanged and no group exists.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_ft.errors import FaultToleranceError, RankFailure

_T = TypeVar("_T")
_Q = TypeVar("_Q")
_A = TypeVar("_A")
_E = TypeVar("_E", bound=BaseException)
_log = logging.getLogger(__name__)

WRITERS = "lightning_ft writers"
"""What describes the process group of the threads that write, which goes on when a rank has failed."""

# Long enough for rank 0 to verify a large checkpoint while the others wait for its decision.
_TIMEOUT = timedelta(minutes=30)


class Ranks:
    """The ranks of this run, with collectives over a gloo group of our own.

    Ranks: construct on all ranks at the same point, after the process group of the training exists.
    """

    def __init__(self, timeout: timedelta = _TIMEOUT) -> None:
        active = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if active else 0
        self.world_size = dist.get_world_size() if active else 1
        self._group = dist.new_group(backend="gloo", timeout=timeout) if active else None

    @property
    def is_zero(self) -> bool:
        """Whether this is rank 0, the one that decides and writes."""
        return self.rank == 0

    def gather(self, value: _T) -> list[_T] | None:
        """Rank 0 holds every rank's value, in rank order; the others get None. Blocks on: all ranks."""
        if self._group is None:
            return [value]
        gathered: list[Any] | None = [None] * self.world_size if self.is_zero else None
        dist.gather_object(_packed(value), gathered, dst=0, group=self._group)
        return None if gathered is None else list(map(_unpacked, gathered))

    def all_gather(self, value: _T) -> list[_T]:
        """Every rank holds every rank's value, in rank order. Blocks on: all ranks."""
        if self._group is None:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, _packed(value), group=self._group)
        return list(map(_unpacked, gathered))

    def decide(self, decision: Callable[[], _T]) -> _T:
        """`decision` ran on rank 0 alone and every rank holds its result, or raises the error it raised.

        Decisions that read a clock or a directory go through here: ranks that look for themselves see different
        moments and disagree.

        Raises:
            FaultToleranceError: Rank 0's own error of that tree, on every rank.
            RankFailure: On the other ranks, when rank 0 raised anything else.
        """
        if self._group is None:
            return decision()
        answer, error = self._asked(decision)
        message: list[Any] = [_packed(answer)]
        dist.broadcast_object_list(message, src=0, group=self._group)
        return _answered(answer if self.is_zero else _unpacked(message[0]), error)  # type: ignore[no-any-return]

    def distribute(self, decision: Callable[[], list[_T]]) -> _T:
        """As `decide`, but every rank holds its own item of the list that `decision` returned, in rank order."""
        if self._group is None:
            return decision()[0]
        (kind, value), error = self._asked(decision)
        messages = [_packed((kind, item)) for item in (value if kind == "value" else [value] * self.world_size)]
        message: list[Any] = [None]
        dist.scatter_object_list(message, messages if self.is_zero else None, src=0, group=self._group)
        return _answered(_unpacked(message[0]), error)  # type: ignore[no-any-return]

    def _asked(self, decision: Callable[[], Any]) -> tuple[tuple[str, Any], Exception | None]:
        """What rank 0 has to tell the others, and what it raises itself when it has told them."""
        if not self.is_zero:
            return ("", None), None
        try:
            answer = ("value", decision())
            _unpacked(_packed(answer))  # an error while it is sent, or on arrival, would leave ranks waiting
        except Exception as e:
            ours = isinstance(e, FaultToleranceError) and _travels(e)
            return ("error", e if ours else RankFailure(0, f"{type(e).__name__}: {e}")), e
        return answer, None

    def together(self, action: Callable[[], _T]) -> _T:
        """`action` ran on every rank and on none it failed; returns this rank's own result.

        Whatever one rank cannot do, no rank goes on from: they would wait for it in the next collective.

        Ranks: all. Blocks on: all ranks.

        Raises:
            FaultToleranceError: The error of the first rank that failed, on every rank, if it is of that tree.
            RankFailure: On the other ranks, when that rank raised anything else.
        """
        if self._group is None:
            return action()
        own: Exception | None = None
        result: Any = None
        try:
            result = action()
        except Exception as error:
            own = error
        failures = self.all_gather(None if own is None else self._to_send(own))
        if own is not None:
            raise everywhere(own)
        failed = next((failure for failure in failures if failure is not None), None)
        if failed is not None:
            raise everywhere(failed)
        return result  # type: ignore[no-any-return]

    def _to_send(self, error: Exception) -> FaultToleranceError:
        if isinstance(error, FaultToleranceError) and _travels(error):
            return error
        return RankFailure(self.rank, f"{type(error).__name__}: {error}")

    def decide_with_help(self, decision: Callable[[Callable[[_Q], list[_A]]], _T], help_with: Callable[[_Q], _A]) -> _T:
        """As `decide`, for a decision that rank 0 does not make alone: it may ask all ranks, itself among them.

        ``decision(ask)`` runs on rank 0; ``ask(question)`` there returns what ``help_with(question)`` has returned on
        each rank, in rank order, or raises the error of one that failed. Both must be things that can be pickled.

        Ranks: all. Blocks on: rank 0's decision.

        Raises:
            FaultToleranceError: See `decide`.
            RankFailure: See `decide`; also for an error of another kind in `help_with`.
        """
        if self._group is None:
            return decision(lambda question: [help_with(question)])

        def ask(question: _Q) -> list[_A]:
            self.decide(lambda: ("question", question))
            answers = self._answers(question, help_with)
            for kind, value in answers:
                if kind == "error":
                    raise value
            return [value for _, value in answers]

        if self.is_zero:
            return self.decide(lambda: ("decided", decision(ask)))[1]
        message: Any
        while (message := self.decide(_by_zero_alone))[0] == "question":
            self._answers(message[1], help_with)
        return message[1]  # type: ignore[no-any-return]

    def _answers(self, question: _Q, help_with: Callable[[_Q], _A]) -> list[Any]:
        answer: tuple[str, Any]
        try:
            answer = "answer", help_with(question)
        except Exception as error:
            answer = "error", self._to_send(error)
        return self.all_gather(answer)

    def fill_from_zero(self, tensor: torch.Tensor) -> None:
        """`tensor`, of one size on all ranks, holds what it holds on rank 0. Blocks on: all ranks."""
        if self._group is not None:
            dist.broadcast(tensor, src=0, group=self._group)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None if there is one rank alone. Thread: main."""
        return self._group

    def close(self) -> None:
        """The group is gone. Local: asks nothing of other ranks, so it is safe after one of them died."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def everywhere(error: _E) -> _E:
    """`error`, marked as one that every rank raises at the same point: nobody has to be told, or to be torn away."""
    error._raised_everywhere = True  # type: ignore[attr-defined]
    return error


@contextmanager
def raised_everywhere() -> Iterator[None]:
    """An error of this package that is raised here is raised by all ranks."""
    try:
        yield
    except FaultToleranceError as error:
        if not isinstance(error, RankFailure):
            everywhere(error)
        raise


def is_everywhere(error: BaseException) -> bool:
    """Whether every rank raises `error`, so that none waits for another."""
    return getattr(error, "_raised_everywhere", False)


def _by_zero_alone() -> Any:
    raise AssertionError("only rank 0 runs a decision")


def _answered(message: tuple[str, Any], error: Exception | None) -> Any:
    kind, value = message
    if error is not None:
        raise everywhere(error)
    if kind == "error":
        raise everywhere(value)
    return value


def _travels(error: Exception) -> bool:
    try:
        pickle.dumps(error)
    except Exception:  # whatever a user's class does when pickled; its text is sent instead
        return False
    return True


class _Pickler(pickle.Pickler):
    """Packs tensors of every dtype.

    In torch's own way nobody can unpack those whose dtype has no storage class: small floats, and unsigned integers of
    more than one byte.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.UntypedStorage) or value.device.type != "cpu":
            return NotImplemented
        return _storage, (torch.empty(0, dtype=torch.uint8, device="cpu").set_(value).numpy().tobytes(),)


def _storage(data: bytes) -> torch.TypedStorage:
    """What torch rebuilds tensors of these dtypes from."""
    memory = torch.empty(len(data), dtype=torch.uint8, device="cpu")
    if data:  # of nothing torch makes no tensor
        memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    storage = memory.untyped_storage()
    return torch.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)  # type: ignore[no-untyped-call]


def _packed(value: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


def _unpacked(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301  # of a rank of this run
