from __future__ import annotations

import io
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ft._state import random_state

SEEDS = (0, 1, 2**32 - 1, 2**32, 2**63 - 1)

# One source of numbers per generator. Normals come in pairs, of which the second waits in a cache.
SOURCES: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(3).tolist(),
    "torch-normal": lambda: torch.empty(1).normal_().item(),
    "torch-normal-double": lambda: torch.empty(1, dtype=torch.float64).normal_().item(),
    "numpy": lambda: np.random.rand(3).tolist(),
    "numpy-normal": lambda: np.random.normal(size=2).tolist(),
    "python": lambda: random.random(),
    "python-gauss": lambda: random.gauss(0, 1),
}


@pytest.fixture(autouse=True)
def _keep_global_state() -> Any:
    state = random_state.capture()
    yield
    random_state.restore(state)


def draws(count: int = 4) -> dict[str, list[Any]]:
    return {name: [draw() for _ in range(count)] for name, draw in SOURCES.items()}


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("drawn_before", [0, 1, 2, 3])
@pytest.mark.parametrize("source", SOURCES)
def test_a_restored_generator_continues_its_sequence(source: str, drawn_before: int) -> None:
    random_state.seed_cpu(7)
    for _ in range(drawn_before):
        SOURCES[source]()
    state = through_a_file(random_state.capture())
    expected = draws()
    random_state.seed_cpu(8)
    draws()
    assert random_state.restore(state) == []
    assert draws() == expected


def test_capturing_draws_nothing_and_what_was_captured_stays() -> None:
    random_state.seed_cpu(7)
    expected = draws()
    random_state.seed_cpu(7)
    state = random_state.capture()
    assert draws() == expected
    random_state.restore(state)
    assert draws() == expected
    random_state.restore(state)
    assert draws() == expected


def test_lists_in_place_of_tuples_are_taken() -> None:
    random_state.seed_cpu(7)
    state = random_state.capture()
    expected = draws()
    version, numbers, gauss = state["python"]
    random_state.restore({**state, "python": [version, list(numbers), gauss]})
    assert draws() == expected


def test_the_second_normal_of_a_pair_is_part_of_the_state() -> None:
    random_state.seed_cpu(7)
    np.random.normal()
    state = random_state.capture()
    expected = np.random.normal(), np.random.rand()
    random_state.restore(state)
    assert (np.random.normal(), np.random.rand()) == expected


def test_a_stream_drops_the_second_normal_of_a_pair() -> None:
    # documented, and the reason why loaders enter their stream whatever the number of workers
    random_state.seed_cpu(7)
    np.random.normal()
    with random_state.Stream(1).active():
        pass
    assert np.random.get_state()[3] == 0


def test_states_of_an_absent_accelerator_are_named() -> None:
    state = {**random_state.capture(), "accelerators": {"warp": [torch.zeros(1)]}}
    (problem,) = random_state.restore(state)
    assert "'warp'" in problem


@pytest.mark.parametrize("seed", SEEDS)
def test_seeding_is_repeatable_for_every_generator(seed: int) -> None:
    random_state.seed_cpu(seed)
    first = draws()
    random_state.seed_cpu(seed)
    assert draws() == first


def test_other_seeds_give_other_sequences() -> None:
    for name, draw in SOURCES.items():
        found = set()
        for seed in (0, 1, 2, 2**31):
            random_state.seed_cpu(seed)
            found.add(repr(draw()))
        assert len(found) == 4, name


def test_draw_seed_advances_the_global_generator_by_one_draw() -> None:
    torch.manual_seed(3)
    expected = torch.empty((), dtype=torch.int64).random_().item()
    after = torch.rand(1)
    torch.manual_seed(3)
    assert random_state.draw_seed() == expected
    assert torch.rand(1) == after


def test_draw_seed_is_of_the_cpu_whatever_the_default_device() -> None:
    torch.manual_seed(3)
    expected = random_state.draw_seed()
    torch.manual_seed(3)
    with torch.device("meta"):
        assert random_state.draw_seed() == expected


