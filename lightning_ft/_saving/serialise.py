"""From a checkpoint to the bytes of a file that `torch.load` reads: torch pickles, `_disk.archive` writes.

The one place that knows how `torch.save` works inside. `torch.serialization._save` is private: where it has another
shape than that of torch 2.13, the plain `torch.save` does the work.
"""

from __future__ import annotations

import collections
import copyreg
import ctypes
import inspect
import logging
import pickle
import types
from collections.abc import Callable
from functools import partial
from typing import IO, Any, cast

import torch

from lightning_ft._disk.archive import Sink, write_archive

_log = logging.getLogger(__name__)

_PARAMETERS = ["obj", "zip_file", "pickle_module", "pickle_protocol", "_disable_byteorder_record"]
_READ_ONLY = 0x100  # PyBUF_READ
_memory_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


class UnfamiliarTorchError(Exception):
    """`torch.save` works in another way than this module knows; caught here."""


Reductions = dict[int, Any]
"""For tensors that are saved again and again, by their ids: what they are to a pickle, None before it was found out.

Whoever makes such a dictionary keeps the tensors, and never changes their shape or place.
"""


def save(checkpoint: Any, sink: Sink, reductions: Reductions | None = None) -> None:
    """`sink` was given the bytes of a file of `checkpoint`, the same as `torch.save` gives but for one identifier.

    Tensors are not copied, and must not change meanwhile.

    Args:
        checkpoint: What to save.
        sink: Where to.
        reductions: Of its tensors; filled in.

    Raises:
        Exception: What cannot be pickled, as `torch.save` raises it; nothing was written then. What `sink` raises.
    """
    try:
        records = collect(checkpoint, reductions)
    except UnfamiliarTorchError as unfamiliar:
        _log.warning("saving is slower than it could be with torch %s: %s", torch.__version__, unfamiliar)
        torch.save(checkpoint, cast(IO[bytes], sink))
        return
    # Where torch has no such setting, it is not to be chosen.
    alignment_bytes = getattr(torch.serialization, "_get_storage_alignment", lambda: 64)()
    write_archive(sink, ((name, data) for name, data, _ in records.found), alignment_bytes)


class Records:
    """Takes the place of torch's zip writer: keeps what it is given, each with the object whose memory it is."""

    def __init__(self) -> None:
        self.found: list[tuple[str, memoryview, object]] = []

    def write_record(self, name: str, data: Any, size_bytes: int) -> None:
        if isinstance(data, torch.UntypedStorage):
            if data.device.type != "cpu":
                raise UnfamiliarTorchError(f"record {name} is on the device {data.device}")
            view = _memory_view(data.data_ptr(), size_bytes, _READ_ONLY) if size_bytes else memoryview(b"")
            held_bytes = data.nbytes()
        elif isinstance(data, (bytes, str)):
            view = memoryview(data.encode() if isinstance(data, str) else data)
            held_bytes = view.nbytes
        else:
            raise UnfamiliarTorchError(f"record {name} is a {type(data).__name__}")
        if held_bytes != size_bytes:
            raise UnfamiliarTorchError(f"record {name} has {held_bytes} bytes, and {size_bytes} are to be written")
        self.found.append((name, view, data))

    def write_record_metadata(self, name: str, size_bytes: int) -> None:
        raise UnfamiliarTorchError(f"record {name} is to be left out (torch.serialization.skip_data)")


def collect(checkpoint: Any, reductions: Reductions | None = None) -> Records:
    """What `torch.save` would write for `checkpoint`, without a copy of a tensor's memory (arguments: see `save`).

    Raises:
        UnfamiliarTorchError: This torch saves in a way that is not known here.
    """
    save_records = getattr(torch.serialization, "_save", None)
    if save_records is None:
        raise UnfamiliarTorchError("it has no torch.serialization._save")
    found = list(inspect.signature(save_records).parameters)
    if found != _PARAMETERS:
        raise UnfamiliarTorchError(f"torch.serialization._save takes {found}")
    records = Records()
    module = _PickleModule(reductions or {})
    try:
        save_records(checkpoint, records, module, torch.serialization.DEFAULT_PROTOCOL, False)
    finally:
        # A class lives on until the garbage collector comes by, and with its reductions all memory of a snapshot would;
        # and in torch 2.6 also with what torch gives it, a function that knows all storages.
        del module.Pickler.reductions
        for derived in module.Pickler.__subclasses__():
            del derived.persistent_id  # type: ignore[attr-defined]
    return records


# -- the same pickle, sooner: all the while the training thread waits for the interpreter ---------------------------

# torch is asked about every object whether it is a storage, 19 times per tensor. These never are.
_NO_STORAGE = frozenset(
    {str, int, float, bool, type(None), tuple, list, dict, collections.OrderedDict, torch.Tensor, torch.Size}
    | {torch.dtype, types.FunctionType, types.BuiltinFunctionType, type, type(torch.FloatStorage)}
)
_NEVER = object()  # of tensors that nobody promises to keep
# What torch pickles in the oldest of its ways; newer ones (float8, uint16) have another.
_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
)


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: Any, protocol: int, storage_id: Callable[[Any], Any], reductions: Reductions) -> None:
        super().__init__(buffer, protocol)
        self._storage_id = storage_id
        self.dispatch_table = {torch.Tensor: partial(_reduce_again, reductions), **copyreg.dispatch_table}

    def persistent_id(self, value: Any) -> Any:
        return None if type(value) in _NO_STORAGE else self._storage_id(value)


class _PickleModule:
    """For torch, which derives a class from `Pickler` and gives it the method `persistent_id`."""

    __name__ = "pickle"

    def __init__(self, given: Reductions) -> None:
        class Pickler:
            reductions = given

            def __init__(self, buffer: Any, protocol: int) -> None:
                self._buffer = buffer
                self._protocol = protocol

            def dump(self, value: Any) -> None:
                storage_id = self.persistent_id  # type: ignore[attr-defined]
                _Pickler(self._buffer, self._protocol, storage_id, self.reductions).dump(value)

        self.Pickler = Pickler


def _reduce_again(reductions: Reductions, tensor: torch.Tensor) -> Any:
    """What `_reduce` returns, kept where it will be asked for again.

    Each is made of some six objects that all live until the pickle is complete: python's garbage collector, which they
    would bring about a dozen times per save, takes more time than making them.
    """
    known = reductions.get(id(tensor), _NEVER)
    if known is None:
        known = reductions[id(tensor)] = _reduce(tensor)
    return _reduce(tensor) if known is _NEVER else known


def _reduce(tensor: torch.Tensor) -> Any:
    """What `Tensor.__reduce_ex__` returns, found sooner for the plainest of tensors."""
    if (
        tensor.dtype not in _DTYPES
        or tensor.layout is not torch.strided
        or not tensor.is_cpu
        or tensor.requires_grad
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.__dict__
    ):
        return tensor.__reduce_ex__(torch.serialization.DEFAULT_PROTOCOL)  # type: ignore[no-untyped-call]
    storage = tensor._typed_storage()  # type: ignore[no-untyped-call]
    place = storage, tensor.storage_offset(), tuple(tensor.size()), tensor.stride()
    return torch._utils._rebuild_tensor_v2, (*place, False, collections.OrderedDict())
