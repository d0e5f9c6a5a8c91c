"""What a pickle of torch would build, as descriptions: nothing that the pickle names is imported or called.

A pickle is a program. Here every global it asks for becomes a class of our own that only remembers its arguments, a
few builtin containers excepted, and every storage a note of where its bytes are. So a file of unknown origin can be
looked at, without torch, in the memory that its pickle takes and not in that of its tensors.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

# More values than any checkpoint has; lists that hold each other many times over would otherwise never end.
MAX_LEAVES = 2_000_000
_MAX_DEPTH = 200
# Of an integer. Those of checkpoints have 16 at most; Python refuses to print one of more than about 1,780.
_MAX_INT_BYTES = 1024
_MAX_SIZE = 1 << 63

_ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex32": 4, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "quint8": 1, "qint8": 1, "qint32": 4,
}  # fmt: skip
_DTYPE_OF_STORAGE = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8", "QUInt8Storage": "quint8",
    "QInt8Storage": "qint8", "QInt32Storage": "qint32",
}  # fmt: skip


def bytes_of(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of the elements of a tensor; one for each, if the dtype is not known."""
    return math.prod(shape) * _ITEM_BYTES.get(dtype, 1)


class DescriptionError(Exception):
    """A pickle cannot be described: it is damaged, or built as torch builds none."""


class _Unchangeable:
    """The pickle that made it cannot change it afterwards: what was checked stays as it was."""

    def __setstate__(self, state: Any) -> None:
        raise DescriptionError(f"a state for a {type(self).__name__}")


@dataclass(frozen=True)
class StorageDescription(_Unchangeable):
    """A block of bytes: the record `data/<key>` of the archive."""

    key: str
    dtype: str
    numel: int
    location: str

    @property
    def size_bytes(self) -> int:
        """Size of the record."""
        return bytes_of(self.dtype, (self.numel,))


@dataclass(frozen=True)
class TensorDescription(_Unchangeable):
    """A view of a storage, as the pickle describes it. Strides and offset count elements."""

    storage: StorageDescription
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements; its storage may be larger, and shared."""
        return bytes_of(self.dtype, self.shape)


@dataclass(frozen=True)
class Name(_Unchangeable):
    """A global that is a value and no class, such as a dtype."""

    qualified: str

    def __str__(self) -> str:
        return self.qualified


class Placeholder:
    """In place of an object whose class was not imported: the class's name, and what the object was made of."""

    qualified = "?"

    def __new__(cls, *args: Any, **kwargs: Any) -> Placeholder:
        self = super().__new__(cls)
        self.args, self.state, self.items = args, None, []
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args: tuple[Any, ...]
        self.state: Any
        self.items: list[Any]

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        """Remembered; the pickle takes the object for a list."""
        self.items.append(value)

    def extend(self, values: Any) -> None:
        """Remembered; the pickle takes the object for a list."""
        self.items.extend(values)

    def add(self, value: Any) -> None:
        """Remembered; the pickle takes the object for a set."""
        self.items.append(value)

    def parts(self) -> dict[str, Any]:
        """What it was made of, without what is empty."""
        parts = {"args": list(self.args), "state": self.state, "items": list(self.items)}
        return {name: part for name, part in parts.items() if part}

    def __repr__(self) -> str:
        return f"<{self.qualified}>"


def describe(data: bytes) -> tuple[Any, frozenset[str]]:
    """What the pickle `data` describes, and the names of the globals that were replaced by placeholders.

    Raises:
        DescriptionError: See there.
    """
    unpickler = _Unpickler(io.BytesIO(data))
    try:
        return unpickler.load(), frozenset(unpickler.unknown)
    except Exception as error:  # a damaged pickle makes the machine that reads it raise anything
        raise DescriptionError(f"{type(error).__name__}: {error}") from error


# What no pickle of torch has: buffers from outside, the registry of extensions, and sizes that are believed before
# there are so many bytes.
_REFUSED = (pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.EXT1, pickle.EXT2, pickle.EXT4)


