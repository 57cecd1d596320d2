"""Tensors of Triton's Python backend: a name and an array; datatypes and texts as it has them.

Lives here: the class that models make and get, from Triton's datatypes to numpy's and back, and arrays of texts as
bytes and back. Must not: requests. The rule: what a model gets is its own, so it may write into it. The source of names
and numbers: Triton's `model_config.proto`, and `TRITONSERVER_DataType`.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from paceline.backends.python.loaded_model import as_array
from paceline.backends.python.triton.errors import TritonModelException
from paceline.backends.spec import Array

__all__ = [
    "Tensor",
    "as_name",
    "deserialize_bytes_tensor",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
]

_KINDS: tuple[tuple[str, Any], ...] = (
    ("BOOL", np.bool_), ("UINT8", np.uint8), ("UINT16", np.uint16), ("UINT32", np.uint32), ("UINT64", np.uint64),
    ("INT8", np.int8), ("INT16", np.int16), ("INT32", np.int32), ("INT64", np.int64), ("FP16", np.float16),
    ("FP32", np.float32), ("FP64", np.float64), ("STRING", np.object_),
)  # fmt: skip
"""Triton's names, in the order of its numbers, which begin with 1."""
BY_NAME = {f"TYPE_{name}": kind for name, kind in _KINDS}
_BY_NUMBER = {number: kind for number, (_, kind) in enumerate(_KINDS, 1)}
_NUMBERS = {np.dtype(kind): number for number, kind in _BY_NUMBER.items()}
_TEXTS = len(_KINDS)

_LENGTH = struct.Struct("<I")

_ON_CPU = (1, 0)
"""DLPack's device: its type and number."""


class Tensor:
    """A name and an array in this process's memory. Those of requests are writable copies, made when asked for."""

    __slots__ = ("_array", "_name")

    def __init__(self, name: str | bytes, array: Array) -> None:
        name = as_name("Tensor", name)
        if not name:
            raise TritonModelException(f"Tensor: expected a name, got {name!r}")
        if not isinstance(array, np.ndarray):
            raise TypeError(f"Tensor '{name}': expected a numpy array, got {type(array).__name__}")
        if numpy_to_triton_type(array.dtype) is None:
            raise TritonModelException(f"Tensor '{name}': expected a datatype that Triton has, got {array.dtype}")
        self._name = name
        self._array = array

    @classmethod
    def received(cls, name: str, array: Array) -> Tensor:
        """One that the server has sent, maybe read-only."""
        made = cls.__new__(cls)
        made._name = name
        made._array = array
        return made

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        """The array. Texts are `bytes`."""
        if not self._array.flags.writeable:
            self._array = self._array.copy()
        return self._array

    def encoded(self) -> Array:
        """The array as it travels, in which texts are `bytes`."""
        array = self._array
        if array.dtype.kind not in "SUO":
            return array if array.dtype.kind != "b" else as_array(self._name, array)
        made: Array = np.empty(array.size, np.object_)
        made[:] = [one if isinstance(one, bytes) else str(one).encode() for one in array.ravel().tolist()]
        return made.reshape(array.shape)

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def triton_dtype(self) -> int | None:
        return numpy_to_triton_type(self._array.dtype)

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule of the array."""
        return self.__dlpack__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor over the memory of another library's tensor, or of a capsule, in the host's memory."""
        exporter = tensor if hasattr(tensor, "__dlpack__") else _Capsule(tensor)
        device = exporter.__dlpack_device__()
        if device[0] != _ON_CPU[0]:
            raise TritonModelException(
                f"Tensor '{name}': expected a tensor in the host's memory, got one on DLPack's device {tuple(device)}"
            )
        return Tensor(name, np.from_dlpack(exporter))

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.as_numpy().__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return _ON_CPU


class _Capsule:
    """What numpy takes, made of a capsule alone."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _ON_CPU


def as_name(what: str, name: str | bytes) -> str:
    """A name that a model's code gives. As in Triton, it may be `bytes`, which is what texts of requests are."""
    if not isinstance(name, (str, bytes)):
        raise TritonModelException(f"{what}: expected a text as name, got {type(name).__name__}")
    return name.decode() if isinstance(name, bytes) else name


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The numpy type of a datatype as configurations name it, such as TYPE_FP32."""
    return BY_NAME[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """The numpy type of a datatype's number; None for one that there isn't."""
    return _BY_NUMBER.get(int(data_type))


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The number of the datatype of a numpy type; None if there is none."""
    dtype = np.dtype(data_type)
    return _TEXTS if dtype.kind in "SUO" else _NUMBERS.get(dtype)


def serialize_byte_tensor(input_tensor: Array) -> Any:
    """The elements of an array of texts, in C order, each after its length; () if there are none, None for an array of
    something else."""
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "SO":
        return None
    pieces: list[bytes] = []
    for one in input_tensor.ravel().tolist():
        text = one if isinstance(one, bytes) else str(one).encode()
        pieces += _LENGTH.pack(len(text)), text
    return b"".join(pieces)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """The texts that `serialize_byte_tensor` made bytes of, as one vector of `bytes`."""
    texts: list[bytes] = []
    at, data = 0, bytes(encoded_tensor)
    while at < len(data):
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + size > len(data):
            raise ValueError(f"expected {size} bytes of an element at {at}, got {len(data) - at}")
        texts.append(data[at : at + size])
        at += size
    made: Array = np.empty(len(texts), np.object_)
    made[:] = texts
    return made
