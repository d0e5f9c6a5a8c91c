"""From a checkpoint to the bytes of a file that `torch.load` reads: torch pickles, `_archive` writes.

The one place that knows how `torch.save` works inside. `torch.serialization._save` is private; it has had this shape
from torch 2.1 on, and where it has another one the plain `torch.save` does the work.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
import pickle
from typing import IO, Any, cast

import torch

from lightning_ft._archive import Sink, write_archive

_log = logging.getLogger(__name__)

_PARAMETERS = ["obj", "zip_file", "pickle_module", "pickle_protocol", "_disable_byteorder_record"]
_READ_ONLY = 0x100  # PyBUF_READ
_memory_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


class UnfamiliarTorchError(Exception):
    """`torch.save` works in another way than this module knows; caught here."""


def save(checkpoint: Any, sink: Sink) -> None:
    """`sink` was given the bytes of a file of `checkpoint`, the same as `torch.save` gives but for one identifier.

    Tensors are not copied, and must not change meanwhile.

    Raises:
        Exception: What cannot be pickled, as `torch.save` raises it; nothing was written then. What `sink` raises.
    """
    try:
        records = collect(checkpoint)
    except UnfamiliarTorchError as unfamiliar:
        _log.warning("saving is slower than it could be with torch %s: %s", torch.__version__, unfamiliar)
        torch.save(checkpoint, cast(IO[bytes], sink))
        return
    # Before torch 2.7 it could not be chosen.
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


def collect(checkpoint: Any) -> Records:
    """What `torch.save` would write for `checkpoint`, without a copy of a tensor's memory.

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
    save_records(checkpoint, records, pickle, torch.serialization.DEFAULT_PROTOCOL, False)
    return records