_KEYS_OF_KEYS = (tuple, frozenset)


class _Unpickler(pickle._Unpickler):
    """The one written in Python: that in C takes the memory that a hostile pickle asks for."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code not in {op[0] for op in _REFUSED}
    }

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="utf-8")
        self.unknown: set[str] = set()
        self._classes: dict[str, Any] = {}
        # What can be a key and holds keys, by id, with how deep it is nested; kept, so that no id is used again.
        self._nested: dict[int, tuple[Any, int]] = {}

    def _note_nested(self) -> None:
        """What was made is not nested so deeply that its hash would overflow the stack of the process."""
        machine: Any = self
        made = machine.stack[-1]
        if type(made) not in _KEYS_OF_KEYS:
            return
        inside = (self._nested.get(id(item), (None, 1))[1] for item in made if type(item) in _KEYS_OF_KEYS)
        depth = 1 + max(inside, default=0)
        if depth > _MAX_DEPTH:
            raise DescriptionError(f"a {type(made).__name__} nested deeper than {_MAX_DEPTH}")
        if depth > 1:
            self._nested[id(made)] = made, depth

    def _load_large_int(self) -> None:
        machine: Any = self  # of which typeshed does not know `read` and `append`
        size_bytes = int.from_bytes(machine.read(4), "little", signed=True)
        if not 0 <= size_bytes <= _MAX_INT_BYTES:
            raise DescriptionError(f"an integer of {size_bytes} bytes")
        machine.append(int.from_bytes(machine.read(size_bytes), "little", signed=True))

    dispatch[pickle.LONG4[0]] = _load_large_int

    def find_class(self, module: str, name: str) -> Any:
        qualified = f"{module}.{name}"
        if qualified in _KNOWN:
            return _KNOWN[qualified]
        if module == "torch" and name in _ITEM_BYTES:
            return Name(qualified)
        if qualified not in self._classes:
            self._classes[qualified] = type("Placeholder", (Placeholder,), {"qualified": qualified})
            if not (module.startswith("torch") and name.endswith("Storage")):
                self.unknown.add(qualified)
        return self._classes[qualified]

    def persistent_load(self, pid: Any) -> StorageDescription:
        kind, storage_type, key, location, numel = pid
        if kind != "storage" or not isinstance(key, str) or not _is_size(numel):
            raise DescriptionError(f"a reference to a {kind}, where only storages are known")
        name = storage_type.qualified.rpartition(".")[2]
        return StorageDescription(key, _DTYPE_OF_STORAGE.get(name, name), numel, str(location))


def _and_noted(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def loaded(machine: Any) -> None:
        load(machine)
        machine._note_nested()

    return loaded


_MAKERS = (
    pickle.TUPLE,
    pickle.TUPLE1,
    pickle.TUPLE2,
    pickle.TUPLE3,
    pickle.FROZENSET,
    pickle.REDUCE,
    pickle.NEWOBJ,
    pickle.NEWOBJ_EX,
)
for _op in _MAKERS:
    _Unpickler.dispatch[_op[0]] = _and_noted(_Unpickler.dispatch[_op[0]])


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_SIZE


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any = False, *_: Any) -> Any:
    """In place of `torch._utils._rebuild_tensor_v2`."""
    if not isinstance(storage, StorageDescription) or not all(map(_is_size, (offset, *shape, *stride))):
        raise DescriptionError("a tensor whose storage, offset, shape or stride is none")
    if len(shape) != len(stride):
        raise DescriptionError(f"a tensor of shape {shape} with stride {stride}")
    numel = 1
    for extent in shape:
        numel *= extent
        if numel >= _MAX_SIZE:  # now: the product of very many takes long
            raise DescriptionError("a tensor of more elements than any memory has")
    return TensorDescription(storage, storage.dtype, tuple(shape), tuple(stride), offset, bool(requires_grad))


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, requires_grad: Any, _: Any, dtype: Any, *__: Any
) -> Any:
    """In place of `torch._utils._rebuild_tensor_v3`: the storage has no dtype, the tensor has."""
    plain = _tensor(storage, offset, shape, stride, requires_grad)
    name = str(dtype).rpartition(".")[2]
    return TensorDescription(plain.storage, name, plain.shape, plain.stride, plain.offset, plain.requires_grad)


def _parameter(data: Any, requires_grad: Any = True, *_: Any) -> Any:
    """In place of `torch._utils._rebuild_parameter`."""
    if not isinstance(data, TensorDescription):
        return data  # of a subclass of tensor, described as that
    return TensorDescription(data.storage, data.dtype, data.shape, data.stride, data.offset, bool(requires_grad))


def _from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """In place of `torch._tensor._rebuild_from_type_v2`: a tensor with attributes, or of a subclass."""
    return function(*args) if function in (_TENSOR, _TENSOR_V3, _PARAMETER) else Placeholder(kind, args, state)


def _encode(text: Any, encoding: Any = "utf-8") -> Any:
    """In place of `_codecs.encode`, which old protocols write bytes with."""
    if encoding != "latin1" or not isinstance(text, str):
        raise DescriptionError(f"text encoded in {encoding!r}")
    return text.encode("latin1")


def _extents(sizes: Any = ()) -> Any:
    """In place of `torch.Size`."""
    if not all(map(_is_size, sizes)):
        raise DescriptionError("a shape that is none")
    return tuple(sizes)


def _defaultdict(_: Any = None, *args: Any) -> Any:
    return dict(*args)


class _Call(_Unchangeable):
    """A function that a pickle may call and not reach into."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


