"""Random state of one process: captured, restored, and split into private streams.

Everything captured is plain tensors, numbers, strings and tuples, so that it travels in a file that
``torch.load(weights_only=True)`` accepts (numpy's own legacy state object would not be).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash

_UINT32 = 2**32
_numpy_random: Any = np.random  # its type information lacks what exchanges the bit generator


def capture() -> dict[str, Any]:
    """The random state of this process: torch CPU, every accelerator, numpy's legacy generator and python."""
    return {
        "torch": torch.default_generator.get_state(),
        "python": random.getstate(),
        "numpy": _pack_numpy(np.random.get_state(legacy=True)),
        "accelerators": _capture_accelerators(),
    }


def restore(state: dict[str, Any]) -> list[str]:
    """This process continues the random sequences of `state`.

    Returns:
        What of `state` found no place here (an accelerator that is not there), in words.
    """
    torch.default_generator.set_state(state["torch"])
    random.setstate(_as_tuple(state["python"]))
    np.random.set_state(_unpack_numpy(state["numpy"]))
    return _restore_accelerators(state.get("accelerators", {}))


def begin(seed: int) -> None:
    """This process starts the random sequences of `seed`: torch CPU, every accelerator, numpy and python."""
    seed_cpu(seed)
    kind = _accelerator()
    if kind is not None:
        torch.get_device_module(kind).manual_seed_all(seed)


def mix(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part, equal on every machine and python version."""
    return xxhash.xxh3_64_intdigest(repr(parts).encode()) >> 1


def draw_seed() -> int:
    """A 63-bit seed drawn from torch's global CPU generator (advances it by one draw)."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def seed_cpu(seed: int) -> None:
    """Torch's CPU generator, numpy and python start the sequences of `seed`."""
    # Not torch.manual_seed: that also reseeds every accelerator, which a loader must not touch.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % _UINT32)


class Stream:
    """A private random stream: code run inside `active` draws from it and leaves the global generators where they are.

    The stream starts at `seed` and continues where it was left, however often it is entered. Of numpy's legacy
    generator, the second value of a pair of normals that was drawn and not yet used is dropped on both sides: its
    bit generator is exchanged, which takes half a microsecond, where copying its state out and in takes seventy.

    Args:
        seed: Where it starts.
        state: Where it continues instead (of `state`).
    """

    def __init__(self, seed: int, state: dict[str, Any] | None = None) -> None:
        self._seed = seed
        self._numpy = np.random.MT19937()
        self._torch: torch.Tensor | None = None
        self._python: Any = None
        if state is not None:
            self._torch, self._python = state["torch"], _as_tuple(state["python"])
            _, key, position, _, _ = _unpack_numpy(state["numpy"])
            self._numpy.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": position}}

    @property
    def state(self) -> dict[str, Any] | None:
        """Where the stream stands, as plain data; None before it was first entered."""
        if self._torch is None:
            return None
        state = self._numpy.state["state"]
        legacy = ("MT19937", state["key"], state["pos"], 0, 0.0)
        return {"torch": self._torch, "python": self._python, "numpy": _pack_numpy(legacy)}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Global CPU draws inside come from this stream; the caller's generators are back afterwards in any case."""
        outer_torch, outer_python = torch.default_generator.get_state(), random.getstate()
        outer_numpy = _numpy_random.get_bit_generator()
        _numpy_random.set_bit_generator(self._numpy)
        if self._torch is None:
            seed_cpu(self._seed)
        else:
            torch.default_generator.set_state(self._torch)
            random.setstate(self._python)
        try:
            yield
        finally:
            self._torch, self._python = torch.default_generator.get_state(), random.getstate()
            torch.default_generator.set_state(outer_torch)
            random.setstate(outer_python)
            _numpy_random.set_bit_generator(outer_numpy)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Like `active`, for code that seeds the generators before it draws: where they stand is not kept.

        Half the cost: of python's generator alone, copying the state out or in takes some seven microseconds.
        """
        outer_torch, outer_python = torch.default_generator.get_state(), random.getstate()
        outer_numpy = _numpy_random.get_bit_generator()
        _numpy_random.set_bit_generator(self._numpy)
        try:
            yield
        finally:
            torch.default_generator.set_state(outer_torch)
            random.setstate(outer_python)
            _numpy_random.set_bit_generator(outer_numpy)


def forget_cached_normal() -> None:
    """Of numpy's legacy generator, the second value of a pair of normals is dropped, as by entering a `Stream`."""
    _numpy_random.set_bit_generator(_numpy_random.get_bit_generator())


def _pack_numpy(legacy: Any) -> dict[str, Any]:
    name, keys, position, has_gauss, gauss = legacy
    # int64 because torch knows no arithmetic on uint32 in older versions, and uint32 keys must not wrap
    return {
        "name": name,
        "keys": torch.from_numpy(keys.astype(np.int64)),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "gauss": float(gauss),
    }


def _unpack_numpy(packed: dict[str, Any]) -> tuple[str, Any, int, int, float]:
    keys = packed["keys"].numpy().astype(np.uint32)
    return packed["name"], keys, packed["position"], packed["has_gauss"], packed["gauss"]


def _as_tuple(value: Any) -> Any:
    """Lists back to tuples: some serialisers keep only lists, `random.setstate` takes only tuples."""
    return tuple(_as_tuple(v) for v in value) if isinstance(value, (list, tuple)) else value


def _capture_accelerators() -> dict[str, list[torch.Tensor]]:
    kind = _accelerator()
    if kind is None:
        return {}
    module = torch.get_device_module(kind)
    if hasattr(module, "get_rng_state_all"):
        return {kind: [s.cpu() for s in module.get_rng_state_all()]}
    return {kind: [module.get_rng_state().cpu()]}


def _restore_accelerators(saved: dict[str, list[torch.Tensor]]) -> list[str]:
    problems = []
    present = _accelerator()
    for kind, states in saved.items():
        if kind != present:
            problems.append(f"random state of {kind!r} (this process has {present or 'no accelerator'})")
            continue
        module = torch.get_device_module(kind)
        if not hasattr(module, "get_rng_state_all"):
            module.set_rng_state(states[0])
            continue
        count = module.device_count()
        if count != len(states):
            problems.append(f"random state of {len(states)} {kind!r} devices (this process sees {count})")
        for index, state in enumerate(states[:count]):
            module.set_rng_state(state, index)
    return problems


def _accelerator() -> str | None:
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type
