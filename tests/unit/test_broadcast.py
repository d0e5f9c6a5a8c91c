"""A checkpoint taken apart and put together again, in one process; between processes: `tests/distributed`."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ft._restart import broadcast
from lightning_ft._restart.broadcast import _messages, _take_apart, _Together, load_once
from lightning_ft._state.digest import digest, digest_of_data
from lightning_ft.errors import ConfigurationError, RestoreError


def put_together(value: Any) -> tuple[Any, list[torch.UntypedStorage]]:
    storages: list[torch.UntypedStorage] = []
    structure = _take_apart(value, storages)
    return _Together(io.BytesIO(structure), [storage.clone() for storage in storages]).load(), storages


def test_everything_is_as_it_was_and_shares_what_it_shared() -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    state = OrderedDict(weight=weight, tied=weight, column=weight[:, 1], half=torch.ones(3, dtype=torch.bfloat16))
    state._metadata = OrderedDict(version=2)  # type: ignore[attr-defined]
    value = {
        "state_dict": state, "empty": torch.empty(0, 4), "scalar": torch.tensor(3.5), "bool": torch.tensor([True]),
        "parameter": torch.nn.Parameter(torch.ones(2)), "sparse": torch.eye(3).to_sparse(), "array": np.arange(3),
        "unsigned": torch.arange(3).to(torch.uint16), "small": torch.ones(3).to(torch.float8_e5m2),
        "rest": [1, None, ("a", {2: b"bytes"})],
    }  # fmt: skip
    built, storages = put_together(value)
    assert digest(built) == digest(value)
    assert built["state_dict"]._metadata == state._metadata
    found = built["state_dict"]
    assert found["weight"] is found["tied"]
    found["weight"].zero_()
    assert found["column"].tolist() == [0.0, 0.0]
    assert weight.sum() == 15
    assert sum(s.nbytes() for s in storages if s.data_ptr() == weight.untyped_storage().data_ptr()) == weight.nbytes


def test_what_cannot_be_sent_is_refused_by_name() -> None:
    with pytest.raises(RestoreError, match=r"cannot be sent to the other ranks .*lambda.*load=\"each\""):
        _take_apart({"a": lambda: None}, [])
    with pytest.raises(RestoreError, match="on the device meta"):
        _take_apart({"a": torch.UntypedStorage(2, device="meta")}, [])


def test_messages_are_bounded_and_small_tensors_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", 100)
    monkeypatch.setattr(broadcast, "PIECE_BYTES", 64)
    sizes_bytes = [10, 90, 20, 0, 20, 20, 20, 20, 20, 7, 200]
    storages = [torch.zeros(size, dtype=torch.uint8).untyped_storage() for size in sizes_bytes]
    messages = [[len(view) for view in message] for message in _messages(storages)]
    assert messages == [[64], [26], [10, 20, 20, 20, 20], [64], [64], [64], [8], [20, 20, 7]]


def test_only_the_cpu_is_loaded_to() -> None:
    assert load_once(lambda: 3, "cpu") == load_once(lambda: 3, torch.device("cpu")) == load_once(lambda: 3, None) == 3
    with pytest.raises(ConfigurationError, match="map_location='cuda'"):
        load_once(lambda: 3, "cuda")


# -- what is compared between ranks ------------------------------------------------------------------------------


class Opaque:
    def __init__(self, value: Any) -> None:
        self.value = value


def test_a_digest_of_data_sees_every_bit_of_data_and_the_type_of_all_else() -> None:
    def made(number: float = 1.0, array: int = 3, other: Any = None, item: str = "a") -> Any:
        return {
            "t": torch.tensor([[0.0, number]]).T, "n": np.arange(array), "g": np.float32(number),
            "o": other or Opaque(number), "s": {item, "z"}, "d": OrderedDict(a=[number, (item, None)]),
        }  # fmt: skip

    same = digest_of_data(made())
    assert same is not None
    assert digest_of_data(made(other=Opaque(object()))) == same
    changed = [made(number=1.0 + 1e-7), made(array=4), made(other=3), made(item="b")]
    assert len({same, *map(digest_of_data, changed)}) == 5
    minus_zero = torch.tensor([0.0]), torch.tensor([-0.0])
    assert digest_of_data(minus_zero[0]) != digest_of_data(minus_zero[1])


def test_there_is_no_digest_of_what_contains_itself() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert digest_of_data(endless) is None
