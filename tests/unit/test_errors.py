from __future__ import annotations

import inspect
import pickle
import re

import pytest

from lightning_ft import errors

EXAMPLES = [
    errors.FaultToleranceError("what happened"),
    errors.ConfigurationError("n=0: at least 1"),
    errors.SaveError("disk full", "/run/step=00000001.ckpt", 1),
    errors.StorageError("no answer", "s3://run/a.ckpt", True),
    errors.CheckpointError("unusable"),
    errors.CorruptCheckpointError("/run/a.ckpt", "truncated"),
    errors.NoUsableCheckpointError("/run", [("/run/a.ckpt", "truncated"), ("/run/b.ckpt", "missing")]),
    errors.ManifestError("lacks step"),
    errors.UnsupportedFormatError("format 2"),
    errors.RestoreError("optimizer differs"),
    errors.TopologyError("4 ranks saved, 2 here", 4, 2),
    errors.DivergenceError("loss of nan", step=3, batch=4, losses=[[], [float("inf")]], restart_from="/run/a.ckpt"),
    errors.DirectoryInUseError("in use by process 1"),
    errors.DivergenceError("loss inf", step=3, batch=4, losses=[[1e9], []], indices=[[[1, 2]], []], restart_from="/a"),
    errors.RankFailure(3, "OSError: disk full"),
    errors.PeerLostError(1, "batch 7: rank 1, rank 2", (1, 2)),
    errors.PeerLostError(-1, "batch 7: nobody", ()),
    errors.PeerLostError(3, "OSError: disk full"),
]


def _classes() -> list[type]:
    return [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_survives_pickling_with_everything(error: errors.FaultToleranceError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert copy.args == error.args


def test_a_subclass_with_another_constructor_survives_pickling() -> None:
    copy = pickle.loads(pickle.dumps(Odd(a=1, b=2)))
    assert (copy.a, copy.b, str(copy)) == (1, 2, "1 and 2")


class Odd(errors.RestoreError):
    def __init__(self, *, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")
        self.a, self.b = a, b


def test_every_class_has_an_example() -> None:
    assert {type(error) for error in EXAMPLES} == set(_classes())


@pytest.mark.parametrize("cls", _classes(), ids=lambda cls: cls.__name__)
def test_one_root_and_not_base_exception(cls: type) -> None:
    assert issubclass(cls, errors.FaultToleranceError)
    assert issubclass(errors.FaultToleranceError, Exception)


def test_configuration_error_is_a_value_error() -> None:
    assert issubclass(errors.ConfigurationError, ValueError)


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn: dict[str, str] = {}
    stack: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"([ │├└─]+)([A-Z]\w+)", line)
        if match is None:
            continue
        depth, name = len(match[1]), match[2]
        while stack and stack[-1][0] >= depth:
            stack.pop()
        if stack:
            drawn[name] = stack[-1][1]
        stack.append((depth, name))
    assert drawn == {cls.__name__: cls.__bases__[0].__name__ for cls in _classes()}


def test_no_usable_checkpoint_names_every_file_and_reason() -> None:
    text = str(errors.NoUsableCheckpointError("/run", [("/run/a", "truncated"), ("/run/b", "missing")]))
    for part in ("/run/a: truncated", "/run/b: missing", "2 checkpoint"):
        assert part in text


def test_a_lost_rank_is_named_as_far_as_it_is_known() -> None:
    failed = errors.PeerLostError(3, "OSError: disk full")
    assert (str(failed), failed.ranks, failed.code) == ("rank 3 failed: OSError: disk full", (3,), 79)
    unknown = errors.PeerLostError(-1, "batch 7: no rank in particular", ())
    assert (str(unknown), unknown.rank, unknown.ranks) == ("batch 7: no rank in particular", -1, ())
