"""Tensors of a checkpoint file, read one by one by their descriptions: nothing of the pickle is executed."""

from __future__ import annotations

import contextlib
import zipfile
from io import BufferedIOBase
from types import TracebackType
from typing import cast

import torch

from lightning_ft._inspection.contents import Contents, opened, read_record
from lightning_ft._inspection.descriptions import TensorDescription
from lightning_ft.errors import CorruptCheckpointError
from lightning_ft.storage import Storage


class TensorReader:
    """Reads tensors while it is open, as a context manager. Memory: the storage of the tensor read last.

    Args:
        storage: Where the file is.
        contents: What is in it.
    """

    def __init__(self, storage: Storage, contents: Contents) -> None:
        self._storage = storage
        self._contents = contents
        self._held: tuple[str, bytearray] | None = None

    def __enter__(self) -> TensorReader:
        path = self._contents.path
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(self._storage.open_read(path))
            self._archive = stack.enter_context(opened(file, path))
            if "byteorder" in self._contents.records:
                order = read_record(self._archive, self._contents.records, "byteorder", path)
                if order != b"little":
                    raise CorruptCheckpointError(path, f"its byte order is {order!r}, not little-endian")
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held = None
        # `opened` is to see the error: it says what is wrong with the archive.
        self._open.__exit__(kind, error, trace)

    def read(self, tensor: TensorDescription) -> torch.Tensor:
        """The tensor, on the CPU, in memory of its own or shared with the one read before.

        Raises:
            CorruptCheckpointError: Its record is damaged, or smaller than the tensor.
        """
        path = self._contents.path
        dtype = getattr(torch, tensor.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CorruptCheckpointError(path, f"a tensor of the unknown dtype {tensor.dtype}")
        if tensor.numel == 0:
            return torch.empty(tensor.shape, dtype=dtype)
        data = self._bytes(tensor.storage.key)
        furthest = tensor.offset + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
        if (furthest + 1) * dtype.itemsize > len(data):
            raise CorruptCheckpointError(
                path, f"data/{tensor.storage.key} has {len(data)} bytes, too few for a tensor of shape {tensor.shape}"
            )
        flat = torch.frombuffer(data, dtype=dtype, count=len(data) // dtype.itemsize)
        return flat.as_strided(tensor.shape, tensor.stride, tensor.offset)

    def _bytes(self, key: str) -> bytearray:
        if self._held is not None and self._held[0] == key:
            return self._held[1]
        self._held = None  # first: the memory of two is not needed
        path = self._contents.path
        info = self._contents.records.get(f"data/{key}")
        if info is None:
            raise CorruptCheckpointError(path, f"there is no record data/{key}, which a tensor is in")
        data = bytearray(info.file_size)
        view, filled = memoryview(data), 0
        try:
            with cast(BufferedIOBase, self._archive.open(info)) as record:
                while filled < len(data) and (count := record.readinto(view[filled:])):
                    filled += count
                if filled < len(data) or record.read(1):
                    raise CorruptCheckpointError(path, f"data/{key} has another size than the table of contents says")
        except zipfile.BadZipFile as error:
            raise CorruptCheckpointError(path, f"data/{key} is damaged: {error}") from error
        self._held = key, data
        return data