# -- streams -----------------------------------------------------------------------------------------------------


def test_a_stream_does_not_touch_the_global_sequences() -> None:
    random_state.seed_cpu(1)
    expected = [draws(1), draws(1)]
    random_state.seed_cpu(1)
    stream = random_state.Stream(99)
    found = []
    for _ in range(2):
        with stream.active():
            draws(3)
        found.append(draws(1))
    assert found == expected


def test_a_stream_depends_on_nothing_but_its_seed_and_continues_where_it_was_left() -> None:
    sequences = []
    for outer in (1, 2):
        random_state.seed_cpu(outer)
        stream, found = random_state.Stream(99), []
        for _ in range(3):
            draws(outer)
            with stream.active():
                found.append(draws(1))
        sequences.append(found)
    assert sequences[0] == sequences[1]
    random_state.seed_cpu(99)
    assert [draws(1) for _ in range(3)] == sequences[0]


def test_after_an_exception_the_global_state_is_back_and_the_stream_stands_where_it_broke() -> None:
    random_state.seed_cpu(1)
    expected = draws(1)
    random_state.seed_cpu(99)
    random.random()
    stream_continues = draws(1)
    random_state.seed_cpu(1)
    stream = random_state.Stream(99)

    def broken() -> None:
        with stream.active():
            random.random()
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert draws(1) == expected
    with stream.active():
        assert draws(1) == stream_continues


def test_streams_nest() -> None:
    def alone(seed: int) -> list[Any]:
        with random_state.Stream(seed).active():
            return [draws(1), draws(1)]

    outer, inner = random_state.Stream(1), random_state.Stream(2)
    found_outer, found_inner = [], []
    with outer.active():
        found_outer.append(draws(1))
        with inner.active():
            found_inner += [draws(1), draws(1)]
        found_outer.append(draws(1))
    assert [found_outer, found_inner] == [alone(1), alone(2)]


def test_a_stream_is_continued_from_its_saved_state() -> None:
    stream = random_state.Stream(5)
    assert stream.state is None
    with stream.active():
        draws(1)
    state = through_a_file(stream.state)
    with stream.active():
        expected = draws()
    with random_state.Stream(123, state).active():
        assert draws() == expected


# -- mix ---------------------------------------------------------------------------------------------------------

GOLDEN: list[tuple[tuple[int | str, ...], int]] = [
    ((), 2561979861487051354),
    ((0,), 7048737020117470111),
    ((1, 2, 3, "order"), 104073851373506818),
    ((9223372036854775807, 1000001, 1, "batch", 0), 7298761545053046020),
    (("é",), 2108919379570619251),
]


@pytest.mark.parametrize(("parts", "value"), GOLDEN)
def test_mix_never_changes(parts: tuple[int | str, ...], value: int) -> None:
    # Every checkpoint in the world relies on it: another value is another order of the data after a restart.
    assert random_state.mix(*parts) == value


def test_mix_is_the_same_in_another_process() -> None:
    code = "from lightning_ft._state import random_state as _rng; print(_rng.mix(1, 'order', 2))"
    env = {"PYTHONHASHSEED": "77", "PATH": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert int(run.stdout) == random_state.mix(1, "order", 2)


def test_mix_depends_on_every_part_its_type_and_its_place() -> None:
    parts: list[tuple[int | str, ...]] = [
        (), (0,), (1,), ("1",), (-1,), (1, 2), (2, 1), (12,), ("1", "2"), ("12",), (1, "2"), ("1", 2), ("",), ("", ""),
        (2**63,), (2**64,), (1, "order"), (1, "batch"),
    ]  # fmt: skip
    values = [random_state.mix(*p) for p in parts]
    assert len(set(values)) == len(parts)
    assert all(0 <= v < 2**63 for v in values)