_TENSOR, _TENSOR_V3, _PARAMETER = _Call(_tensor), _Call(_tensor_v3), _Call(_parameter)
_KNOWN: Mapping[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": _Call(_defaultdict),
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "__builtin__.set": set,
    "builtins.complex": complex,
    "_codecs.encode": _Call(_encode),
    "torch.Size": _Call(_extents),
    "torch._utils._rebuild_tensor_v2": _TENSOR,
    "torch._utils._rebuild_tensor_v3": _TENSOR_V3,
    "torch._utils._rebuild_parameter": _PARAMETER,
    "torch._utils._rebuild_parameter_with_state": _PARAMETER,
    "torch._tensor._rebuild_from_type_v2": _Call(_from_type),
}

Path = tuple[Any, ...]


@dataclass
class _Walk:
    inside: set[int] = field(default_factory=set)
    left: int = MAX_LEAVES


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is no container, with the keys and positions that lead to it; an empty container counts.

    Raises:
        DescriptionError: A container holds itself, or there are more than `MAX_LEAVES` values.
    """
    yield from _leaves(value, path, _Walk())


def _leaves(value: Any, path: Path, walk: _Walk) -> Iterator[tuple[Path, Any]]:
    children: Any
    if isinstance(value, dict):
        children = dict.items(value)  # the pickle can give an OrderedDict attributes, and so another `items`
    elif isinstance(value, (list, tuple)):
        children = enumerate(value)
    elif isinstance(value, Placeholder):
        children = value.parts().items()
        yield (*path, "class"), Name(value.qualified)
    else:
        children = ()
    if not children or not value:
        walk.left -= 1
        if walk.left < 0:
            raise DescriptionError(f"more than {MAX_LEAVES} values")
        if not isinstance(value, Placeholder):
            yield path, value
        return
    if id(value) in walk.inside or len(walk.inside) > _MAX_DEPTH:
        raise DescriptionError(f"{dotted(path)} holds itself, or is nested deeper than {_MAX_DEPTH}")
    walk.inside.add(id(value))
    for key, child in children:
        yield from _leaves(child, (*path, key), walk)
    walk.inside.remove(id(value))


def dotted(path: Path) -> str:
    """The path as people write it: `state_dict.layer.weight`, `optimizer_states.0.state.0.exp_avg`."""
    return ".".join(str(key) for key in path)
